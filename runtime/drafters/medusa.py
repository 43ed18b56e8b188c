"""Medusa: every head guesses one depth of a tree from the same hidden state (arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from speccompile.graphs.errors import BundleError
from speccompile.graphs.tree import ROOT_ALONE, AdaptiveChain, DraftTree, DynamicTree, TokenTree, grow
from speccompile.runtime.backends.step import Heads, StepOutput
from speccompile.runtime.drafters.draft import Draft


class MedusaDrafter:
    """Drafts for one sequence; `heads` may be shared by many.

    The hidden state that produced the root token feeds the heads: with it head d-1 guesses the token at depth d
    (reference notes 1.3: lm_head is one ahead, head h two plus h). The tree is the same every round, or, when it
    is dynamic, the most probable one of its size by what the heads say this time.

    Raises:
        BundleError: when a fixed tree is deeper or wider than what the heads give, or the tree is an adaptive chain.
    """

    def __init__(self, heads: Heads, tree: DraftTree) -> None:
        if isinstance(tree, AdaptiveChain):
            raise BundleError(
                "tree: adaptive chains are for what drafts token by token; rebuild the bundle with another tree."
            )
        if isinstance(tree, TokenTree) and (tree.max_depth > heads.heads or max(tree.ranks) >= heads.top_k):
            raise BundleError(
                f"tree: depth {tree.max_depth} and rank {max(tree.ranks)} need more than the {heads.heads} heads and "
                f"top {heads.top_k} of this bundle; rebuild it with that tree."
            )
        self.heads = heads
        self.tree: TokenTree | DynamicTree = tree
        self.seconds = 0.0
        self._hidden: npt.NDArray[np.float32] | None = None
        self._pruned: dict[tuple[int, int], TokenTree] = {}

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        assert output.hidden is not None
        self._hidden = output.hidden[0, nodes[-1]].copy()

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        assert self._hidden is not None, "the target must run once before its heads can draft"
        nodes, depth = min(max_nodes, len(self.tree)), min(max_depth, self.heads.heads)
        if nodes < 2 or depth < 1:
            self.seconds = 0.0
            return Draft(ROOT_ALONE, np.array([root], np.int64), np.ones(1))
        ids, logprobs = self.heads.run(self._hidden)
        self.seconds = self.heads.seconds
        tree = self._shape(logprobs[:depth], nodes)
        tokens = np.empty(len(tree), np.int64)
        tokens[0] = root
        places = tree.depths[1:] - 1, tree.rank_array[1:]
        tokens[1:] = ids[places]
        own = np.zeros(len(tree))
        own[1:] = logprobs[places]
        return Draft(tree, tokens, np.exp(tree.mask @ own))  # heads guess independently: a path's logs add up

    def _shape(self, logprobs: npt.NDArray[np.float32], nodes: int) -> TokenTree:
        """This round's tree, of at most `nodes` nodes and no deeper than `logprobs` [depth,K]."""
        if isinstance(self.tree, DynamicTree):
            return grow(logprobs[: self.tree.depth], nodes, self.tree.floor, self.tree.top_k)
        key = (nodes, len(logprobs))
        if key not in self._pruned:
            self._pruned[key] = self.tree.prune(*key)
        return self._pruned[key]
