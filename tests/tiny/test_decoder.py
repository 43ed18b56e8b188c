"""The decoding loop on a bundle whose heads draft well: the same tokens as plain decoding, as transformers, and as
the probabilities say; where an answer ends; what a sequence remembers."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from scipy.stats import chisquare

from speccompile.graphs.errors import GenerationError
from speccompile.graphs.tree import DraftTree, DynamicTree, TokenTree
from speccompile.runtime import Decoder
from speccompile.runtime import decoder as decoding
from speccompile.runtime.acceptance import Accepted, walk
from speccompile.runtime.backends.ort import OrtCache, StepOutput
from speccompile.runtime.drafters.medusa import MedusaDrafter
from speccompile.runtime.sampling import draw
from speccompile.runtime.stats import STAGES
from tests.tiny.models import VOCAB

TEXTS = ("def fibonacci(n):", "the fox and the crow", "Hello", "one two three four", "Why is the sky blue?")
LONG = 60  # new tokens

Ids = list[int]


@pytest.fixture(scope="session")
def prompts(tiny_decoder: Decoder) -> list[Ids]:
    return [tiny_decoder.encode(text)[-40:] for text in TEXTS]


@pytest.fixture(scope="session")
def endless(tiny_decoder: Decoder) -> Decoder:
    """The same bundle, in which no token ends an answer."""
    return with_eos(tiny_decoder, [])


@pytest.fixture(scope="session")
def eager(tiny_checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The paths that are committed while a test runs, prefills included."""
    paths: list[tuple[int, ...]] = []
    commit = OrtCache.commit

    def spy(self: OrtCache, nodes: Sequence[int]) -> None:
        paths.append(tuple(nodes))
        commit(self, nodes)

    monkeypatch.setattr(OrtCache, "commit", spy)
    return paths


def with_eos(decoder: Decoder, eos_ids: Ids, tree: DraftTree | None = None) -> Decoder:
    """The decoder's bundle with other end-of-text tokens, and perhaps another tree."""
    bundle = decoder.bundle
    manifest = replace(bundle.manifest, eos_ids=eos_ids)
    return Decoder(replace(bundle, manifest=manifest, tree=tree or bundle.tree), threads=1)


def fresh(decoder: Decoder, prompt: Any, **options: Any) -> decoding.Generation:
    """An answer from a sequence of its own."""
    return decoder.generate(prompt, sequence=decoder.new_sequence(), **options)


def transformers_tokens(eager: Any, prompt: Ids, count: int, **options: Any) -> Ids:
    ids = torch.tensor([prompt])
    out = eager.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0, **options
    )
    tokens: Ids = out[0, len(prompt) :].tolist()
    return tokens


# ---- greedy ----


TREES: dict[str, DraftTree | None] = {
    "the bundle's": None,
    "chain": TokenTree.chain(3),
    "wide": TokenTree.from_paths([*([rank] for rank in range(6)), *([rank, 0] for rank in range(3))]),
    "dynamic": DynamicTree(12),
}


@pytest.mark.parametrize("tree", TREES)
def test_greedy_equals_plain_and_transformers(
    tiny_decoder: Decoder, eager: Any, prompts: list[Ids], committed: list[tuple[int, ...]], tree: str
) -> None:
    decoder = with_eos(tiny_decoder, [], TREES[tree])
    rounds, accepted, paths = 0, 0, list[tuple[int, ...]]()
    for prompt in prompts:
        wanted = transformers_tokens(eager, prompt, LONG, eos_token_id=None)
        plain = fresh(decoder, prompt, max_new_tokens=LONG, speculate=False)
        committed.clear()
        answer = fresh(decoder, prompt, max_new_tokens=LONG)
        assert plain.token_ids == answer.token_ids == wanted
        assert len(wanted) == LONG
        assert (plain.stats.drafted, plain.stats.accepted, plain.stats.bonus) == (0, 0, LONG - 1)
        rounds, accepted = rounds + answer.stats.rounds, accepted + answer.stats.accepted
        paths += committed[1:]  # the first is the prefill's
    assert accepted > rounds / 3
    assert {len(path) for path in paths} == set(range(1, (3 if tree == "wide" else 4) + 1)), "depths accepted"
    moved = sum(path != tuple(range(len(path))) for path in paths)
    assert moved == 0 if tree == "chain" else moved > 10


