"""Prompt lookup: where it looks, how far it believes what it finds, and that it never changes what comes out.

Places are checked against plain loops and transformers' own prompt lookup; sampled output against the enumerated
probabilities of every answer of a small fake target.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chisquare
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from speccompile.graphs.errors import SettingsError
from speccompile.graphs.settings import LookupSettings
from speccompile.graphs.tree import ROOT_ALONE, DynamicTree
from speccompile.runtime.acceptance import Accepted, accept_sampled, walk
from speccompile.runtime.backends.ort import StepOutput
from speccompile.runtime.drafters.combined import CombinedDrafter
from speccompile.runtime.drafters.draft import Draft, Drafter
from speccompile.runtime.drafters.prompt_lookup import (
    LONGEST,
    MEMORY,
    PLACES,
    PRIOR,
    PRIOR_WEIGHT,
    PromptLookupDrafter,
)
from speccompile.runtime.sampling import Sampling, distribution, draw

torch.set_num_threads(1)

NO_OUTPUT = cast(StepOutput, None)
BIG = DynamicTree(500)
Path = tuple[int, ...]
NextToken = Callable[[Sequence[int]], int]


def lookup(
    tokens: list[int],
    settings: LookupSettings = LookupSettings(),  # noqa: B008 (frozen)
    tree: DynamicTree = BIG,
    eos_ids: Sequence[int] = (),
) -> PromptLookupDrafter:
    return PromptLookupDrafter(tokens, settings, tree, eos_ids)


def paths(draft: Draft) -> set[Path]:
    return {tuple(draft.tokens[draft.tree.ancestry(node)[1:]].tolist()) for node in range(1, len(draft.tree))}


def chain(draft: Draft) -> list[int]:
    """The tokens of a draft without branches, the root left out."""
    assert draft.tree.parents == tuple(range(-1, len(draft.tree) - 1))
    return draft.tokens[1:].tolist()


def decode(
    drafter: Drafter,
    tokens: list[int],
    root: int,
    accept: Callable[[Draft, list[int]], Accepted],
    limit: int,
    eos_ids: Sequence[int] = (),
    max_nodes: int = 64,
) -> tuple[list[int], list[Accepted]]:
    """The decoder's loop without a model: the answer (root first), and what every round accepted."""
    answer, rounds = [root], list[Accepted]()
    while len(answer) < limit and answer[-1] not in eos_ids:
        max_depth = limit - len(answer) - 1
        draft = drafter.propose(root, max_nodes, max_depth)
        assert draft.tokens[0] == root and len(draft.tree) <= max_nodes and draft.tree.max_depth <= max(max_depth, 0)
        accepted = accept(draft, [*tokens, root])
        rounds.append(accepted)
        new = [int(draft.tokens[node]) for node in accepted.nodes[1:]] + [accepted.bonus]
        tokens += [root, *new[:-1]]
        answer += new[: next((index for index, token in enumerate(new, 1) if token in eos_ids), None)]
        drafter.observe(accepted.nodes, NO_OUTPUT)
        root = accepted.bonus
    return answer, rounds


def greedy(next_token: NextToken) -> Callable[[Draft, list[int]], Accepted]:
    return lambda draft, text: walk(draft.tree, draft.tokens, lambda node, path: next_token([*text, *path]))


def replay(script: Sequence[int]) -> Callable[[Draft, list[int]], Accepted]:
    """A target whose text, prompt included, is written down. Behind its end it says -1."""
    return greedy(lambda text: script[len(text)] if len(text) < len(script) else -1)


# ---- places ----


def places_by_loops(text: list[int], settings: LookupSettings, depth: int, eos_ids: Sequence[int]) -> set[Path]:
    """The rule in plain loops, without an index: every prefix of the first `guesses` different continuations."""
    starts = list[int]()
    for size in range(settings.ngram, 0, -1):
        found = [
            start
            for start in range(size, len(text))
            if all(text[start - size + i] == text[len(text) - size + i] for i in range(size))
        ]
        starts += [start for start in (found[::-1] if settings.newest else found) if start not in starts]
    union, guesses = set[Path](), 0
    for start in starts[: max(PLACES, settings.guesses)]:
        grown, before = list(text), len(union)
        for step in range(depth):
            grown.append(grown[start + step])  # may read what was just written, as LZ77 does
            union.add(tuple(grown[len(text) :]))
            if grown[-1] in eos_ids:
                break
        guesses += len(union) > before
        if guesses == settings.guesses:
            break
    return union


