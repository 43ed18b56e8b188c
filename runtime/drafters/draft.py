"""What a drafter is to the decoding loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.ort import StepOutput


@dataclass(frozen=True)
class Draft:
    """A tree and the token of each of its nodes, int64 [N]; node 0 holds the root token."""

    tree: TokenTree
    tokens: npt.NDArray[np.int64]


class Drafter(Protocol):
    """Drafts for one sequence. `seconds` is the backend time of the last `propose`."""

    seconds: float

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        """The target ran and the rows `nodes` of its output were committed (all of them in a prefill)."""

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        """Draft behind `root`, with at most `max_nodes` nodes (the root included), none deeper than `max_depth`."""
