"""Rounds that a setting would have taken over a known answer: counted, not estimated from acceptance rates.

The answer's tokens are the target's, so the loop of `runtime.decoder` needs no target to go through it. Prompt lookup
and Medusa's trees are made by the drafters themselves; what a draft model or EAGLE head grows comes from a recording.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from speccompile.graphs.tree import ROOT_ALONE, AdaptiveChain, DynamicTree, TokenTree
from speccompile.runtime import Decoder
from speccompile.runtime.acceptance import walk
from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.decoder import PREFILL_CHUNK
from speccompile.runtime.drafters.candidates import token_tree
from speccompile.runtime.drafters.combined import CombinedDrafter
from speccompile.runtime.drafters.draft import Draft, Drafter
from speccompile.runtime.drafters.lookahead import LookaheadDrafter
from speccompile.runtime.drafters.medusa import MedusaDrafter
from speccompile.runtime.drafters.plain import PlainDrafter
from speccompile.runtime.drafters.prompt_lookup import PromptLookupDrafter
from speccompile.tools.tune.recording import NO_IDS, NO_LOGITS, Grown, Recorded
from speccompile.tools.tune.setting import Setting
from speccompile.tools.tune.texts import Sample

MOST_ROWS = 1 << 16
UNSEEN = StepOutput(NO_IDS, NO_LOGITS, np.broadcast_to(np.float32(0), (1, MOST_ROWS, 1)))
"""What replayed drafters observe; none of them looks at it."""


@dataclass(frozen=True)
class Round:
    """One call of the target.

    Args:
        nodes: of its tree, the root included.
        past: tokens in the cache.
        calls: rows of each call of a drafting graph before it.
        emitted: tokens that the answer gained.
    """

    nodes: int
    past: int
    calls: tuple[int, ...]
    emitted: int


def replay(
    sample: Sample,
    setting: Setting,
    recorded: Recorded,
    capacity: int,
    eos_ids: Collection[int],
    in_order: bool = False,
) -> list[Round]:
    """The rounds of `Decoder.generate` with this setting; `in_order` as it is of the decoder."""
    tokens, calls, answer = list(sample.prompt), list[int](), sample.answer
    drafter = replaying(setting, recorded, tokens, calls, eos_ids)
    drafter.observe(range(len(tokens)), UNSEEN)
    rounds, done = [], 1
    while done < len(answer) and len(tokens) < capacity:
        calls.clear()
        draft = drafter.propose(answer[done - 1], capacity - len(tokens), sample.limit - done - 1)
        if in_order:
            draft = draft.one_path()
        following = answer[done:]
        nodes = walk(draft.tree, draft.tokens, lambda _, path: _token(following, len(path))).nodes  # noqa: B023
        kept = min(len(nodes), len(following))
        rounds.append(Round(len(draft.tree), len(tokens), tuple(calls), kept))
        tokens += answer[done - 1 : done - 1 + kept]
        done += kept
        drafter.observe(nodes[:kept], UNSEEN)
    return rounds


def look_ahead(decoder: Decoder, sample: Sample, setting: Setting) -> list[Round]:
    """The same for lookahead decoding with a window, which reads what the target says at the window's cells: every call
    is really made."""
    assert setting.lookahead is not None
    tokens, answer, eos_ids = list(sample.prompt), sample.answer, decoder.bundle.manifest.eos_ids
    drafter = LookaheadDrafter(tokens, setting.lookahead, eos_ids)
    cache = decoder.target.open(decoder.capacity)
    for begin in range(0, len(tokens), PREFILL_CHUNK):
        chunk = tokens[begin : begin + PREFILL_CHUNK]
        positions, mask = np.arange(begin, begin + len(chunk)), np.tri(len(chunk), dtype=np.bool_)
        output = cache.run(np.array(chunk), positions, mask, np.array([len(chunk) - 1]))
        cache.commit(range(len(chunk)))
    drafter.observe(range(len(tokens)), output)
    rounds, done = [], 1
    while done < len(answer) and cache.length < decoder.capacity:
        draft = drafter.propose(answer[done - 1], decoder.capacity - cache.length, sample.limit - done - 1)
        tree, past = draft.tree, cache.length
        output = cache.run(draft.tokens, past + tree.depths, tree.mask, tree.nodes)
        following = answer[done:]
        tested = tree.trunk if decoder.in_order else tree
        nodes = walk(tested, draft.tokens, lambda _, path: _token(following, len(path))).nodes  # noqa: B023
        kept = min(len(nodes), len(following))
        rounds.append(Round(len(tree), past, (), kept))
        cache.commit(nodes[:kept])
        tokens += answer[done - 1 : done - 1 + kept]
        done += kept
        drafter.observe(nodes[:kept], output)
    return rounds


def _token(tokens: Sequence[int], place: int) -> int:
    return tokens[place] if place < len(tokens) else -1


@dataclass(frozen=True)
class RankCounts:
    """How often guesses were right, [depth - 1][rank], among the places where the path so far was and had children."""

    right: list[list[int]]
    places: list[int]

    def shares(self) -> list[list[float]]:
        return [
            [count / places for count in row] for row, places in zip(self.right, self.places, strict=True) if places
        ]


def count_ranks(
    samples: Iterable[tuple[Sample, Recorded]], setting: Setting, capacity: int, eos_ids: Collection[int]
) -> RankCounts:
    """Draft at every position, whatever was accepted before, and look for the answer's tokens."""
    right, places = list[list[int]](), list[int]()
    for sample, recorded in samples:
        tokens = list(sample.prompt)
        drafter = replaying(setting, recorded, tokens, [], eos_ids)
        drafter.observe(range(len(tokens)), UNSEEN)
        for done in range(1, len(sample.answer)):
            draft = drafter.propose(sample.answer[done - 1], capacity - len(tokens), sample.limit - done - 1)
            node = 0
            for depth, token in enumerate(sample.answer[done:]):
                children = draft.tree.children[node]
                if not children:
                    break
                if depth == len(places):
                    places.append(0)
                    right.append([])
                places[depth] += 1
                found = next((child for child in children if draft.tokens[child] == token), None)
                if found is None:
                    break
                node, rank = found, draft.tree.ranks[found]
                right[depth] += [0] * (rank + 1 - len(right[depth]))
                right[depth][rank] += 1
            tokens.append(sample.answer[done - 1])
            drafter.observe([0], UNSEEN)
    return RankCounts(right, places)