@pytest.mark.parametrize("newest", [True, False])
def test_places_equal_a_search_by_loops(newest: bool) -> None:
    """Texts over two to four letters, read in rounds of any length: an index that lags or runs ahead would show."""
    rng = np.random.default_rng(int(newest))
    sizes = Counter[int]()
    for _ in range(120):
        settings = LookupSettings(int(rng.choice([1, 2, 3, 4, 12])), int(rng.integers(1, 5)), newest)
        letters = int(rng.integers(2, 5))
        eos_ids = [0] if rng.random() < 0.3 else []
        text = rng.integers(0, letters, 40).tolist()
        committed = int(rng.integers(1, 25))
        tokens = text[:committed]
        drafter = lookup(tokens, settings, eos_ids=eos_ids)
        while committed < 39:
            depth = int(rng.integers(1, 8))
            draft = drafter.propose(text[committed], 500, depth)
            assert paths(draft) == places_by_loops(text[: committed + 1], settings, depth, eos_ids)
            sizes[sum(not children for children in draft.tree.children)] += 1
            step = min(int(rng.integers(1, 5)), 39 - committed)
            tokens += text[committed : committed + step]
            committed += step
    assert {1, 2, 3, 4} <= set(sizes)  # leaves


@pytest.mark.parametrize("eos_ids", [(), (1, 3)])
def test_the_oldest_longest_match_is_the_one_of_transformers(eos_ids: tuple[int, ...]) -> None:
    """One guess, no floor. Theirs stops at the end of the text and before an EOS id; ours goes on, and includes it."""
    rng = np.random.default_rng(5)
    cut = ended = 0
    for _ in range(300):
        ngram, depth = int(rng.integers(1, 5)), int(rng.integers(1, 8))
        text = rng.integers(0, int(rng.integers(2, 9)), int(rng.integers(2, 30))).tolist()
        theirs, _ = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor(eos_ids) if eos_ids else None,
            num_output_tokens=depth,
            max_matching_ngram_size=ngram,
            max_length=10_000,
        ).get_candidates(torch.tensor([text]))
        expected = theirs[0, len(text) :].tolist()
        draft = lookup(text[:-1], LookupSettings(ngram, 1, newest=False), eos_ids=eos_ids).propose(text[-1], 500, depth)
        ours = chain(draft)
        if ours and ours[-1] in eos_ids:
            ended += 1
            ours.pop()
        cut += len(ours) > len(expected)
        assert ours[: len(expected)] == expected
        assert bool(len(draft.tree) > 1) or not expected
        assert len(ours) == len(expected) or len(expected) < depth
    assert cut > 10 and (ended > 20) == bool(eos_ids)


def test_a_prompt_shorter_than_the_ngram_uses_shorter_ngrams() -> None:
    assert chain(lookup([4], LookupSettings(ngram=5)).propose(4, 9, 3)) == [4, 4, 4]
    assert chain(lookup([4, 7], LookupSettings(ngram=5)).propose(4, 9, 3)) == [7, 4, 7]
    assert lookup([4], LookupSettings(ngram=5)).propose(5, 9, 3).tree is ROOT_ALONE


def test_the_end_of_the_text_does_not_match_itself() -> None:
    draft = lookup([1, 2, 3, 4, 5, 6, 7]).propose(8, 9, 9)
    assert draft.tree is ROOT_ALONE and draft.tokens.tolist() == [8]
    assert draft.probabilities is not None and draft.probabilities.tolist() == [1]


def test_a_bounded_number_of_places_is_looked_at() -> None:
    """The one place with another continuation is the oldest of a few, then of too many."""
    for repeats, found in ((PLACES - 2, {(6,), (9,)}), (PLACES + 2, {(6,)})):
        tokens = [5, 9, *[5, 6] * repeats]
        assert paths(lookup(tokens, LookupSettings(guesses=2)).propose(5, 9, 1)) == found
        assert paths(lookup(tokens, LookupSettings(guesses=100)).propose(5, 9, 1)) == {(6,), (9,)}


@pytest.mark.parametrize(
    ("field", "value"),
    [("ngram", 0), ("ngram", 33), ("ngram", 2.0), ("guesses", 0), ("guesses", -1), ("guesses", True)],
)
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"prompt lookup: {field} is {value}; use 1"):
        LookupSettings(**{field: value})  # type: ignore[arg-type]


# ---- limits ----


