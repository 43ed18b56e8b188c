"""Drafts of an EAGLE head: what is run when and with which feature, and that it never shows in the output.

Target and head are made up, but for the last part. A feature holds the target's state, which is a function of the whole
text. A head whose row sees exactly the rows before it, each with the feature that belongs to it, at the right position,
works out the next state from its feature and its token; any other row gets a state of its own. So whatever is wrong in
masks, positions, features or commits gives other guesses.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
import transformers
from scipy.special import log_softmax, softmax
from scipy.stats import chisquare

from speccompile.graphs.draft_model import DraftTail
from speccompile.graphs.eagle import EagleForm, EagleModel
from speccompile.graphs.errors import BundleError
from speccompile.graphs.gqa import trace_gqa
from speccompile.graphs.manifest import EagleInfo
from speccompile.graphs.passes import finish_gqa_target
from speccompile.graphs.settings import LookupSettings
from speccompile.graphs.target import survey
from speccompile.graphs.tree import AdaptiveChain, DraftTree, DynamicTree, TokenTree
from speccompile.runtime import Decoder
from speccompile.runtime import decoder as decoding
from speccompile.runtime.acceptance import Accepted, accept_drawn, accept_sampled
from speccompile.runtime.backends.ort import OrtTarget, StepOutput
from speccompile.runtime.decoder import SequenceState
from speccompile.runtime.drafters.combined import CombinedDrafter
from speccompile.runtime.drafters.draft import Draft
from speccompile.runtime.drafters.eagle import EagleDrafter
from speccompile.runtime.sampling import Sampling, distribution, draw, next_token
from tests.tiny.chances import outcomes
from tests.tiny.conftest import EOS_IDS
from tests.tiny.models import VOCAB
from tests.tiny.test_draft_model import SHAPES, TREE, Model, best_branch, paths_of, wrong_rule

torch.set_num_threads(1)  # rows of a few numbers

GREEDY = Sampling()
CHAIN = TokenTree.chain(3)
EAGLE_2 = {"EAGLE-2": DynamicTree(9, depth=4, top_k=3)}
TREES: dict[str, DraftTree] = {**SHAPES, **EAGLE_2}
LIMB = (1 << 20) - 1  # float32 holds such numbers exactly
TRUE, OWN = 1.0, 0.0  # last place of a feature: the target's, or a state that the head passed on
NO_LOGITS = np.zeros((1, 1, 1), np.float32)

Array = npt.NDArray[Any]


# ---- made-up models ----


def follow(state: int, token: int) -> int:
    """The state after one more token, which is its low limb."""
    return hash((state, token)) % 2**40 << 20 | token


def state_of(text: Sequence[int]) -> int:
    return reduce(follow, text, 0)


def feature(state: int, origin: float) -> list[float]:
    return [state & LIMB, state >> 20 & LIMB, state >> 40, origin]


def state_in(feature: Array) -> int:
    low, middle, high = (int(limb) for limb in feature[:3])
    return low + (middle << 20) + (high << 40)


def after(target: Model, text: Sequence[int]) -> npt.NDArray[np.float32]:
    """The target's logits float32 [V]."""
    return target.row(state_of(text))


@dataclass(frozen=True)
class Row:
    """One row of the head's cache: the state in its feature, where that came from, and the state it passes on."""

    token: int
    read: int
    origin: float
    passed_on: int


class HeadCache:
    """A cache as `OrtCache` is one, of a head that guesses as `model` does. Outputs are views of one buffer."""

    def __init__(self, model: Model, capacity: int = 1000) -> None:
        self.model, self.capacity, self.length, self.seconds = model, capacity, 0, 0.25
        self.rows: list[Row | None] = [None] * capacity
        self.ran: list[list[int]] = []  # tokens of each call
        self.wanted: list[list[int]] = []  # rows of each call whose logits were asked for
        self.features: list[Array] = []
        self._hidden = np.zeros((1, 1024, 4), np.float32)

    def run(self, input_ids: Any, position_ids: Any, tree_mask: Any, logit_rows: Any, *, features: Any) -> StepOutput:
        tokens, masked = tree_mask.shape
        assert input_ids.shape == position_ids.shape == (tokens,) and tree_mask.dtype == np.bool_ and masked >= tokens
        assert features.shape == (tokens, 4) and features.dtype == np.float32
        features = features.copy()  # the backend copies it into a buffer of its own
        self._hidden[:] = -1
        older = self.length + masked - tokens
        assert older + tokens <= self.capacity, "rows do not fit the cache"
        made: list[int] = []
        for index, (token, position, mask) in enumerate(zip(input_ids, position_ids, tree_mask, strict=True)):
            own = masked - tokens + index
            assert mask[own] and not mask[own + 1 :].any()
            places = [*range(self.length), *(self.length + row for row in np.flatnonzero(mask[:own]))]
            seen = [cast(Row, self.rows[place]) for place in places]
            read = state_in(features[index])
            chain = [*(row.read for row in seen), read]
            right = position == len(seen) and [row.passed_on for row in seen] == chain[1:]
            passed_on = follow(read, int(token)) if right else follow(hash((int(position), *seen)), int(token))
            self.rows[older + index] = Row(int(token), read, float(features[index, 3]), passed_on)
            self._hidden[0, index] = feature(passed_on, OWN)
            made.append(passed_on)
        self.ran.append(input_ids.tolist())
        self.wanted.append(np.asarray(logit_rows).tolist())
        self.features.append(features)
        logits = np.array([self.model.row(made[row]) for row in logit_rows])
        ids, logprobs = (
            np.array(best) for best in zip(*(self.model.best(made[row]) for row in logit_rows), strict=True)
        )
        return StepOutput(ids[None, :, 0], logits[None], self._hidden[:, :tokens], ids[None], logprobs[None])

    def commit(self, nodes: Sequence[int]) -> None:
        assert list(nodes) == list(range(len(nodes))), "only rows of true features are committed, and those come first"
        self.length += len(nodes)
        assert all(row is not None and row.origin == TRUE for row in self.rows[: self.length])

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length


class TargetCache:
    """The target's cache, which only counts here."""

    length = 0

    def truncate(self, length: int) -> None:
        self.length = length

    def commit(self, nodes: Sequence[int]) -> None:
        self.length += len(nodes)


class Outputs:
    """The target's outputs, features in one buffer that every call overwrites, as the backend's are."""

    def __init__(self) -> None:
        self._hidden = np.zeros((1, 1024, 4), np.float32)

    def __call__(self, texts: Sequence[Sequence[int]]) -> StepOutput:
        self._hidden[:] = -1
        for row, text in enumerate(texts):
            self._hidden[0, row] = feature(state_of(text), TRUE)
        return StepOutput(np.zeros((1, 1), np.int64), NO_LOGITS, self._hidden[:, : len(texts)])