def test_greedy_ends_where_transformers_ends(tiny_decoder: Decoder, eager: Any, prompts: list[Ids]) -> None:
    reasons = Counter[str]()
    for prompt in prompts:
        answer = fresh(tiny_decoder, prompt, max_new_tokens=LONG)
        assert answer.token_ids == transformers_tokens(eager, prompt, LONG)
        assert fresh(tiny_decoder, prompt, max_new_tokens=LONG, speculate=False).token_ids == answer.token_ids
        reasons[answer.finish_reason] += 1
    assert reasons.keys() >= {"eos"}


def test_greedy_with_a_penalty_equals_transformers(endless: Decoder, eager: Any, prompts: list[Ids]) -> None:
    """Within a round, the penalty must see the tokens of the path that is being accepted."""
    accepted = 0
    for prompt in prompts:
        wanted = transformers_tokens(eager, prompt, 40, repetition_penalty=1.2, eos_token_id=None)
        answer = fresh(endless, prompt, max_new_tokens=40, repetition_penalty=1.2)
        assert answer.token_ids == wanted
        accepted += answer.stats.accepted
    assert accepted > 0


def test_a_text_and_a_chat_are_encoded_as_transformers_does(tiny_decoder: Decoder, tiny_checkpoint: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)
    messages = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    by_chat = fresh(tiny_decoder, messages, max_new_tokens=8)
    assert by_chat.stats.prompt_tokens == len(ids)
    assert by_chat.token_ids == fresh(tiny_decoder, ids, max_new_tokens=8).token_ids
    by_text = fresh(tiny_decoder, "Hello", max_new_tokens=8)
    assert by_text.token_ids == fresh(tiny_decoder, tokenizer.encode("Hello"), max_new_tokens=8).token_ids
    assert by_text.text == tokenizer.decode(by_text.token_ids, skip_special_tokens=True)


def test_token_ids_may_come_in_an_array(tiny_decoder: Decoder, prompts: list[Ids]) -> None:
    wanted = fresh(tiny_decoder, prompts[1], max_new_tokens=8).token_ids
    for array in (np.array(prompts[1]), torch.tensor(prompts[1]), tuple(prompts[1])):
        assert fresh(tiny_decoder, array, max_new_tokens=8).token_ids == wanted


# ---- sampling ----


def halve_even_tokens(_context: Sequence[int], logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    logits[::2] /= 2
    return logits


def forbid_the_last(context: Sequence[int], logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    logits[context[-1]] = -np.inf
    return logits


SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.3},
    "bias": {"temperature": 0.9, "logit_bias": {7: 3.0, 11: float("-inf"), 50: 1.5}},
    "hook": {"temperature": 0.9, "processor": halve_even_tokens},
    "hook on context": {"temperature": 0.0, "processor": forbid_the_last},
    "all": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1,
            "logit_bias": {9: 1.0}, "processor": forbid_the_last},
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_gives_the_same_tokens_with_and_without_speculation(
    tiny_decoder: Decoder, prompts: list[Ids], setting: str
) -> None:
    options, accepted, answers = SETTINGS[setting], 0, set()
    for seed in range(12):
        for prompt in prompts[:3]:
            speculative, plain = (
                fresh(tiny_decoder, prompt, max_new_tokens=20, seed=seed, speculate=speculate, **options)
                for speculate in (True, False)
            )
            assert speculative.token_ids == plain.token_ids
            assert speculative.finish_reason == plain.finish_reason
            assert speculative.stats.lossless
            accepted += speculative.stats.accepted
            answers.add(tuple(speculative.token_ids))
    assert accepted > 0
    assert len(answers) >= (3 if options["temperature"] == 0 else 30)


