"""`Trie`: guesses from any number of sources become one draft tree, in which they compete for the node budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from speccompile.graphs.errors import GenerationError
from speccompile.graphs.tree import ROOT_ALONE, TokenTree
from speccompile.runtime.drafters.draft import Draft

token_tree = lru_cache(maxsize=512)(TokenTree)
"""Shapes recur (chains above all), and a known tree has its mask and depths already."""


@dataclass(frozen=True)
class Candidate:
    """A chain of guesses behind the root.

    Args:
        tokens: one per depth, from depth 1 on.
        probabilities: as long as `tokens`; how likely it is that the target says the chain up to this token,
            so non-increasing.
    """

    tokens: Sequence[int]
    probabilities: Sequence[float]


class Trie:
    """Guesses behind one root; those with a common prefix share its nodes.

    Nodes are numbered as they are added: node 0 is the root, and a parent is added before its child. `tokens`,
    `parents` and `probabilities` (of the path from the root to the node) are indexed by node, and so is
    `children`, which leads from a token to the child that holds it.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.probabilities = [1.0]
        self.children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, probability: float = 1.0) -> int:
        """The child of `parent` that holds `token`, made when there is none.

        Of several probabilities for a node the largest counts, and none is more probable than its parent.
        """
        probability = min(probability, self.probabilities[parent])
        node = self.children[parent].get(token)
        if node is None:
            node = self.children[parent][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.probabilities.append(probability)
            self.children.append({})
        elif probability > self.probabilities[node]:
            self.probabilities[node] = probability
        return node

    def insert(self, tokens: Sequence[int], probabilities: Iterable[float] | None = None) -> list[int]:
        """Add a chain behind the root; returns its nodes, one per token. Without `probabilities` all are 1."""
        if probabilities is None:
            probabilities = [1.0] * len(tokens)
        node, nodes = 0, []
        for token, probability in zip(tokens, probabilities, strict=True):
            node = self.add(node, token, probability)
            nodes.append(node)
        return nodes

    def draft(self, max_nodes: int, floor: float = 0.0) -> Draft:
        """The tree of the most probable nodes, most probable first and ties in the order they were added.

        A parent is at least as probable as its child and was added before it, so it is kept whenever the child is, and
        comes first (reference notes, pitfall 27).

        Args:
            max_nodes: largest number of nodes, the root included; the root always stays.
            floor: less probable nodes are dropped.
        """
        likely = [node for node, probability in enumerate(self.probabilities) if probability >= floor or not node]
        kept = sorted(likely, key=self.probabilities.__getitem__, reverse=True)[: max(max_nodes, 1)]
        if len(kept) == 1:
            return Draft(ROOT_ALONE, np.array(self.tokens[:1], np.int64), np.ones(1))
        new, widths = {0: 0}, [0] * len(kept)
        parents, ranks = [-1], [0]
        for node in kept[1:]:
            parent = new[self.parents[node]]
            new[node] = len(parents)
            parents.append(parent)
            ranks.append(widths[parent])
            widths[parent] += 1
        return Draft(
            token_tree(tuple(parents), tuple(ranks)),
            np.array([self.tokens[node] for node in kept], np.int64),
            np.array([self.probabilities[node] for node in kept]),
        )


def merge(root: int, candidates: Iterable[Candidate], max_nodes: int, max_depth: int, floor: float = 0.0) -> Draft:
    """One draft tree of several chains: the union of their nodes, cut at `max_depth`, then as in `Trie.draft`."""
    trie, depth = Trie(root), max(max_depth, 0)
    for candidate in candidates:
        trie.insert(candidate.tokens[:depth], candidate.probabilities[:depth])
    return trie.draft(max_nodes, floor)


def merge_drafts(first: Draft, second: Draft, max_nodes: int, floor: float = 0.0) -> Draft:
    """One draft tree of two drafts behind the same root, as in `Trie.draft`; between equals `first` comes first.

    Raises:
        GenerationError: when a draft's guesses were drawn (`sampled_from`), or have no probabilities to compare by.
    """
    assert first.tokens[0] == second.tokens[0], "drafts behind different roots have no common tree"
    for draft in (first, second):
        if draft.sampled_from is not None:
            raise GenerationError(
                "draft: guesses drawn from a distribution cannot share a tree with others, because the rule that "
                "accepts them needs every sibling to come from it; choose guesses instead of drawing them, or leave "
                "out the second drafter."
            )
        if draft.probabilities is None and len(draft.tree) > 1:
            raise GenerationError(
                f"draft: {len(draft.tree) - 1} guesses without probabilities cannot be weighed against others; "
                "leave out the second drafter."
            )
    for one, other in ((first, second), (second, first)):
        likely = one.probabilities is None or one.probabilities.min() >= floor
        if len(other.tree) == 1 and len(one.tree) <= max_nodes and likely:
            return one  # as it is, with the tree whose mask is known
    trie = Trie(int(first.tokens[0]))
    for draft in (first, second):
        tokens, nodes = draft.tokens.tolist(), [0]
        probabilities = [1.0] if draft.probabilities is None else draft.probabilities.tolist()
        for node in range(1, len(tokens)):
            nodes.append(trie.add(nodes[draft.tree.parents[node]], tokens[node], probabilities[node]))
    return trie.draft(max_nodes, floor)