def test_nothing_is_drafted_behind_any_of_several_eos_ids() -> None:
    """Pitfalls 6 and 8."""
    rng = np.random.default_rng(2)
    drafted = 0
    for _ in range(100):
        tokens = rng.integers(0, 5, 40).tolist()
        draft = lookup(tokens, LookupSettings(guesses=4), eos_ids=(3, 4)).propose(int(rng.integers(0, 3)), 200, 12)
        for node in range(1, len(draft.tree)):
            if draft.tokens[node] in (3, 4):
                drafted += 1
                assert not draft.tree.children[node]
    assert drafted > 50


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 100])
@pytest.mark.parametrize("max_depth", [0, 1, 2, 100])
def test_limits_hold(max_nodes: int, max_depth: int) -> None:
    """Pitfall 22: near the end of cache and answer; also the tree's own budget of 6 nodes."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        drafter = lookup(rng.integers(0, 3, 60).tolist(), LookupSettings(guesses=PLACES), DynamicTree(6))
        tree = drafter.propose(1, max_nodes, max_depth).tree
        expected = 1 if max_depth == 0 else min(max_nodes, 6)
        if max_depth == 1:
            assert len(tree) <= expected  # the three letters may have fewer continuations
        else:
            assert len(tree) == expected
        assert tree.max_depth <= max_depth


def test_a_round_without_room_is_made_up_for_by_the_next() -> None:
    """A root that was not drafted behind is indexed all the same."""
    tokens = [1, 2, 3, 9]
    drafter = lookup(tokens, LookupSettings(guesses=1))
    assert drafter.propose(5, 1, 9).tree is ROOT_ALONE
    tokens += [5, 6, 9]
    assert chain(drafter.propose(5, 9, 1)) == [6]


def test_no_state_leaks_between_answers() -> None:
    """Pitfall 25."""
    rng = np.random.default_rng(4)
    first, second = rng.integers(0, 3, 60).tolist(), rng.integers(0, 3, 60).tolist()

    def trees() -> list[tuple[tuple[int, ...], list[int], list[float]]]:
        tokens, drafts = second[:10], []
        drafter = lookup(tokens, tree=DynamicTree(9, 0.05))
        for token in second[10:]:
            draft = drafter.propose(token, 9, 9)
            tokens.append(token)
            assert draft.probabilities is not None
            drafts.append((draft.tree.parents, draft.tokens.tolist(), draft.probabilities.tolist()))
        return drafts

    before = trees()
    decode(lookup(first[:20]), first[:20], first[20], replay(first), 40)
    assert trees() == before


# ---- belief ----


def test_probabilities_are_the_product_along_the_path() -> None:
    """Worked by hand, with the table as it starts. The text ends in 1 2, seen before 3 and, later, before 4."""
    tokens = [7, 1, 2, 3, 8, 1, 2, 4, 9, 1]
    drafter = lookup(tokens, LookupSettings(guesses=2))
    draft = drafter.propose(2, 7, 3)
    # The prompt trains nothing, but the root did: after 1 the newest place says 2, which came.
    learned = PRIOR[1] + (1 - PRIOR[1]) / (PRIOR_WEIGHT + 1)
    assert drafter.accuracy == pytest.approx([PRIOR[0], learned, *PRIOR[2:]])
    one, two, three = PRIOR[2], PRIOR[2] * PRIOR[3], PRIOR[2] * PRIOR[3] * PRIOR[4]
    other = (1 - PRIOR[2]) * PRIOR[2]
    expected = {
        (): 1.0,
        (4,): one,
        (4, 9): two,
        (4, 9, 1): three,
        (3,): other,
        (3, 8): other * PRIOR[3],
        (3, 8, 1): other * PRIOR[3] * PRIOR[4],
    }
    assert draft.probabilities is not None
    got = {
        tuple(draft.tokens[draft.tree.ancestry(node)[1:]].tolist()): float(draft.probabilities[node])
        for node in range(len(draft.tree))
    }
    assert got == pytest.approx(expected)
    assert (np.diff(draft.probabilities) <= 0).all()


def test_match_length_counts_beyond_the_ngram() -> None:
    """A match of six tokens is believed as such though only three are looked up; one of twelve counts as LONGEST."""
    for ngram, length, counted in (
        (3, 2, 2),
        (3, 3, 3),
        (3, 6, 6),
        (3, 12, LONGEST),
        (10, 12, LONGEST),
        (20, 12, LONGEST),
    ):
        same = list(range(10, 10 + length))
        drafter = lookup([1, *same, 2, 3, *same[:-1]], LookupSettings(ngram))
        draft = drafter.propose(same[-1], 9, 1)
        assert chain(draft) == [2]
        assert draft.probabilities is not None and draft.probabilities[1] == drafter.accuracy[counted]


def test_the_floor_decides_how_far_is_drafted() -> None:
    text = list(range(40)) * 2
    believed = PRIOR[LONGEST] + (1 - PRIOR[LONGEST]) / (PRIOR_WEIGHT + 1)  # the root came as foretold
    for floor, length in ((0.95, 0), (0.9, 1), (0.8, 2), (0.6, 5), (0.23, 15)):
        assert believed**length >= floor > believed ** (length + 1)
        draft = lookup(text[:-1], tree=DynamicTree(64, floor)).propose(text[-1], 64, 64)
        assert chain(draft) == text[:length]


def test_every_emitted_token_teaches_even_when_nothing_is_drafted() -> None:
    """The floor is above what the table starts with, so only learning can lift a guess over it."""
    cycle = list(range(20))
    tokens = cycle * 2
    drafter = lookup(tokens, tree=DynamicTree(8, 0.95))
    sizes = []
    for token in cycle * 4:
        sizes.append(len(drafter.propose(token, 8, 8).tree))
        tokens.append(token)
    assert sizes[0] == 1
    right, weight, rounds = PRIOR[LONGEST], PRIOR_WEIGHT, 0
    while right < 0.95:  # the mean with one more right outcome, until it may stand
        rounds, weight = rounds + 1, min(weight + 1, MEMORY)
        right += (1 - right) / weight
    assert [size > 1 for size in sizes].index(True) == rounds - 1
    assert sizes[-1] > 1


def test_old_outcomes_are_forgotten() -> None:
    """However long a copy was right, a wrong token weighs one part in MEMORY."""
    cycle = list(range(20))
    tokens = cycle * 2
    drafter = lookup(tokens)
    for token in cycle * 10:
        drafter.propose(token, 8, 8)
        tokens.append(token)
    before = drafter.accuracy[LONGEST]
    assert 0.99 < before < 1
    drafter.propose(99, 8, 8)
    assert drafter.accuracy[LONGEST] == pytest.approx(before * (1 - 1 / MEMORY))


def test_wrong_copies_stop_drafting_and_right_ones_start_it_again() -> None:
    """Quoting, then the document's words in any order (each has an earlier place, none that helps), then quoting."""
    document = list(range(1000, 1240))
    shuffled = np.random.default_rng(6).permutation(document).tolist()
    script = [*document, 1, *document[:80], *shuffled, *document[100:220]]
    shuffle, again = 241 + 80, 241 + 80 + 240
    tokens, rows = script[:241], dict[int, int]()

    def accept(draft: Draft, text: list[int]) -> Accepted:
        rows[len(text)] = len(draft.tree) - 1
        return replay(script)(draft, text)

    drafter = lookup(tokens, tree=DynamicTree(16, 0.1))
    answer, _ = decode(drafter, tokens, script[241], accept, len(script) - 241)
    assert answer == script[241:]
    quoting, early, late, resumed = (
        [count for place, count in rows.items() if first <= place < last]
        for first, last in ((242, shuffle), (shuffle + 2, shuffle + 12), (shuffle + 80, again), (again, len(script)))
    )
    assert len(quoting) < 80 / 5 and np.mean(quoting) > 5
    assert np.mean(early) > 0.8  # one-token matches are tried at first
    assert np.mean([count > 0 for count in late]) < 0.05  # but for two words that meet again by chance
    assert len(resumed) < 120 / 5 and np.mean(resumed) > 5


