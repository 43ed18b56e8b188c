"""Several products of one activation become one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.graphs.passes import FuseParallelMatMuls
from tests.tiny.passes import Array, apply, graph, kinds, normal, only

FEEDS = [{"x": normal(2, 3, 8)}, {"x": normal(1, 1, 8)}]


def linear(out: str, source: str, weight: str, bias: str = "") -> str:
    """One nn.Linear, as the exporter writes it."""
    product = f"{out}_product" if bias else out
    text = f"{out}_t = Transpose<perm = [1, 0]>({weight})\n{product} = MatMul({source}, {out}_t)\n"
    return text + (f"{out} = Add({product}, {bias})\n" if bias else "")


def qkv(biased: str, **arrays: Array) -> ir.Model:
    """Three products of x, 8, 4 and 4 wide; those named in `biased` have a bias."""
    weights = {"Q": normal(8, 8), "K": normal(4, 8, seed=1), "V": normal(4, 8, seed=2)}
    weights |= {"bias_q": normal(8), "bias_k": normal(4, seed=1), "bias_v": normal(4, seed=2)}
    body = "".join(linear(name, "x", name.upper(), f"bias_{name}" if name in biased else "") for name in "qkv")
    used = {name: array for name, array in weights.items() if len(name) == 1 or name[-1] in biased}
    return graph(
        f"""agraph (float[B,T,8] x) => (float[B,T,8] y, float[B,T,4] z)
        <float[B,T,8] q, float[B,T,4] k, float[B,T,4] v> {{
            {body}
            y = Neg(q)
            z = Sub(k, v)
        }}""",
        **used,
        **arrays,
    )


def test_without_bias() -> None:
    model = qkv("")
    assert apply(FuseParallelMatMuls(), model, FEEDS)
    counts = kinds(model)
    assert (counts["MatMul"], counts["Split"]) == (1, 1)
    assert "Add" not in counts
    split = only(model, "Split")
    assert split.inputs[1] is not None
    assert split.inputs[1].const_value is not None
    assert split.inputs[1].const_value.numpy().tolist() == [8, 4, 4]
    assert [part.name for part in split.outputs] == ["q", "k", "v"]
    assert [[str(size) for size in part.shape or ()] for part in split.outputs] == [
        ["B", "T", "8"],
        ["B", "T", "4"],
        ["B", "T", "4"],
    ]


def test_with_bias_there_is_one_add() -> None:
    model = qkv("qkv")
    assert apply(FuseParallelMatMuls(), model, FEEDS)
    counts = kinds(model)
    assert (counts["MatMul"], counts["Add"], counts["Split"]) == (1, 1, 1)


def test_a_bias_may_stand_on_the_left() -> None:
    model = qkv("qkv")
    for node in model.graph:
        if node.op_type == "Add":
            product, bias = node.inputs
            node.replace_input_with(0, bias)
            node.replace_input_with(1, product)
    assert apply(FuseParallelMatMuls(), model, FEEDS)
    assert kinds(model)["MatMul"] == 1


def test_products_with_and_without_bias_are_separate_groups() -> None:
    model = qkv("kv")
    assert apply(FuseParallelMatMuls(), model, FEEDS)
    counts = kinds(model)
    assert (counts["MatMul"], counts["Add"], counts["Split"]) == (2, 1, 1)
    assert [part.name for part in only(model, "Split").outputs] == ["k", "v"]


def test_a_group_for_each_activation() -> None:
    """Gate and up read one activation, and two other products another."""
    hidden = linear("g", "x", "G") + linear("u", "x", "U") + "h = Mul(g, u)\n"
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,4] y)
        <float[B,T,6] g, float[B,T,6] u, float[B,T,6] h, float[B,T,4] a, float[B,T,4] b> {"""
        + hidden + linear("a", "h", "A") + linear("b", "h", "C") + "y = Add(a, b) }",
        G=normal(6, 8), U=normal(6, 8, seed=1), A=normal(4, 6), C=normal(4, 6, seed=1),
    )  # fmt: skip
    assert apply(FuseParallelMatMuls(), model, FEEDS)
    counts = kinds(model)
    assert (counts["MatMul"], counts["Split"]) == (2, 2)


