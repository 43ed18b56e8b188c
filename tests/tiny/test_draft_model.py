"""Drafts of a draft model: what they compute, what they cost, and that they never show in the output.

Both models are made up. Their logits are a function of everything the newest row has seen (token, position, and what
the rows it sees had seen), so that a wrong mask, position or commit gives other logits.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.special import log_softmax, softmax
from scipy.stats import chisquare
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from speccompile.graphs.errors import BundleError, GenerationError
from speccompile.graphs.tree import AdaptiveChain, DraftTree, DynamicTree, TokenTree
from speccompile.runtime.acceptance import Accepted, accept_drawn, accept_sampled
from speccompile.runtime.backends.ort import StepOutput
from speccompile.runtime.drafters.draft import Draft
from speccompile.runtime.drafters.draft_model import DraftModelDrafter, expected_tokens, predicted_speedup
from speccompile.runtime.sampling import Sampling, distribution, draw, next_token
from tests.tiny.chances import outcomes

torch.set_num_threads(1)  # rows of a few numbers

GREEDY = Sampling()
CHAIN = TokenTree.chain(3)
TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
SHAPES: dict[str, DraftTree] = {
    "chain": CHAIN,
    "tree": TREE,
    "out of order": TokenTree((-1, 0, 1, 0, 3), (0, 1, 0, 0, 0)),  # depth first, the better sibling last
    "dynamic": DynamicTree(7),
    "dynamic with floor": DynamicTree(12, 0.2),
    "adaptive": AdaptiveChain(6),
    "adaptive with confidence": AdaptiveChain(6, 0.5),
}


# ---- models ----


def seen(token: int, position: int, before: Sequence[int]) -> int:
    """What a row knows: itself, and what the rows it sees know."""
    return hash((token, position, *before))


class Model:
    """Logits [V] for every context. With `copies` = 1 it is the model `of`, with 0 it has nothing to do with it.

    `vocabulary` lists the tokens that it can say; `size` is the number of tokens otherwise.
    """

    def __init__(
        self,
        seed: int,
        size: int,
        of: Model | None = None,
        copies: float = 0.0,
        vocabulary: Sequence[int] | None = None,
        scale: float = 1.5,
    ) -> None:
        self.seed, self.size, self.of, self.copies, self.scale = seed, size, of, copies, scale
        self.max_tokens = self.max_masked = None
        self.vocabulary = None if vocabulary is None else np.array(vocabulary, np.int64)
        self.ids = np.arange(size) if self.vocabulary is None else self.vocabulary
        self.vocab_size = len(self.ids)
        self.top_k = min(5, self.vocab_size)
        self._rows: dict[int, npt.NDArray[np.float32]] = {}
        self._best: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
        self._contexts: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}

    def row(self, state: int) -> npt.NDArray[np.float32]:
        """float32 [Vd]."""
        if state not in self._rows:
            own = np.random.default_rng([self.seed, state % 2**63]).normal(0, self.scale, self.size)
            mixed = own if self.of is None else self.copies * self.of.row(state)[: self.size] + (1 - self.copies) * own
            self._rows[state] = mixed[self.ids].astype(np.float32)
        return self._rows[state]

    def best(self, state: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The best tokens int64 [K], and their log-probabilities float32 [K]."""
        if state not in self._best:
            row = self.row(state)
            places = np.argsort(-row, kind="stable")[: self.top_k]
            self._best[state] = self.ids[places], log_softmax(row)[places]
        return self._best[state]

    def after(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        """float32 [Vd] after a whole text, each token of which sees all before it."""
        return self.row(self._states(tuple(context))[-1])

    def _states(self, context: tuple[int, ...]) -> tuple[int, ...]:
        if context not in self._contexts:
            before = self._states(context[:-1])
            self._contexts[context] = (*before, seen(context[-1], len(before), before))
        return self._contexts[context]


class Cache:
    """A cache as `OrtCache` is one. `ran` has the tokens of each call, `states` what each row knew."""

    def __init__(self, model: Model, capacity: int = 1000) -> None:
        self.model, self.capacity, self.length, self.seconds = model, capacity, 0, 0.25
        self.rows: list[int] = [-1] * capacity
        self.ran: list[list[int]] = []
        self.states: list[int] = []

    def run(self, input_ids: Any, position_ids: Any, tree_mask: Any, logit_rows: Any) -> StepOutput:
        tokens, masked = tree_mask.shape
        assert input_ids.shape == position_ids.shape == (tokens,) and tree_mask.dtype == np.bool_ and masked >= tokens
        older = self.length + masked - tokens
        assert older + tokens <= self.capacity, "rows do not fit the cache"
        states = []
        for index, (token, position, mask) in enumerate(zip(input_ids, position_ids, tree_mask, strict=True)):
            before = [self.rows[self.length + row] for row in np.flatnonzero(mask) if row < masked - tokens + index]
            assert mask[masked - tokens + index] and not mask[masked - tokens + index + 1 :].any()
            states.append(seen(int(token), int(position), [*self.rows[: self.length], *before]))
            self.rows[older + index] = states[-1]
        self.ran.append(input_ids.tolist())
        self.states += states
        logits = np.array([self.model.row(states[row]) for row in logit_rows])
        ids, logprobs = (
            np.array(best) for best in zip(*(self.model.best(states[row]) for row in logit_rows), strict=True)
        )
        return StepOutput(ids[None, :, 0], logits[None], None, ids[None], logprobs[None])

    def commit(self, nodes: Sequence[int]) -> None:
        assert list(nodes) == sorted(set(nodes))
        kept = [self.rows[self.length + node] for node in nodes]
        self.rows[self.length : self.length + len(kept)] = kept
        self.length += len(kept)

    def truncate(self, length: int) -> None:
        self.length = min(length, self.length)


@dataclass
class Talk:
    """A target, a draft model and the text so far, in the hands of a small decoding loop."""

    target: Model
    model: Model
    tree: DraftTree
    sampling: Sampling = GREEDY
    uniform: Callable[[], float] = lambda: 0.5
    eos_ids: frozenset[int] = frozenset()
    cache: Cache | None = None
    rule: Callable[..., Accepted] = accept_drawn
    change: Callable[[Draft], Draft] = lambda draft: draft
    draws: bool = True
    tokens: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def answer(self, prompt: Sequence[int], count: int, root: int | None = None, max_nodes: int = 64) -> list[int]:
        """`count` tokens, or fewer up to an end-of-text token. A given root counts as the prompt's last token."""
        cache = self.cache = self.cache or Cache(self.model)
        common = next(
            (i for i, (a, b) in enumerate(zip(self.tokens, prompt, strict=False)) if a != b),
            min(len(self.tokens), len(prompt) - 1),
        )
        cache.truncate(common)
        self.tokens[:] = prompt
        self.drafts, self.accepted = [], []
        self.drafter = drafter = DraftModelDrafter(
            cast(Any, self.model),
            cast(Any, cache),
            self.tokens,
            self.tree,
            self.sampling,
            self.uniform,
            self.eos_ids,
            self.model.vocabulary,
            self.target.size,
            draws=self.draws,
        )
        drafter.observe([0], EMPTY)
        emitted: list[int] = []
        if root is None:
            root = next_token(self.target.after(prompt), prompt, self.sampling, self.uniform)
            emitted.append(root)
        while len(emitted) < count and not self.eos_ids.intersection(emitted):
            draft = self.change(drafter.propose(root, max_nodes, count - len(emitted) - 1))
            assert len(draft.tree) <= max_nodes and draft.tree.max_depth <= max(count - len(emitted) - 1, 0)
            accepted = self._verify(draft)
            new = [*(int(draft.tokens[node]) for node in accepted.nodes[1:]), accepted.bonus]
            ended = next((place for place, token in enumerate(new, 1) if token in self.eos_ids), len(new))
            nodes, new = accepted.nodes[: ended + 1], new[:ended]
            self.tokens += [root, *new[: len(nodes) - 1]]
            emitted += new
            root = accepted.bonus
            drafter.observe(nodes, EMPTY)
            self.drafts.append(draft)
            self.accepted.append(len(nodes) - 1)
        return emitted

    def _verify(self, draft: Draft) -> Accepted:
        before, root = list(self.tokens), int(draft.tokens[0])

        def distribution_at(node: int, path: Sequence[int]) -> npt.NDArray[np.float64]:
            context = [*before, root, *path]
            return distribution(self.target.after(context), context, self.sampling)

        if draft.sampled_from is not None:
            return self.rule(draft.tree, draft.tokens, distribution_at, draft.sampled_from, self.uniform)
        return accept_sampled(draft.tree, draft.tokens, distribution_at, self.uniform)


EMPTY = StepOutput(np.zeros((1, 1), np.int64), np.zeros((1, 1, 1), np.float32))


def plainly(target: Model, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(target.after(text), text, sampling, lambda: 0.5))
    return text[len(prompt) :]


def best_branch(tree: TokenTree) -> list[int]:
    """From the root down: the child of rank 0, as long as there is one."""
    nodes = [0]
    while (best := next((child for child in tree.children[nodes[-1]] if not tree.ranks[child]), None)) is not None:
        nodes.append(best)
    return nodes


# ---- greedy ----


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_that_of_plain_decoding(name: str, seed: int) -> None:
    target = Model(seed, 11)
    model = Model(seed + 100, 11, target, 0.75)
    talk = Talk(target, model, SHAPES[name])
    assert talk.answer([3, 1, 4], 40) == plainly(target, [3, 1, 4], 40)
    assert 10 < sum(talk.accepted) < 40 - len(talk.accepted)  # some guesses are right, some are not
    assert talk.cache is not None and len(set(talk.cache.states)) == len(talk.cache.states)  # nothing is computed twice
    assert all(draft.sampled_from is None for draft in talk.drafts)


@pytest.mark.parametrize("name", SHAPES)
def test_a_draft_model_that_is_the_target_is_always_right(name: str) -> None:
    """Any error in masks, positions or commits would make it wrong sooner or later."""
    target = Model(1, 11)
    talk = Talk(target, target, SHAPES[name])
    assert talk.answer([3, 1, 4], 60) == plainly(target, [3, 1, 4], 60)
    depths = [len(best_branch(draft.tree)) - 1 for draft in talk.drafts]
    assert talk.accepted == depths
    if name == "adaptive":
        assert depths[:3] == [3, 5, 6]
    elif name in ("chain", "tree"):
        assert set(depths[:-1]) == {3}


def test_after_a_fully_accepted_round_two_tokens_are_caught_up() -> None:
    target = Model(1, 11)
    talk = Talk(target, target, CHAIN)
    text = talk.answer([3, 1, 4], 9)
    assert talk.accepted == [3, 3]
    assert talk.cache is not None
    a, b, c, d, e, f, g, *_ = text
    # The guess at the leaf was never run: it comes with the root that follows it.
    assert talk.cache.ran == [[3, 1, 4], [a], [b], [c], [d, e], [f], [g]]
    assert (talk.drafter.calls, talk.drafter.step_seconds) == (6, 0.25)


def test_after_a_rejection_only_the_root_is_run() -> None:
    target = Model(1, 11)
    model = Model(2, 11)  # it knows nothing of the target
    talk = Talk(target, model, CHAIN)
    text = talk.answer([3, 1, 4], 12)
    rejected = [index for index, accepted in enumerate(talk.accepted[:-1]) if accepted < 3]
    assert rejected and talk.cache is not None
    assert talk.cache.ran[0] == [3, 1, 4]
    assert talk.cache.ran[1] == text[:1]
    assert all(len(call) == 1 for call in talk.cache.ran[1:])
    assert talk.cache.length <= len(talk.tokens)


def test_the_prompt_is_run_at_once_and_in_chunks() -> None:
    target = Model(1, 11)
    prompt = np.random.default_rng(0).integers(0, 11, 600).tolist()
    talk = Talk(target, target, CHAIN)
    cache = talk.cache = Cache(target)
    talk.tokens = prompt
    drafter = DraftModelDrafter(
        cast(Any, target), cast(Any, cache), prompt, CHAIN, GREEDY, lambda: 0.5, frozenset(), None, 11
    )
    drafter.observe([87], EMPTY)
    assert [len(call) for call in cache.ran] == [256, 256, 88]
    assert (cache.length, drafter.seconds, drafter.calls) == (600, 0.75, 0)
    draft = drafter.propose(5, 64, 64)
    assert draft.tokens.tolist() == [5, *plainly(target, [*prompt, 5], 3)]


def test_a_prompt_not_seen_before_the_first_draft_is_caught_up() -> None:
    """The chunk's edge falls on the root."""
    target = Model(1, 11)
    prompt = np.random.default_rng(0).integers(0, 11, 512).tolist()
    cache = Cache(target)
    drafter = DraftModelDrafter(
        cast(Any, target), cast(Any, cache), prompt, CHAIN, GREEDY, lambda: 0.5, frozenset(), None, 11
    )
    assert drafter.propose(5, 64, 64).tokens.tolist() == [5, *plainly(target, [*prompt, 5], 3)]
    assert [len(call) for call in cache.ran] == [256, 256, 1, 1, 1]
    assert cache.length == 512


@pytest.mark.parametrize("name", SHAPES)
def test_a_conversation_keeps_the_draft_models_cache(name: str) -> None:
    target = Model(1, 11)
    talk = Talk(target, Model(2, 11, target, 0.8), SHAPES[name])
    first = talk.answer([3, 1, 4], 15)
    assert talk.cache is not None
    known = talk.cache.length
    talk.cache.ran.clear()
    prompt = [3, 1, 4, *first[:10], 7, 7]
    assert talk.answer(prompt, 15) == plainly(target, prompt, 15)
    assert known > 13 and talk.cache.ran[0] == [7, 7]
    assert len(set(talk.cache.states)) == len(talk.cache.states)


@pytest.mark.parametrize("name", SHAPES)
def test_beyond_the_draft_models_capacity_decoding_goes_on_plainly(name: str) -> None:
    target = Model(1, 11)
    talk = Talk(target, target, SHAPES[name], cache=Cache(target, 16))
    assert talk.answer([3, 1, 4], 40) == plainly(target, [3, 1, 4], 40)
    assert talk.accepted[0] > 0 and talk.accepted[-5:] == [0] * 5
    talk = Talk(target, target, SHAPES[name], cache=Cache(target, 3))
    assert talk.answer([3, 1, 4], 10) == plainly(target, [3, 1, 4], 10)
    assert talk.cache is not None and not talk.cache.ran


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("max_nodes", [1, 2, 3, 5])
def test_limits_of_nodes_and_depth(name: str, max_nodes: int) -> None:
    target = Model(1, 11)
    for count in (1, 2, 3, 9):
        talk = Talk(target, target, SHAPES[name])
        assert talk.answer([3, 1, 4], count, max_nodes=max_nodes) == plainly(target, [3, 1, 4], count)  # asserts limits
        if max_nodes == 1:
            assert talk.cache is not None and talk.cache.ran == [[3, 1, 4]]  # nothing is run for nothing
    if max_nodes == 2 and name in ("chain", "tree", "dynamic", "adaptive"):
        assert talk.accepted == [1, 1, 1, 1]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_nothing_is_drafted_behind_an_end_of_text_token(name: str, temperature: float) -> None:
    target = Model(4, 5)
    model = Model(2, 5, target, 0.5)
    rng = np.random.default_rng(1)
    ended = 0
    for start in range(5):
        talk = Talk(target, model, SHAPES[name], Sampling(temperature), rng.random, frozenset({2, 3}))
        emitted = talk.answer([start, 4], 12)
        assert not {2, 3}.intersection(emitted[:-1])
        for draft in talk.drafts:
            inner = [node for node, children in enumerate(draft.tree.children) if children]
            assert not {2, 3}.intersection(draft.tokens[inner].tolist())
            ended += bool({2, 3}.intersection(draft.tokens.tolist()))
        if not temperature:
            plain = plainly(target, [start, 4], 12)
            end = next((place for place, token in enumerate(plain, 1) if token in (2, 3)), 12)
            assert emitted == plain[:end]
    assert ended
    assert len(talk.drafter.propose(3, 64, 64).tree) == 1


def test_processors_act_on_greedy_drafts_too() -> None:
    """Penalty, bias and hook at temperature 0: guesses of the target's own twin stay always right."""
    target = Model(6, 11)

    def forbid_last(context: Sequence[int], logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        logits[context[-1]] = -np.inf
        return logits

    sampling = Sampling(repetition_penalty=1.7, logit_bias={3: 1.5}, processor=forbid_last)
    expected = plainly(target, [3, 1, 4], 25, sampling)
    assert expected != plainly(target, [3, 1, 4], 25)
    for tree in SHAPES.values():
        talk = Talk(target, target, tree, sampling)
        assert talk.answer([3, 1, 4], 25) == expected
        assert talk.accepted == [len(best_branch(draft.tree)) - 1 for draft in talk.drafts]
        for draft in talk.drafts:
            assert draft.sampled_from is None
            paths = [[int(draft.tokens[node]) for node in draft.tree.ancestry(n)] for n in range(len(draft.tree))]
            assert all(a != b for path in paths for a, b in itertools.pairwise(path))  # the hook's rule


# ---- which guesses ----


def chance(model: Model, prompt: Sequence[int], path: Sequence[int]) -> float:
    """Probability of a path behind `prompt`, by the draft model."""
    return math.prod(
        float(softmax(model.after([*prompt, *path[:place]]).astype(np.float64))[token])
        for place, token in enumerate(path)
    )


def propose(
    model: Model, tree: DraftTree, max_nodes: int = 64, max_depth: int = 64, capacity: int = 99, **options: Any
) -> Draft:
    """A first draft behind the prompt 3, 1 and the root 2."""
    settings: dict[str, Any] = {
        "sampling": GREEDY,
        "uniform": lambda: 0.5,
        "eos_ids": frozenset(),
        "target_vocab": model.size,
    } | options
    drafter = DraftModelDrafter(
        cast(Any, model), cast(Any, Cache(model, capacity)), [3, 1], tree, vocabulary=model.vocabulary, **settings
    )
    return drafter.propose(2, max_nodes, max_depth)


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens on each node's path, root excluded."""
    return [
        tuple(int(draft.tokens[above]) for above in draft.tree.ancestry(node)[1:]) for node in range(len(draft.tree))
    ]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(logit_bias={0: 0.0})])
