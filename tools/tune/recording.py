"""What a drafter would propose at every position of a known answer, noted once.

The tokens before a position are the answer's own, whatever was drafted there, so a position's guesses depend on nothing
but the position. One pass of the real drafter at its largest setting is therefore enough to know what any smaller one
proposes (see `Grown.cut`), and which rounds it would have taken (see `replay`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from speccompile.graphs.tree import DynamicTree
from speccompile.runtime import Decoder
from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.decoder import PREFILL_CHUNK
from speccompile.runtime.drafters.draft_model import DraftModelDrafter
from speccompile.runtime.drafters.eagle import EagleDrafter
from speccompile.runtime.drafters.growing import GrowingDrafter, Growth
from speccompile.runtime.sampling import Sampling
from speccompile.tools.tune.texts import Sample

NO_IDS, NO_LOGITS = np.zeros((1, 0), np.int64), np.zeros((1, 0, 0), np.float32)
DEEPEST = 8
TOP_KS = (None, 3, 1)
"""Kinds of growth to record: with all children that the graph names, with few, and chains."""


@dataclass(frozen=True)
class Grown:
    """Everything that was added to a tree while it grew, what was left out in the end included.

    Args:
        tokens, parents, ranks, depths, probabilities: by node, parents first.
        ended: whether the node's token ends an answer, so that nothing is drafted behind it.
        top_k: as in the `DynamicTree` that grew.
    """

    tokens: list[int]
    parents: list[int]
    ranks: list[int]
    depths: list[int]
    probabilities: list[float]
    ended: list[bool]
    top_k: int | None

    @classmethod
    def of(cls, growth: Growth, eos_ids: Collection[int], top_k: int | None) -> Grown:
        ended = [token in eos_ids for token in growth.tokens]
        return cls(growth.tokens, growth.parents, growth.ranks, growth.depths, growth.probabilities, ended, top_k)

    @cached_property
    def order(self) -> list[int]:
        """Nodes, the most probable first, equals as they came."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.probabilities[node])

    @cached_property
    def levels(self) -> list[tuple[list[int], list[float]]]:
        """By depth: its nodes, and the probabilities of all nodes down to it; both descending."""
        found: list[tuple[list[int], list[float]]] = []
        for depth in range(max(self.depths) + 1):
            above = [node for node in self.order if self.depths[node] <= depth]
            at = [node for node in above if self.depths[node] == depth]
            found.append((at, [self.probabilities[node] for node in above]))
        return found

    def cut(self, nodes: int, floor: float, depth: int) -> tuple[list[int], list[list[int]]]:
        """What `GrowingDrafter` grows at this place with a smaller tree of the same top_k.

        It keeps the most probable nodes. A node is run, so that it gets children, if it is more probable than the last
        of the best `nodes` of its own and the earlier levels. Whatever a smaller tree keeps or runs, a larger one has
        added, too: it forgets less of every level.

        Args:
            nodes, floor, depth: as in `DynamicTree`; no larger (a floor: no smaller) than when it grew.

        Returns:
            the nodes of the tree, ascending, and those that are run, level by level.
        """
        ran: list[list[int]] = []
        for nodes_there, probabilities in self.levels[1:depth]:
            beaten = probabilities[nodes - 1] if len(probabilities) >= nodes else 0.0
            beaten = beaten if beaten >= floor else 0.0
            frontier = []
            for node in nodes_there:
                probability = self.probabilities[node]
                if not (probability > beaten and probability >= floor):
                    break
                if not self.ended[node]:
                    frontier.append(node)
            if not frontier:
                break
            ran.append(frontier[: self.top_k])
        kept = list[int]()
        for node in self.order:
            if self.probabilities[node] < floor or len(kept) == nodes:
                break
            if self.depths[node] <= depth:
                kept.append(node)
        return sorted(kept), ran