def test_a_fused_graph_output_keeps_its_name() -> None:
    model = graph(
        "agraph (float[B,T,8] x) => (float[B,T,4] y, float[B,T,6] z) {"
        + linear("y", "x", "Y", "c") + linear("z", "x", "Z", "d") + "}",
        Y=normal(4, 8), Z=normal(6, 8), c=normal(4), d=normal(6),
    )  # fmt: skip
    assert apply(FuseParallelMatMuls(), model, FEEDS)
    assert kinds(model)["MatMul"] == 1


def test_a_tied_weight_is_left_alone() -> None:
    """Stacking it would store the embedding twice."""
    model = graph(
        "agraph (int64[B,T] ids, float[B,T,8] x) => (float[B,T,8] e, float[B,T,4] y) {"
        "e = Gather<axis = 0>(L, ids)\n" + linear("l", "x", "L") + linear("p", "x", "P") + "y = Add(l, p) }",
        L=normal(4, 8), P=normal(4, 8, seed=1),
    )  # fmt: skip
    feeds = [{"ids": np.array([[3, 0]]), "x": normal(1, 2, 8)}]
    assert not apply(FuseParallelMatMuls(), model, feeds)
    assert kinds(model)["MatMul"] == 2


@pytest.mark.parametrize("bias", ["", "c"])
def test_different_activations_are_left_alone(bias: str) -> None:
    model = graph(
        "agraph (float[B,T,8] x) => (float[B,T,4] y) { n = Neg(x)\n"
        + linear("a", "x", "A", bias) + linear("b", "n", "C", bias) + "y = Add(a, b) }",
        A=normal(4, 8), C=normal(4, 8, seed=1), **({"c": normal(4)} if bias else {}),
    )  # fmt: skip
    assert not apply(FuseParallelMatMuls(), model, FEEDS)
    assert kinds(model)["MatMul"] == 2


def test_an_add_that_is_no_bias_stays_behind_the_split() -> None:
    """The product plus a computed value, or plus a matrix, is not a linear layer's bias."""
    model = graph(
        "agraph (float[B,T,8] x) => (float[B,T,8] y, float[B,T,8] z) <float[B,T,8] a, float[B,T,8] b> {"
        + linear("a", "x", "A") + linear("b", "x", "C") + "y = Add(a, x)\n z = Add(b, M) }",
        A=normal(8, 8), C=normal(8, 8, seed=1), M=normal(1, 8),
    )  # fmt: skip
    assert apply(FuseParallelMatMuls(), model, FEEDS)
    counts = kinds(model)
    assert (counts["MatMul"], counts["Add"], counts["Split"]) == (1, 2, 1)


@pytest.mark.parametrize(("width", "addend"), [(4, 1), (1, 4)])
def test_a_vector_that_broadcasts_is_no_bias(width: int, addend: int) -> None:
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,4] y)
        <float[B,T,N] a_product, float[B,T,N] b_product, float[B,T,4] a, float[B,T,4] b> {"""
        + linear("a", "x", "A", "c") + linear("b", "x", "C", "d") + "y = Add(a, b) }",
        A=normal(width, 8), C=normal(width, 8, seed=1), c=normal(addend), d=normal(addend, seed=1),
    )  # fmt: skip
    assert apply(FuseParallelMatMuls(), model, FEEDS)
    assert kinds(model)["Add"] == 3


def test_one_product_alone_is_left_alone() -> None:
    model = graph(
        "agraph (float[B,T,8] x) => (float[B,T,4] y) {" + linear("y", "x", "A", "c") + "}", A=normal(4, 8), c=normal(4)
    )
    assert not apply(FuseParallelMatMuls(), model, FEEDS)
