"""Exact chances: run a program for every way its uniform numbers can fall."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

Outcome = TypeVar("Outcome", bound=Hashable)


class _Branches:
    """One run: comparisons go the way of `script`, then below the threshold, until the program ends."""

    def __init__(self, script: list[bool]) -> None:
        self.script, self.taken = script, list[bool]()
        self.numbers: list[_Uniform] = []

    def uniform(self) -> float:
        self.numbers.append(_Uniform(self))
        return cast(float, self.numbers[-1])

    def choose(self) -> bool:
        place = len(self.taken)
        self.taken.append(self.script[place] if place < len(self.script) else True)
        return self.taken[-1]


class _Uniform:
    """A number in [low, high): all that the comparisons so far have told. Fractions stay fractions."""

    def __init__(self, branches: _Branches) -> None:
        self.branches = branches
        self.low: Any = 0
        self.high: Any = 1

    def __mul__(self, factor: Any) -> _Scaled:
        return _Scaled(self, factor)

    def below(self, threshold: Any) -> bool:
        if threshold >= self.high:
            return True
        if threshold <= self.low:
            return False
        if self.branches.choose():
            self.high = threshold
            return True
        self.low = threshold
        return False


class _Scaled:
    def __init__(self, number: _Uniform, factor: Any) -> None:
        self.number, self.factor = number, factor

    def __lt__(self, other: Any) -> bool:
        return other is not self and self.number.below(other / self.factor)  # numpy's search compares keys, too

    def __gt__(self, other: Any) -> bool:
        return other is not self and not self.number.below(other / self.factor)  # they are equal with probability zero


def outcomes(program: Callable[[Callable[[], float]], Outcome]) -> dict[Outcome, Any]:
    """The probability of each of the program's results. It may multiply and compare the numbers that it is given."""
    found: dict[Outcome, Any] = {}
    scripts: list[list[bool]] = [[]]
    while scripts:
        branches = _Branches(scripts.pop())
        result = program(branches.uniform)
        chance: Any = 1
        for number in branches.numbers:
            chance *= number.high - number.low
        found[result] = found.get(result, 0) + chance
        scripts += [[*branches.taken[:place], False] for place in range(len(branches.script), len(branches.taken))]
    return found
