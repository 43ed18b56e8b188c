"""A draft model: a small model that guesses, token by token, what the target is about to say.

arXiv 2211.17192 and 2302.01318 (chains), 2305.09781 and 2402.12374 (trees). The draft model's cache follows the
sequence. In a round it first catches up with what it has not seen, the root included, then the tree grows level by
level (see `growing`), and the rows of those nodes that are accepted stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.drafters.growing import GrowingDrafter, Growth


class DraftModelDrafter(GrowingDrafter):
    """Drafts of a draft model. Everything is derived from `cache.length`: it has seen that many of `tokens`."""

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        del nodes, output  # `tokens` says what was accepted, also of drafts that were pruned or merged since
        self.seconds = 0.0
        growth = self._growth
        if growth is None:
            if self.cache.length < len(self.tokens) < self.cache.capacity:
                self._read(self.tokens[self.cache.length :], len(self.tokens) - self.cache.length)
            self.calls = 0
        elif growth.rows:
            accepted = growth.follow(self.tokens[self.cache.length :])
            self.cache.commit(next((growth.rows[node] for node in reversed(accepted) if node in growth.rows), []))
            self._adapt(growth, len(accepted))

    def _catch_up(self, growth: Growth) -> StepOutput | None:
        """What is committed stays in the cache; the root's row waits, as those of the tree do, for what is accepted."""
        assert self.cache.length <= len(self.tokens), "the draft model's cache must be truncated with the target's"
        if len(self.tokens) >= self.cache.capacity:
            return None
        growth.run([0])
        pending = [*self.tokens[self.cache.length :], growth.tokens[0]]
        return self._read(pending, len(pending) - 1)


# ---- what to expect ----


def expected_tokens(alpha: float, gamma: float) -> float:
    """Mean tokens of a round, the bonus included, when each of `gamma` guesses in a chain is accepted with probability
    `alpha` and independently: (1 - alpha^(gamma+1)) / (1 - alpha) (arXiv 2211.17192, equation 1)."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def predicted_speedup(alpha: float, beta: float, gamma: float) -> float:
    """Speed against plain decoding, when a draft call costs `beta` of a target call and verifying a chain costs as much
    as one plain step (arXiv 2211.17192, theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * beta + 1)