@dataclass
class Talk:
    """A target, a head and the text so far, in the hands of a small decoding loop."""

    target: Model
    head: Model
    tree: DraftTree
    sampling: Sampling = GREEDY
    uniform: Callable[[], float] = lambda: 0.5
    eos_ids: frozenset[int] = frozenset()
    capacity: int = 1000
    rule: Callable[..., Accepted] = accept_drawn
    chosen_rule: Callable[..., Accepted] = accept_sampled
    draws: bool = True
    chunk: int = 256
    beside: Any = None  # makes a second drafter of the live tokens
    drafts: list[Draft] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = HeadCache(self.head, self.capacity)
        self.sequence = SequenceState(cast(Any, TargetCache()), draft_cache=cast(Any, self.cache), reads_ahead=1)
        self.outputs = Outputs()

    def start(self, prompt: Sequence[int]) -> EagleDrafter:
        """A drafter that has seen the prompt."""
        tokens = self.sequence.tokens
        self.drafter = EagleDrafter(
            cast(Any, self.head),
            cast(Any, self.cache),
            tokens,
            self.tree,
            self.sampling,
            self.uniform,
            self.eos_ids,
            self.head.vocabulary,
            self.target.size,
            draws=self.draws,
        )
        self.both = CombinedDrafter(self.drafter, self.beside(tokens), 64, 0.0) if self.beside else self.drafter
        for begin in range(self.sequence.keep_prefix(prompt, features=True), len(prompt), self.chunk):
            piece = prompt[begin : begin + self.chunk]
            output = self.outputs([prompt[: begin + place] for place in range(1, len(piece) + 1)])
            self.sequence.commit(range(len(piece)), piece)
            self.both.observe(range(len(piece)), output)
        return self.drafter

    def answer(self, prompt: Sequence[int], count: int, root: int | None = None, max_nodes: int = 64) -> list[int]:
        """`count` tokens, or fewer up to an end-of-text token. A given root counts as the prompt's last token."""
        self.start(prompt)
        self.drafts, self.accepted = [], []
        emitted: list[int] = []
        if root is None:
            root = next_token(after(self.target, prompt), prompt, self.sampling, self.uniform)
            emitted.append(root)
        while len(emitted) < count and not self.eos_ids.intersection(emitted):
            depth = count - len(emitted) - 1
            draft = self.both.propose(root, max_nodes, depth)
            assert len(draft.tree) <= max_nodes and draft.tree.max_depth <= max(depth, 0)
            before = [*self.sequence.tokens, root]
            output = self.outputs([[*before, *path] for path in paths_of(draft)])
            accepted = self._verify(draft, before)
            new = [*(int(draft.tokens[node]) for node in accepted.nodes[1:]), accepted.bonus]
            ended = next((place for place, token in enumerate(new, 1) if token in self.eos_ids), len(new))
            nodes, new = accepted.nodes[: ended + 1], new[:ended]
            self.sequence.commit(nodes, [root, *new[: len(nodes) - 1]])
            self.both.observe(nodes, output)
            emitted += new
            root = accepted.bonus
            self.drafts.append(draft)
            self.accepted.append(len(nodes) - 1)
        return emitted

    def _verify(self, draft: Draft, before: list[int]) -> Accepted:
        def distribution_at(node: int, path: Sequence[int]) -> npt.NDArray[np.float64]:
            context = [*before, *path]
            return distribution(after(self.target, context), context, self.sampling)

        if draft.sampled_from is not None:
            return self.rule(draft.tree, draft.tokens, distribution_at, draft.sampled_from, self.uniform)
        return self.chosen_rule(draft.tree, draft.tokens, distribution_at, self.uniform)


def plainly(target: Model, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(after(target, text), text, sampling, lambda: 0.5))
    return text[len(prompt) :]


def same(one: Sequence[Draft], other: Sequence[Draft]) -> bool:
    """Whether two answers were drafted alike, to the last bit."""
    return len(one) == len(other) and all(
        a.tree == b.tree
        and a.tokens.tolist() == b.tokens.tolist()
        and (a.probabilities is None) == (b.probabilities is None)
        and (a.probabilities is None or a.probabilities.tolist() == b.probabilities.tolist())  # type: ignore[union-attr]
        for a, b in zip(one, other, strict=True)
    )


# ---- greedy ----


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_that_of_plain_decoding(name: str, seed: int) -> None:
    target = Model(seed, 11)
    talk = Talk(target, Model(seed + 100, 11, target, 0.75), TREES[name])
    assert talk.answer([3, 1, 4], 40) == plainly(target, [3, 1, 4], 40)
    assert 8 < sum(talk.accepted) < 40 - len(talk.accepted)  # some guesses are right, some are not
    assert all(draft.sampled_from is None for draft in talk.drafts)


@pytest.mark.parametrize("name", TREES)
def test_a_head_that_knows_the_target_is_always_right(name: str) -> None:
    """Any error in features, masks, positions or commits would make it wrong sooner or later."""
    target = Model(1, 11)
    talk = Talk(target, target, TREES[name])
    assert talk.answer([3, 1, 4], 60) == plainly(target, [3, 1, 4], 60)
    depths = [len(best_branch(draft.tree)) - 1 for draft in talk.drafts]
    assert talk.accepted == depths
    if name == "adaptive":
        assert depths[:3] == [3, 5, 6]
    elif name in ("chain", "tree"):
        assert set(depths[:-1]) == {3}


def test_accepted_tokens_run_again_with_true_features() -> None:
    target = Model(1, 11)
    talk = Talk(target, target, CHAIN)
    text = talk.answer([3, 1, 4], 9)
    assert talk.accepted == [3, 3]
    a, b, c, d, e, f, g, *_ = text
    # The prompt's pairs, the root, two levels (the leaf is never run); then the accepted path with the next root.
    assert talk.cache.ran == [[1, 4], [a], [b], [c], [b, c, d, e], [f], [g]]
    origins = [features[:, 3].tolist() for features in talk.cache.features]
    assert origins == [[TRUE] * 2, [TRUE], [OWN], [OWN], [TRUE] * 4, [OWN], [OWN]]
    texts = [[3, 1, 4, *text[:place]] for place in range(6)]
    assert [state_in(row) for row in talk.cache.features[4]] == [state_of(texts[place]) for place in (1, 2, 3, 4)]
    assert talk.cache.length == 7  # pairs up to the second root: the last path waits for its round
    assert (talk.drafter.calls, talk.drafter.step_seconds) == (6, 0.25)


def test_only_wanted_logits_are_asked_for() -> None:
    target = Model(1, 11)
    talk = Talk(target, Model(2, 11, target, 0.8), TREE)
    talk.answer([3, 1, 4], 30)
    assert sum(talk.accepted) > 5
    for tokens, wanted, features in zip(talk.cache.ran, talk.cache.wanted, talk.cache.features, strict=True):
        catching_up = features[0, 3] == TRUE
        assert wanted == ([len(tokens) - 1] if catching_up else list(range(len(tokens))))


