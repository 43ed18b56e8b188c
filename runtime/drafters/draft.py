"""What a drafter is to the decoding loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.ort import StepOutput


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


class Drafter(Protocol):
    """Drafts for one answer. `seconds` is the backend time of the last `propose` or `observe`."""

    seconds: float

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        """The target ran and the rows `nodes` of its output were committed: the accepted path of the last draft, root
        included, or a piece of the prompt. The sequence's tokens have been extended by then."""

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        """Draft behind `root`, with at most `max_nodes` nodes (the root included), none deeper than `max_depth`."""