def test_a_hook_sees_the_same_contexts_with_and_without_speculation(endless: Decoder, prompts: list[Ids]) -> None:
    seen: list[Ids] = []

    def remember(context: Sequence[int], logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        seen.append(list(context))
        return logits

    answer = fresh(endless, prompts[0], max_new_tokens=30, processor=remember)
    assert answer.stats.accepted > 0
    text = [*prompts[0], *answer.token_ids]
    assert seen == [text[:length] for length in range(len(prompts[0]), len(text))]


def enumerated(eager: Any, prompt: Ids, length: int, temperature: float, top_k: int, top_p: float) -> dict[Any, float]:
    """Probability of every continuation of `length` tokens, from eager logits and transformers' warpers in float64."""
    warpers = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(temperature),
            transformers.TopKLogitsWarper(top_k),
            transformers.TopPLogitsWarper(top_p),
        ]
    )
    table: dict[Any, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Any, float] = {}
        for path, probability in table.items():
            with torch.no_grad():
                logits = eager(input_ids=torch.tensor([[*prompt, *path]])).logits[:, -1].double()
            row = warpers(torch.empty(1, 0), logits).softmax(-1)[0]
            for token in row.nonzero().flatten().tolist():
                longer[*path, token] = probability * float(row[token])
        table = longer
    return table


CHI_SQUARE: dict[str, Any] = {"temperature": 1.5, "top_k": 3, "top_p": 0.95}
SAMPLES, LENGTH = 2500, 4


def p_value(decoder: Decoder, prompt: Ids, table: dict[Any, float], samples: int) -> tuple[float, int]:
    """How well sampled answers agree with their probabilities, and how many drafted tokens were accepted."""
    counts, accepted, sequence = Counter[Any](), 0, decoder.new_sequence()
    for seed in range(samples):
        answer = decoder.generate(prompt, max_new_tokens=LENGTH, seed=seed, sequence=sequence, **CHI_SQUARE)
        counts[tuple(answer.token_ids)] += 1
        accepted += answer.stats.accepted
    assert set(counts) <= set(table), "an answer came out that has probability zero"
    # Outcomes expected fewer than five times count as one.
    common = [path for path, probability in table.items() if probability * samples >= 5]
    observed, expected = [counts[path] for path in common], [table[path] * samples for path in common]
    if (rest := samples - sum(expected)) > 1e-6:
        observed, expected = [*observed, samples - sum(observed)], [*expected, rest]
    return float(chisquare(observed, expected).pvalue), accepted


