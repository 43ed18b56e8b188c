"""The table of what calls cost: between, beside and behind what was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.interpolate import RegularGridInterpolator

from speccompile.graphs.costs import Costs
from speccompile.graphs.errors import SettingsError

TOKENS, PASTS = [1, 2, 4, 8, 16], [0, 200, 1000]
TARGET = [[10.0, 11, 13, 18, 40], [11.0, 12, 15, 19, 38], [14.0, 16, 17, 25, 60]]
COSTS = Costs(TOKENS, PASTS, TARGET, draft=2.5, host=0.25)


def test_what_was_measured_is_given_back() -> None:
    for past, row in zip(PASTS, TARGET, strict=True):
        assert [COSTS.call(tokens, past) for tokens in TOKENS] == row
        assert COSTS.plain(past) == row[0]
        assert COSTS.round(8, past) == row[3] + 2.75


def test_between_measurements_lines_are_straight() -> None:
    table = RegularGridInterpolator((PASTS, TOKENS), np.array(TARGET))
    for tokens in range(1, 17):
        for past in (0, 1, 77, 200, 201, 640, 1000):
            assert COSTS.call(tokens, past) == pytest.approx(float(table((past, tokens))), rel=1e-12)


def test_behind_the_last_measurement_its_slope_goes_on() -> None:
    assert COSTS.call(24, 0) == pytest.approx(40 + 8 * (40 - 18) / 8)
    assert COSTS.plain(1800) == pytest.approx(14 + 800 * 3 / 800)
    twice = [COSTS.call(24, past) for past in (200, 1000)]
    assert COSTS.call(24, 1400) == pytest.approx(twice[1] + (twice[1] - twice[0]) / 2)


def test_more_is_never_expected_to_cost_less() -> None:
    """The last slope may fall by noise, the line behind it may not."""
    falling = Costs([1, 8, 16], [100], [[10.0, 31.0, 30.0]])
    assert falling.call(12, 100) == 30.5
    assert falling.call(64, 100) == 30.0
    assert falling.call(8, 0) == falling.call(8, 5000) == 31.0  # one past tells nothing of others
    assert Costs([1], [100], [[10.0]]).call(9, 100) == 10.0


def test_before_the_first_past_nothing_is_cheaper() -> None:
    late = Costs([1, 2], [200, 1000], [[11.0, 12.0], [14.0, 16.0]])
    assert (late.call(1, 0), late.call(2, 0)) == (11.0, 12.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [2, 4, 8, 16, 32]}, "tokens start at 2; time a call of 1 token too"),
        ({"tokens": [1, 2, 8, 4, 16]}, r"tokens is \[1, 2, 8, 4, 16\]; expected ascending whole numbers"),
        ({"tokens": [1, 2, 2, 8, 16]}, "expected ascending"),
        ({"tokens": [1, 2.5, 4, 8, 16]}, "expected ascending whole"),
        ({"pasts": []}, r"pasts is \[\]"),
        ({"pasts": [0, 200, True]}, "pasts is"),
        ({"pasts": [0, 200]}, "target is not a table of 2 rows of 5 numbers"),
        ({"target": [[1.0, 2.0, 3.0, 4.0, 5.0]] * 2 + [[1.0]]}, "target is not a table of 3 rows of 5"),
        ({"target": [[1.0, 2.0, 3.0, 4.0, float("nan")]] * 3}, "nan is no time"),
        ({"target": [[1.0, 2.0, 3.0, 4.0, "5"]] * 3}, "'5' is no time"),
        ({"target": [[0.0, 2.0, 3.0, 4.0, 5.0]] * 3}, "one token took no time"),
        ({"draft": -1.0}, "-1.0 is no time"),
        ({"host": float("inf")}, "inf is no time"),
        ({"host": True}, "True is no time"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"tokens": TOKENS, "pasts": PASTS, "target": TARGET}
    with pytest.raises(SettingsError, match=message):
        Costs(**{**fields, **changes})
