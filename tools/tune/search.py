"""The setting of the most expected tokens a second.

A round of N nodes costs what its target call, its drafting and the loop around them cost, and gains what is accepted.
Settings are compared by the quotient of both sums over replayed rounds, with the cost of every single round, as their
sizes differ where a floor cuts them.

*Fixed trees.* What a tree gains is the sum over its nodes of the chance that the path down to them is right (see
`tools.training.tree_search`). So for every N the most frequent N - 1 paths are best, they are prefix-closed, and only N
is left to choose: by trying all, as costs need not rise evenly, or at all.

*Trees that are grown, and prompt lookup.* Their numbers are few and the count changes slowly with each, so a coarse
grid is tried first, then its best points are improved one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.graphs.manifest import Manifest
from speccompile.graphs.settings import LookaheadSettings
from speccompile.graphs.tree import ROOT_ALONE, AdaptiveChain, DynamicTree, NodePath, TokenTree
from speccompile.tools.training.tree_search import path_frequencies
from speccompile.tools.tune.costs import RoundCosts
from speccompile.tools.tune.recording import DEEPEST, TOP_KS, Recorded
from speccompile.tools.tune.replay import Round
from speccompile.tools.tune.setting import Setting
from speccompile.tools.tune.texts import Sample

NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
FLOORS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
CONFIDENCES = (0.0, 0.2, 0.4, 0.6)
GUESSES = (1, 2, 3, 5, 8)
WINDOWS = ((2, 2, 2), (3, 2, 3), (3, 3, 3), (5, 3, 5), (4, 4, 4), (7, 3, 7), (5, 5, 5), (7, 5, 7))
"""W, N, G to try: the paper uses 15, 5, 15 for its smallest model, but a CPU pays for every row."""

COARSE, STARTS = 4, 3

Point = tuple[int, ...]


def climb(axes: Sequence[Sequence[Any]], score: Callable[..., float]) -> dict[tuple[Any, ...], float]:
    """Try a coarse grid of `axes`, then go from its best points to the better of their neighbours until none is.

    Args:
        score: called with one value of each axis; the larger the better.

    Returns:
        everything that was tried, the best first.
    """
    tried: dict[Point, float] = {}

    def value(point: Point) -> float:
        if point not in tried:
            tried[point] = score(*(axis[place] for axis, place in zip(axes, point, strict=True)))
        return tried[point]

    grid = product(*(sorted({round(x) for x in np.linspace(0, len(axis) - 1, COARSE)}) for axis in axes))
    for point in sorted(grid, key=value, reverse=True)[:STARTS]:
        while value(better := max(_neighbours(point, axes), key=value, default=point)) > value(point):
            point = better
    ranked = sorted(tried, key=lambda point: (-tried[point], point))
    return {tuple(axis[place] for axis, place in zip(axes, point, strict=True)): tried[point] for point in ranked}


def _neighbours(point: Point, axes: Sequence[Sequence[Any]]) -> Iterator[Point]:
    for number, axis in enumerate(axes):
        for place in (point[number] - 1, point[number] + 1):
            if 0 <= place < len(axis):
                yield (*point[:number], place, *point[number + 1 :])


def best_fixed_tree(
    ranks: npt.NDArray[np.int8], round_cost: Callable[[int], float], largest: int
) -> tuple[TokenTree, float]:
    """The tree of at most `largest` nodes that emits the most tokens per cost on measured positions; the root alone
    may be it.

    Args:
        ranks: [positions, depths], as in `tree_search`: the rank of the true token among the guesses for each depth.
        round_cost: of a round with so many nodes, the root included; any shape.

    Returns:
        the tree, and its tokens per cost.
    """
    frequencies = path_frequencies(ranks)
    # Prefixes before what follows them, also where they are as frequent.
    paths: list[NodePath] = sorted(frequencies, key=lambda path: (-frequencies[path], len(path), path))[: largest - 1]
    gained = np.cumsum([1.0, *(frequencies[path] for path in paths)])
    rates = [gain / round_cost(nodes) for nodes, gain in enumerate(gained, 1)]
    best = int(np.argmax(rates))
    return TokenTree.from_paths(paths[:best]) if best else ROOT_ALONE, rates[best]


# ---- what to try ----


@dataclass(frozen=True)
class Family:
    """Settings that differ in a few numbers: `make` takes one of each of `axes`."""

    axes: tuple[Sequence[Any], ...]
    make: Callable[..., Setting]


def families(manifest: Manifest, largest: int) -> list[Family]:
    """What replays can tell for the method of a bundle.

    Args:
        largest: most nodes of a tree that was recorded.
    """
    lookup, ahead, info = manifest.lookup, manifest.lookahead, manifest.heads or manifest.drafting
    sizes = [count for count in NODES if count <= largest]
    if info is not None:
        levels = manifest.heads.count if manifest.heads is not None else min(DEEPEST, largest - 1)
        widths = [k for k in TOP_KS if k is None or k <= info.top_k]
        axes = (sizes, FLOORS, range(1, levels + 1), widths)
        grown = [Family(axes, lambda *numbers: Setting(DynamicTree(*numbers), lookup))]
        if manifest.heads is not None:
            return grown
        return [
            *grown,
            Family((range(1, levels + 1),), lambda length: Setting(TokenTree.chain(length), lookup)),
            Family((range(1, levels + 1), CONFIDENCES), lambda *numbers: Setting(AdaptiveChain(*numbers), lookup)),
        ]
    if lookup is not None:
        return [
            Family(
                (NODES, FLOORS, GUESSES),
                lambda nodes, floor, guesses: Setting(DynamicTree(nodes, floor), replace(lookup, guesses=guesses)),
            )
        ]
    if ahead is not None:  # without a window
        return [
            Family(
                (NODES, FLOORS, GUESSES),
                lambda nodes, floor, guesses: Setting(
                    DynamicTree(nodes, floor), lookahead=LookaheadSettings(0, ahead.ngram, guesses)
                ),
            )
        ]
    return []


def windows(present: LookaheadSettings, largest: int) -> list[Setting]:
    """Lookahead with a window, of at most so many nodes."""
    tried = [LookaheadSettings(*numbers, present.from_prompt) for numbers in WINDOWS]
    if present.window and present not in tried:
        tried.append(present)
    return [Setting(DynamicTree(ahead.nodes), lookahead=ahead) for ahead in tried if ahead.nodes <= largest]


def true_ranks(recorded: Iterable[tuple[Sample, Recorded]]) -> npt.NDArray[np.int8]:
    """[positions, heads]: which guess of each head was the answer's token; -1 for none."""
    rows = []
    for sample, notes in recorded:
        assert notes.heads is not None
        ids, answer = notes.heads[0], sample.answer
        for done in range(1, len(answer)):
            row = np.full(ids.shape[1], -1, np.int8)
            for head, token in enumerate(answer[done : done + len(row)]):
                found = np.flatnonzero(ids[done - 1, head] == token)
                if len(found):
                    row[head] = found[0]
            rows.append(row)
    return np.stack(rows)


