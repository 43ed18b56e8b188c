"""EAGLE: a head that drafts from the target's own features (arXiv 2401.15077, 2406.16858, 2503.01840).

Row i of a head reads the token t_(i+1) beside the feature f_i and guesses t_(i+2) (see `graphs.eagle`). What the target
has run has true features, and only rows made of these stay in the head's cache: in a round it first catches up with
what was accepted, the root included. Then the tree grows level by level (see `growing`), each node with the state of
its parent for a feature. None of that is ever committed: an accepted node runs again, with the feature that the target
has meanwhile given it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.drafters.growing import GrowingDrafter, Growth

Features = npt.NDArray[np.float32]


class EagleDrafter(GrowingDrafter):
    """Drafts of an EAGLE head.

    `cache.length` and the features that wait for their next token or their turn make up the length of `tokens`, as long
    as the sequence fits the cache. Behind that no features are kept, for nothing is drafted any more.
    """

    _waiting: tuple[Features, ...] = ()  # [n,F] each: the target's, of the rows from `cache.length` on
    _states: dict[int, Features]  # [F], what the level that was run last passes on, by node; views of its output

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        assert output.hidden is not None, "an EAGLE head needs a target that gives features"
        self.seconds = 0.0
        growth = self._growth
        if len(self.tokens) > self.cache.capacity:
            self._waiting = ()
            return
        self._waiting += (output.hidden[0, list(nodes)],)  # a copy, as the buffer is used again
        if growth is None:
            if len(self.tokens) > self.cache.length + 1:
                self._read_waiting(self.tokens[self.cache.length + 1 :])
            self.calls = 0
        else:
            self._adapt(growth, len(growth.follow(self.tokens[-len(nodes) :])))

    def _catch_up(self, growth: Growth) -> StepOutput | None:
        if len(self.tokens) > self.cache.capacity:
            return None
        output = self._read_waiting([*self.tokens[self.cache.length + 1 :], growth.tokens[0]])
        assert output.hidden is not None
        growth.rows[0] = []
        self._states = {0: output.hidden[0, -1]}
        return output

    def _read_waiting(self, tokens: Sequence[int]) -> StepOutput:
        """Run as many of the waiting features as there are `tokens` to go with them; all rows stay in the cache."""
        features = np.concatenate(self._waiting)
        assert self.cache.length + len(features) == len(self.tokens), "features and tokens must match"
        self._waiting = (features[len(tokens) :],)
        return self._read(tokens, len(tokens), features[: len(tokens)])

    def _run(self, growth: Growth, nodes: Sequence[int], **beside: Features) -> StepOutput:
        features = np.stack([self._states[growth.parents[node]] for node in nodes])
        output = super()._run(growth, nodes, features=features, **beside)
        assert output.hidden is not None
        self._states = dict(zip(nodes, output.hidden[0], strict=True))
        return output
