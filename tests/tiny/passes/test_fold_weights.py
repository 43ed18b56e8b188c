"""Weights stored the way their MatMul reads them."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.graphs.passes import FoldWeights
from tests.tiny.passes import apply, graph, kinds, normal, only

X = [{"x": normal(2, 3, 8)}, {"x": normal(1, 1, 8)}]
TIED = """agraph (int64[B,T] ids, float[B,T,8] x) => (float[B,T,8] e, float[B,T,12] y)
    <float[8,12] t, float[B,T,12] z> {
        e = Gather<axis = 0>(W, ids)
        t = Transpose<perm = [1, 0]>(W)
        z = MatMul(x, t)
        y = Neg(z)
    }"""
TIED_FEEDS = [
    {"ids": np.array([[3, 0, 11]]), "x": normal(1, 3, 8)},
    {"ids": np.array([[7], [7]]), "x": normal(2, 1, 8)},
]


def test_a_weight_of_its_own_is_stored_transposed() -> None:
    weight = normal(12, 8)
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,12] y) <float[8,12] t> {
            t = Transpose<perm = [1, 0]>(W)
            y = MatMul(x, t)
        }""",
        W=weight,
    )
    assert apply(FoldWeights(), model, X)
    assert kinds(model) == {"MatMul": 1}
    stored = only(model, "MatMul").inputs[1]
    assert stored is not None
    assert stored.const_value is not None
    np.testing.assert_array_equal(stored.const_value.numpy(), weight.T)


def test_one_transpose_may_serve_several_products() -> None:
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,12] y)
        <float[8,12] t, float[B,T,12] a, float[B,T,12] b, float[B,T,8] n> {
            t = Transpose<perm = [1, 0]>(W)
            n = Neg(x)
            a = MatMul(x, t)
            b = MatMul(n, t)
            y = Mul(a, b)
        }""",
        W=normal(12, 8),
    )
    assert apply(FoldWeights(), model, X)
    assert kinds(model) == {"Neg": 1, "MatMul": 2, "Mul": 1}


def test_a_tied_table_is_copied_so_that_the_product_owns_what_it_packs() -> None:
    table = normal(12, 8)
    model = graph(TIED, W=table)
    assert apply(FoldWeights(), model, TIED_FEEDS)
    assert kinds(model) == {"Gather": 1, "MatMul": 1, "Neg": 1}
    stored = only(model, "MatMul").inputs[1]
    assert stored is not None and stored.const_value is not None
    np.testing.assert_array_equal(stored.const_value.numpy(), table.T)
    assert [use.node.op_type for use in model.graph.initializers["W"].uses()] == ["Gather"]


def test_a_large_weight_is_read_in_parts() -> None:
    table = normal(12, 8)
    model = graph(TIED, W=table)
    assert apply(FoldWeights(part_bytes=5 * 8 * 4), model, TIED_FEEDS)  # five of twelve rows
    assert kinds(model) == {"Gather": 1, "MatMul": 3, "Concat": 1, "Neg": 1}
    stored = [node.inputs[1].const_value for node in model.graph if node.op_type == "MatMul"]  # type: ignore[union-attr]
    assert [tensor.shape.numpy() for tensor in stored if tensor is not None] == [(8, 4)] * 3  # type: ignore[union-attr]
    np.testing.assert_array_equal(np.concatenate([t.numpy() for t in stored if t is not None], 1), table.T)


def test_the_products_name_shape_and_place_as_an_output_are_kept() -> None:
    model = graph(TIED.replace("z = MatMul(x, t)\n        y = Neg(z)", "y = MatMul(x, t)"), W=normal(12, 8))
    assert apply(FoldWeights(), model, TIED_FEEDS)
    out = model.graph.outputs[1]
    assert out.shape is not None
    assert (out.name, [str(size) for size in out.shape]) == ("y", ["B", "T", "12"])


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("y = MatMul(x, W)", {"W": (8, 8)}),  # no transpose
        ("t = Transpose<perm = [0, 2, 1]>(x) y = MatMul(t, x)", {}),  # not a weight
        ("t = Transpose<perm = [1, 0]>(W) y = MatMul(t, v)", {"W": (8, 8), "v": (8, 8)}),  # the left operand
        ("t = Transpose<perm = [1, 0]>(W) a = MatMul(x, t) y = Add(a, t)", {"W": (8, 8)}),  # another reader
        ("t = Transpose<perm = [0, 1]>(W) y = MatMul(x, t)", {"W": (8, 8)}),  # turns nothing round
        ("t = Transpose<perm = [0, 2, 1]>(W) y = MatMul(x, t)", {"W": (2, 4, 8)}),  # a stack, as of experts
    ],
)
def test_everything_else_stays(body: str, weights: dict[str, tuple[int, ...]]) -> None:
    arrays = {name: normal(*shape) for name, shape in weights.items()}
    model = graph(f"agraph (float[B,T,8] x) => (float[U,V,W] y) {{ {body} }}", **arrays)
    before = kinds(model)
    assert not apply(FoldWeights(), model, [{"x": normal(2, 8, 8)}])
    assert kinds(model) == before