# ---- what to expect ----


@dataclass(frozen=True)
class Prediction:
    """What replayed rounds come to.

    Args:
        speedup: over plain decoding of the same tokens.
        mean_accepted_tokens: per round, bonus included.
        nodes, round_ms, draft_ms, host_ms: of a round, on average.
    """

    setting: Setting
    speedup: float
    mean_accepted_tokens: float
    nodes: float
    round_ms: float
    draft_ms: float
    host_ms: float


def predict(setting: Setting, rounds: Sequence[Round], costs: RoundCosts) -> Prediction:
    """Price every round, and the plain steps that it stands for."""
    spent = sum(costs.round(r.nodes, r.past, r.calls) for r in rounds)
    plain = sum(costs.plain(r.past + place) for r in rounds for place in range(r.emitted))
    count = len(rounds)
    return Prediction(
        setting,
        plain / spent,
        sum(r.emitted for r in rounds) / count,
        sum(r.nodes for r in rounds) / count,
        spent / count,
        sum(costs.drafting(r.calls) for r in rounds) / count,
        sum(costs.outside(r.calls) for r in rounds) / count,
    )


def worthwhile_nodes(costs: RoundCosts, dearest: float, limit: int) -> int:
    """The largest of NODES whose target call costs less than `dearest` plain steps; at least 8."""
    past = costs.calls.target.pasts[0]
    paid = [count for count in NODES if count <= limit and costs.call(count, past) < dearest * costs.plain(past)]
    return max([*paid, min(8, limit)])