def test_ranks_of_a_fixed_tree_are_those_of_the_draft_model(sampling: Sampling) -> None:
    """With a bias of nothing the logits are processed: the same guesses must come out of both ways."""
    model = Model(5, 9)
    draft = propose(model, TREE, sampling=sampling)
    assert draft.tree == TREE
    for node, (path, ranks) in enumerate(zip(paths_of(draft), TREE.paths, strict=True)):
        for place, rank in enumerate(ranks):
            logits = model.after([3, 1, 2, *path[:place]])
            assert path[place] == np.argsort(-logits)[rank]
        assert draft.probabilities is not None
        assert draft.probabilities[node] == pytest.approx(chance(model, [3, 1, 2], path), rel=1e-5)


@pytest.mark.parametrize(
    ("nodes", "floor", "depth"), [(2, 0.0, 9), (6, 0.0, 9), (14, 0.0, 2), (14, 0.06, 5), (9, 0.9, 9)]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_dynamic_tree_holds_the_most_probable_paths(nodes: int, floor: float, depth: int, seed: int) -> None:
    """Against a list of all paths of up to 5 tokens."""
    model = Model(seed, 4, scale=2.0)
    draft = propose(model, DynamicTree(nodes, floor), max_depth=depth)
    every = [
        (chance(model, [3, 1, 2], path), path)
        for length in range(1, min(depth, 5) + 1)
        for path in itertools.product(range(4), repeat=length)
    ]
    best = [(p, path) for p, path in sorted(every, reverse=True)[: nodes - 1] if p >= floor]
    assert max(len(path) for path in paths_of(draft)) <= 5  # else the list above is too short to compare with
    assert set(paths_of(draft)[1:]) == {path for _, path in best}
    if len(draft.tree) > 1:
        assert draft.probabilities is not None
        assert sorted(draft.probabilities[1:], reverse=True) == pytest.approx([p for p, _ in best], rel=1e-5)
        assert draft.sampled_from is None
    else:
        assert not best


def test_a_dynamic_tree_stays_a_tree_when_a_guess_is_certain() -> None:
    """A child as probable as its parent (pitfall 27), and a log-probability that rounding has left above 0."""

    class Certain(Model):
        def row(self, state: int) -> npt.NDArray[np.float32]:
            return np.array([0, 200, 0, 0], np.float32)

    class Rounded(Cache):
        def run(self, *arguments: Any) -> StepOutput:
            output = super().run(*arguments)
            assert output.topk_logprobs is not None
            output.topk_logprobs[..., 0] = 1e-6
            return output

    model = Certain(0, 4)
    drafter = DraftModelDrafter(
        cast(Any, model), cast(Any, Rounded(model)), [3], DynamicTree(5), GREEDY, lambda: 0.5, (), None, 4
    )
    draft = drafter.propose(4, 64, 64)
    assert draft.tree == TokenTree.chain(4)
    assert draft.probabilities is not None and draft.probabilities.tolist() == [1.0] * 5


@pytest.mark.parametrize("name", SHAPES)
def test_guesses_may_be_chosen_where_tokens_are_drawn(name: str) -> None:
    """Always in a dynamic tree, else on request. They cost no numbers: a seed means the text of plain decoding."""
    target = Model(1, 11)
    sampling = Sampling(0.8, top_p=0.9)
    uniform = np.random.default_rng(3).random
    talk = Talk(target, target, SHAPES[name], sampling, uniform, draws=name.startswith("dynamic"))
    answer = talk.answer([3, 1, 4], 30)
    assert all(draft.sampled_from is None for draft in talk.drafts) and sum(talk.accepted) > 5
    uniform = np.random.default_rng(3).random
    text = [3, 1, 4]
    for _ in range(30):
        text.append(next_token(target.after(text), text, sampling, uniform))
    assert answer == text[3:]


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
    assert lengths >= {1, 2, 3, 4, 5}
    strangers = Talk(target, Model(6, 9, scale=5), AdaptiveChain(7))
    strangers.answer([3, 1, 4], 30)
    assert min(len(draft.tree) for draft in strangers.drafts[:-1]) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafting_stops_behind_a_doubtful_guess(temperature: float) -> None:
    target = Model(3, 9)
    sampling = Sampling(temperature)
    talk = Talk(target, target, AdaptiveChain(9, 0.4), sampling, np.random.default_rng(0).random)
    talk.answer([3, 1, 4], 60)
    stopped = 0
    for draft in talk.drafts[:-9]:
        if draft.sampled_from is not None:
            own = [draft.sampled_from[node][draft.tokens[node + 1]] for node in range(len(draft.tree) - 1)]
        else:
            assert draft.probabilities is not None
            own = (draft.probabilities[1:] / draft.probabilities[:-1]).tolist()
        assert min(own[:-1], default=1) >= 0.4
        stopped += own[-1] < 0.4
    assert stopped > 5


# ---- drawn guesses ----


def test_drawn_guesses_come_with_the_q_that_they_were_drawn_from() -> None:
    """q is the draft model's distribution after the target's own processing; siblings differ, and where q has fewer
    tokens than there are siblings, the rest is left out, with what hangs below."""
    model = Model(5, 6)
    sampling = Sampling(0.9, top_p=0.8, repetition_penalty=1.3)
    sizes = Counter[int]()
    for seed in range(30):
        draft = propose(model, TREE, sampling=sampling, uniform=np.random.default_rng(seed).random)
        assert draft.sampled_from is not None and draft.probabilities is None
        paths = paths_of(draft)
        inner = [node for node, children in enumerate(draft.tree.children) if children]
        assert sorted(draft.sampled_from) == inner
        for node in inner:
            context = [3, 1, 2, *paths[node]]
            expected = distribution(model.after(context), context, sampling)
            assert draft.sampled_from[node].tolist() == expected.tolist()
            drawn = [int(draft.tokens[child]) for child in draft.tree.children[node]]
            assert len(set(drawn)) == len(drawn) and (expected[drawn] > 0).all()
            wanted = [
                len(TREE.children[plan]) for plan, ranks in enumerate(TREE.paths) if ranks == draft.tree.paths[node]
            ]
            assert [len(drawn)] == [min(count, np.count_nonzero(expected)) for count in wanted]
        sizes[len(draft.tree)] += 1
    assert len(sizes) > 1 and max(sizes) == len(TREE)


def test_draws_without_replacement_have_their_chances() -> None:
    """Exact, over all draws: q(a) for the first sibling, q(b) / (1 - q(a)) for the second."""
    model = Model(8, 4)
    tree = TokenTree.from_paths([[0], [1]])

    def siblings(uniform: Callable[[], float]) -> tuple[int, ...]:
        return tuple(propose(model, tree, sampling=Sampling(1.0), uniform=uniform).tokens[1:].tolist())

    q = softmax(model.after([3, 1, 2]).astype(np.float64))
    found = outcomes(siblings)
    assert len(found) == 12
    for (first, second), p in found.items():
        assert p == pytest.approx(q[first] * q[second] / (1 - q[first]), rel=1e-9)


@pytest.mark.parametrize("tree", [CHAIN, AdaptiveChain(4), AdaptiveChain(4, 0.3), TREE])
def test_drawn_guesses_of_the_targets_twin_are_always_accepted(tree: DraftTree) -> None:
    target = Model(2, 11)
    talk = Talk(target, target, tree, Sampling(0.8, top_p=0.9), np.random.default_rng(0).random)
    talk.answer([3, 1, 4], 80)
    assert len(talk.drafts) > 10
    # q is p, so the first sibling is kept at every level.
    assert talk.accepted == [len(best_branch(draft.tree)) - 1 for draft in talk.drafts]


# ---- the output's distribution ----

SIZE, LENGTH, PROMPT, ROOT = 4, 3, [3, 1], 2
DRAWN: dict[str, DraftTree] = {
    "chain": TokenTree.chain(2),
    "adaptive": AdaptiveChain(3, 0.45),
    "tree": TokenTree.from_paths([[0], [1], [0, 0], [0, 1]]),
}
SETTINGS = [Sampling(0.7, top_p=0.9), Sampling(1.3, top_p=0.9)]
TARGET = Model(21, SIZE)
DRAFT = Model(22, SIZE, TARGET, 0.4)
Sequences = tuple[int, ...]


def enumerated(sampling: Sampling) -> dict[Sequences, float]:
    """Probability of every answer under transformers' warpers."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature), TopPLogitsWarper(sampling.top_p)])

    def row(path: Sequences) -> npt.NDArray[np.float64]:
        logits = torch.tensor(TARGET.after([*PROMPT, ROOT, *path]), dtype=torch.float64)
        return steps(torch.empty(1, 0), logits[None]).softmax(-1)[0].numpy()

    return {
        path: math.prod(float(row(path[:place])[token]) for place, token in enumerate(path))
        for path in itertools.product(range(SIZE), repeat=LENGTH)
    }


def answer(
    tree: DraftTree, sampling: Sampling, uniform: Callable[[], float], talks: list[Talk] | None = None, **changes: Any
) -> Sequences:
    talk = Talk(TARGET, DRAFT, tree, sampling, uniform, **changes)
    if talks is not None:
        talks.append(talk)
    return tuple(talk.answer(PROMPT, LENGTH, ROOT))


def p_value(answers: Counter[Sequences], sampling: Sampling) -> float:
    """Chi-square of whole answers; those expected less than 5 times go into one class."""
    expected = {path: p * answers.total() for path, p in enumerated(sampling).items()}
    common = [path for path in expected if expected[path] >= 5]
    observed_counts = [answers[path] for path in common]
    expected_counts = [expected[path] for path in common]
    rest = answers.total() - sum(expected_counts)
    if rest > 1e-6:
        observed_counts.append(answers.total() - sum(observed_counts))
        expected_counts.append(rest)
    return float(chisquare(observed_counts, expected_counts).pvalue)


def wrong_rule(compare: bool, subtract: bool) -> Callable[..., Accepted]:
    """`accept_drawn` without one of its halves."""

    def rule(
        tree: TokenTree,
        tokens: npt.NDArray[np.int64],
        distribution_at: Callable[..., npt.NDArray[np.float64]],
        sampled_from: Mapping[int, npt.NDArray[np.float64]],
        uniform: Callable[[], float],
    ) -> Accepted:
        node, nodes, path = 0, [0], list[int]()
        while True:
            p, q = distribution_at(node, path), sampled_from.get(node, np.zeros(SIZE)).copy()
            for child in tree.children[node]:
                token = int(tokens[child])
                if uniform() * (q[token] if compare else 1) < p[token]:
                    break
                residual = np.maximum(p - q, 0) if subtract else p
                p = residual / residual.sum() if residual.any() else p
                q[token] = 0
                q /= q.sum() or 1
            else:
                return Accepted(tuple(nodes), draw(p, uniform()))
            node, path = child, [*path, token]
            nodes.append(node)

    return rule


def drop_the_doubtful(draft: Draft) -> Draft:
    """Wrong on purpose: a drawn guess that q finds improbable is taken back."""
    if draft.sampled_from is None:
        return draft
    last = len(draft.tree) - 1
    if draft.sampled_from[last - 1][draft.tokens[last]] >= 0.45:
        return draft
    kept = {node: q for node, q in draft.sampled_from.items() if node < last - 1}
    return Draft(TokenTree.chain(last - 1), draft.tokens[:last], sampled_from=kept)


@pytest.mark.parametrize("sampling", SETTINGS, ids=["cool", "hot"])
@pytest.mark.parametrize("name", DRAWN)
def test_answers_have_the_targets_probabilities(name: str, sampling: Sampling) -> None:
    rng = np.random.default_rng(20)
    talks: list[Talk] = []
    answers = Counter(answer(DRAWN[name], sampling, rng.random, talks) for _ in range(1000))
    assert p_value(answers, sampling) > 1e-3
    accepted = [sum(talk.accepted) for talk in talks]
    assert min(accepted) == 0 and max(accepted) == 2


@pytest.mark.parametrize("sampling", SETTINGS, ids=["cool", "hot"])
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("wrong", ["no comparison", "no subtraction"])
def test_the_chi_square_test_finds_wrong_rules(name: str, sampling: Sampling, wrong: str) -> None:
    rng = np.random.default_rng(20)
    rule = wrong_rule(wrong != "no comparison", wrong != "no subtraction")
    answers = Counter(answer(DRAWN[name], sampling, rng.random, rule=rule) for _ in range(1000))
    assert p_value(answers, sampling) < 1e-6


@pytest.mark.parametrize("sampling", SETTINGS, ids=["cool", "hot"])
def test_dropping_a_drawn_guess_for_what_it_is_biases_the_output(sampling: Sampling) -> None:
    """Why drafting stops behind a doubtful guess and not before it."""
    rng = np.random.default_rng(20)
    answers = Counter(answer(DRAWN["adaptive"], sampling, rng.random, change=drop_the_doubtful) for _ in range(1000))
    assert p_value(answers, sampling) < 1e-6


@pytest.mark.parametrize("sampling", SETTINGS, ids=["cool", "hot"])
@pytest.mark.parametrize("name", DRAWN)
def test_answers_have_the_targets_probabilities_exactly(name: str, sampling: Sampling) -> None:
    """Drafter, rule and loop together, over every way the uniform numbers can fall."""
    found = outcomes(lambda uniform: answer(DRAWN[name], sampling, uniform))
    expected = enumerated(sampling)
    assert found == pytest.approx({path: p for path, p in expected.items() if p > 0}, rel=1e-6, abs=1e-9)


# ---- vocabularies ----


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("vocabulary", [[0, 1, 2, 4, 5, 7, 9], [9, 2, 0, 5, 7, 4, 1, 3, 6, 8, 10]])
def test_a_draft_vocabulary_of_its_own(name: str, temperature: float, vocabulary: list[int]) -> None:
    """Fewer tokens than the target's, or the same in another order; q is zero for the others."""
    target = Model(1, 11)
    model = Model(2, 11, target, 0.8, vocabulary)
    talk = Talk(target, model, SHAPES[name], Sampling(temperature, top_p=0.9), np.random.default_rng(0).random)
    emitted = talk.answer([3, 8, 10], 40)
    assert sum(talk.accepted) > 8
    others = sorted(set(range(11)) - set(vocabulary))
    for draft in talk.drafts:
        assert set(draft.tokens[1:].tolist()) <= set(vocabulary)
        for q in (draft.sampled_from or {}).values():
            assert len(q) == 11 and not q[others].any() and q.sum() == pytest.approx(1)
    if not temperature:
        assert emitted == plainly(target, [3, 8, 10], 40)
        assert set(emitted) - set(vocabulary) or not others  # the target says what the draft model cannot


def test_q_is_scattered_to_the_targets_ids() -> None:
    vocabulary = [7, 2, 9, 0]
    model = Model(2, 11, vocabulary=vocabulary)
    draft = propose(model, TokenTree.chain(1), sampling=Sampling(0.7))
    assert draft.sampled_from is not None
    expected = np.zeros(11)
    expected[vocabulary] = softmax(model.after([3, 1, 2]).astype(np.float64) / 0.7)
    assert draft.sampled_from[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_smaller_draft_model_is_never_shown_a_token_it_lacks(temperature: float) -> None:
    """A target padded to more rows than its draft model (pitfall 9): their tokens may come up all the same."""
    target = Model(1, 13)
    model = Model(2, 11, target, 0.8)
    talk = Talk(target, model, CHAIN, Sampling(temperature), np.random.default_rng(0).random)
    emitted = talk.answer([3, 12, 10], 40)
    assert talk.cache is not None and max(itertools.chain(*talk.cache.ran)) == 10
    assert {11, 12} & set(emitted) and sum(talk.accepted) > 2  # from then on it reads another text
    assert all(draft.tokens[1:].max(initial=0) < 11 for draft in talk.drafts)
    if not temperature:
        assert emitted == plainly(target, [3, 12, 10], 40)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_hook_may_forbid_all_that_the_draft_model_can_say(name: str, temperature: float) -> None:
    """A grammar that leaves one token: it is guessed although the draft model does not know it."""

    def only_six(context: Sequence[int], logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        logits[np.arange(len(logits)) != 6] = -np.inf
        return logits

    target = Model(1, 11)
    model = Model(2, 11, vocabulary=[0, 1, 2])
    sampling = Sampling(temperature, processor=only_six)
    talk = Talk(target, model, SHAPES[name], sampling, np.random.default_rng(0).random)
    assert talk.answer([3, 1, 4], 12) == [6] * 12
    assert len(talk.drafts) < 6


def test_a_damaged_draft_model_says_so_where_its_logits_are_used() -> None:
    class Damaged(Model):
        def row(self, state: int) -> npt.NDArray[np.float32]:
            return np.full(self.size, np.nan, np.float32)

    target, damaged = Model(1, 11), Damaged(2, 11)
    for tree in SHAPES.values():
        assert Talk(target, damaged, tree).answer([3, 1, 4], 12) == plainly(target, [3, 1, 4], 12)
    with pytest.raises(GenerationError, match="not finite"):
        Talk(target, damaged, CHAIN, Sampling(0.8)).answer([3, 1, 4], 12)


def test_trees_and_vocabularies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BundleError, match="rank 5 needs more than the top 5"):
        propose(Model(1, 11), TokenTree.from_paths([[rank] for rank in range(6)]))
    for model in (Model(1, 11), Model(1, 11, vocabulary=[0, 10])):
        with pytest.raises(BundleError, match="names token 10, but the target has 10 tokens"):
            propose(model, CHAIN, target_vocab=10)


# ---- what to expect ----


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 4])
def test_expected_tokens_of_a_round(alpha: float, gamma: int) -> None:
    """Against the sum over outcomes: k guesses accepted, then a rejection; or all of them."""
    total = sum((k + 1) * alpha**k * (1 - alpha) for k in range(gamma)) + (gamma + 1) * alpha**gamma
    assert expected_tokens(alpha, gamma) == pytest.approx(total)
    assert predicted_speedup(alpha, 0.2, gamma) == pytest.approx(total / (1 + 0.2 * gamma))


def test_expected_tokens_against_chance() -> None:
    accepted = np.random.default_rng(0).random((200_000, 5)) < 0.7
    lengths = 1 + np.cumprod(accepted, 1).sum(1)
    assert expected_tokens(0.7, 5) == pytest.approx(lengths.mean(), rel=0.01)
    assert expected_tokens(1 - 1e-12, 5) == pytest.approx(6)
    assert predicted_speedup(0.5, 1.0, 3) < 1  # a draft model as dear as its target does not pay
