"""Channels moved from activations into weights: nothing changes but their sizes, and only where that is so."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.graphs.passes import Smooth, smoothable
from tests.tiny.passes import Array, apply, graph, kinds, normal, only, run

WIDTH, INNER = 128, 192  # enough weights to be worth rounding
X = [{"x": normal(2, 3, WIDTH), "z": normal(2, 3, WIDTH, seed=1)}, {"x": normal(1, 1, WIDTH), "z": normal(1, 1, WIDTH)}]
WEIGHTS: dict[str, Array] = {
    "n": 1 + normal(WIDTH) / 4,
    "c": normal(WIDTH, seed=1),
    "A": normal(WIDTH, INNER) / 10,
    "B": normal(WIDTH, INNER, seed=1) / 10,
    "G": normal(WIDTH, 2 * INNER) / 10,
    "D": normal(INNER, WIDTH) / 10,
}
RMS = "RMSNormalization<axis = -1, epsilon = 0.01>(x, n)"
NORMS = {
    "rms": f"h = {RMS}",
    "layer": "h = LayerNormalization<axis = -1, epsilon = 0.01>(x, n, c)",
    "layer without bias": "h = LayerNormalization<axis = -1, epsilon = 0.01>(x, n)",
    "skip rms": "h, m, i, s = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.01>(x, z, n)",
    "skip layer": "h, m, i, s = com.microsoft.SkipLayerNormalization<epsilon = 0.01>(x, z, n, c)",
}
GATED = """u = MatMul(x, G)
    a, b = Split<axis = -1>(u, halves)
    g = Sigmoid(a)
    h = Mul(g, b)
    y = MatMul(h, D)"""


def model_of(body: str, outputs: str = "y", **more: Array) -> ir.Model:
    """y and other outputs of any shape, from x and z; h is what is smoothed."""
    found = ", ".join(f"float[B,T,{name.upper()}] {name}" for name in outputs.split())
    halves = {"halves": np.array([INNER, INNER])} if "halves" in body else {}
    weights = {name: array for name, array in WEIGHTS.items() if any(f"{end}{name}" in body for end in ("(", ", "))}
    return graph(
        f"agraph (float[B,T,{WIDTH}] x, float[B,T,{WIDTH}] z) => ({found}) {{ {body} }}",
        **weights,
        **halves,
        **more,
    )


def factors(width: int) -> Array:
    """From 1/30 to 30."""
    return np.exp(np.random.default_rng(3).uniform(-3.4, 3.4, width)).astype(np.float32)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_norm_gives_what_several_products_read(norm: str) -> None:
    model = model_of(f"{norm} y = MatMul(h, A) w = MatMul(h, B)", "y w")
    assert [node.op_type for node in smoothable(model)["h"].readers] == ["MatMul", "MatMul"]
    factor = factors(WIDTH)
    before = dict(kinds(model))
    assert apply(Smooth({"h": factor}), model, X, atol=5e-6)
    assert kinds(model) == before
    for name, wanted in (
        ("n", WEIGHTS["n"] / factor),
        ("c", WEIGHTS["c"] / factor),
        ("A", WEIGHTS["A"] * factor[:, None]),
        ("B", WEIGHTS["B"] * factor[:, None]),
    ):
        if name in model.graph.initializers:
            tensor = model.graph.initializers[name].const_value
            assert tensor is not None
            np.testing.assert_allclose(tensor.numpy(), wanted, rtol=1e-6)


def test_what_is_read_is_divided() -> None:
    model = model_of(f"h = {RMS} y = MatMul(h, A)")
    model.graph.outputs.append(only(model, "RMSNormalization").outputs[0])
    before = run(model, X[0])[1]
    model.graph.outputs.pop()
    factor = factors(WIDTH)
    Smooth({"h": factor})(model)
    model.graph.outputs.append(only(model, "RMSNormalization").outputs[0])
    np.testing.assert_allclose(run(model, X[0])[1], before / factor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("order", ["g, b", "b, g"])
def test_a_gated_layer_is_divided_through_its_ungated_half(order: str) -> None:
    model, factor = model_of(GATED.replace("g, b", order)), factors(INNER)
    assert [(made.name, *span) for made, *span in smoothable(model)["h"].makers] == [("G", INNER, 2 * INNER)]
    assert apply(Smooth({"h": factor}), model, X, atol=5e-6)
    tensor = model.graph.initializers["G"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy()[:, :INNER], WEIGHTS["G"][:, :INNER])
    np.testing.assert_allclose(tensor.numpy()[:, INNER:], WEIGHTS["G"][:, INNER:] / factor, rtol=1e-6)


def test_a_product_of_its_own_is_divided_too() -> None:
    model = model_of("p = MatMul(x, A) g = MatMul(z, B) s = Sigmoid(g) h = Mul(s, p) y = MatMul(h, D)")
    assert [(made.name, *span) for made, *span in smoothable(model)["h"].makers] == [("A", 0, INNER)]
    assert apply(Smooth({"h": factors(INNER)}), model, X, atol=5e-6)


def test_a_whole_feed_forward_layer_at_once() -> None:
    """One table is read by what is smoothed and makes what is smoothed: both factors reach it."""
    model = model_of(GATED.replace("(x, G)", "(k, G)").replace("u =", f"k = {RMS} u =", 1))
    assert set(smoothable(model)) == {"k", "h"}
    into, out = factors(WIDTH), factors(INNER)[::-1].copy()
    assert apply(Smooth({"k": into, "h": out}), model, X, atol=1e-5)
    tensor = model.graph.initializers["G"].const_value
    assert tensor is not None
    wanted = WEIGHTS["G"] * into[:, None] / np.concatenate([np.ones(INNER), out])
    np.testing.assert_allclose(tensor.numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (f"h = {RMS} y = MatMul(h, A) w = Neg(h)", "y w"),  # read by something else
        (f"h = {RMS} y = MatMul(h, A)", "y h"),  # given out
        (f"h = {RMS} q = RMSNormalization(z, n) y = MatMul(h, A) w = Neg(q)", "y w"),  # another norm's weight too
        (f"h = {RMS} y = MatMul(h, A) w = MatMul(z, A)", "y w"),  # another product's table too
        (f"h = {RMS} y = MatMul(h, S)", "y"),  # its reader is too small to be rounded
        ("h = Neg(x) y = MatMul(h, A)", "y"),  # no weight makes it
        ("h = Mul(x, z) y = MatMul(h, A)", "y"),
        (GATED.replace("h = Mul(g, b)", "d = Add(b, o) h = Mul(g, d)"), "y"),  # a bias comes between
        (GATED, "y b"),  # the half is given out
        (GATED, "y u"),
        (GATED + " w = Neg(b)", "y w"),  # or read elsewhere
        (GATED + " w = Neg(u)", "y w"),  # or both are
    ],
)
def test_everything_else_stays(body: str, outputs: str) -> None:
    more = {"S": normal(WIDTH, 8)} if ", S)" in body else {"o": normal(INNER)} if ", o)" in body else {}
    model = model_of(body, outputs, **more)
    assert "h" not in smoothable(model)
    width = INNER if "Split" in body else WIDTH
    assert not Smooth({"h": factors(width)})(model).modified


def test_names_that_are_not_there_are_passed_over() -> None:
    model = model_of(f"h = {RMS} y = MatMul(h, A)")
    assert not apply(Smooth({"other": factors(WIDTH)}), model, X)
    assert not apply(Smooth({}), model, X)