def test_after_a_rejection_only_the_root_is_run() -> None:
    target = Model(1, 11)
    talk = Talk(target, Model(2, 11), CHAIN)  # it knows nothing of the target
    text = talk.answer([3, 1, 4], 12)
    assert 0 in talk.accepted
    assert talk.cache.ran[:2] == [[1, 4], text[:1]]
    catching_up = [
        len(ran) for ran, features in zip(talk.cache.ran, talk.cache.features, strict=True) if features[0, 3]
    ]
    assert catching_up[2:] == [accepted + 1 for accepted in talk.accepted[: len(catching_up) - 2]]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_a_prompt_in_pieces_gives_the_drafts_of_the_whole(name: str, chunk: int) -> None:
    """The last token of a piece waits for the first of the next."""
    target = Model(1, 11)
    prompt = np.random.default_rng(0).integers(0, 11, 30).tolist()
    whole, pieces = (Talk(target, Model(2, 11, target, 0.8), TREES[name], chunk=size) for size in (1000, chunk))
    assert whole.answer(prompt, 20) == pieces.answer(prompt, 20) == plainly(target, prompt, 20)
    assert same(whole.drafts, pieces.drafts)


def test_the_prompt_is_run_in_chunks_and_its_time_is_told() -> None:
    target = Model(1, 11)
    prompt = np.random.default_rng(0).integers(0, 11, 600).tolist()
    talk = Talk(target, target, CHAIN, chunk=600)
    drafter = talk.start(prompt)
    assert [len(call) for call in talk.cache.ran] == [256, 256, 87]
    assert (talk.cache.length, drafter.seconds, drafter.calls) == (599, 0.75, 0)
    draft = drafter.propose(5, 64, 64)
    assert talk.cache.ran[3] == [5] and talk.cache.length == 600
    assert draft.tokens.tolist() == [5, *plainly(target, [*prompt, 5], 3)]


def test_a_prompt_of_one_token() -> None:
    target = Model(1, 11)
    talk = Talk(target, target, CHAIN)
    assert talk.answer([3], 9) == plainly(target, [3], 9)
    assert talk.accepted == [3, 3]
    assert len(talk.cache.ran[0]) == 1  # nothing could be run before the root was known


# ---- what lasts ----


@pytest.mark.parametrize("name", TREES)
def test_a_conversation_drafts_as_a_fresh_sequence_does(name: str) -> None:
    """Continued, cut short in the answer or in the prompt, changed at one token, answered plainly in between."""
    target = Model(1, 11)
    head = Model(2, 11, target, 0.8)
    talk = Talk(target, head, TREES[name])
    first = talk.answer([3, 1, 4, 1, 5], 15)
    known = talk.cache.length
    assert known > 14
    longer = [3, 1, 4, 1, 5, *first[:10], 7, 7]
    for prompt in (longer, longer[:9], [*longer[:7], 2, 2], [3, 1], [8, *longer[1:]], longer):
        fresh = Talk(target, head, TREES[name])
        assert talk.answer(prompt, 15) == fresh.answer(prompt, 15) == plainly(target, prompt, 15)
        assert same(talk.drafts, fresh.drafts)
        assert talk.drafter.calls == fresh.drafter.calls
        if prompt is not longer:  # a plain answer moves the target's cache, the head's stays behind
            kept = talk.sequence.keep_prefix(prompt)
            assert kept == len(prompt) - 1
            talk.sequence.commit(range(len(prompt) - kept), prompt[kept:])
            talk.sequence.commit(range(3), [1, 2, 3])


def test_what_is_known_is_not_run_again() -> None:
    target = Model(1, 11)
    talk = Talk(target, target, CHAIN)
    first = talk.answer([3, 1, 4], 15)
    known = talk.cache.length
    prompt = [3, 1, 4, *first[:10], 7, 7]
    talk.cache.ran.clear()
    talk.start(prompt)
    # Row 11 had read the token behind the last common one: it is run again, with the same feature and another token.
    assert known > 12 and talk.cache.ran == [[first[9], 7, 7][-2:]]
    assert talk.cache.length == len(prompt) - 1


def test_a_row_depends_on_the_token_behind_it() -> None:
    """Pitfall 17. Were a row kept because its own token is, guesses would come out wrong."""
    target = Model(1, 11)
    talk, careless = (Talk(target, target, CHAIN) for _ in range(2))
    careless.sequence.reads_ahead = 0
    for one in (talk, careless):
        one.answer([3, 1, 4, 1, 5], 15)
        one.answer([3, 1, 4, 2, 6], 15)
    assert sum(talk.accepted) > 9 > sum(careless.accepted)


def test_a_plain_request_keeps_more() -> None:
    """Features are wanted for a head only: without one, the target's cache keeps all that is common."""
    talk = Talk(Model(1, 11), Model(1, 11), CHAIN)
    talk.answer([3, 1, 4, 1, 5], 15)
    assert talk.sequence.keep_prefix([3, 1, 4, 1, 6]) == 4
    assert (talk.sequence.cache.length, talk.cache.length, talk.sequence.tokens) == (4, 3, [3, 1, 4, 1])
    assert talk.sequence.keep_prefix([3, 1, 4, 1, 6], features=True) == 3
    assert talk.sequence.keep_prefix([7], features=True) == 0


@pytest.mark.parametrize("name", TREES)
def test_no_answer_shows_in_the_next(name: str) -> None:
    """Pitfall 25: the same prompt twice on one sequence, another one between."""
    target = Model(1, 11)
    sampling = Sampling(0.8, top_p=0.9)
    talk = Talk(target, Model(2, 11, target, 0.8), TREES[name], sampling)
    drafts = []
    for prompt in ([3, 1, 4], [9, 9, 9, 9], [3, 1, 4]):
        talk.uniform = np.random.default_rng(5).random
        talk.answer(prompt, 20)
        drafts.append(talk.drafts)
    assert same(drafts[0], drafts[2]) and not same(drafts[0], drafts[1])


# ---- limits ----


@pytest.mark.parametrize("name", TREES)
def test_nothing_is_drafted_beyond_the_heads_capacity(name: str) -> None:
    target = Model(1, 11)
    for capacity in range(4, 20):
        talk = Talk(target, target, TREES[name], capacity=capacity)
        assert talk.answer([3, 1, 4], 40) == plainly(target, [3, 1, 4], 40)
        assert talk.accepted[0] > 0 and talk.accepted[-5:] == [0] * 5
        assert not talk.drafter._waiting  # features are not kept for nothing
    # A prompt that is too long, in one piece or in several, is decoded without drafts.
    for chunk in (1, 2, 20):
        prompt = list(range(10))
        talk = Talk(target, target, TREES[name], capacity=7, chunk=chunk)
        assert talk.answer(prompt, 10) == plainly(target, prompt, 10)
        assert not any(talk.accepted)
        # The rows that fitted serve a later, shorter prompt.
        assert talk.answer(prompt[:4], 10) == plainly(target, prompt[:4], 10)
        assert talk.accepted[0] > 0


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("max_nodes", [1, 2, 3, 5])
def test_limits_of_nodes_and_depth(name: str, max_nodes: int) -> None:
    target = Model(1, 11)
    for count in (1, 2, 3, 9):
        talk = Talk(target, target, TREES[name])
        assert talk.answer([3, 1, 4], count, max_nodes=max_nodes) == plainly(target, [3, 1, 4], count)  # asserts limits
        if max_nodes == 1:
            assert talk.cache.ran == [[1, 4]]  # nothing is run for nothing
    if max_nodes == 2 and name in ("chain", "tree", "dynamic", "adaptive", "EAGLE-2"):
        assert talk.accepted == [1, 1, 1, 1]


