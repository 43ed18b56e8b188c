"""The TensorRT flavour: what ONNX Runtime can run of it gives what it gave; the rest is as the parser reads it."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from speccompile.graphs.errors import EngineError
from speccompile.graphs.passes import ForTensorrt
from tests.tiny.passes import Array, kinds, normal, only, run

HEADER = '<ir_version: 11, opset_import: ["": 24]>'
HEADS, SHARED, SLOTS = 6, 2, 12
FLOATS = ir.TensorType(ir.DataType.FLOAT)


def attention(attributes: str = "scale = 0.3", kind: str = "float", size: int = 16, slots: object = SLOTS) -> ir.Model:
    """One Attention of the scatter dialect, its cache given."""
    text = f"""{HEADER} agraph (int64[B,T] input_ids, int64[B] past_length, {kind}[B,{HEADS},T,{size}] q,
        {kind}[B,{SHARED},{slots},{size}] k, {kind}[B,{SHARED},{slots},{size}] v, {kind}[B,1,T,{slots}] mask)
        => ({kind}[B,{HEADS},T,{size}] y) {{ y = Attention{f"<{attributes}>" if attributes else ""}(q, k, v, mask) }}"""
    return ir.from_proto(onnx.parser.parse_model(text))


def feed(batch: int, tokens: int, dtype: type = np.float32, size: int = 16) -> dict[str, Array]:
    """Queries large enough that a soft cap matters, and a mask that leaves each row a few slots."""
    generator = np.random.default_rng([batch, tokens, size])
    seen = generator.random((batch, 1, tokens, SLOTS)) < 0.5
    seen[..., 0] = True
    return {
        "input_ids": np.zeros((batch, tokens), np.int64),
        "past_length": np.arange(3, 3 + batch),
        "q": (6 * normal(batch, HEADS, tokens, size)).astype(dtype),
        "k": normal(batch, SHARED, SLOTS, size, seed=1).astype(dtype),
        "v": normal(batch, SHARED, SLOTS, size, seed=2).astype(dtype),
        "mask": np.where(seen, 0, np.finfo(dtype).min).astype(dtype),
    }


def reference(given: dict[str, Array], scale: float, cap: float) -> Array:
    """Capped attention in float64, head by head."""
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    hidden = given["mask"][:, 0] < -1
    out = np.empty_like(q)
    for head in range(HEADS):
        shared = head // (HEADS // SHARED)
        scores = cap * np.tanh(scale * (q[:, head] @ k[:, shared].transpose(0, 2, 1)) / cap)
        weights = np.where(hidden, 0, np.exp(scores))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
    return out


# ---- attention ----


@pytest.mark.parametrize(
    ("attributes", "scale"), [("scale = 0.3", 0.3), ("", 0.25), ("scale = 0.3, is_causal = 0", 0.3)]
)
@pytest.mark.parametrize(("kind", "dtype"), [("float", np.float32), ("float16", np.float16)])
def test_attention_gets_lengths_and_scaled_queries(attributes: str, scale: float, kind: str, dtype: type) -> None:
    model = attention(attributes, kind)
    assert ForTensorrt()(model).modified
    node = only(model, "TRT_Attention")
    assert node.domain == "trt" and model.opset_imports["trt"] == 1
    names = [value.name if value is not None else None for value in node.inputs]
    assert names[1:5] == ["k", "v", "mask", None] and len(names) == 6
    assert model.graph.outputs[0] is node.outputs[0] and node.outputs[0].name == "y"
    wanted = {"causal_kind": "none", **({"TRT_decomposable": 1} if kind == "float" else {})}
    assert {name: attribute.value for name, attribute in node.attributes.items()} == wanted
    # What feeds it, run: all but the node itself, which no runtime knows but TensorRT.
    scaled, lengths = node.inputs[0], node.inputs[5]
    assert scaled is not None and lengths is not None and scaled.dtype == model.graph.inputs[2].dtype
    model.graph.outputs.clear()
    model.graph.outputs.extend([scaled, lengths])
    model.graph.remove(node)
    del model.opset_imports["trt"]
    given = feed(2, 5, dtype)
    got, used = run(model, given)
    np.testing.assert_allclose(
        got, given["q"].astype(np.float64) * scale, rtol=0, atol=2e-2 if kind == "float16" else 1e-6
    )
    assert got.dtype == dtype
    np.testing.assert_array_equal(used, np.array([8, 9], np.int32))
    assert used.dtype == np.int32


@pytest.mark.parametrize(("size", "decomposable"), [(256, False), (264, True)])
def test_heads_without_a_fused_kernel_may_be_taken_apart(size: int, decomposable: bool) -> None:
    model = attention(kind="float16", size=size)
    ForTensorrt()(model)
    assert ("TRT_decomposable" in only(model, "TRT_Attention").attributes) == decomposable


def test_lengths_are_made_once() -> None:
    model = attention()
    first = only(model, "Attention")
    second = ir.node("Attention", [first.outputs[0], *first.inputs[1:]], {"scale": 0.2}, name="second")
    second.outputs[0].name, second.outputs[0].shape, second.outputs[0].type = "z", first.outputs[0].shape, FLOATS
    model.graph.insert_after(first, second)
    model.graph.outputs[0] = second.outputs[0]
    ForTensorrt()(model)
    nodes = [node for node in model.graph if node.op_type == "TRT_Attention"]
    assert len(nodes) == 2 and nodes[0].inputs[5] is nodes[1].inputs[5]
    assert kinds(model) == {"Shape": 1, "Add": 1, "Cast": 1, "Mul": 2, "TRT_Attention": 2}


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ("is_causal = 1", "no causality"),
        ("qk_matmul_output_mode = 1", "attributes qk_matmul_output_mode"),
        ("softmax_precision = 1", "attributes softmax_precision"),
    ],
)
def test_an_attention_of_another_dialect_is_refused(attributes: str, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        ForTensorrt()(attention(attributes))


def test_lengths_where_the_parser_drops_them_are_refused() -> None:
    model = attention()
    node = only(model, "Attention")
    dropped = ir.node("Attention", [*node.inputs, None, None, model.graph.inputs[1]], {"scale": 0.3}, name="dropped")
    model.graph.insert_after(node, dropped)
    ir.convenience.replace_all_uses_with(node.outputs[0], dropped.outputs[0], replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    with pytest.raises(EngineError, match=r"dropped: an Attention with inputs in slots \[0, 1, 2, 3, 6\]"):
        ForTensorrt()(model)


# ---- soft caps ----


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 5), (3, 2)])
@pytest.mark.parametrize("cap", [2.0, 8.0])
@pytest.mark.parametrize(("kind", "dtype", "close"), [("float", np.float32, 2e-5), ("float16", np.float16, 2e-2)])
def test_capped_attention_in_plain_operators(
    batch: int, tokens: int, cap: float, kind: str, dtype: type, close: float
) -> None:
    model = attention(f"scale = 0.3, softcap = {cap}", kind)
    given = feed(batch, tokens, dtype)
    exact, uncapped = reference(given, 0.3, cap), reference(given, 0.3, 1e6)
    assert np.abs(exact - uncapped).max() > 3 * close, "the cap must matter"
    (before,) = run(model, given)
    np.testing.assert_allclose(before, exact, rtol=0, atol=close)
    assert ForTensorrt()(model).modified
    assert not {"Attention", "TRT_Attention"} & set(kinds(model)) and "trt" not in model.opset_imports
    (after,) = run(model, given)
    assert after.dtype == dtype
    np.testing.assert_allclose(after, exact, rtol=0, atol=close)


def test_a_capped_attention_over_an_open_capacity_is_refused() -> None:
    with pytest.raises(EngineError, match=r"whose keys are not known to be \[B,Hkv,C,D\]"):
        ForTensorrt()(attention("softcap = 2.0", slots="C"))


# ---- argmax ----


@pytest.mark.parametrize(("axis", "keepdims", "shape"), [(0, 0, ""), (-1, 1, "[1]")])
def test_argmax_of_a_vector(axis: int, keepdims: int, shape: str) -> None:
    text = f"{HEADER} agraph (float[N] x) => (int64{shape} y) {{ y = ArgMax<axis = {axis}, keepdims = {keepdims}>(x) }}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    given = {"x": normal(9)}
    (before,) = run(model, given)
    assert ForTensorrt()(model).modified
    (after,) = run(model, given)
    assert after.shape == before.shape and after == before == given["x"].argmax()
    assert len(only(model, "ArgMax").inputs[0].producer().inputs) == 2 and kinds(model)["Unsqueeze"] == 1


def test_argmax_of_more_stays() -> None:
    text = f"{HEADER} agraph (float[N,4] x) => (int64[N] y) {{ y = ArgMax<axis = -1, keepdims = 0>(x) }}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert not ForTensorrt()(model).modified
