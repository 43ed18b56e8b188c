"""What decoding costs on the machine that `speccompile tune` ran on; the runtime compares its own progress with it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from speccompile.graphs.errors import SettingsError


@dataclass(frozen=True)
class Costs:
    """Medians, in milliseconds.

    Args:
        tokens: numbers of new tokens T of the calls that were timed, ascending, the first one 1.
        pasts: numbers of tokens in the cache when they were, ascending.
        target: [pasts][tokens], what a call of the target took.
        draft: what a round's drafting takes inside the backend, with the tree of the manifest.
        host: what a round takes outside the backend.

    Raises:
        SettingsError: when the numbers do not fit each other.
    """

    tokens: list[int]
    pasts: list[int]
    target: list[list[float]]
    draft: float = 0.0
    host: float = 0.0

    def __post_init__(self) -> None:
        for name, values in (("tokens", self.tokens), ("pasts", self.pasts)):
            whole = all(type(value) is int and value >= 0 for value in values)
            if not values or not whole or list(values) != sorted(set(values)):
                raise SettingsError(f"costs: {name} is {values}; expected ascending whole numbers.")
        if self.tokens[0] != 1:
            raise SettingsError(f"costs: tokens start at {self.tokens[0]}; time a call of 1 token too.")
        rows = self.target
        if len(rows) != len(self.pasts) or any(not isinstance(r, list) or len(r) != len(self.tokens) for r in rows):
            raise SettingsError(
                f"costs: target is not a table of {len(self.pasts)} rows of {len(self.tokens)} numbers; tune again."
            )
        for value in (*(number for row in rows for number in row), self.draft, self.host):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise SettingsError(f"costs: {value!r} is no time in milliseconds; tune again.")
        if min(row[0] for row in rows) <= 0:
            raise SettingsError("costs: a call of one token took no time; tune again.")

    def call(self, tokens: int, past: int) -> float:
        """Milliseconds of a target call for `tokens` new tokens behind `past`: straight lines between what was
        measured, and the last one's slope behind it."""
        return _line(past, self.pasts, [_line(tokens, self.tokens, row) for row in self.target])

    def plain(self, past: int) -> float:
        """Milliseconds of a plain step; what little it takes outside the backend is not counted."""
        return self.call(1, past)

    def round(self, tokens: int, past: int) -> float:
        """Milliseconds of a round whose tree has `tokens` nodes, the root included."""
        return self.call(tokens, past) + self.draft + self.host


def _line(at: float, places: list[int], values: list[float]) -> float:
    """The value at `at`. No numpy: the runtime asks in every round, and of a few numbers."""
    if at <= places[0] or len(places) == 1:
        return values[0]
    right = min(bisect_left(places, at), len(places) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (places[right] - places[left])
    if at <= places[-1]:
        return values[left] + slope * (at - places[left])
    return values[-1] + max(slope, 0.0) * (at - places[-1])
