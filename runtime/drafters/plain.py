"""No drafting: a tree of one node, which is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.graphs.tree import ROOT_ALONE
from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.drafters.draft import Draft


class PlainDrafter:
    """Proposes nothing."""

    seconds = 0.0

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        del nodes, output

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        del max_nodes, max_depth
        return Draft(ROOT_ALONE, np.array([root], np.int64))
