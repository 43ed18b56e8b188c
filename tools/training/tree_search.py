"""Which tree to draft: the nodes most often right, found on held-out ranks.

The tokens a tree gains over plain decoding are, at each position, the length of its longest right path, which is
the number of its nodes whose whole path is right (no two of them share a depth). Its mean is therefore the sum over
nodes of the probability that the path down to them is right. A parent is right whenever its child is, so the N most
probable paths are prefix-closed by themselves: taking them is not a heuristic but the optimum for N nodes.

Two estimates of a path's probability: its measured frequency, or the product of each head's marginal accuracy
(FasterDecoding/Medusa `medusa/eval/gen_results.py`), when only those are known. Heads are right together more often
than independence says, so prefer the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from speccompile.graphs.errors import TreeError
from speccompile.graphs.tree import NodePath, TokenTree

MAX_RANK = 10  # guesses per node, as in Medusa's own search


def best_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> TokenTree:
    """The best tree of `nodes` draft nodes (the root not counted), heads taken as independent.

    Args:
        accuracy: [heads][ranks]: how often the true token is the head's guess of that rank.

    Raises:
        TreeError: when the heads cannot fill that many nodes with guesses that are ever right.
    """
    # Each head's ranks from the best on: then a node's next sibling and first child are never better than itself.
    orders = [sorted(range(len(row)), key=lambda rank: -row[rank]) for row in map(list, accuracy)]
    heap: list[tuple[float, int, NodePath]] = []

    def offer(parent: NodePath, parent_value: float, place: int) -> None:
        depth = len(parent)
        if depth < len(orders) and place < len(orders[depth]):
            value = parent_value * accuracy[depth][orders[depth][place]]
            if value > 0:
                heapq.heappush(heap, (-value, depth, (*parent, place)))

    offer((), 1.0, 0)
    values: dict[NodePath, float] = {(): 1.0}
    while heap and len(values) <= nodes:
        negated, _, path = heapq.heappop(heap)
        values[path] = -negated
        offer(path[:-1], values[path[:-1]], path[-1] + 1)
        offer(path, values[path], 0)
    paths = [tuple(orders[depth][place] for depth, place in enumerate(path)) for path in values if path]
    return _tree(paths, nodes)


def best_tree_measured(ranks: npt.NDArray[np.int8], nodes: int) -> TokenTree:
    """The tree of `nodes` draft nodes with the most accepted tokens on the measured positions.

    Args:
        ranks: [P,heads]: rank of the true token in each head; a negative one or MAX_RANK and above counts as wrong.

    Raises:
        TreeError: when fewer than `nodes` paths were ever right.
    """
    counts = path_frequencies(ranks)
    best = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return _tree(best[:nodes], nodes)


def path_frequencies(ranks: npt.NDArray[np.int8]) -> dict[NodePath, float]:
    """Share of the positions at which each path (tuple of ranks, one per depth) is right, for all that ever are."""
    right = np.logical_and.accumulate((ranks >= 0) & (ranks < MAX_RANK), axis=1)
    frequencies: dict[NodePath, float] = {}
    for depth in range(1, ranks.shape[1] + 1):
        paths, counts = np.unique(ranks[right[:, depth - 1], :depth], axis=0, return_counts=True)
        frequencies |= {
            tuple(path): count / len(ranks) for path, count in zip(paths.tolist(), counts.tolist(), strict=True)
        }
    return frequencies


def mean_accepted_tokens(tree: TokenTree, ranks: npt.NDArray[np.int8]) -> float:
    """Tokens per round on the measured positions, bonus included."""
    frequencies = path_frequencies(ranks)
    return 1.0 + sum(frequencies.get(path, 0.0) for path in tree.paths[1:])


def _tree(paths: Sequence[NodePath], nodes: int) -> TokenTree:
    if len(paths) < nodes:
        raise TreeError(
            f"tree search: {nodes} nodes asked for, but only {len(paths)} paths were ever right; ask for fewer."
        )
    return TokenTree.from_paths(paths)
