"""Stepping back to plain decoding: when, for how long, and that it never shows in what is emitted."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.graphs.costs import Costs
from speccompile.graphs.errors import BundleError
from speccompile.graphs.settings import LookupSettings
from speccompile.graphs.tree import ROOT_ALONE, DynamicTree, TokenTree
from speccompile.runtime import Decoder, load
from speccompile.runtime import pace as pacing
from speccompile.runtime.acceptance import accept_drawn
from speccompile.runtime.decoder import Generation
from speccompile.runtime.drafters import growing
from speccompile.runtime.drafters.draft import Draft
from speccompile.runtime.drafters.eagle import EagleDrafter
from speccompile.runtime.drafters.prompt_lookup import PRIOR, PromptLookupDrafter
from speccompile.runtime.pace import FIRST_PAUSE, LONGEST_PAUSE, PROBE, WINDOW, Pace
from speccompile.runtime.sampling import draw
from tests.tiny.chances import outcomes
from tests.tiny.test_acceptance import Prefix, Row, random_row
from tests.tiny.test_bundle import edit_manifest
from tests.tiny.test_eagle_drafter import EAGLE_2, changed, eagle_decoder, fresh
from tests.tiny.test_methods import TEXTS, draft_bundle, draft_checkpoint, draft_decoder, methods

__all__ = ["draft_bundle", "draft_checkpoint", "draft_decoder", "eagle_decoder"]  # fixtures

# A plain step takes 10 ms, and a tree of two nodes 20: one emitted token loses, two break even.
COSTS = Costs([1, 2], [0, 1000], [[10.0, 20.0], [20.0, 22.0]])

Ids = list[int]


# ---- when ----


def schedule(pace: Pace, rounds: int, emitted: Callable[[int], int]) -> list[tuple[bool, int]]:
    """(whether they draft, how many rounds in a row)."""
    drafts = []
    for number in range(rounds):
        drafts.append(pace.drafts())
        if drafts[-1]:
            pace.note(2, 0, emitted(number))
    return [(kind, len(list(run))) for kind, run in groupby(drafts)]


def test_pauses_double_up_to_a_limit_while_probes_lose() -> None:
    runs = schedule(Pace(COSTS), 6000, lambda _: 1)
    assert (WINDOW, PROBE, FIRST_PAUSE, LONGEST_PAUSE) == (64, 16, 64, 1024)
    pauses = [64, 128, 256, 512, 1024, 1024, 1024]
    assert [length for drafts, length in runs if not drafts][:7] == pauses
    assert [length for drafts, length in runs if drafts][:7] == [64, *[16] * 6]


def test_a_probe_that_wins_resets_everything() -> None:
    probe_starts = 64 + 64 + 16 + 128
    won = range(probe_starts, probe_starts + 16)
    runs = schedule(Pace(COSTS), 700, lambda number: 3 if number in won else 1)
    assert runs[:6] == [(True, 64), (False, 64), (True, 16), (False, 128), (True, 16 + 64), (False, 64)]


@pytest.mark.parametrize(("twos", "stays"), [(64, True), (63, False)])
def test_the_line_is_where_tokens_pay_for_their_rounds(twos: int, stays: bool) -> None:
    """A window is judged as a whole: 64 rounds of 20 ms must emit 128 tokens of 10 ms, no matter which emits what."""
    pace = Pace(COSTS)
    stepped_back = [pace.note(2, 0, 2 if number < twos else 1) for number in range(64)]
    assert stepped_back == [False] * 63 + [not stays]
    assert pace.drafts() is stays


def test_costs_are_those_at_each_rounds_past() -> None:
    """With much to read in the cache a wider call hardly costs more: there the same rounds win."""
    for past, stays in ((0, False), (1000, True)):
        pace = Pace(COSTS)
        back = [pace.note(2, past, 2 if number % 4 == 0 else 1) for number in range(64)]  # 1.25 tokens a round
        assert back[-1] is not stays, past


def test_rounds_that_paid_for_no_guess_tell_nothing() -> None:
    free, paid = Pace(COSTS), Pace(Costs([1, 2], [0], [[10.0, 20.0]], draft=0.1))
    assert not any(free.note(1, 0, 1) for _ in range(1000))
    assert [paid.note(1, 0, 1) for _ in range(64)][-1]


def test_reports_that_come_in_a_pause_are_left_out() -> None:
    """Rounds of other streams that were under way when it began."""
    pace = Pace(COSTS)
    assert [pace.note(2, 0, 1) for _ in range(64)][-1]
    assert not any(pace.note(2, 0, 1) for _ in range(100))
    assert [pace.drafts() for _ in range(65)] == [False] * 64 + [True]
    assert [pace.note(2, 0, 1) for _ in range(16)] == [False] * 15 + [True]


def test_threads_share_a_pause() -> None:
    pace = Pace(COSTS)
    for _ in range(64):
        pace.note(2, 0, 1)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: [pace.drafts() for _ in range(50)], range(8)))
    assert sum(not drafts for batch in answers for drafts in batch) == 64


@pytest.mark.parametrize(("rate", "least", "most"), [(0.6, 0.97, 1.0), (0.36, 0.0, 0.12)])
def test_noise_seldom_hides_a_gain_and_never_a_loss_for_long(rate: float, least: float, most: float) -> None:
    """Chains of three guesses that are right with chance `rate` each, at a cost that makes this a gain of 1.2, or a
    loss of 0.85 (1.8 plain steps a round): the share of rounds that draft, over long texts."""
    pace = Pace(Costs([1, 4], [0], [[10.0, 18.1]]))
    rng = np.random.default_rng(0)
    right = rng.random((40_000, 3)) < rate
    emitted = 1 + np.cumprod(right, 1).sum(1)
    assert emitted.mean() * 10 / 18.1 == pytest.approx(1.2 if rate > 0.5 else 0.85, abs=0.01)
    drafted = 0
    for tokens in emitted.tolist():
        if pace.drafts():
            drafted += 1
            pace.note(4, 0, tokens)
    assert least <= drafted / len(emitted) <= most


# ---- what is emitted ----

P_SEED, Q_SEED = 4, 7
LENGTH = 3


def p_at(prefix: Prefix) -> Row:
    return random_row(P_SEED, prefix)


def emitted(chooses: Callable[[Pace, int], bool], monkeypatch: pytest.MonkeyPatch) -> dict[Prefix, Fraction]:
    """Chances of the first tokens of a text, with windows and pauses of one round, so that every decision hangs on what
    the round before has emitted. `chooses` is told the guess that was drawn, though it should not look."""
    for name in ("WINDOW", "PROBE", "FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(pacing, name, 1)

    def program(uniform: Callable[[], float]) -> Prefix:
        pace, text = Pace(COSTS), ()
        while len(text) < LENGTH:
            q = random_row(Q_SEED, text)
            guess = draw(q, uniform())
            if chooses(pace, guess):
                tree, tokens, drawn = TokenTree.chain(1), np.array([-1, guess]), {0: q}
            else:
                tree, tokens, drawn = ROOT_ALONE, np.array([-1]), {}
            start = text
            accepted = accept_drawn(tree, tokens, lambda node, path, start=start: p_at((*start, *path)), drawn, uniform)
            text = (*text, *(int(tokens[node]) for node in accepted.nodes[1:]), accepted.bonus)
            if len(tree) > 1:
                pace.note(2, 0, len(text) - len(start))
        return text[:LENGTH]

    return outcomes(program)


def chance(text: Prefix) -> Fraction:
    """What the target alone says."""
    result = Fraction(1)
    for place, token in enumerate(text):
        result *= p_at(text[:place])[token]
    return result


@pytest.mark.parametrize("peeks", [False, True])
def test_sampled_tokens_keep_the_targets_chances_exactly(peeks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fractions. A rule that looked at what was drawn for the round that it decides about would be found out."""
    decisions = set()

    def chooses(pace: Pace, guess: int) -> bool:
        drafts = pace.drafts()
        decisions.add(drafts)
        return drafts and not (peeks and guess == 2)

    found = emitted(chooses, monkeypatch)
    assert decisions == {True, False}
    wanted = {text: chance(text) for text in product(range(3), repeat=LENGTH)}
    assert ({text: found.get(text, 0) for text in wanted} == wanted) is not peeks


