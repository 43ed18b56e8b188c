"""x * sigmoid(x) in one kernel."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes import FuseSilu
from tests.tiny.passes import apply, graph, kinds, normal, only, run

WIDTH = 37  # no multiple of any vector
FEEDS = [{"x": normal(2, 3, WIDTH) * 4, "z": normal(2, 3, WIDTH)}, {"x": normal(1, 1, WIDTH), "z": normal(1, 1, WIDTH)}]
SILU = "s = Sigmoid(x) y = Mul(x, s)"


def gated(body: str, dtype: str = "float", outputs: str = "y") -> str:
    given, found = (
        ", ".join(f"{dtype}[B,T,{WIDTH}] {name}" for name in names) for names in (("x", "z"), outputs.split())
    )
    return f"agraph ({given}) => ({found}) <{dtype}[B,T,{WIDTH}] g> {{ {body} }}"


@pytest.mark.parametrize("order", ["x, s", "s, x"])
def test_either_order(order: str) -> None:
    model = graph(gated(f"s = Sigmoid(x) y = Mul({order})"))
    assert apply(FuseSilu(), model, FEEDS)
    assert kinds(model) == {"QuickGelu": 1}
    node = only(model, "QuickGelu")
    assert (node.domain, node.attributes["alpha"].as_float()) == (MICROSOFT, 1.0)


def test_a_gated_layer_keeps_its_second_product() -> None:
    model = graph(gated("s = Sigmoid(x) g = Mul(x, s) y = Mul(g, z)"))
    assert apply(FuseSilu(), model, FEEDS)
    assert kinds(model) == {"QuickGelu": 1, "Mul": 1}


def test_values_far_from_zero_too() -> None:
    """Against x / (1 + exp(-x)) in float64."""
    model = graph(gated(SILU))
    assert FuseSilu()(model).modified
    x = np.concatenate([np.linspace(-80, 80, 2 * WIDTH - 1), [0.0]]).astype(np.float32).reshape(1, 2, WIDTH)
    wide = x.astype(np.float64)
    found = run(model, {"x": x, "z": x})[0]
    np.testing.assert_allclose(found, wide / (1 + np.exp(-wide)), rtol=2e-6, atol=1e-6)


def test_a_row_is_the_same_wherever_it_stands() -> None:
    """Its elements are in another lane, or behind the last whole vector; that must not show."""
    model = graph(gated(SILU))
    FuseSilu()(model)
    x = normal(1, 9, WIDTH) * 4
    together = run(model, {"x": x, "z": x})[0]
    for row in range(9):
        alone = run(model, {"x": x[:, row : row + 1], "z": x[:, row : row + 1]})[0]
        np.testing.assert_array_equal(alone[:, 0], together[:, row])


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("s = Sigmoid(x) y = Mul(z, s)", "y"),  # of another value
        ("s = Sigmoid(x) y = Add(x, s)", "y"),
        ("s = Sigmoid(x) y = Mul(x, s)", "y s"),  # the sigmoid is given out
        ("s = Sigmoid(x) y = Mul(x, s) w = Neg(s)", "y w"),  # or read elsewhere
        ("s = Sigmoid(x) y = Mul(s, s)", "y"),
    ],
)
def test_everything_else_stays(body: str, outputs: str) -> None:
    model = graph(gated(body, outputs=outputs))
    before = kinds(model)
    assert not apply(FuseSilu(), model, FEEDS)
    assert kinds(model) == before


def test_other_dtypes_stay() -> None:
    """ONNX Runtime has the kernel for float32 only on a CPU."""
    model = graph(gated(SILU, "double"))
    assert not FuseSilu()(model).modified
    assert kinds(model) == {"Sigmoid": 1, "Mul": 1}
