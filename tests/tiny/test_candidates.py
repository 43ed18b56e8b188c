"""Merging guesses into one tree: against a best-first search over plain dictionaries, and the rules at its edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from speccompile.graphs.errors import GenerationError
from speccompile.graphs.tree import ROOT_ALONE, TokenTree
from speccompile.runtime.backends.ort import StepOutput
from speccompile.runtime.drafters.candidates import Candidate, Trie, merge, merge_drafts
from speccompile.runtime.drafters.combined import CombinedDrafter
from speccompile.runtime.drafters.draft import Draft
from speccompile.runtime.drafters.plain import PlainDrafter

ROOT = 90
Path = tuple[int, ...]
NO_OUTPUT = cast(StepOutput, None)


def paths(draft: Draft) -> list[tuple[Path, float]]:
    """Tokens from depth 1 on and probability of every node, in node order, the root's first."""
    assert draft.probabilities is not None and draft.probabilities.dtype == np.float64
    assert draft.tokens.dtype == np.int64 and len(draft.tokens) == len(draft.tree) == len(draft.probabilities)
    return [
        (tuple(draft.tokens[draft.tree.ancestry(node)[1:]].tolist()), float(draft.probabilities[node]))
        for node in range(len(draft.tree))
    ]


def best_first(chains: Sequence[Candidate], max_nodes: int, max_depth: int, floor: float) -> list[tuple[Path, float]]:
    """The same tree by search: again and again the most probable prefix whose own prefix has been taken."""
    known: dict[Path, float] = {}  # in order of insertion
    for chain in chains:
        for depth in range(1, min(len(chain.tokens), max_depth) + 1):
            path = tuple(chain.tokens[:depth])
            known[path] = max(known.get(path, 0.0), chain.probabilities[depth - 1])
    taken: list[tuple[Path, float]] = [((), 1.0)]
    while len(taken) < max_nodes:
        reachable = [
            (path, p)
            for path, p in known.items()
            if p >= floor and path[:-1] in dict(taken) and path not in dict(taken)
        ]
        if not reachable:
            break
        best = reachable[0]
        for path, p in reachable:
            if p > best[1]:
                best = (path, p)
        taken.append(best)
    return taken


def random_chains(rng: np.random.Generator) -> list[Candidate]:
    """Few tokens and few probabilities, so that prefixes are shared and ties are common."""
    chains = []
    for _ in range(rng.integers(0, 6)):
        length = int(rng.integers(0, 6))
        probabilities = np.sort(rng.integers(1, 5, length) / 4)[::-1]
        chains.append(Candidate(rng.integers(0, 3, length).tolist(), probabilities.tolist()))
    return chains


def test_merged_chains_equal_a_best_first_search() -> None:
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(400):
        chains = random_chains(rng)
        max_nodes, max_depth = int(rng.integers(1, 12)), int(rng.integers(0, 6))
        floor = float(rng.choice([0.0, 0.3, 0.5, 0.75]))
        draft = merge(ROOT, chains, max_nodes, max_depth, floor)
        assert draft.tokens[0] == ROOT
        assert paths(draft) == best_first(chains, max_nodes, max_depth, floor)
        assert len(draft.tree) <= max_nodes and draft.tree.max_depth <= max_depth
        for children in draft.tree.children:
            assert [draft.tree.ranks[child] for child in children] == list(range(len(children)))
            assert len({int(draft.tokens[child]) for child in children}) == len(children)
        sizes.append(len(draft.tree))
    assert {1, 2, 5, 8} <= set(sizes)


def test_a_worked_merge() -> None:
    """Chains 5 6 7, 5 8 and 9: 5 is shared and takes the larger probability; the best five of six nodes stay."""
    chains = [Candidate([5, 6, 7], [0.5, 0.4, 0.1]), Candidate([5, 8], [0.7, 0.3]), Candidate([9], [0.4])]
    draft = merge(ROOT, chains, max_nodes=5, max_depth=3)
    assert draft.tokens.tolist() == [ROOT, 5, 6, 9, 8]  # 6 ties with 9 and was said first
    assert draft.tree == TokenTree(parents=(-1, 0, 1, 0, 1), ranks=(0, 0, 0, 1, 1))
    assert draft.probabilities is not None and draft.probabilities.tolist() == [1, 0.7, 0.4, 0.4, 0.3]


def test_a_child_never_outlives_its_parent() -> None:
    """Pitfall 27. Rounding, or a careless drafter, may say that a path is more probable than its prefix."""
    draft = merge(ROOT, [Candidate([1, 2, 3], [0.2, 0.9, 0.21]), Candidate([4], [0.5])], max_nodes=3, max_depth=3)
    assert paths(draft) == [((), 1.0), ((4,), 0.5), ((1,), 0.2)]


def test_nothing_to_merge_is_plain_decoding() -> None:
    for draft in (
        merge(ROOT, [], 8, 8),
        merge(ROOT, [Candidate([], [])], 8, 8),
        merge(ROOT, [Candidate([1], [0.1])], 8, 8, floor=0.2),
        merge(ROOT, [Candidate([1], [0.9])], 1, 8),
        merge(ROOT, [Candidate([1], [0.9])], 0, 8),
        merge(ROOT, [Candidate([1], [0.9])], 8, 0),
    ):
        assert draft.tree is ROOT_ALONE
        assert paths(draft) == [((), 1.0)] and draft.tokens.tolist() == [ROOT]