# ---- the decoder ----


class Script:
    """A pace that pauses as it is told, then drafts."""

    def __init__(self, drafts: Sequence[bool]) -> None:
        self.script = iter(drafts)
        self.said: list[bool] = []
        self.noted: list[tuple[int, int, int]] = []

    def drafts(self) -> bool:
        self.said.append(next(self.script, True))
        return self.said[-1]

    def note(self, nodes: int, past: int, emitted: int) -> bool:
        self.noted.append((nodes, past, emitted))
        return False


def paced(decoder: Decoder, pace: Any) -> Decoder:
    other = copy.copy(decoder)
    other.pace, other._default = pace, None
    return other


@pytest.fixture(scope="module")
def every(tiny_decoder: Decoder, draft_decoder: Decoder, eagle_decoder: Decoder) -> list[tuple[str, Decoder]]:
    """Every method with the kinds of trees that it knows, in endless bundles."""

    def all_methods() -> Iterator[tuple[str, Decoder]]:
        yield "medusa", changed(tiny_decoder, tiny_decoder.tree)
        yield "medusa, dynamic", changed(tiny_decoder, DynamicTree(12))
        yield from methods(tiny_decoder, draft_decoder, [])
        yield "EAGLE, dynamic", changed(eagle_decoder, EAGLE_2["EAGLE-2"])
        yield "EAGLE, chain", changed(eagle_decoder, TokenTree.chain(3))
        yield "also, EAGLE", changed(eagle_decoder, EAGLE_2["EAGLE-2"], lookup=LookupSettings())

    return list(all_methods())