# ---- drafters that remember ----


def replaying(
    setting: Setting, recorded: Recorded, tokens: list[int], calls: list[int], eos_ids: Collection[int]
) -> Drafter:
    """What `Decoder` would draft with.

    Args:
        tokens: the live list of committed tokens; now the prompt.
        calls: gets the rows of every call that a drafting graph would have run.
    """
    tree, lookup = setting.tree, setting.looks_up
    if len(tree) == 1:
        return PlainDrafter()
    first: Drafter | None = None
    if recorded.heads is not None:
        first = MedusaDrafter(cast(Any, _RecordedHeads(*recorded.heads, tokens, calls)), tree)
    elif recorded.grown:
        first = _GrownDrafter(recorded, setting, tokens, calls)
    if lookup is None:
        return first or PlainDrafter()
    budget = tree if isinstance(tree, DynamicTree) else DynamicTree(len(tree))
    looking_up = PromptLookupDrafter(tokens, lookup, budget, eos_ids)
    return looking_up if first is None else CombinedDrafter(first, looking_up, budget.nodes, budget.floor)


class _RecordedHeads:
    """Answers as `OrtHeads` did at the same place."""

    seconds = 0.0

    def __init__(self, ids: Any, logprobs: Any, tokens: list[int], calls: list[int]) -> None:
        self._ids, self._logprobs, self._tokens, self._calls = ids, logprobs, tokens, calls
        self._start = len(tokens)
        self.heads, self.top_k = ids.shape[1:]

    def run(self, hidden: Any) -> tuple[Any, Any]:
        del hidden  # the place says whose it is
        self._calls.append(1)
        place = len(self._tokens) - self._start
        return self._ids[place], self._logprobs[place]


class _GrownDrafter:
    """Proposes what a `GrowingDrafter` would, cut out of what was grown at the same place."""

    seconds = 0.0

    def __init__(self, recorded: Recorded, setting: Setting, tokens: list[int], calls: list[int]) -> None:
        tree = setting.tree
        if isinstance(tree, TokenTree):
            assert len(tree) == tree.max_depth + 1, "of fixed trees only chains were recorded"
        self._tree, self._tokens, self._calls, self._eagle = tree, tokens, calls, recorded.eagle
        self._grown = recorded.grown[tree.top_k if isinstance(tree, DynamicTree) else 1]
        self._start = len(tokens)
        self._known = self._start - recorded.eagle  # rows in the drafting graph's cache
        self._length = (tree.longest + 1) // 2 if isinstance(tree, AdaptiveChain) else 0
        self._last: tuple[Grown, list[int], set[int]] | None = None  # grown, kept nodes, nodes that were run

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        nodes, self._last = min(max_nodes, len(self._tree)), None
        if nodes < 2 or max_depth < 1:
            return Draft(ROOT_ALONE, np.array([root], np.int64))
        grown = self._grown[len(self._tokens) - self._start]
        kept, ran = self._cut(grown, nodes, max_depth)
        self._calls += [len(self._tokens) + (not self._eagle) - self._known, *map(len, ran)]
        self._known = len(self._tokens)
        self._last = grown, kept, {0, *(node for level in ran for node in level)}
        new = {old: index for index, old in enumerate(kept)}
        parents = (-1, *(new[grown.parents[node]] for node in kept[1:]))
        return Draft(
            token_tree(parents, tuple(grown.ranks[node] for node in kept)),
            np.array([grown.tokens[node] for node in kept], np.int64),
            np.array([grown.probabilities[node] for node in kept]),
        )

    def _cut(self, grown: Grown, nodes: int, max_depth: int) -> tuple[list[int], list[list[int]]]:
        tree = self._tree
        if isinstance(tree, DynamicTree):
            return grown.cut(nodes, tree.floor, min(max_depth, tree.depth or max_depth))
        longest = min(nodes - 1, max_depth, self._length or nodes)
        doubted = tree.confidence if isinstance(tree, AdaptiveChain) else 0.0
        for node in range(1, min(longest, len(grown.tokens) - 1)):
            if grown.probabilities[node] < doubted * grown.probabilities[node - 1]:
                longest = node
                break
        return grown.cut(longest + 1, 0.0, longest)

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        del output
        if self._last is None:
            return
        grown, kept, ran = self._last
        accepted = _follow(grown, kept, self._tokens[-len(nodes) :])
        if not self._eagle:  # rows of accepted nodes stay in the cache
            self._known += 1 + max(place for place, node in enumerate(accepted) if node in ran)
        if isinstance(self._tree, AdaptiveChain) and len(kept) > 1:
            longer = len(accepted) == len(kept)
            self._length = min(self._length + 2, self._tree.longest) if longer else max(self._length - 1, 1)


def _follow(grown: Grown, kept: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The kept nodes, root first, that hold `tokens`, as far as they go."""
    nodes: list[int] = []
    for node in kept:
        above = nodes[-1] if nodes else -1
        if grown.parents[node] == above and len(nodes) < len(tokens) and grown.tokens[node] == tokens[len(nodes)]:
            nodes.append(node)
    return nodes
