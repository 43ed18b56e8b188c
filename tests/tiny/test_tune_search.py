"""The search of `tune` against trying everything, and its arithmetic against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from speccompile.graphs.costs import Costs
from speccompile.graphs.tree import DynamicTree, NodePath, TokenTree
from speccompile.runtime.stats import Stats
from speccompile.tools.tune.costs import CallCosts, DraftCosts, RoundCosts
from speccompile.tools.tune.recording import Recorded
from speccompile.tools.tune.replay import Round
from speccompile.tools.tune.search import best_fixed_tree, climb, predict, true_ranks, worthwhile_nodes
from speccompile.tools.tune.setting import Setting
from speccompile.tools.tune.texts import Sample

# ---- fixed trees ----


def every_tree(paths: frozenset[NodePath], left: int, depth: int, ranks: int) -> set[frozenset[NodePath]]:
    """All prefix-closed sets of paths that hold `paths` and at most `left` more."""
    found = {paths}
    if left:
        for parent in ((), *paths):
            for rank in range(ranks if len(parent) < depth else 0):
                if (*parent, rank) not in paths:
                    found |= every_tree(paths | {(*parent, rank)}, left - 1, depth, ranks)
    return found


TREES = [TokenTree.from_paths(paths) for paths in every_tree(frozenset(), 4, 3, 3)]


def walked(tree: TokenTree, ranks: Any) -> float:
    """Mean tokens a round, by walking down the tree at every position."""
    tokens = 0
    for row in ranks.tolist():
        node, depth = 0, 0
        while True:
            tokens += 1
            wanted = row[depth] if depth < len(row) else -1
            child = next((child for child in tree.children[node] if tree.ranks[child] == wanted), None)
            if child is None:
                break
            node, depth = child, depth + 1
    return tokens / len(ranks)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_fixed_tree_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet([1.5, 0.8, 0.5, 1.0])  # of ranks 0, 1 and 2, and of none of them
    ranks = rng.choice([0, 1, 2, -1], (60, 3), p=shares).astype(np.int8)
    costs = np.concatenate([[1.0], np.cumsum(rng.uniform(0, 0.4, 4)) + 1.0])
    if seed % 2:
        costs = rng.uniform(0.8, 1.6, 5)  # going up and down
    tree, rate = best_fixed_tree(ranks, lambda nodes: float(costs[nodes - 1]), 5)
    every = {candidate: walked(candidate, ranks) / costs[len(candidate) - 1] for candidate in TREES}
    assert len(every) > 250
    assert rate == pytest.approx(max(every.values()))
    assert rate == pytest.approx(every[tree])


def test_where_guesses_do_not_pay_the_root_stands_alone() -> None:
    ranks = np.zeros((10, 2), np.int8)  # always right
    assert best_fixed_tree(ranks, lambda nodes: 3.0 ** (nodes - 1), 4) == (TokenTree.chain(0), 1.0)
    assert best_fixed_tree(ranks, lambda nodes: 1.9 ** (nodes - 1), 4)[0] == TokenTree.chain(1)
    assert best_fixed_tree(ranks, lambda _: 1.0, 4)[0] == TokenTree.chain(2)
    assert best_fixed_tree(ranks - 1, lambda _: 1.0, 4)[0] == TokenTree.chain(0)  # never right


# ---- a few numbers ----


@pytest.mark.parametrize("seed", range(8))
def test_climbing_finds_the_summit(seed: int) -> None:
    """Of surfaces with one summit along every axis, wherever it is."""
    rng = np.random.default_rng(seed)
    axes = [range(16), range(7), range(8), range(3)]
    summit = [int(rng.integers(len(axis))) for axis in axes]
    steepness = rng.uniform(0.1, 3, len(axes))

    def score(*point: int) -> float:
        return -sum(s * abs(x - top) ** 1.3 for s, x, top in zip(steepness, point, summit, strict=True))

    tried = climb(axes, score)
    assert next(iter(tried)) == tuple(summit)
    assert list(tried.values()) == sorted(tried.values(), reverse=True)
    assert len(tried) < 0.2 * 16 * 7 * 8 * 3
    assert all(value == score(*point) for point, value in tried.items())


def test_climbing_starts_from_several_places() -> None:
    """The second summit is the higher one, but its foot is not the best point of the grid."""
    heights = [0, 5, 0, 0, 0, 4, 3, 4, 6, 9, 0, 0, 0]
    tried = climb([range(13)], lambda place: heights[place])
    assert sorted({0, 4, 8, 12} & {point for (point,) in tried}) == [0, 4, 8, 12]
    assert next(iter(tried)) == (9,)


def test_axes_of_few_values() -> None:
    assert climb([["a"], [3, 1]], lambda letter, number: number) == {("a", 3): 3, ("a", 1): 1}


# ---- costs of rounds ----

COSTS = RoundCosts(
    CallCosts(
        Costs([1, 2, 4], [100, 300], [[10.0, 12.0, 20.0], [14.0, 16.0, 28.0]]),
        DraftCosts([1, 2, 4], [3.0, 4.0, 5.0], [1.0, 2.0, 3.0]),
    ),
    plain_host=0.5,
    host=0.6,
    host_per_call=0.1,
)


def test_a_round_costs_its_calls_and_the_loop() -> None:
    assert COSTS.plain(100) == 10.5
    assert COSTS.plain(200) == 12.5
    # target (3 tokens) 16, first draft call of 2 rows 4, later ones of 1 and 3 rows 1 + 2.5, loop 0.6 + 3 * 0.1
    assert COSTS.round(3, 100, (2, 1, 3)) == pytest.approx(16 + 4 + 1 + 2.5 + 0.9)
    assert COSTS.round(1, 300) == pytest.approx(14.6)
    assert RoundCosts(CallCosts(COSTS.calls.target)).round(2, 100, (1,)) == 12


def test_a_prediction_is_what_its_rounds_come_to() -> None:
    rounds = [Round(3, 100, (1, 1), 2), Round(1, 102, (1,), 1), Round(3, 103, (2, 1), 3)]
    setting = Setting(DynamicTree(3))
    found = predict(setting, rounds, COSTS)
    spent = [16 + 3 + 1 + 0.8, 10 + 3 + 0.7, 16 + 4 + 1 + 0.8]
    spent = [one + slope for one, slope in zip(spent, (0, 0.02 * 2, 0.03 * 3), strict=True)]  # a longer past
    plain = sum(10.5 + 0.02 * place for place in range(6))
    assert found.setting is setting
    assert found.mean_accepted_tokens == 2
    assert found.nodes == pytest.approx(7 / 3)
    assert found.draft_ms == pytest.approx((4 + 3 + 5) / 3)
    assert found.host_ms == pytest.approx((0.8 + 0.7 + 0.8) / 3)
    assert found.round_ms == pytest.approx(sum(spent) / 3, rel=1e-3)
    assert found.speedup == pytest.approx(plain / sum(spent), rel=1e-3)


def test_only_trees_that_could_pay_are_recorded() -> None:
    costs = RoundCosts(CallCosts(Costs([1, 64], [10], [[1.0, 64.0]])))
    assert worthwhile_nodes(costs, 5.0, 64) == 8  # more than 4 cost 5 plain steps, but 8 are always tried
    assert worthwhile_nodes(costs, 13.0, 64) == 12
    assert worthwhile_nodes(costs, 100.0, 48) == 48
    assert worthwhile_nodes(costs, 5.0, 6) == 6


def test_ranks_of_the_true_tokens() -> None:
    ids = np.array([[[5, 6, 7], [8, 9, 4]], [[1, 2, 3], [7, 5, 6]], [[9, 9, 9], [9, 9, 9]]])
    sample = Sample([1], [3, 6, 4], 8, Stats())
    recorded = Recorded(heads=(ids, np.zeros(ids.shape, np.float32)))
    # behind 3: head 0 says 6 second, head 1 says 4 third; behind 6: 4 is nowhere, and then the answer is over
    assert true_ranks([(sample, recorded)]).tolist() == [[1, 2], [-1, -1]]