def test_sampled_answers_have_the_targets_distribution(
    endless: Decoder, eager: Any, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole answers of four tokens: the first from the prefill, then up to two drafted ones, then a bonus."""
    prompt = prompts[1]
    table = enumerated(eager, prompt, LENGTH, **CHI_SQUARE)
    assert sum(table.values()) == pytest.approx(1, abs=1e-9)
    assert 20 <= len(table) <= 3**LENGTH
    agreement, accepted = p_value(endless, prompt, table, SAMPLES)
    assert accepted > SAMPLES / 4
    assert agreement > 1e-3

    # The same test must see a rule that gives drafted tokens a second chance.
    def draw_twice(
        tree: TokenTree, tokens: npt.NDArray[np.int64], distribution_at: Any, uniform: Callable[[], float]
    ) -> Accepted:
        def next_token(node: int, path: Ids) -> int:
            token, drafted = draw(distribution_at(node, path), uniform()), {int(tokens[n]) for n in tree.children[node]}
            return token if token in drafted or not drafted else draw(distribution_at(node, path), uniform())

        return walk(tree, tokens, next_token)

    monkeypatch.setattr(decoding, "accept_sampled", draw_twice)
    assert p_value(endless, prompt, table, SAMPLES // 4)[0] < 1e-6


# ---- drafting ----


@pytest.mark.parametrize("tree", ["the bundle's", "dynamic"])
def test_guesses_come_from_the_state_behind_the_root(endless: Decoder, tree: str) -> None:
    """The last accepted node's hidden state chose the root, so head d-1 guesses the token at depth d from it."""
    assert endless.heads is not None
    hidden = np.random.default_rng(0).standard_normal((1, 6, endless.heads.width)).astype(np.float32)
    drafter = MedusaDrafter(endless.heads, TREES[tree] or endless.tree)
    for nodes in ((0,), (0, 2, 5), (0, 1, 3, 4)):
        drafter.observe(nodes, StepOutput(np.zeros((1, 6), np.int64), np.zeros((1, 6, VOCAB), np.float32), hidden))
        wanted = endless.heads.run(hidden[0, nodes[-1]])[0].copy()
        draft = drafter.propose(77, max_nodes=100, max_depth=100)
        assert draft.tokens[0] == 77
        for node, path in enumerate(draft.tree.paths[1:], 1):
            assert draft.tokens[node] == wanted[len(path) - 1, path[-1]]
        pruned = drafter.propose(77, max_nodes=4, max_depth=1)
        assert len(pruned.tree) == 4
        assert pruned.tree.max_depth == 1


# ---- typical acceptance ----


def test_typical_acceptance_says_that_it_is_not_lossless(endless: Decoder, prompts: list[Ids]) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 30}
    exact = [fresh(endless, prompt, **options) for prompt in prompts]
    typical = [fresh(endless, prompt, acceptance="typical", **options) for prompt in prompts]
    assert all(answer.stats.lossless for answer in exact)
    assert not any(answer.stats.lossless for answer in typical)
    assert not any(answer.to_json()["stats"]["lossless"] for answer in typical)
    assert [answer.token_ids for answer in exact] != [answer.token_ids for answer in typical]
    assert all(len(answer.token_ids) == 30 for answer in typical)
    plain = fresh(endless, prompts[0], acceptance="typical", speculate=False, **options)
    assert plain.stats.lossless  # nothing was drafted, so nothing was accepted by that rule
    assert plain.token_ids == exact[0].token_ids


def test_typical_acceptance_needs_a_temperature(tiny_decoder: Decoder) -> None:
    with pytest.raises(GenerationError, match="'typical' needs a temperature above 0"):
        tiny_decoder.stream("Hello", acceptance="typical")


# ---- where an answer ends ----


@pytest.fixture(scope="session")
def rounds(endless: Decoder, prompts: list[Ids]) -> list[tuple[Ids, list[Ids]]]:
    """For each prompt the tokens of a greedy answer, round by round (the first is the prefill's one)."""
    return [
        (prompt, [piece.token_ids for piece in endless.stream(prompt, max_new_tokens=LONG)][:-1]) for prompt in prompts
    ]


def first_occurrences(rounds: list[tuple[Ids, list[Ids]]], in_branch: bool) -> Iterator[tuple[Ids, Ids, int]]:
    """(prompt, answer, index) of tokens that come for the first time, amid an accepted branch or as a bonus."""
    for prompt, answer in rounds:
        flat = list(itertools.chain(*answer))
        start = len(answer[0])
        for tokens in answer[1:]:
            places = range(start, start + len(tokens) - 1) if in_branch else [start + len(tokens) - 1]
            yield from ((prompt, flat, place) for place in places if flat.index(flat[place]) == place)
            start += len(tokens)


@pytest.mark.parametrize("in_branch", [True, False])
def test_an_end_of_text_token_ends_the_answer_wherever_it_is(
    tiny_decoder: Decoder, rounds: list[tuple[Ids, list[Ids]]], in_branch: bool
) -> None:
    places = list(first_occurrences(rounds, in_branch))[::3][:8]
    assert len(places) >= 4
    for prompt, flat, place in places:
        decoder = with_eos(tiny_decoder, [VOCAB - 1, flat[place], VOCAB - 2])
        sequence = decoder.new_sequence()
        answer = decoder.generate(prompt, max_new_tokens=LONG, sequence=sequence)
        ended = min(place, *(flat.index(token) for token in (VOCAB - 1, VOCAB - 2) if token in flat), len(flat))
        assert answer.token_ids == flat[: ended + 1]
        assert answer.finish_reason == "eos"
        check_counts(answer, cut=in_branch)
        check_sequence(sequence, prompt, answer)
        plain = fresh(decoder, prompt, max_new_tokens=LONG, speculate=False)
        assert (plain.token_ids, plain.text, plain.finish_reason) == (answer.token_ids, answer.text, "eos")