# ---- what comes out ----


def test_a_list_reaches_more_than_eight_tokens_in_one_step() -> None:
    """A counting text, of which the prompt shows two rounds: "one, two, ... ten." again and again."""
    count = list(itertools.chain.from_iterable((10 + number, 1) for number in range(10)))
    tokens = count * 2
    script = count * 6
    answer, rounds = decode(lookup(tokens, tree=DynamicTree(16, 0.05)), tokens, script[40], replay(script), 80)
    assert answer == script[40:]
    assert max(len(accepted.nodes) for accepted in rounds) > 8
    assert len(answer) / len(rounds) > 8


def test_a_short_period_is_drafted_beyond_the_end_of_the_text() -> None:
    tokens = [5, 6, 5, 6]
    draft = lookup(tokens, LookupSettings(guesses=1)).propose(5, 12, 11)
    assert chain(draft) == [6, 5] * 5 + [6]


def test_greedy_output_is_plain_output() -> None:
    """A target that looks three tokens back, over six tokens of which one ends the answer."""
    rng = np.random.default_rng(7)
    kept = Counter[int]()
    ends = 0
    for trial in range(60):
        table = rng.choice(6, (6, 6, 6), p=[0.194] * 5 + [0.03])
        prompt = rng.integers(0, 6, int(rng.integers(1, 20))).tolist()

        def next_token(text: Sequence[int], table: npt.NDArray[np.int64] = table) -> int:
            last = [0, 0, *text][-3:]
            return int(table[last[0], last[1], last[2]])

        plain = [next_token(prompt)]
        while len(plain) < 40 and plain[-1] != 5:
            plain.append(next_token([*prompt, *plain]))
        settings = LookupSettings(1 + trial % 4, 1 + trial % 3, newest=trial % 2 == 0)
        tokens = list(prompt)
        drafter = lookup(tokens, settings, DynamicTree(2 + trial % 9, 0.1), (5,))
        answer, rounds = decode(drafter, tokens, plain[0], greedy(next_token), 40, (5,))
        assert answer == plain
        ends += plain[-1] == 5
        kept.update(len(accepted.nodes) for accepted in rounds)
    assert ends > 5 and max(kept) > 5 and kept[1] > 20