def test_trie_insert_says_which_nodes_a_chain_has() -> None:
    trie = Trie(ROOT)
    assert trie.insert([1, 2, 3]) == [1, 2, 3]
    assert trie.insert([1, 2, 4], [0.5, 0.5, 0.5]) == [1, 2, 4]
    assert trie.insert([2]) == [5]
    assert trie.insert([]) == []
    assert len(trie) == 6
    assert (trie.tokens, trie.parents) == ([ROOT, 1, 2, 3, 4, 2], [-1, 0, 1, 2, 2, 0])
    assert trie.probabilities == [1, 1, 1, 1, 0.5, 1]
    with pytest.raises(ValueError):
        trie.insert([1, 2], [0.5])


# ---- two drafts ----


def as_chains(draft: Draft) -> list[Candidate]:
    """A draft node by node, as the chains that lead there."""
    assert draft.probabilities is not None
    ancestries = [draft.tree.ancestry(node)[1:] for node in range(1, len(draft.tree))]
    return [Candidate(draft.tokens[nodes].tolist(), draft.probabilities[nodes].tolist()) for nodes in ancestries]


def test_merged_drafts_equal_a_best_first_search() -> None:
    rng = np.random.default_rng(1)
    shared = 0
    for _ in range(300):
        first, second = (merge(ROOT, random_chains(rng), 10, 5) for _ in range(2))
        max_nodes, floor = int(rng.integers(1, 24)), float(rng.choice([0.0, 0.3, 0.6]))
        merged = merge_drafts(first, second, max_nodes, floor)
        assert paths(merged) == best_first([*as_chains(first), *as_chains(second)], max_nodes, 9, floor)
        shared += floor == 0 and len(merged.tree) < min(max_nodes, len(first.tree) + len(second.tree) - 1)
    assert shared > 20  # the union was not always a sum


def test_a_draft_alone_keeps_its_tree_but_not_what_is_below_the_floor() -> None:
    """A fixed tree's mask is known, so nothing is rebuilt for a lookup that found nothing."""
    tree = TokenTree.from_paths([[0], [1], [0, 0]])
    first = Draft(tree, np.array([ROOT, 1, 2, 3]), np.array([1, 0.5, 0.1, 0.3]))
    nothing = Draft(ROOT_ALONE, np.array([ROOT]))
    assert merge_drafts(first, nothing, 4) is first
    assert merge_drafts(nothing, first, 4, floor=0.1) is first
    assert paths(merge_drafts(first, nothing, 4, floor=0.2)) == [((), 1.0), ((1,), 0.5), ((1, 3), 0.3)]
    assert paths(merge_drafts(nothing, first, 2)) == [((), 1.0), ((1,), 0.5)]
    assert merge_drafts(nothing, nothing, 4).tree is ROOT_ALONE


def test_guesses_that_cannot_be_compared_are_refused() -> None:
    chain, two = TokenTree.chain(1), np.array([ROOT, 3])
    other = Draft(chain, two, np.array([1, 0.5]))
    drawn = Draft(chain, two, np.array([1, 0.5]), sampled_from={0: np.full(4, 0.25)})
    for pair in ((drawn, other), (other, drawn)):
        with pytest.raises(GenerationError, match=r"drawn from a distribution .* leave out the second drafter"):
            merge_drafts(*pair, max_nodes=4)
    with pytest.raises(GenerationError, match="1 guesses without probabilities"):
        merge_drafts(Draft(chain, two), other, 4)


# ---- the combined drafter ----


class Scripted:
    """Says one thing, within the limits it is given, and writes down what it is told."""

    def __init__(self, chains: list[Candidate], seconds: float) -> None:
        self.chains, self.seconds = chains, seconds
        self.observed: list[list[int]] = []
        self.limits: list[tuple[int, int]] = []

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        del output
        self.observed.append(list(nodes))
        self.seconds += 1

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        self.limits.append((max_nodes, max_depth))
        return merge(root, self.chains, max_nodes, max_depth)


def test_combined_drafter_merges_within_its_budget_and_forwards_what_it_sees() -> None:
    first = Scripted([Candidate([1, 2, 3], [0.6, 0.5, 0.05])], seconds=0.25)
    second = Scripted([Candidate([1, 7], [0.8, 0.55]), Candidate([4], [0.1])], seconds=0.5)
    combined = CombinedDrafter(first, second, tree_budget=4, floor=0.1)
    draft = combined.propose(ROOT, max_nodes=30, max_depth=9)
    assert paths(draft) == [((), 1.0), ((1,), 0.8), ((1, 7), 0.55), ((1, 2), 0.5)]
    assert combined.seconds == 0.75
    assert paths(combined.propose(ROOT, max_nodes=3, max_depth=1)) == [((), 1.0), ((1,), 0.8), ((4,), 0.1)]
    assert first.limits == second.limits == [(4, 9), (3, 1)]
    combined.observe([0, 2], NO_OUTPUT)
    assert first.observed == second.observed == [[0, 2]]
    assert combined.seconds == 2.75
    assert CombinedDrafter(first, second, 30, 0.1).propose(ROOT, 1, 9).tree is ROOT_ALONE


def test_combined_with_a_drafter_that_proposes_nothing() -> None:
    first = Scripted([Candidate([1, 2], [0.6, 0.5])], seconds=0.25)
    alone = paths(first.propose(ROOT, 8, 8))
    assert paths(CombinedDrafter(first, PlainDrafter(), 8, 0.1).propose(ROOT, 8, 8)) == alone
    assert paths(CombinedDrafter(PlainDrafter(), first, 8, 0.1).propose(ROOT, 8, 8)) == alone
