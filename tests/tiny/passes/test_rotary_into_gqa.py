"""Rotary embedding inside GroupQueryAttention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes import PackQkv, RotaryIntoGqa
from tests.tiny.passes import Feed, apply, graph, kinds, normal, only, run

HEADS, KV_HEADS, HEAD_DIM, CAPACITY, POSITIONS = 4, 2, 32, 24, 32
# Tree nodes: two of them at one position.
TREE_DEPTHS = np.array([0, 1, 1, 2, 2, 3])


def feed(depths: np.ndarray, past: int) -> Feed:
    tokens, shape = len(depths), (1, KV_HEADS, CAPACITY, HEAD_DIM)
    return {
        "q": normal(1, tokens, HEADS * HEAD_DIM),
        "k": normal(1, tokens, KV_HEADS * HEAD_DIM),
        "v": normal(1, tokens, KV_HEADS * HEAD_DIM, seed=1),
        "past_k": normal(*shape, seed=2),
        "past_v": normal(*shape, seed=3),
        "seqlens": np.array([past + tokens - 1], np.int32),
        "total": np.array(past + tokens, np.int32),
        "positions": (past + depths)[None].astype(np.int64),
        "bias": np.where(normal(1, 1, tokens, past + tokens) > -1, 0, -1e30).astype(np.float32),
    }


FEEDS = [feed(TREE_DEPTHS, 9), feed(np.arange(5), 0), feed(np.zeros(1, np.int64), 20)]


def rotated(out: str, source: str, heads: int, attributes: str, cos: str = "cos", between: str = "") -> str:
    """A projection cut into heads, rotated and joined, as a traced model does it."""
    return f"""
        {out}_s = Reshape({source}, split_{heads})
        {out}_n = {between or "Identity"}({out}_s)
        {out}_h = Transpose<perm = [0, 2, 1, 3]>({out}_{"n" if between else "s"})
        {out}_r = RotaryEmbedding<{attributes}>({out}_h, {cos}, sin, positions)
        {out}_t = Transpose<perm = [0, 2, 1, 3]>({out}_r)
        {out} = Reshape({out}_t, joined_{heads})"""


def attention(
    width: int = HEAD_DIM,
    query: str = "interleaved = 0",
    key: str | None = None,
    key_cos: str = "cos",
    between: str = "",
    more: str = "",
) -> ir.Model:
    """Attention over rotated queries and keys; `width` channels of each head are rotated."""
    partial = f", rotary_embedding_dim = {width}" if width < HEAD_DIM else ""
    angles = np.random.default_rng(0).uniform(0, 6.28, (POSITIONS, width // 2)).astype(np.float32)
    other = {"other": np.cos(angles + 1)} if key_cos == "other" else {}
    model = graph(
        f"""agraph (float[B,T,128] q, float[B,T,64] k, float[B,T,64] v,
            float[B,2,24,32] past_k, float[B,2,24,32] past_v,
            int32[B] seqlens, int32 total, int64[B,T] positions, float[B,1,T,S] bias)
            => (float[B,T,128] y{", float[B,N,T,D] z" if more else ""})
        <int64[4] split_4 = {{0, 0, 4, 32}}, int64[4] split_2 = {{0, 0, 2, 32}},
         int64[3] joined_4 = {{0, 0, 128}}, int64[3] joined_2 = {{0, 0, 64}},
         float[B,T,128] rq, float[B,T,64] rk> {{
            {rotated("rq", "q", HEADS, query + partial, between=between)}
            {rotated("rk", "k", KV_HEADS, (key or query) + partial, key_cos, between)}
            y, new_k, new_v = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, scale = 0.25>(
                rq, rk, v, past_k, past_v, seqlens, total, , , , bias)
            {more}
        }}""",
        cos=np.cos(angles),
        sin=np.sin(angles),
        **other,
    )
    ir.passes.common.RemoveUnusedNodesPass()(model)
    return model


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("width", [HEAD_DIM, HEAD_DIM // 2])
def test_queries_and_keys_are_rotated_by_the_operator(interleaved: int, width: int) -> None:
    model = attention(width, f"interleaved = {interleaved}")
    assert apply(RotaryIntoGqa(), model, FEEDS, atol=5e-6)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    assert kinds(model) == {"GroupQueryAttention": 1}
    node = only(model, "GroupQueryAttention")
    assert [value.name if value else None for value in node.inputs] == [
        "q", "k", "v", "past_k", "past_v", "seqlens", "total", "cos", "sin", "positions", "bias",
    ]  # fmt: skip
    assert node.attributes["rotary_interleaved"].as_int() == interleaved


def test_the_data_tells_the_two_pairings_apart() -> None:
    halves, pairs = (run(attention(query=f"interleaved = {pairing}"), FEEDS[0])[0] for pairing in (0, 1))
    assert np.abs(halves - pairs).max() > 0.1


def test_norms_between_projection_and_rotation_stay() -> None:
    model = attention(between="Neg")
    before = kinds(model)
    assert not apply(RotaryIntoGqa(), model, FEEDS)
    assert kinds(model) == before
    assert before["RotaryEmbedding"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"query": "interleaved = 0", "key": "interleaved = 1"},
        {"key_cos": "other"},  # local and global rotary tables differ
        {"more": "z = Neg(rk_r)"},  # rotated keys are read elsewhere
    ],
)
def test_what_one_operator_cannot_do_stays(changes: dict[str, str]) -> None:
    model = attention(**changes)
    before = kinds(model)
    assert not apply(RotaryIntoGqa(), model, FEEDS)
    assert kinds(model) == before


@pytest.mark.parametrize("width", [8, 24])
def test_widths_that_the_operator_refuses_stay(width: int) -> None:
    """Its kernels want tables a multiple of 8 wide: heads of 24, 40 or 120 channels rotate outside."""
    model = attention(width)
    assert not apply(RotaryIntoGqa(), model, FEEDS)


def test_a_projection_read_elsewhere_too_is_no_obstacle() -> None:
    model = attention(more="z = Neg(rk_h)")
    assert apply(RotaryIntoGqa(), model, FEEDS, atol=5e-6)


def test_only_the_key_rotated_stays() -> None:
    model = attention()
    only_gqa = next(node for node in model.graph if node.domain == MICROSOFT)
    only_gqa.replace_input_with(0, model.graph.inputs[0])
    assert not apply(RotaryIntoGqa(), model, FEEDS)


def test_packed_afterwards_it_still_rotates() -> None:
    """The two passes in their order: the operator rotates queries and keys inside the packed tensor."""
    model = attention()
    parts = model.graph.inputs[:3]
    sizes = ir.Value(name="sizes", const_value=ir.tensor([128, 64, 64], name="sizes"), shape=ir.Shape([3]))
    model.graph.register_initializer(sizes)
    packed = ir.Value(name="packed", shape=ir.Shape(["B", "T", 256]), type=ir.TensorType(ir.DataType.FLOAT))
    split = ir.node("Split", [packed, sizes], {"axis": -1}, num_outputs=3)
    for part, out in zip(parts, split.outputs, strict=True):
        out.shape, out.dtype = part.shape, part.dtype
        ir.convenience.replace_all_uses_with(part, out)
    model.graph.insert_before(next(iter(model.graph)), split)
    rest = list(model.graph.inputs)[3:]
    model.graph.inputs.clear()
    model.graph.inputs.extend([packed, *rest])
    feeds = []
    for one in FEEDS:
        joined = np.concatenate([one["q"], one["k"], one["v"]], -1)
        feeds.append({"packed": joined, **{name: value for name, value in one.items() if name not in "qkv"}})
    assert apply(RotaryIntoGqa(), model, feeds, atol=5e-6)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    assert apply(PackQkv(), model, feeds)
    assert kinds(model) == {"GroupQueryAttention": 1}