VOCABULARY, STEPS = 3, 4
TABLE = np.random.default_rng(11).normal(0, 1.3, (VOCABULARY, VOCABULARY, VOCABULARY))
PROMPT = [0, 1, 2, 0, 1, 0, 2, 1, 1, 0, 1]


@cache
def target(before: int, last: int, temperature: float) -> npt.NDArray[np.float64]:
    """The processed distribution after two tokens."""
    return distribution(TABLE[before, last], [before, last], Sampling(temperature=temperature, top_p=0.9))


def enumerated(temperature: float) -> dict[Path, float]:
    """The probability of every answer of STEPS tokens."""
    outcomes = {}
    for answer in itertools.product(range(VOCABULARY), repeat=STEPS):
        text, probability = [*PROMPT, *answer], 1.0
        for place in range(len(PROMPT), len(text)):
            probability *= target(text[place - 2], text[place - 1], temperature)[text[place]]
        outcomes[answer] = probability
    assert sum(outcomes.values()) == pytest.approx(1)
    return outcomes


def sampled_p_value(temperature: float, combined: bool, broken: bool, samples: int = 5000) -> float:
    """Chi-square of sampled answers against their enumerated probabilities.

    `broken` takes a drafted token with the drafter's own probability instead of the target's.
    """
    uniform = np.random.default_rng(12).random

    def accept(draft: Draft, text: list[int]) -> Accepted:
        def distribution_at(node: int, path: list[int]) -> npt.NDArray[np.float64]:
            before, last = [*text, *path][-2:]
            return target(before, last, temperature)

        if not broken:
            return accept_sampled(draft.tree, draft.tokens, distribution_at, uniform)
        q = draft.probabilities
        assert q is not None
        node, nodes, path = 0, [0], list[int]()
        while (child := next(iter(draft.tree.children[node]), None)) and uniform() < q[child] / q[node]:
            node, path = child, [*path, int(draft.tokens[child])]
            nodes.append(node)
        return Accepted(tuple(nodes), draw(distribution_at(node, path), uniform()))

    observed, sizes = Counter[Path](), Counter[int]()
    for _ in range(samples):
        tokens = list(PROMPT)
        tree = DynamicTree(6, 0.05)
        drafter: Drafter = lookup(tokens, tree=tree)
        if combined:
            drafter = CombinedDrafter(drafter, lookup(tokens, LookupSettings(1, 2, newest=False), tree), 8, 0.05)
        root = draw(target(*PROMPT[-2:], temperature), uniform())
        answer, rounds = decode(drafter, tokens, root, accept, STEPS)
        assert len(answer) == STEPS
        observed[tuple(answer)] += 1
        sizes.update(len(accepted.nodes) for accepted in rounds)
    assert sizes[2] > samples / 10 and sizes[3] > samples / 50  # drafts were accepted
    expected = {answer: probability * samples for answer, probability in enumerated(temperature).items()}
    common = [answer for answer, count in expected.items() if count >= 5]
    counts = [*(observed[answer] for answer in common), samples - sum(observed[answer] for answer in common)]
    means = [*(expected[answer] for answer in common), samples - sum(expected[answer] for answer in common)]
    if means[-1] < 1e-6:
        assert counts.pop() == 0 or broken
        means.pop()
    if not broken:
        assert all(expected[answer] > 0 for answer in observed)  # nothing that top-p rules out
    return float(chisquare(counts, np.array(means) * sum(counts) / sum(means)).pvalue)


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_output_has_the_targets_distribution(temperature: float, combined: bool) -> None:
    assert sampled_p_value(temperature, combined, broken=False) > 0.001


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_chi_square_rejects_a_rule_that_believes_the_drafter(temperature: float) -> None:
    assert sampled_p_value(temperature, combined=False, broken=True, samples=1500) < 1e-6