@dataclass(frozen=True)
class Recorded:
    """What was noted for one sample; index i of everything is for the round whose root is the answer's token i.

    Args:
        heads: int64 and float32 [positions, heads, K], Medusa's guesses and their logarithms.
        grown: by top_k.
        eagle: whether an EAGLE head grew them, which keeps no row of its own guesses.
    """

    heads: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None
    grown: Mapping[int | None, Sequence[Grown]] = field(default_factory=dict)
    eagle: bool = False


def record(
    decoder: Decoder,
    sample: Sample,
    nodes: int,
    depth: int = DEEPEST,
    top_ks: Sequence[int | None] = TOP_KS,
) -> Recorded:
    """Note what the bundle's heads, draft model or EAGLE head propose along an answer; nothing where it has none.

    Args:
        nodes, depth, top_ks: of the largest trees that are grown.
    """
    if (heads := decoder.heads) is not None:
        found = [
            tuple(part.copy() for part in heads.run(row))
            for row in _features(decoder, sample)[len(sample.prompt) - 1 :]
        ]
        ids, logprobs = zip(*found, strict=True)
        return Recorded(heads=(np.stack(ids), np.stack(logprobs)))
    if decoder.draft is None:
        return Recorded()
    eagle = decoder.bundle.manifest.eagle is not None
    features = _features(decoder, sample) if eagle else None
    named = [k for k in top_ks if k is None or k <= decoder.draft.top_k]
    grown = {k: _grow(decoder, sample, DynamicTree(nodes, 0.0, depth, k), features) for k in named}
    return Recorded(grown=grown, eagle=eagle)


def _features(decoder: Decoder, sample: Sample) -> npt.NDArray[np.float32]:
    """The target's float32 [tokens, F], of the prompt and all of the answer but its last token."""
    ids, features = [*sample.prompt, *sample.answer[:-1]], []
    cache = decoder.target.open(len(ids))
    for begin in range(0, len(ids), PREFILL_CHUNK):
        chunk = ids[begin : begin + PREFILL_CHUNK]
        count = len(chunk)
        positions = np.arange(begin, begin + count)
        output = cache.run(np.array(chunk), positions, np.tri(count, dtype=np.bool_), np.array([count - 1]))
        assert output.hidden is not None, "heads need a target that gives features"
        features.append(output.hidden[0].copy())
        cache.commit(range(count))
    return np.concatenate(features)


class _Whole(GrowingDrafter):
    """Keeps what the drafter cuts off."""

    whole: Growth | None = None

    def _grow_best(self, growth: Growth, output: StepOutput, tree: DynamicTree, nodes: int, max_depth: int) -> Growth:
        self.whole = growth
        return super()._grow_best(growth, output, tree, nodes, max_depth)


class _WholeDraft(_Whole, DraftModelDrafter):
    pass


class _WholeEagle(_Whole, EagleDrafter):
    pass


def _grow(decoder: Decoder, sample: Sample, tree: DynamicTree, features: npt.NDArray[np.float32] | None) -> list[Grown]:
    """A tree at every position of the answer but the last, the answer's own tokens before it."""
    info, eos_ids = decoder.bundle.manifest.drafting, frozenset(decoder.bundle.manifest.eos_ids)
    assert decoder.draft is not None and info is not None
    cache = decoder.draft.open(min(decoder.capacity + tree.nodes, info.max_length))
    tokens = list(sample.prompt)
    drafter = (_WholeDraft if features is None else _WholeEagle)(
        decoder.draft,
        cache,
        tokens,
        tree,
        Sampling(),
        lambda: 0.0,
        eos_ids,
        decoder.draft_tokens,
        decoder.target.vocab_size,
    )

    def see(count: int) -> None:
        rows = None if features is None else features[None, len(tokens) - count : len(tokens)]
        drafter.observe(range(count), StepOutput(NO_IDS, NO_LOGITS, rows))

    see(len(tokens))
    grown = []
    for root in sample.answer[:-1]:
        drafter.whole = None
        drafter.propose(root, tree.nodes, tree.nodes)
        grown.append(Grown.of(drafter.whole or Growth([root]), eos_ids, tree.top_k))
        tokens.append(root)
        see(1)
    return grown