def check_counts(answer: decoding.Generation, cut: bool = False) -> None:
    """Counts add up: every emitted token is the prefill's, an accepted guess or a bonus."""
    stats = answer.stats
    assert stats.emitted == len(answer.token_ids)
    assert stats.emitted == 1 + stats.accepted + stats.bonus
    assert stats.bonus == stats.rounds - cut
    assert stats.accepted <= stats.drafted
    if stats.rounds:
        assert stats.mean_accepted_tokens == pytest.approx((stats.emitted - 1) / stats.rounds)
    assert answer.to_json()["stats"]["mean_accepted_tokens"] == stats.mean_accepted_tokens


def check_sequence(sequence: decoding.SequenceState, prompt: Ids, answer: decoding.Generation) -> None:
    """The cache holds the text so far, apart from a last token that nothing has read yet."""
    text = [*prompt, *answer.token_ids]
    assert sequence.cache.length == len(sequence.tokens)
    assert sequence.tokens in (text, text[:-1])


@pytest.mark.parametrize("speculate", [True, False])
def test_the_first_token_may_end_the_answer(
    tiny_decoder: Decoder, rounds: list[tuple[Ids, list[Ids]]], speculate: bool
) -> None:
    prompt, answer = rounds[0]
    decoder = with_eos(tiny_decoder, [answer[0][0]])
    got = fresh(decoder, prompt, speculate=speculate)
    assert (got.token_ids, got.finish_reason, got.stats.rounds) == (answer[0], "eos", 0)
    assert got.stats.mean_accepted_tokens == 0
    check_counts(got)


def test_stop_strings_end_the_answer_at_the_token_that_completes_them(
    endless: Decoder, rounds: list[tuple[Ids, list[Ids]]]
) -> None:
    """Random pieces of the text, most of them longer than a token and many longer than a round."""
    rng, spanning_rounds = np.random.default_rng(0), 0
    for prompt, answer in rounds:
        flat = list(itertools.chain(*answer))
        text, ends = endless.text.decode(flat), np.cumsum([len(tokens) for tokens in answer])
        tried = 0
        while tried < 6:
            start, size = int(rng.integers(0, len(text) - 8)), int(rng.integers(1, 9))
            stop = text[start : start + size]
            if "\ufffd" in stop:
                continue
            tried += 1
            count = next(n for n in range(1, len(flat) + 1) if stop in endless.text.decode(flat[:n]))
            first = next(n for n in range(count + 1) if len(endless.text.decode(flat[:n])) > text.find(stop))
            spanning_rounds += bool(np.searchsorted(ends, first) < np.searchsorted(ends, count))
            for speculate in (True, False):
                sequence = endless.new_sequence()
                got = endless.generate(
                    prompt, max_new_tokens=LONG, stop=["never so", stop], speculate=speculate, sequence=sequence
                )
                assert got.finish_reason == "stop"
                assert got.text == text[: text.find(stop)]
                assert got.token_ids == flat[:count]
                assert got.stats.emitted == 1 + got.stats.accepted + got.stats.bonus == count
                check_sequence(sequence, prompt, got)
    assert spanning_rounds > 0


def test_a_stop_string_alone_may_be_given_as_a_string(endless: Decoder, rounds: list[tuple[Ids, list[Ids]]]) -> None:
    prompt, answer = rounds[1]
    text = endless.text.decode(list(itertools.chain(*answer)))
    stop = next(text[i : i + 2] for i in range(4, len(text)) if "\ufffd" not in text[i : i + 2])
    got = fresh(endless, prompt, max_new_tokens=LONG, stop=stop)
    assert (got.text, got.finish_reason) == (text[: text.find(stop)], "stop")


