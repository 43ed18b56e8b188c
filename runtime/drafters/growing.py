"""What a draft model and an EAGLE head share: a tree that grows by running a small graph on it, level by level.

A node is run once, against the cache that already holds the levels above it. Where the target's tokens are drawn,
guesses are drawn too, from the graph's own distribution q, so that acceptance can compare p with q
(`acceptance.accept_drawn`). In greedy decoding and in dynamic trees they are chosen, best first.

What is drawn must be verified. Whether a node gets children, and how many, may depend on tokens drawn before, but a
token that has been drawn stays in the draft: to drop it for what it is would bias what is emitted in its place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.graphs.errors import BundleError
from speccompile.graphs.tree import ROOT_ALONE, AdaptiveChain, DraftTree, DynamicTree, TokenTree
from speccompile.runtime.backends.step import Cache, StepOutput, Target
from speccompile.runtime.drafters.candidates import token_tree
from speccompile.runtime.drafters.draft import Draft
from speccompile.runtime.sampling import Sampling, distribution, draw

CATCH_UP_CHUNK = 256

UNSAID = -1e30
"""Logit of a token that the graph cannot say. Not -inf: a processor may forbid all that the graph can say, which must
not end the answer; the guess is then one of the tokens that are left."""

Guess = tuple[int, float]
"""(token, its probability)."""


@dataclass
class Growth:
    """A tree in the making, parents before children.

    `rows` names the nodes that have been run: for each the uncommitted cache rows that it sees, its own last (none for
    a root whose row is committed). `ran` counts the uncommitted rows.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    ranks: list[int] = field(default_factory=lambda: [0])
    depths: list[int] = field(default_factory=lambda: [0])
    probabilities: list[float] = field(default_factory=lambda: [1.0])
    rows: dict[int, list[int]] = field(default_factory=dict)
    sampled_from: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    ran: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, rank: int, guess: Guess) -> int:
        self.tokens.append(guess[0])
        self.parents.append(parent)
        self.ranks.append(rank)
        self.depths.append(self.depths[parent] + 1)
        self.probabilities.append(self.probabilities[parent] * guess[1])
        return len(self) - 1

    def run(self, nodes: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Give `nodes`, whose parents have been run, the next rows; the mask bool [T,M] of their call."""
        first = self.ran
        self.ran += len(nodes)
        mask = np.zeros((len(nodes), self.ran), np.bool_)
        for index, node in enumerate(nodes):
            rows = self.rows[node] = [*self.rows.get(self.parents[node], []), first + index]
            mask[index, rows] = True
        return mask

    def path(self, node: int) -> list[int]:
        """Tokens from the root to `node`."""
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes, root first, that hold `tokens`, as far as they go."""
        nodes: list[int] = []
        for node, parent in enumerate(self.parents):
            above = nodes[-1] if nodes else -1
            if parent == above and len(nodes) < len(tokens) and self.tokens[node] == tokens[len(nodes)]:
                nodes.append(node)
        return nodes

    def keep(self, nodes: Sequence[int]) -> Growth:
        """The sub-tree of `nodes` (ascending, prefix-closed), renumbered."""
        new = {old: index for index, old in enumerate(nodes)}
        return Growth(
            [self.tokens[node] for node in nodes],
            [-1, *(new[self.parents[node]] for node in nodes[1:])],
            [self.ranks[node] for node in nodes],
            [self.depths[node] for node in nodes],
            [self.probabilities[node] for node in nodes],
            {new[node]: rows for node, rows in self.rows.items() if node in new},
        )


class GrowingDrafter(ABC):
    """Drafts for one answer; the cache may have a longer life, as the target's has.

    Args:
        model: the graph that drafts.
        cache: its cache, truncated with `tokens` before the answer. Once the sequence does not fit it any more, nothing
            is drafted.
        tokens: the live list of committed tokens, which the decoding loop extends.
        tree: a `TokenTree` (rank r is the r-th best guess, or the r-th draw), a `DynamicTree` (the most probable paths,
            chosen anew in every round), or an `AdaptiveChain`.
        sampling: what acts on the target's logits; the graph's are treated alike.
        uniform: numbers in [0, 1), for drawing.
        eos_ids: nothing is drafted behind these.
        vocabulary: int64 [Vd], the target's id of each of the graph's logits; None when the ids are the same.
        target_vocab: V.
        draws: False chooses guesses even where the target's tokens are drawn, for drafts that share their tree with
            those of another drafter.

    Raises:
        BundleError: when the tree needs more guesses per node than the graph names, or the graph names tokens that the
            target does not have.
    """

    def __init__(
        self,
        model: Target,
        cache: Cache,
        tokens: list[int],
        tree: DraftTree,
        sampling: Sampling,
        uniform: Callable[[], float],
        eos_ids: Collection[int],
        vocabulary: npt.NDArray[np.int64] | None,
        target_vocab: int,
        *,
        draws: bool = True,
    ) -> None:
        width, top_k = model.vocab_size, model.top_k
        if isinstance(tree, TokenTree) and max(tree.ranks) >= top_k:
            raise BundleError(
                f"tree: rank {max(tree.ranks)} needs more than the top {top_k} that this bundle's draft graph names; "
                "rebuild it with that tree."
            )
        if isinstance(tree, DynamicTree) and (tree.top_k or 0) > top_k < width:
            raise BundleError(
                f"tree: top_k {tree.top_k} is more than the top {top_k} that this bundle's draft graph names; rebuild "
                "it with that tree."
            )
        largest = width - 1 if vocabulary is None else int(vocabulary.max())
        if largest >= target_vocab:
            raise BundleError(
                f"draft graph: it names token {largest}, but the target has {target_vocab} tokens; rebuild the bundle."
            )
        self.cache, self.tokens, self.tree = cache, tokens, tree
        self._most_tokens = model.max_tokens or cache.capacity  # of one call
        self._most_masked = model.max_masked or cache.capacity
        self.seconds = 0.0
        self.calls = 0  # of the graph, those for the prompt left out
        self._uniform, self._eos_ids = uniform, eos_ids
        self._drawn_as = sampling if draws and not sampling.greedy and not isinstance(tree, DynamicTree) else None
        # Temperature and what follows it do not change which guess is best; penalties, biases and hooks do.
        chosen = replace(sampling, temperature=0.0)
        self._chosen_as = (
            replace(chosen, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if chosen.needs_logits else None
        )
        self._length = (tree.longest + 1) // 2 if isinstance(tree, AdaptiveChain) else 0
        self._plan = TokenTree.chain(tree.longest) if isinstance(tree, AdaptiveChain) else tree
        same = vocabulary is None and width == target_vocab
        self._vocabulary: Any = slice(width) if vocabulary is None else vocabulary
        self._wide = None if same else np.full(target_vocab, UNSAID, np.float32)  # a row of the target's width
        # Without a vocabulary of its own a smaller draft model lacks the target's last tokens, which are padding.
        self._last_readable = largest if vocabulary is None else target_vocab - 1
        self._step_seconds: list[float] = []
        self._growth: Growth | None = None  # this round's; None before the first

    @property
    def step_seconds(self) -> float:
        """Median backend time of a call that ran one token; 0 before the first."""
        return median(self._step_seconds) if self._step_seconds else 0.0

    # ---- the protocol ----

    @abstractmethod
    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        """See `Drafter`."""

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        self.seconds = 0.0
        growth = self._growth = Growth([root])
        nodes, output = min(max_nodes, len(self.tree)), None
        if nodes > 1 and max_depth > 0 and root not in self._eos_ids:
            output = self._catch_up(growth)
        if output is None:
            return Draft(ROOT_ALONE, np.array([root], np.int64))
        if isinstance(self._plan, DynamicTree):
            growth = self._growth = self._grow_best(growth, output, self._plan, nodes, max_depth)
        elif isinstance(self.tree, AdaptiveChain):
            plan = self._plan.prune(min(nodes, self._length + 1), max_depth)
            self._grow_plan(growth, output, plan, self.tree.confidence)
        else:
            self._grow_plan(growth, output, self._plan.prune(nodes, max_depth))
        tokens = np.array(growth.tokens, np.int64)
        if len(growth) == 1:
            return Draft(ROOT_ALONE, tokens)
        tree = token_tree(tuple(growth.parents), tuple(growth.ranks))
        if self._drawn_as:
            return Draft(tree, tokens, sampled_from=growth.sampled_from)
        return Draft(tree, tokens, np.array(growth.probabilities))

    @abstractmethod
    def _catch_up(self, growth: Growth) -> StepOutput | None:
        """Run what the cache does not hold of the sequence, and the root. Its row of the output is the only one; None
        when the cache has no room."""

    def _adapt(self, growth: Growth, accepted: int) -> None:
        """Learn that of the last draft's nodes `accepted` were right, the root included."""
        if isinstance(self.tree, AdaptiveChain) and len(growth) > 1:
            # transformers' "heuristic" schedule (generation/candidate_generator.py, update_candidate_strategy).
            everything = accepted == len(growth)
            self._length = min(self._length + 2, self.tree.longest) if everything else max(self._length - 1, 1)

    # ---- growing ----

    def _grow_plan(self, growth: Growth, output: StepOutput, plan: TokenTree, confidence: float = 0.0) -> None:
        """Fill `plan`, as far as there are guesses. Behind a guess less probable than `confidence` nothing follows; the
        guess itself stays (see the module's docstring)."""
        frontier = [(0, 0)]  # (node in the plan, node in the growth)
        while True:
            reached = []
            for row, (planned, parent) in enumerate(frontier):
                children = plan.children[planned]
                # Draws are taken in node order, which is the order acceptance goes through them.
                places = range(len(children)) if self._drawn_as else [plan.ranks[child] for child in children]
                guesses = self._guess(output, row, growth, parent, max(places) + 1)
                for child, place in zip(children, places, strict=True):
                    if place >= len(guesses):
                        continue
                    node = growth.add(parent, plan.ranks[child], guesses[place])
                    token, probability = guesses[place]
                    if plan.children[child] and token not in self._eos_ids and probability >= confidence:
                        reached.append((child, node))
            if not reached or not self._room(growth, len(reached)):
                return
            output = self._run(growth, [node for _, node in reached])
            frontier = reached

    def _grow_best(self, growth: Growth, output: StepOutput, tree: DynamicTree, nodes: int, max_depth: int) -> Growth:
        """The `nodes` - 1 most probable paths, none below the tree's floor, within its limits.

        A path is never more probable than its prefix, so a node outside the best so far cannot have a child among the
        best in the end, and only those inside are run.
        """
        max_depth = min(max_depth, tree.depth or max_depth)
        guesses = min(nodes - 1, tree.top_k or nodes)
        frontier, beaten = [0], 0.0  # a path must be more probable than `beaten` to be among the best
        for depth in range(1, max_depth + 1):
            first = len(growth)
            for row, parent in enumerate(frontier):
                above = growth.probabilities[parent]
                for rank, guess in enumerate(self._guess(output, row, growth, parent, guesses)):
                    if not (above * guess[1] > beaten and above * guess[1] >= tree.floor):  # NaN ends it too
                        break
                    growth.add(parent, rank, guess)
            if len(growth) >= nodes:
                beaten = sorted(growth.probabilities, reverse=True)[nodes - 1]
            frontier = [
                node
                for node in range(first, len(growth))
                if growth.probabilities[node] > beaten and growth.tokens[node] not in self._eos_ids
            ]
            frontier = sorted(frontier, key=growth.probabilities.__getitem__, reverse=True)[: tree.top_k]
            if depth == max_depth or not frontier or not self._room(growth, len(frontier)):
                break
            output = self._run(growth, frontier)
        # Equals in the order they came, so that no child stays without its parent.
        best = sorted(range(len(growth)), key=lambda node: (-growth.probabilities[node], node))[:nodes]
        return growth.keep(sorted(best))

    def _guess(self, output: StepOutput, row: int, growth: Growth, node: int, count: int) -> list[Guess]:
        """At most `count` guesses behind `node`, whose output is `row`: draws, or the best ones, best first."""
        settings = self._drawn_as or self._chosen_as
        if settings is None:
            assert output.topk_ids is not None and output.topk_logprobs is not None
            # Rounding may leave a logarithm above 0, and a child may not be more probable than its parent.
            probabilities = [math.exp(min(logprob, 0.0)) for logprob in output.topk_logprobs[0, row, :count].tolist()]
            return list(zip(output.topk_ids[0, row, :count].tolist(), probabilities, strict=True))
        q = self._distribution(output.logits[0, row], [*self.tokens, *growth.path(node)], settings)
        if self._drawn_as is None:
            tokens = _best(q, count)
        else:
            growth.sampled_from[node] = q
            tokens = _draw_without_replacement(q, count, self._uniform)
        return [(token, float(q[token])) for token in tokens]

    def _distribution(
        self, logits: npt.NDArray[np.float32], context: Sequence[int], settings: Sampling
    ) -> npt.NDArray[np.float64]:
        """float64 [V] of logits float32 [Vd]."""
        if self._wide is None:
            return distribution(logits, context, settings)
        if self._chosen_as is None:  # no setting names a token: the narrow row will do
            q = np.zeros(len(self._wide))
            q[self._vocabulary] = distribution(logits, context, settings)
            return q
        self._wide[self._vocabulary] = logits
        return distribution(self._wide, context, settings)

    # ---- the graph ----

    def _read(
        self, tokens: Sequence[int], committed: int, features: npt.NDArray[np.float32] | None = None
    ) -> StepOutput:
        """Run `tokens` behind the cache, in chunks; the output of the last one. The first `committed` of them stay.

        Args:
            tokens: at least one; `committed` is their number or one less.
            features: float32 [tokens,F], for a head.
        """
        most = min(CATCH_UP_CHUNK, self._most_tokens)
        for begin in range(0, len(tokens), most):
            chunk = tokens[begin : begin + most]
            count = len(chunk)
            positions = np.arange(self.cache.length, self.cache.length + count)
            beside = {} if features is None else {"features": features[begin : begin + count]}
            output = self._call(chunk, positions, np.tri(count, dtype=np.bool_), np.array([count - 1]), **beside)
            self.cache.commit(range(min(count, committed - begin)))
        return output

    def _run(self, growth: Growth, nodes: Sequence[int], **beside: npt.NDArray[np.float32]) -> StepOutput:
        """Run `nodes`, whose parents have been run: one row of output each."""
        mask = growth.run(nodes)
        # The rows that a node sees before its own are the tokens before it: no other row of the tree counts.
        positions = np.array([self.cache.length + len(growth.rows[node]) - 1 for node in nodes])
        return self._call([growth.tokens[node] for node in nodes], positions, mask, np.arange(len(nodes)), **beside)

    def _call(
        self,
        tokens: Sequence[int],
        positions: npt.NDArray[np.int64],
        mask: npt.NDArray[np.bool_],
        rows: npt.NDArray[np.int64],
        **beside: npt.NDArray[np.float32],
    ) -> StepOutput:
        output = self.cache.run(np.minimum(tokens, self._last_readable), positions, mask, rows, **beside)
        self.calls += 1
        self.seconds += self.cache.seconds
        if len(tokens) == 1:
            self._step_seconds.append(self.cache.seconds)
        return output

    def _room(self, growth: Growth, count: int) -> bool:
        """Whether one call for `count` more rows fits the cache and the graph."""
        rows = growth.ran + count
        fits = count <= self._most_tokens and rows <= self._most_masked
        return fits and self.cache.length + rows <= self.cache.capacity


def _best(probabilities: npt.NDArray[np.float64], count: int) -> list[int]:
    """The `count` most probable tokens, best first, lower ids first among equals; never one of probability zero."""
    place = max(len(probabilities) - count, 0)
    edge = np.partition(probabilities, place)[place]
    tokens = np.flatnonzero((probabilities >= edge) & (probabilities > 0))
    best: list[int] = tokens[np.argsort(-probabilities[tokens], kind="stable")][:count].tolist()
    return best


def _draw_without_replacement(q: npt.NDArray[np.float64], count: int, uniform: Callable[[], float]) -> list[int]:
    """`count` draws from q, or as many as there are tokens of non-zero probability; each is taken out for the next."""
    if count == 1:
        return [draw(q, uniform())]
    left, tokens = q.copy(), list[int]()
    for _ in range(min(count, int(np.count_nonzero(q)))):
        tokens.append(draw(left, uniform()))
        left[tokens[-1]] = 0
    return tokens