def test_rounds_without_a_draft_are_caught_up_at_once() -> None:
    """Near a limit nothing is run; the features wait."""
    target = Model(1, 11)
    talk = Talk(target, target, CHAIN)
    drafter = talk.start([3, 1, 4])
    text = plainly(target, [3, 1, 4], 9)
    for place in range(4):
        assert len(drafter.propose(text[place], 1 + place % 2 * 9, place % 2 - 1).tree) == 1
        talk.sequence.commit([0], [text[place]])
        drafter.observe([0], talk.outputs([[3, 1, 4, *text[: place + 1]]]))
    assert talk.cache.ran == [[1, 4]]
    assert drafter.propose(text[4], 64, 64).tokens.tolist() == text[4:8]
    assert talk.cache.ran[1] == text[:5]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_nothing_is_drafted_behind_an_end_of_text_token(name: str, temperature: float) -> None:
    target = Model(4, 5)
    head = Model(2, 5, target, 0.5)
    rng = np.random.default_rng(1)
    ended, in_a_branch = 0, 0
    for start in range(5):
        talk = Talk(target, head, TREES[name], Sampling(temperature), rng.random, frozenset({2, 3}))
        emitted = talk.answer([start, 4], 12)
        assert not {2, 3}.intersection(emitted[:-1])
        for draft in talk.drafts:
            inner = [node for node, children in enumerate(draft.tree.children) if children]
            assert not {2, 3}.intersection(draft.tokens[inner].tolist())
            ended += bool({2, 3}.intersection(draft.tokens.tolist()))
        in_a_branch += bool(talk.accepted and talk.accepted[-1])
        if not temperature:
            plain = plainly(target, [start, 4], 12)
            end = next((place for place, token in enumerate(plain, 1) if token in (2, 3)), 12)
            assert emitted == plain[:end]
        # The conversation goes on behind the end, as a fresh one would.
        prompt = [start, 4, *emitted, 1, 1]
        fresh = Talk(target, head, TREES[name], eos_ids=frozenset({2, 3}))
        talk.sampling = GREEDY
        assert talk.answer(prompt, 6) == fresh.answer(prompt, 6)
        assert same(talk.drafts, fresh.drafts)
    assert ended and in_a_branch
    assert len(talk.drafter.propose(3, 64, 64).tree) == 1


def test_the_adaptive_chain_follows_the_heuristic_schedule() -> None:
    """Against the published rule: two more when all were accepted, else one fewer, from 1 to the longest."""
    target = Model(3, 9)
    talk = Talk(target, Model(5, 9, target, 0.7), AdaptiveChain(7))
    talk.answer([3, 1, 4], 150)
    length, lengths = 4, set()
    for draft, accepted in itertools.islice(zip(talk.drafts, talk.accepted, strict=True), len(talk.drafts) - 8):
        assert len(draft.tree) - 1 == length
        length = min(length + 2, 7) if accepted == length else max(length - 1, 1)
        lengths.add(length)
    assert lengths >= {1, 2, 3, 4}


def test_trees_and_vocabularies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BundleError, match="rank 5 needs more than the top 5 that this bundle's draft graph names"):
        Talk(Model(1, 11), Model(1, 11), TokenTree.from_paths([[rank] for rank in range(6)])).start([1])
    with pytest.raises(BundleError, match="names token 10, but the target has 10 tokens"):
        Talk(Model(1, 10), Model(1, 11, vocabulary=[0, 10]), CHAIN).start([1])


# ---- which guesses ----


class Table(Model):
    """Next tokens by the last token alone: `chances` [V,V]."""

    def __init__(self, chances: Array) -> None:
        super().__init__(0, len(chances))
        self.chances, self.top_k = chances, len(chances)

    def row(self, state: int) -> npt.NDArray[np.float32]:
        row: npt.NDArray[np.float32] = np.log(self.chances[state & LIMB]).astype(np.float32)
        return row


def propose(
    head: Model, tree: DraftTree, max_nodes: int = 64, max_depth: int = 64, root: int = 2, **options: Any
) -> Draft:
    """A first draft behind the prompt 3, 1 and the root."""
    return Talk(Model(0, head.size), head, tree, **options).start([3, 1]).propose(root, max_nodes, max_depth)


def test_the_published_example_of_a_dynamic_tree() -> None:
    """Reference notes 2.6, by hand: k = 2, depth = 2, five draft nodes behind token 0."""
    table = np.array([[0.6, 0.25, 0.1, 0.05], [0.1, 0.2, 0.65, 0.05], [0.3, 0.1, 0.1, 0.5], [0.25, 0.45, 0.2, 0.1]])
    draft = propose(Table(table), DynamicTree(6, depth=3, top_k=2), root=0)
    assert draft.tokens.tolist() == [0, 0, 1, 0, 2, 0]
    assert draft.tree.parents == (-1, 0, 0, 1, 2, 3)
    assert draft.tree.depths.tolist() == [0, 1, 1, 2, 2, 3]
    rows = ["".join(str(int(bit)) for bit in row) for row in draft.tree.mask]
    assert rows == ["100000", "110000", "101000", "110100", "101010", "110101"]
    assert draft.probabilities is not None
    assert draft.probabilities == pytest.approx([1, 0.6, 0.25, 0.36, 0.1625, 0.216], rel=1e-6)