def test_pauses_of_any_pattern_leave_greedy_answers_alone(every: list[tuple[str, Decoder]]) -> None:
    rng = np.random.default_rng(3)
    patterns = ([False] * 9, [True, True, *[False] * 12], [False, True] * 20, (rng.random(40) < 0.5).tolist())
    prompt = every[0][1].encode(TEXTS[0])[-40:]
    for name, decoder in every:
        plain = fresh(decoder, prompt, max_new_tokens=36, speculate=False)
        for pattern in patterns:
            script = Script(pattern)
            ours = fresh(paced(decoder, script), prompt, max_new_tokens=36)
            assert ours.token_ids == plain.token_ids, name
            check(ours, script, len(prompt))
            assert ours.stats.plain_rounds >= min(9, pattern.count(False) // 4)


def check(answer: Generation, script: Script, prompt: int) -> None:
    """Statistics, against what the pace was told."""
    stats = answer.stats
    assert stats.rounds == len(script.said)
    assert stats.plain_rounds == script.said.count(False)
    assert len(script.noted) == script.said.count(True)
    assert sum(emitted for *_, emitted in script.noted) == stats.emitted - 1 - stats.plain_rounds
    assert sum(nodes - 1 for nodes, *_ in script.noted) == stats.drafted
    pasts = iter(script.noted)
    length = prompt  # committed tokens, as each round begins
    for drafts in script.said:
        nodes, past, emitted = next(pasts) if drafts else (1, length, 1)
        assert past == length and 1 <= emitted <= nodes
        length += emitted


def drafts_of(decoder: Decoder, prompt: Ids, count: int, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """What the decoder's drafter proposes while it answers."""
    drafts: list[Draft] = []
    make = decoder._drafter

    def spied(*arguments: Any) -> Any:
        drafter = make(*arguments)
        propose = drafter.propose

        def spy(*limits: int) -> Draft:
            drafts.append(propose(*limits))
            return drafts[-1]

        drafter.propose = spy  # type: ignore[method-assign]
        return drafter

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_drafter", spied)
        fresh(decoder, prompt, max_new_tokens=count)
    return drafts


@pytest.mark.parametrize("pause", [1, 7, 24])
def test_after_a_pause_drafts_are_those_of_a_fresh_drafter(
    every: list[tuple[str, Decoder]], pause: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was given the same text as a prompt. Lookahead decoding is left out: its window starts at random."""
    prompt, compared = every[0][1].encode(TEXTS[2])[-40:], 0
    for name, decoder in every:
        if name.startswith("lookahead") and not name.startswith("lookahead (0"):
            continue
        answer = fresh(decoder, prompt, max_new_tokens=pause, speculate=False).token_ids
        paused = drafts_of(paced(decoder, Script([False] * pause)), prompt, pause + 12, monkeypatch)
        anew = drafts_of(decoder, [*prompt, *answer], 12, monkeypatch)
        assert [len(draft.tree) for draft in paused[:pause]] == [1] * pause
        # The last of its rounds has no room for guesses in either.
        for ours, theirs in zip(paused[pause:], anew, strict=True):
            assert ours.tree == theirs.tree, name
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            if theirs.probabilities is not None and ours.probabilities is not None:
                np.testing.assert_allclose(ours.probabilities, theirs.probabilities, rtol=1e-5, atol=0)
            compared += len(theirs.tree) > 1
    assert compared > 30


def test_lookahead_goes_on_with_its_window_after_a_pause(every: list[tuple[str, Decoder]]) -> None:
    prompt = every[0][1].encode(TEXTS[2])[-40:]
    for name, decoder in every:
        if name.startswith("lookahead"):
            whole = fresh(decoder, prompt, max_new_tokens=60)
            for pattern in ([False] * 5, [True] * 9 + [False] * 20):
                ours = fresh(paced(decoder, Script(pattern)), prompt, max_new_tokens=60)
                assert ours.token_ids == whole.token_ids, name
                assert ours.stats.accepted > whole.stats.accepted / 3 > 0, name


def test_prompt_lookup_learns_through_a_pause() -> None:
    """Token by token, as if it had drafted."""
    text: Ids = np.random.default_rng(1).integers(1, 5, 120).tolist()
    tokens = text[:6], text[:6]
    awake, paused = (PromptLookupDrafter(live, LookupSettings(), DynamicTree(12), []) for live in tokens)
    for place in range(6, len(text)):
        ours = awake.propose(text[place], 12, 12)
        if place in (6, len(text) - 1):
            theirs = paused.propose(text[place], 12, 12)
            assert theirs.tree == ours.tree and len(ours.tree) > 1
            np.testing.assert_array_equal(theirs.tokens, ours.tokens)
        else:
            assert len(paused.propose(text[place], 1, 0).tree) == 1
        for live in tokens:
            live.append(text[place])
    assert awake.accuracy == paused.accuracy != list(PRIOR)


def test_a_head_reads_a_long_pause_in_chunks(
    eagle_decoder: Decoder, draft_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "CATCH_UP_CHUNK", 5)
    for decoder in (changed(eagle_decoder, EAGLE_2["EAGLE-2"]), changed(draft_decoder, DynamicTree(8, 0.02))):
        prompt = decoder.encode(TEXTS[1])[-20:]
        plain = fresh(decoder, prompt, max_new_tokens=40, speculate=False)
        ours = fresh(paced(decoder, Script([True, *[False] * 23])), prompt, max_new_tokens=40)
        assert ours.token_ids == plain.token_ids
        assert ours.stats.accepted > 4


def test_a_seed_draws_the_same_tokens_whatever_pauses(every: list[tuple[str, Decoder]]) -> None:
    """Where guesses are chosen: each token takes one number, from whichever round."""
    prompt, rng = every[0][1].encode(TEXTS[0])[-40:], np.random.default_rng(2)
    drafted = plain_rounds = 0
    for name, decoder in every:
        if ("draft" in name or "EAGLE" in name) and "dynamic" not in name:
            continue  # these draw their guesses
        for seed in range(2):
            options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": seed}
            pauses = Script((rng.random(24) < 0.6).tolist())
            ours = fresh(paced(decoder, pauses), prompt, **options)
            assert ours.token_ids == fresh(decoder, prompt, speculate=False, **options).token_ids, name
            drafted, plain_rounds = drafted + ours.stats.drafted, plain_rounds + ours.stats.plain_rounds
        assert plain_rounds, name
    assert drafted > 300


def test_a_losing_bundle_steps_back_across_answers_and_says_so(tiny_decoder: Decoder) -> None:
    """Every node as dear as a plain step: nothing can pay. The state outlives answers, and a new decoder repeats it."""
    dear = Costs([1, 2], [0], [[10.0, 20.0]], draft=1.0)
    prompts = [tiny_decoder.encode(text)[-40:] for text in TEXTS]
    runs = []
    for _ in range(2):
        decoder = paced(changed(tiny_decoder, tiny_decoder.tree), Pace(dear))
        plain = [fresh(decoder, prompt, max_new_tokens=40, speculate=False) for prompt in prompts]
        assert not any(answer.stats.plain_rounds for answer in plain), "plain by request, not by pace"
        answers = [fresh(decoder, prompts[turn % 4], max_new_tokens=40) for turn in range(12)]
        assert [answer.token_ids for answer in answers] == [plain[turn % 4].token_ids for turn in range(12)]
        runs.append([(a.stats.rounds, a.stats.plain_rounds, a.stats.stepped_back) for a in answers])
    assert runs[0] == runs[1]
    drafted = np.cumsum([rounds - plain for rounds, plain, _ in runs[0]])
    first = next(number for number, (_, plain, _) in enumerate(runs[0]) if plain)
    assert drafted[first - 1] <= WINDOW <= drafted[first], "a window of several answers"
    assert [back for *_, back in runs[0][: first + 1]] == [0] * first + [1] or runs[0][first - 1][2] == 1
    assert sum(back for *_, back in runs[0]) >= 2, "probed, and stepped back again"
    assert any(plain and not back for _, plain, back in runs[0]), "some answers begin in a pause"
    facts = answers[first].stats.to_json()
    assert facts["plain_rounds"] == runs[0][first][1] and facts["stepped_back"] == runs[0][first][2]


def test_a_winning_bundle_and_one_without_costs_never_step_back(tiny_decoder: Decoder) -> None:
    decoder = changed(tiny_decoder, tiny_decoder.tree)
    assert decoder.pace is None
    prompt = decoder.encode(TEXTS[0])[-40:]
    for other in (decoder, paced(decoder, Pace(Costs([1], [0], [[10.0]])))):
        for _ in range(4):
            stats = fresh(other, prompt, max_new_tokens=60).stats
            assert (stats.plain_rounds, stats.stepped_back) == (0, 0)


def test_costs_come_from_the_manifest(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "tuned.bundle"
    shutil.copytree(tiny_bundle, bundle)
    costs = {"tokens": [1, 8], "pasts": [0], "target": [[10.0, 10.5]], "draft": 30.0, "host": 0.5}
    edit_manifest(bundle, lambda manifest: manifest.update(costs=costs))
    decoder = load(bundle, threads=1)
    prompt = decoder.encode(TEXTS[0])[-40:]
    stats = [fresh(decoder, prompt, max_new_tokens=50).stats for _ in range(6)]
    assert sum(s.stepped_back for s in stats) >= 1 and sum(s.plain_rounds for s in stats) >= FIRST_PAUSE
    edit_manifest(bundle, lambda manifest: manifest["costs"].update(tokens=[2, 8]))
    with pytest.raises(BundleError, match=r"manifest.json: field 'costs' is not usable: costs: tokens start at 2"):
        load(bundle, threads=1)


# ---- off ----


def test_a_tree_of_the_root_alone_is_plain_decoding(
    every: list[tuple[str, Decoder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every method, with nothing run, kept or opened for a drafter that has nothing to say."""

    def never(*_: Any) -> None:
        raise AssertionError("the drafter's graph was used")

    for name, decoder in every:
        off = copy.copy(decoder)
        off.tree, off._default, off.pace = ROOT_ALONE, None, Pace(COSTS)
        prompt = off.encode(TEXTS[0])[-40:]
        with monkeypatch.context() as patch:
            for graph, method in ((off.draft, "open"), (off.heads, "run")):
                if graph is not None:
                    patch.setattr(graph, method, never)
            patch.setattr(EagleDrafter, "observe", never)
            sequence = off.new_sequence()
            ours = off.generate(prompt, max_new_tokens=20, sequence=sequence)
            assert sequence.draft_cache is None
            longer = [*prompt, *ours.token_ids, 7]
            again = off.generate(longer, max_new_tokens=5, sequence=sequence)
        assert again.stats.reused_tokens == len(longer) - 2, name  # no features to run again
        assert ours.token_ids == fresh(decoder, prompt, max_new_tokens=20, speculate=False).token_ids, name
        stats = ours.stats
        assert (stats.drafted, stats.plain_rounds, stats.draft_calls, stats.rounds) == (0, 0, 0, 19), name
