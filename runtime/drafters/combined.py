"""Two drafters for one answer: both propose, and the most probable guesses of either are verified together."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.drafters.candidates import merge_drafts
from speccompile.runtime.drafters.draft import Draft, Drafter


class CombinedDrafter:
    """Drafts for one answer.

    Args:
        first, second: their guesses have probabilities, and are chosen, not drawn: a sibling from elsewhere would break
            the rule that accepts drawn ones, so `propose` raises GenerationError for those (see `merge_drafts`).
        tree_budget: largest size of the merged tree, the root included.
        floor: less probable guesses are not worth a row of the target call.
    """

    def __init__(self, first: Drafter, second: Drafter, tree_budget: int, floor: float) -> None:
        self.first, self.second = first, second
        self.tree_budget, self.floor = tree_budget, floor
        self.seconds = 0.0

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        self.first.observe(nodes, output)
        self.second.observe(nodes, output)
        self.seconds = self.first.seconds + self.second.seconds

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        nodes = min(max_nodes, self.tree_budget)
        first = self.first.propose(root, nodes, max_depth)
        second = self.second.propose(root, nodes, max_depth)
        self.seconds = self.first.seconds + self.second.seconds
        return merge_drafts(first, second, nodes, self.floor)