@pytest.mark.parametrize("options", [{}, {"stop": "zq#"}, {"temperature": 0.8, "seed": 1}, {"speculate": False}])
def test_pieces_joined_are_the_answer(tiny_decoder: Decoder, prompts: list[Ids], options: dict[str, Any]) -> None:
    for prompt in prompts:
        answer = fresh(tiny_decoder, prompt, max_new_tokens=30, **options)
        stream = tiny_decoder.stream(prompt, max_new_tokens=30, sequence=tiny_decoder.new_sequence(), **options)
        pieces = list(stream)
        assert "".join(piece.text for piece in pieces) == answer.text
        assert list(itertools.chain(*(piece.token_ids for piece in pieces))) == answer.token_ids
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == answer.finish_reason
        assert len(pieces) == answer.stats.rounds + 1  # one after the prefill, one after each round


@pytest.mark.parametrize("tree", ["the bundle's", "dynamic"])
def test_never_more_tokens_than_asked_for(endless: Decoder, rounds: list[tuple[Ids, list[Ids]]], tree: str) -> None:
    endless = with_eos(endless, [], TREES[tree])
    prompt, answer = rounds[2]
    flat = list(itertools.chain(*answer))
    for count in range(1, 20):
        for speculate in (True, False):
            got = fresh(endless, prompt, max_new_tokens=count, speculate=speculate)
            assert got.token_ids == flat[:count]
            assert got.finish_reason == "length"
            check_counts(got)
        assert got.stats.rounds == count - 1
    for count in (0, -3):
        with pytest.raises(GenerationError, match=f"max_new_tokens: {count} asks for nothing"):
            endless.stream(prompt, max_new_tokens=count)


# ---- the end of the cache ----


@pytest.mark.parametrize("tree", ["the bundle's", "dynamic"])
def test_a_full_cache_ends_the_answer(endless: Decoder, rounds: list[tuple[Ids, list[Ids]]], tree: str) -> None:
    """At every capacity, so that the tree is cut at each of its sizes; the last token needs no room."""
    prompt, answer = rounds[0]
    flat = list(itertools.chain(*answer))
    for room in range(16):
        bundle = replace(endless.bundle, tree=TREES[tree] or endless.tree)
        decoder = Decoder(bundle, threads=1, capacity=len(prompt) + room)
        for speculate in (True, False):
            sequence = decoder.new_sequence()
            got = decoder.generate(prompt, max_new_tokens=LONG, speculate=speculate, sequence=sequence)
            assert got.token_ids == flat[: room + 1]
            assert got.finish_reason == "capacity"
            check_counts(got)
            check_sequence(sequence, prompt, got)
            assert sequence.cache.length == len(prompt) + room == sequence.cache.capacity


def test_length_comes_before_capacity(endless: Decoder, prompts: list[Ids]) -> None:
    decoder = Decoder(endless.bundle, threads=1, capacity=len(prompts[0]) + 5)
    assert fresh(decoder, prompts[0], max_new_tokens=6).finish_reason == "length"
    assert fresh(decoder, prompts[0], max_new_tokens=7).finish_reason == "capacity"


