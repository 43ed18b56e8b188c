"""What a drafter is to the decoding loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.step import StepOutput

_chain = cache(TokenTree.chain)


@dataclass(frozen=True)
class Draft:
    """Guesses behind one root token.

    Args:
        tree: N nodes.
        tokens: int64 [N], the token of each node; node 0 holds the root token.
        probabilities: float64 [N], how likely the drafter thinks it is that a node's whole path is what the target
            says; 1 for the root, never above the parent's. It decides which guesses are worth verifying, never what
            is accepted. None when the drafter cannot say.
        sampled_from: by node with children, the distribution q float64 [V] they were drawn from, without replacement
            and in node order. None when guesses were chosen, not drawn: acceptance then needs no q.
    """

    tree: TokenTree
    tokens: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64] | None = None
    sampled_from: Mapping[int, npt.NDArray[np.float64]] | None = None

    def one_path(self) -> Draft:
        """The draft cut down to a chain: from each node its likeliest child, or the first where guesses were drawn (a
        choice among drawn tokens would bias what is emitted) or nothing is known of them."""
        nodes = [0]
        while children := self.tree.children[nodes[-1]]:
            if self.sampled_from is not None or self.probabilities is None:
                nodes.append(children[0])
            else:
                nodes.append(max(children, key=self.probabilities.__getitem__))
        if len(nodes) == len(self.tree):
            return self
        return Draft(
            _chain(len(nodes) - 1),
            self.tokens[nodes],
            None if self.probabilities is None else self.probabilities[nodes],
            None
            if self.sampled_from is None
            else {place: q for place, node in enumerate(nodes) if (q := self.sampled_from.get(node)) is not None},
        )


class Drafter(Protocol):
    """Drafts for one answer. `seconds` is the backend time of the last `propose` or `observe`."""

    seconds: float

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        """The target ran and the rows `nodes` of its output were committed: the accepted path of the last draft, root
        included, or a piece of the prompt. The sequence's tokens have been extended by then."""

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        """Draft behind `root`, with at most `max_nodes` nodes (the root included), none deeper than `max_depth`."""