def eagle_2(head: Model, k: int, depth: int, total: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of EAGLE-2's tree behind 3, 1, 2, as reference notes 2.6 put `topK_genrate`: the whole pool,
    then the rerank. `depth` is EAGLE's own, `total` its total_token."""
    pool: list[tuple[float, tuple[int, ...]]] = []  # score and path
    groups: list[int] = []  # by group of k in the pool: the pool's place of the parent, -1 for the root

    def expand(places: Sequence[int]) -> list[int]:
        """The k best places below."""
        first = len(pool)
        for place in places:
            score, path = pool[place] if place >= 0 else (0.0, ())
            logs = log_softmax(after(head, [3, 1, 2, *path]).astype(np.float64))
            groups.append(place)
            pool.extend((score + logs[token], (*path, int(token))) for token in np.argsort(-logs)[:k])
        return sorted(range(first, len(pool)), key=lambda place: -pool[place][0])[:k]

    frontier = expand([-1])
    for _ in range(depth):
        frontier = expand(frontier)
    kept = sorted(sorted(range(len(pool)), key=lambda place: -pool[place][0])[: total - 1])
    nodes = {-1: 0} | {place: node for node, place in enumerate(kept, 1)}
    return [2, *(pool[place][1][-1] for place in kept)], [-1, *(nodes[groups[place // k]] for place in kept)]


def test_dynamic_trees_are_those_of_eagle_2() -> None:
    """Though nodes that cannot be among the best are not run here."""
    rng = np.random.default_rng(3)
    work = Counter[str]()
    for seed in range(60):
        k, depth, total = (int(rng.integers(*bounds)) for bounds in ((1, 5), (1, 6), (2, 24)))
        total = min(total, 1 + k + depth * k * k)
        head = Model(seed, 9, scale=2.5)
        talk = Talk(Model(0, 9), head, DynamicTree(total, depth=depth + 1, top_k=k))
        draft = talk.start([3, 1]).propose(2, 64, 64)
        tokens, parents = eagle_2(head, k, depth, total)
        assert draft.tokens.tolist() == tokens and list(draft.tree.parents) == parents
        work["theirs"] += k * depth
        work["ours"] += sum(map(len, talk.cache.ran[2:]))
    assert work["ours"] < work["theirs"] * 0.8


@pytest.mark.parametrize(
    ("tree", "max_depth"),
    [
        (DynamicTree(2), 9),
        (DynamicTree(6), 9),
        (DynamicTree(14), 2),
        (DynamicTree(14, 0.06), 5),
        (DynamicTree(9, 0.9), 9),
        (DynamicTree(14, depth=2), 9),
        (DynamicTree(14, depth=9), 2),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_dynamic_tree_holds_the_most_probable_paths(tree: DynamicTree, max_depth: int, seed: int) -> None:
    """Against a list of all paths of up to 5 tokens."""
    head = Model(seed, 4, scale=2.0)
    draft = propose(head, tree, max_depth=max_depth)
    depth = min(max_depth, tree.depth or 9, 5)
    every = [
        (chance(head, path), path)
        for length in range(1, depth + 1)
        for path in itertools.product(range(4), repeat=length)
    ]
    best = [(p, path) for p, path in sorted(every, reverse=True)[: tree.nodes - 1] if p >= tree.floor]
    assert set(paths_of(draft)[1:]) == {path for _, path in best}
    if best:
        assert draft.probabilities is not None
        assert sorted(draft.probabilities[1:], reverse=True) == pytest.approx([p for p, _ in best], rel=1e-5)


def chance(head: Model, path: Sequence[int]) -> float:
    """Probability of a path behind 3, 1, 2, by the head."""
    return math.prod(
        float(softmax(after(head, [3, 1, 2, *path[:place]]).astype(np.float64))[token])
        for place, token in enumerate(path)
    )


@pytest.mark.parametrize("limits", [{}, {"depth": 4, "top_k": 2}])
def test_a_dynamic_tree_stays_a_tree_when_guesses_tie(limits: dict[str, int]) -> None:
    """Pitfall 27: children as probable as their parents, siblings as probable as each other."""
    certain = np.eye(4)[[1, 2, 3, 0]] + 1e-30
    draft = propose(Table(certain), DynamicTree(4, **limits), root=0)
    assert draft.tree == TokenTree.chain(3) and draft.tokens.tolist() == [0, 1, 2, 3]
    # The last place is between token 2 (0.4) and the token 3 that surely follows it.
    table = np.array([[0, 0.6, 0.4, 0], [0, 0, 0.08, 0.92], [0, 0, 0, 1], [0, 0, 0, 1]]) + 1e-30
    draft = propose(Table(table), DynamicTree(4, **limits), root=0, max_depth=2)
    assert draft.tokens.tolist() == [0, 1, 2, 3] and draft.tree.parents == (-1, 0, 0, 1)
    for nodes in range(2, 15):
        even = propose(Table(np.full((4, 4), 0.25)), DynamicTree(nodes, **limits))  # a TokenTree checks its parents
        most = 1 + sum(2 ** min(level, 2) for level in range(1, 5)) if limits else 99
        assert len(even.tree) == min(nodes, most)
        if limits:
            assert max(even.tree.ranks) <= 1


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(logit_bias={0: 0.0})])
def test_ranks_of_a_fixed_tree_are_those_of_the_head(sampling: Sampling) -> None:
    """With a bias of nothing the logits are processed: the same guesses must come out of both ways."""
    head = Model(5, 9)
    draft = propose(head, TREE, sampling=sampling)
    assert draft.tree == TREE and draft.probabilities is not None
    for node, (path, ranks) in enumerate(zip(paths_of(draft), TREE.paths, strict=True)):
        for place, rank in enumerate(ranks):
            assert path[place] == np.argsort(-after(head, [3, 1, 2, *path[:place]]))[rank]
        assert draft.probabilities[node] == pytest.approx(chance(head, path), rel=1e-5)


def test_processors_act_on_greedy_drafts_too() -> None:
    """Penalty, bias and hook at temperature 0: guesses of a head that knows the target stay always right."""
    target = Model(6, 11)

    def forbid_last(context: Sequence[int], logits: Array) -> Array:
        logits[context[-1]] = -np.inf
        return logits

    sampling = Sampling(repetition_penalty=1.7, logit_bias={3: 1.5}, processor=forbid_last)
    expected = plainly(target, [3, 1, 4], 25, sampling)
    assert expected != plainly(target, [3, 1, 4], 25)
    for tree in TREES.values():
        talk = Talk(target, target, tree, sampling)
        assert talk.answer([3, 1, 4], 25) == expected
        assert talk.accepted == [len(best_branch(draft.tree)) - 1 for draft in talk.drafts]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_vocabulary_of_its_own(name: str, temperature: float) -> None:
    """Fewer tokens than the target's; the target says others, and the head must read those too."""
    target, vocabulary = Model(1, 11), [0, 1, 2, 4, 5, 7, 9]
    head = Model(2, 11, target, 0.8, vocabulary)
    talk = Talk(target, head, TREES[name], Sampling(temperature, top_p=0.9), np.random.default_rng(0).random)
    emitted = talk.answer([3, 8, 10], 40)
    assert sum(talk.accepted) > 8
    for draft in talk.drafts:
        assert set(draft.tokens[1:].tolist()) <= set(vocabulary)
        for q in (draft.sampled_from or {}).values():
            assert len(q) == 11 and not q[[3, 6, 8, 10]].any() and q.sum() == pytest.approx(1)
    assert set(emitted) - set(vocabulary)
    assert {3, 8, 10} & set(itertools.chain(*talk.cache.ran))
    if not temperature:
        assert emitted == plainly(target, [3, 8, 10], 40)


@pytest.mark.parametrize("name", TREES)
def test_guesses_may_be_chosen_where_tokens_are_drawn(name: str) -> None:
    """Always in a dynamic tree, else on request. They cost no numbers: a seed means the text of plain decoding."""
    target = Model(1, 11)
    sampling = Sampling(0.8, top_p=0.9)
    talk = Talk(target, target, TREES[name], sampling, np.random.default_rng(3).random)
    talk.draws = isinstance(TREES[name], DynamicTree)
    answer = talk.answer([3, 1, 4], 30)
    assert all(draft.sampled_from is None for draft in talk.drafts) and sum(talk.accepted) > 5
    uniform = np.random.default_rng(3).random
    text = [3, 1, 4]
    for _ in range(30):
        text.append(next_token(after(target, text), text, sampling, uniform))
    assert answer == text[3:]


# ---- in one tree with another drafter's guesses ----


class Guesser:
    """A second drafter: the right next tokens now and then, else wrong ones."""

    seconds = 0.0

    def __init__(self, target: Model, tokens: Sequence[int]) -> None:
        self.target, self.tokens, self.rounds = target, tokens, 0

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        pass

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        self.rounds += 1
        length = min(max_nodes - 1, max_depth, 5)
        if length < 1:
            return Draft(TokenTree.chain(0), np.array([root]), np.ones(1))
        right = plainly(self.target, [*self.tokens, root], length)
        tokens = right if self.rounds % 2 else [(token + 1) % 11 for token in right]
        return Draft(TokenTree.chain(length), np.array([root, *tokens]), np.power(0.9, np.arange(length + 1)))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("copies", [1.0, 0.7])
def test_features_follow_the_path_that_was_accepted_in_a_merged_tree(name: str, copies: float) -> None:
    target = Model(1, 11)
    head = Model(2, 11, target, copies)
    alone, talk = Talk(target, head, TREES[name]), Talk(target, head, TREES[name], draws=False)
    talk.beside = lambda tokens: Guesser(target, tokens)
    assert talk.answer([3, 1, 4], 60) == alone.answer([3, 1, 4], 60) == plainly(target, [3, 1, 4], 60)
    assert len(talk.drafts) <= len(alone.drafts)
    assert max(talk.accepted) >= 5
    if copies == 1:  # always right all the same
        assert min(talk.accepted[:-1]) >= 1


# ---- drawn guesses and the output's distribution ----

SIZE, LENGTH, PROMPT, ROOT = 4, 3, [3, 1], 2
DRAWN: dict[str, DraftTree] = {
    "chain": TokenTree.chain(2),
    "adaptive": AdaptiveChain(3, 0.45),
    "tree": TokenTree.from_paths([[0], [1], [0, 0], [0, 1]]),
}
CHOSEN: dict[str, DraftTree] = {"dynamic": DynamicTree(5), "EAGLE-2": DynamicTree(6, depth=2, top_k=2)}
SETTINGS = [Sampling(0.7, top_p=0.9), Sampling(1.3, top_p=0.9)]
TARGET = Model(21, SIZE)
HEAD = Model(22, SIZE, TARGET, 0.4)
Answer = tuple[int, ...]


def enumerated(sampling: Sampling) -> dict[Answer, float]:
    """Probability of every answer under transformers' warpers."""
    steps = transformers.LogitsProcessorList(
        [transformers.TemperatureLogitsWarper(sampling.temperature), transformers.TopPLogitsWarper(sampling.top_p)]
    )

    def row(path: Answer) -> npt.NDArray[np.float64]:
        logits = torch.tensor(after(TARGET, [*PROMPT, ROOT, *path]), dtype=torch.float64)
        chances: npt.NDArray[np.float64] = steps(torch.empty(1, 0), logits[None]).softmax(-1)[0].numpy()
        return chances

    return {
        path: math.prod(float(row(path[:place])[token]) for place, token in enumerate(path))
        for path in itertools.product(range(SIZE), repeat=LENGTH)
    }


def answer(tree: DraftTree, sampling: Sampling, uniform: Callable[[], float], **changes: Any) -> Answer:
    return tuple(Talk(TARGET, HEAD, tree, sampling, uniform, **changes).answer(PROMPT, LENGTH, ROOT))


def p_value(answers: Counter[Answer], sampling: Sampling) -> float:
    """Chi-square of whole answers; those expected less than 5 times go into one class."""
    expected = {path: p * answers.total() for path, p in enumerated(sampling).items()}
    common = [path for path in expected if expected[path] >= 5]
    counts, expected_counts = [answers[path] for path in common], [expected[path] for path in common]
    rest = answers.total() - sum(expected_counts)
    if rest > 1e-6:
        counts.append(answers.total() - sum(counts))
        expected_counts.append(rest)
    return float(chisquare(counts, expected_counts).pvalue)


def as_if_drawn(
    tree: TokenTree,
    tokens: npt.NDArray[np.int64],
    distribution_at: Callable[..., npt.NDArray[np.float64]],
    uniform: Callable[[], float],
) -> Accepted:
    """Wrong on purpose (pitfall 19): chosen guesses are verified with the head's probability as q."""
    node, nodes, path = 0, [0], list[int]()
    while True:
        p = distribution_at(node, path)
        q = softmax(after(HEAD, [*PROMPT, ROOT, *path]).astype(np.float64))
        for child in tree.children[node]:
            token = int(tokens[child])
            if uniform() * q[token] < p[token]:
                break
            p = np.maximum(p - q, 0)
            p /= p.sum()
        else:
            return Accepted(tuple(nodes), draw(p, uniform()))
        node, path = child, [*path, token]
        nodes.append(node)


@pytest.mark.parametrize("sampling", SETTINGS, ids=["cool", "hot"])
@pytest.mark.parametrize("name", [*DRAWN, *CHOSEN])
def test_answers_have_the_targets_probabilities_exactly(name: str, sampling: Sampling) -> None:
    """Drafter, rule and loop together, over every way the uniform numbers can fall."""
    tree = {**DRAWN, **CHOSEN}[name]
    found = outcomes(lambda uniform: answer(tree, sampling, uniform))
    expected = {path: p for path, p in enumerated(sampling).items() if p > 0}
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


WRONG: list[dict[str, Any]] = [
    {"rule": wrong_rule(compare=False, subtract=True)},
    {"rule": wrong_rule(compare=True, subtract=False)},
    {"chosen_rule": as_if_drawn},
]


@pytest.mark.parametrize("name", ["chain", "adaptive", *CHOSEN])
def test_wrong_rules_do_not_have_them(name: str) -> None:
    tree = {**DRAWN, **CHOSEN}[name]
    expected = enumerated(SETTINGS[0])
    for changes in WRONG[2:] if name in CHOSEN else WRONG[:2]:
        found = outcomes(lambda uniform: answer(tree, SETTINGS[0], uniform, **changes))  # noqa: B023
        assert sum(found.values()) == pytest.approx(1)
        assert sum(abs(expected[path] - found.get(path, 0)) for path in expected) > 0.02


@pytest.mark.parametrize("name", ["tree", "EAGLE-2"])
def test_a_chi_square_test_tells_right_rules_from_wrong_ones(name: str) -> None:
    tree, rng = {**DRAWN, **CHOSEN}[name], np.random.default_rng(20)
    right = Counter(answer(tree, SETTINGS[0], rng.random) for _ in range(1000))
    assert p_value(right, SETTINGS[0]) > 1e-3
    for changes in WRONG[2:] if name in CHOSEN else WRONG[:2]:
        wrong = Counter(answer(tree, SETTINGS[0], rng.random, **changes) for _ in range(1000))
        assert p_value(wrong, SETTINGS[0]) < 1e-6


def test_drawn_guesses_come_with_the_q_that_they_were_drawn_from() -> None:
    """q is the head's distribution after the target's own processing, siblings differ."""
    head = Model(5, 6)
    sampling = Sampling(0.9, top_p=0.8, repetition_penalty=1.3)
    for seed in range(20):
        draft = propose(head, TREE, sampling=sampling, uniform=np.random.default_rng(seed).random)
        assert draft.sampled_from is not None and draft.probabilities is None
        paths = paths_of(draft)
        assert sorted(draft.sampled_from) == [node for node, below in enumerate(draft.tree.children) if below]
        for node, q in draft.sampled_from.items():
            context = [3, 1, 2, *paths[node]]
            assert q.tolist() == distribution(after(head, context), context, sampling).tolist()
            drawn = [int(draft.tokens[child]) for child in draft.tree.children[node]]
            assert len(set(drawn)) == len(drawn) and (q[drawn] > 0).all()


@pytest.mark.parametrize("tree", [CHAIN, AdaptiveChain(4), TREE])
def test_drawn_guesses_of_a_head_that_knows_the_target_are_always_accepted(tree: DraftTree) -> None:
    target = Model(2, 11)
    talk = Talk(target, target, tree, Sampling(0.8, top_p=0.9), np.random.default_rng(0).random)
    talk.answer([3, 1, 4], 80)
    assert len(talk.drafts) > 10
    assert talk.accepted == [len(best_branch(draft.tree)) - 1 for draft in talk.drafts]


# ---- real heads ----

FORMS = {
    "EAGLE-1": EagleForm(1),
    "EAGLE-3": EagleForm(3, taps=(1, 2), fusion_norm="each", norm_output=True),
    "EAGLE-3, normed residual": EagleForm(3, taps=(0,), norm_before_residual=True),
}


def random_head(form: EagleForm, vocabulary: int, draft_vocabulary: int, width: int = 32) -> EagleModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    model = EagleModel(config, form, width, draft_vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15)
    model.eval()
    return model


def graph_of(model: EagleModel, folder: Path, token_ids: torch.Tensor | None = None, top_k: int = 5) -> OrtTarget:
    graph = trace_gqa(model, survey(model, 128), DraftTail(token_ids, top_k, with_state=True), model.feature_width)
    finish_gqa_target(graph)
    ir.save(graph, folder / "eagle.onnx", external_data="eagle.onnx.data")
    return OrtTarget(folder / "eagle.onnx", threads=1)


def recomputed(model: EagleModel, tokens: Sequence[int], features: Array, path: Sequence[int]) -> Array:
    """Log-probabilities float64 [Vd] behind `path`: everything anew, one row after the other."""
    read, ids = torch.from_numpy(features).double()[None], [*tokens]
    while True:
        mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        with torch.no_grad():
            out = model(torch.tensor([ids]), torch.arange(len(ids))[None], read, mask)
        if len(ids) == len(tokens) + len(path):
            logs: Array = out.logits[0, -1].log_softmax(-1).numpy()
            return logs
        ids.append(path[len(ids) - len(tokens)])
        read = torch.cat((read, out.hidden_states[-1][:, -1:]), 1)


@pytest.mark.parametrize("name", FORMS)
def test_a_tree_grown_level_by_level_is_that_of_full_recomputation(name: str, tmp_path: Path) -> None:
    """A traced graph, a draft vocabulary of its own, and rounds that keep paths of any length."""
    model = random_head(FORMS[name], 97, 50)
    ids = torch.from_numpy(np.sort(np.random.default_rng(0).permutation(97)[:50]))
    head = graph_of(model, tmp_path, ids)
    model.double()
    assert (head.features, head.width, head.vocab_size, head.top_k) == (32, 32, 50, 5)
    for tree in (DynamicTree(14, depth=4, top_k=3), TREE):
        check_drafts(head, model, ids.numpy(), tree)


def check_drafts(head: OrtTarget, model: EagleModel, names: npt.NDArray[np.int64], tree: DraftTree) -> None:
    """Every guess of some rounds, against the eager model in float64."""
    rng = np.random.default_rng(2)
    tokens: list[int] = []
    features = np.zeros((0, 32), np.float32)
    cache = head.open(64)
    drafter = EagleDrafter(head, cache, tokens, tree, GREEDY, lambda: 0.5, (), names, 97)

    def see(new: Sequence[int], nodes: Sequence[int], size: int) -> None:
        nonlocal features
        hidden = rng.standard_normal((1, size, 32)).astype(np.float32)
        tokens.extend(new)
        features = np.concatenate((features, hidden[0, list(nodes)]))
        drafter.observe(nodes, StepOutput(np.zeros((1, 1), np.int64), NO_LOGITS, hidden))
        hidden[:] = np.nan  # the buffer is used again

    see(rng.integers(97, size=5).tolist(), range(5), 5)
    see(rng.integers(97, size=4).tolist(), range(4), 4)
    for number in range(8):
        root = int(rng.integers(97))
        draft = drafter.propose(root, 64, 64)
        assert cache.length == len(tokens) and draft.probabilities is not None
        paths = paths_of(draft)
        pairs = [*tokens[1:], root]
        for node, below in enumerate(draft.tree.children):
            if not below:
                continue
            logs = recomputed(model, pairs, features, paths[node])
            best = np.argsort(-logs)
            for child in below:
                place = best[draft.tree.ranks[child]]
                assert draft.tokens[child] == names[place]
                own = draft.probabilities[child] / draft.probabilities[node]
                assert np.log(own) == pytest.approx(logs[place], abs=1e-5)
        depth = number % (draft.tree.max_depth + 1)
        nodes = draft.tree.ancestry(int(rng.choice(np.flatnonzero(draft.tree.depths == depth))))
        see(draft.tokens[nodes].tolist(), nodes, len(draft.tree))


# ---- the whole decoder ----

TEXTS = ("def fibonacci(n):", "the fox and the crow", "one two one two one two", "Why is the sky blue?")


@pytest.fixture(scope="module")
def eagle_decoder(tiny_decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """The tiny target with an EAGLE-1 head that has learned for some seconds what it says to `TEXTS`."""
    model = random_head(EagleForm(1, input_norm=True, output_norm=True), VOCAB, VOCAB, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.5)
    ids, features = [], []
    for text in TEXTS:
        prompt = tiny_decoder.encode(text)[-40:]
        endless = changed(tiny_decoder, tiny_decoder.tree)
        said = prompt + fresh(endless, prompt, max_new_tokens=100 - len(prompt)).token_ids
        cache = tiny_decoder.target.open(100)
        output = cache.run(np.array(said), np.arange(100), np.tri(100, dtype=np.bool_), np.array([0]))
        assert output.hidden is not None
        ids.append(said)
        features.append(output.hidden[0].copy())
    tokens, read = torch.tensor(ids), torch.from_numpy(np.stack(features))
    mask = torch.full((98, 98), -torch.inf).triu(1)[None, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(120):
        out = model(tokens[:, 1:-1], torch.arange(98)[None], read[:, :-2] + 0.05 * torch.randn(4, 98, 64), mask)
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens[:, 2:].flatten())
        loss = loss + torch.nn.functional.smooth_l1_loss(out.hidden_states[-1], read[:, 1:-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("eagle")
    info = EagleInfo("f", "eagle-1", 1, VOCAB, None, 10, tiny_decoder.capacity, None, 1, [])
    decoder = changed(tiny_decoder, DynamicTree(10, depth=5, top_k=3), method="eagle", heads=None, eagle=info)
    decoder.heads, decoder.draft = None, graph_of(model, folder, top_k=10)
    return decoder


def changed(decoder: Decoder, tree: DraftTree, eos_ids: Sequence[int] = (), **fields: Any) -> Decoder:
    """The same loaded graphs with another tree and other fields in the manifest."""
    manifest = replace(decoder.bundle.manifest, eos_ids=list(eos_ids), **fields)
    other = copy.copy(decoder)
    other.bundle, other.tree, other._default = replace(decoder.bundle, manifest=manifest, tree=tree), tree, None
    return other


def fresh(decoder: Decoder, prompt: Any, **options: Any) -> decoding.Generation:
    return decoder.generate(prompt, sequence=decoder.new_sequence(), **options)


def decoders(decoder: Decoder, eos_ids: Sequence[int] = ()) -> dict[str, Decoder]:
    every = {name: changed(decoder, tree, eos_ids) for name, tree in TREES.items()}
    also = {f"also, {name}": changed(decoder, TREES[name], eos_ids, lookup=LookupSettings()) for name in TREES}
    return every | also


@pytest.mark.parametrize("eos_ids", [(), EOS_IDS], ids=["endless", "eos"])
def test_greedy_answers_are_those_of_plain_decoding(eagle_decoder: Decoder, eos_ids: Sequence[int]) -> None:
    prompts = [eagle_decoder.encode(text)[-40:] for text in TEXTS]
    for name, decoder in decoders(eagle_decoder, eos_ids).items():
        rounds, accepted = 0, 0
        for prompt in prompts:
            plain = fresh(decoder, prompt, max_new_tokens=60, speculate=False)
            ours = fresh(decoder, prompt, max_new_tokens=60)
            assert (ours.token_ids, ours.finish_reason) == (plain.token_ids, plain.finish_reason), name
            assert plain.stats.draft_calls == 0
            assert ours.stats.draft_calls >= ours.stats.rounds - 3
            if ours.stats.rounds > 3:
                assert ours.stats.draft_step_seconds > 0 and ours.stats.seconds["draft"] > 0
            rounds, accepted = rounds + ours.stats.rounds, accepted + ours.stats.accepted
        assert accepted > rounds / 2, name


def test_prompts_longer_than_a_chunk(eagle_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = eagle_decoder.encode(TEXTS[0])[-40:]
    whole = fresh(eagle_decoder, prompt, max_new_tokens=40)
    for chunk in (1, 5, len(prompt) - 1):
        monkeypatch.setattr(decoding, "PREFILL_CHUNK", chunk)
        pieces = fresh(eagle_decoder, prompt, max_new_tokens=40)
        assert pieces.token_ids == whole.token_ids
        for name in ("rounds", "drafted", "accepted", "draft_calls"):
            assert getattr(pieces.stats, name) == getattr(whole.stats, name)


def test_a_conversation_goes_on_where_it_was(eagle_decoder: Decoder) -> None:
    text = eagle_decoder.encode(TEXTS[0])[-40:]
    for name, decoder in decoders(eagle_decoder).items():
        sequence = decoder.new_sequence()
        first = decoder.generate(text, max_new_tokens=20, sequence=sequence)
        longer = [*text, *first.token_ids, 7, 8, 9]
        for prompt in (longer, text[:5], [*longer[:12], 30, 31], text):
            wanted = fresh(decoder, prompt, max_new_tokens=20)
            got = decoder.generate(prompt, max_new_tokens=20, sequence=sequence)
            assert got.token_ids == wanted.token_ids, name
            assert (got.stats.drafted, got.stats.accepted) == (wanted.stats.drafted, wanted.stats.accepted), name
            assert got.stats.reused_tokens > 0
        plain = decoder.generate(longer, max_new_tokens=9, sequence=sequence, speculate=False)
        assert plain.token_ids == fresh(decoder, longer, max_new_tokens=9).token_ids
        again = decoder.generate([*longer, *plain.token_ids, 5], max_new_tokens=9, sequence=sequence, speculate=False)
        assert again.stats.reused_tokens >= len(longer) + 8  # plainly, nothing runs twice


def test_where_the_head_ends_decoding_is_plain(eagle_decoder: Decoder) -> None:
    manifest = eagle_decoder.bundle.manifest
    assert manifest.eagle is not None
    text = eagle_decoder.encode(TEXTS[1])[-30:]
    short = changed(eagle_decoder, eagle_decoder.tree, eagle=replace(manifest.eagle, max_length=48))
    sequence = short.new_sequence()
    ours = short.generate(text, max_new_tokens=60, sequence=sequence)
    assert ours.token_ids == fresh(short, text, max_new_tokens=60, speculate=False).token_ids
    assert 0 < ours.stats.drafted < fresh(eagle_decoder, text, max_new_tokens=60).stats.drafted
    # A prompt that the head cannot hold is not run again for its sake.
    longer = [*text, *ours.token_ids, 7]
    got = short.generate(longer, max_new_tokens=10, sequence=sequence)
    assert (got.stats.reused_tokens, got.stats.drafted) == (len(longer) - 2, 0)
    assert got.token_ids == fresh(short, longer, max_new_tokens=10, speculate=False).token_ids
    assert short.generate(text, max_new_tokens=20, sequence=sequence).token_ids == ours.token_ids[:20]


def test_limits_are_kept_to_the_last_token(eagle_decoder: Decoder) -> None:
    prompt = eagle_decoder.encode(TEXTS[2])[-20:]
    for name, decoder in decoders(eagle_decoder).items():
        for limit in (1, 2, 3):
            assert len(fresh(decoder, prompt, max_new_tokens=limit).token_ids) == limit, name
        full = fresh(decoder, prompt, max_new_tokens=1000)
        assert full.finish_reason == "capacity", name
        assert len(full.token_ids) == decoder.capacity - len(prompt) + 1, name


def test_chosen_drafts_do_not_change_what_a_seed_draws(eagle_decoder: Decoder) -> None:
    prompt = eagle_decoder.encode(TEXTS[1])[-40:]
    for name, decoder in decoders(eagle_decoder).items():
        if "also" not in name and not isinstance(decoder.tree, DynamicTree):
            continue  # these draw their guesses from the same numbers
        for seed in range(3):
            options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": seed}
            ours, plain = (fresh(decoder, prompt, speculate=speculate, **options) for speculate in (True, False))
            assert ours.token_ids == plain.token_ids, name