def test_a_capacity_beyond_the_graphs_positions_is_not_taken(endless: Decoder) -> None:
    longest = endless.bundle.manifest.target.max_length
    assert Decoder(endless.bundle, threads=1, capacity=longest + 1).capacity == longest


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: it is empty"),
        ("", "prompt: it is empty"),
        ([5] * 9, "9 tokens do not fit the cache of 8"),
        ([5, VOCAB, 6], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([5, -1], f"token id -1 is outside the vocabulary of {VOCAB}"),
    ],
)
def test_unusable_prompts_are_refused_at_once(tiny_decoder: Decoder, prompt: Any, message: str) -> None:
    decoder = Decoder(tiny_decoder.bundle, threads=1, capacity=8)
    with pytest.raises(GenerationError, match=message):
        decoder.stream(prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": "hopeful"}, "acceptance: 'hopeful' is unknown; use one of exact, typical"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"stop": ["fine", ""]}, "a stop string is empty"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias names token {VOCAB}, but the model has {VOCAB} tokens"),
    ],
)
def test_unusable_options_are_refused_at_once(tiny_decoder: Decoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        tiny_decoder.stream("Hello", **options)


# ---- sequences ----


def test_interleaved_sequences_equal_solo_runs(tiny_decoder: Decoder, prompts: list[Ids]) -> None:
    """Pitfall 25: no state leaks from one call, or one sequence, to another."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 5},
        {"speculate": False},
        {"temperature": 0.7, "seed": 1, "acceptance": "typical"},
        {"repetition_penalty": 1.2, "stop": "qzq"},
    ]
    jobs = list(zip(prompts, options, strict=True))
    solo = [fresh(tiny_decoder, prompt, max_new_tokens=25, **more) for prompt, more in jobs]
    streams = [
        tiny_decoder.stream(prompt, max_new_tokens=25, sequence=tiny_decoder.new_sequence(), **more)
        for prompt, more in jobs
    ]
    ids, text, running = [list[int]() for _ in jobs], [""] * len(jobs), set(range(len(jobs)))
    while running:
        for job in sorted(running):
            piece = next(streams[job])
            ids[job] += piece.token_ids
            text[job] += piece.text
            if piece.finish_reason:
                running.discard(job)
    assert ids == [answer.token_ids for answer in solo]
    assert text == [answer.text for answer in solo]
    again = [fresh(tiny_decoder, prompt, max_new_tokens=25, **more) for prompt, more in jobs]
    assert [answer.token_ids for answer in again] == ids


def test_a_longer_conversation_runs_only_what_is_new(endless: Decoder, prompts: list[Ids]) -> None:
    sequence = endless.new_sequence()
    first = endless.generate(prompts[0], max_new_tokens=15, sequence=sequence)
    assert first.stats.reused_tokens == 0
    held = sequence.cache.length
    longer = [*prompts[0], *first.token_ids, *prompts[1]]
    second = endless.generate(longer, max_new_tokens=15, sequence=sequence)
    assert second.stats.reused_tokens == held >= len(prompts[0]) + 14
    assert second.token_ids == fresh(endless, longer, max_new_tokens=15).token_ids


def test_the_decoders_own_sequence_is_reused_too(endless: Decoder, prompts: list[Ids]) -> None:
    decoder = Decoder(endless.bundle, threads=1)
    first = decoder.generate(prompts[0], max_new_tokens=5)
    second = decoder.generate([*prompts[0], *first.token_ids, 9], max_new_tokens=5)
    assert second.stats.reused_tokens >= len(prompts[0])
    assert second.token_ids == fresh(endless, [*prompts[0], *first.token_ids, 9], max_new_tokens=5).token_ids


def test_a_change_in_the_middle_reuses_what_comes_before_it(endless: Decoder, prompts: list[Ids]) -> None:
    sequence, prompt = endless.new_sequence(), prompts[0]
    endless.generate(prompt, max_new_tokens=15, sequence=sequence)
    for place in (len(prompt) // 2, 1, 0):
        changed = [*prompt[:place], prompt[place] ^ 1, *prompt[place + 1 :]]
        answer = endless.generate(changed, max_new_tokens=15, sequence=sequence)
        assert answer.stats.reused_tokens == place
        assert answer.token_ids == fresh(endless, changed, max_new_tokens=15).token_ids


def test_the_same_and_a_shorter_prompt(endless: Decoder, prompts: list[Ids]) -> None:
    """The last token must run again, since its hidden state and logits are not kept."""
    sequence, prompt = endless.new_sequence(), prompts[1]
    first = endless.generate(prompt, max_new_tokens=15, sequence=sequence)
    second = endless.generate(prompt, max_new_tokens=15, sequence=sequence)
    assert second.stats.reused_tokens == len(prompt) - 1
    assert second.token_ids == first.token_ids
    shorter = endless.generate(prompt[:-2], max_new_tokens=15, sequence=sequence)
    assert shorter.stats.reused_tokens == len(prompt) - 3
    assert shorter.token_ids == fresh(endless, prompt[:-2], max_new_tokens=15).token_ids


def test_a_prompt_longer_than_a_prefill_chunk(
    endless: Decoder, eager: Any, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [token for some in prompts for token in some][:70]
    wanted = transformers_tokens(eager, prompt, 20, eos_token_id=None)
    for chunk in (69, 70, 33, 7, 1):
        monkeypatch.setattr(decoding, "PREFILL_CHUNK", chunk)
        assert fresh(endless, prompt, max_new_tokens=20).token_ids == wanted


@pytest.mark.parametrize("pieces", [0, 1, 2, 4])
def test_a_stream_that_is_closed_early_leaves_the_sequence_usable(
    endless: Decoder, prompts: list[Ids], pieces: int
) -> None:
    sequence = endless.new_sequence()
    stream = endless.stream(prompts[0], max_new_tokens=30, sequence=sequence)
    got = [token for _ in range(pieces) for token in next(stream).token_ids]
    stream.close()
    wanted = fresh(endless, prompts[0], max_new_tokens=30).token_ids
    assert got == wanted[: len(got)]
    assert sequence.cache.length == len(sequence.tokens)
    assert endless.generate(prompts[0], max_new_tokens=30, sequence=sequence).token_ids == wanted
    longer = [*prompts[0], *wanted[:3], 17]
    again = endless.generate(longer, max_new_tokens=30, sequence=sequence)
    assert again.stats.reused_tokens == len(longer) - 1
    assert again.token_ids == fresh(endless, longer, max_new_tokens=30).token_ids


def test_a_stream_whose_sequence_was_used_meanwhile_stops(endless: Decoder, prompts: list[Ids]) -> None:
    """Going on would emit tokens that the target never chose."""
    sequence = endless.new_sequence()
    older = endless.stream(prompts[0], max_new_tokens=30, sequence=sequence)
    next(older)
    newer = endless.generate(prompts[1], max_new_tokens=30, sequence=sequence)
    with pytest.raises(GenerationError, match="another call has used it"):
        next(older)
    assert newer.token_ids == fresh(endless, prompts[1], max_new_tokens=30).token_ids
    assert endless.generate(prompts[1], max_new_tokens=30, sequence=sequence).token_ids == newer.token_ids


# ---- numbers ----


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8}, {"speculate": False}, {"temperature": 1.0, "acceptance": "typical"}]
)
@pytest.mark.parametrize("when", ["prefill", "verify"])
def test_logits_that_are_no_numbers_are_refused(
    endless: Decoder, prompts: list[Ids], options: dict[str, Any], when: str
) -> None:
    """A NaN in the cache goes through attention into every logit, as an overflow would."""
    sequence = endless.new_sequence()
    stream = endless.stream(prompts[0], sequence=sequence, **options)
    next(stream)
    sequence.cache.buffer[:, :, :, 0] = np.nan
    if when == "prefill":
        stream = endless.stream([*prompts[0], 9], sequence=sequence, **options)
    with pytest.raises(GenerationError, match="not finite"):
        list(stream)


@pytest.mark.parametrize("speculate", [True, False])
def test_seconds_add_up_to_the_time_the_loop_had(endless: Decoder, prompts: list[Ids], speculate: bool) -> None:
    begin, away = time.perf_counter(), 0.0
    stream = endless.stream(prompts[0], max_new_tokens=LONG, speculate=speculate, sequence=endless.new_sequence())
    while True:
        try:
            next(stream)
        except StopIteration as end:
            stats = end.value.stats
            break
        left = time.perf_counter()
        time.sleep(0.01)
        away += time.perf_counter() - left
    whole = time.perf_counter() - begin
    assert set(stats.seconds) == set(STAGES)
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    assert (stats.seconds["draft"] > 0) == speculate
    assert min(stats.seconds[stage] for stage in ("prefill", "verify", "accept", "commit", "host")) > 0
    loop = whole - away
    assert sum(stats.seconds.values()) <= loop
    assert sum(stats.seconds.values()) >= 0.5 * loop
    assert away > 0.01 * stats.rounds
