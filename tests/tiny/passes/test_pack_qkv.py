"""One packed tensor for GroupQueryAttention."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.graphs.passes import PackQkv
from tests.tiny.passes import Feed, apply, graph, kinds, normal, only

KV_HEADS, HEAD_DIM, CAPACITY = 2, 8, 16


def feed(tokens: int, past: int) -> Feed:
    shape = (1, KV_HEADS, CAPACITY, HEAD_DIM)
    return {
        "x": normal(1, tokens, 64),
        "past_k": normal(*shape),
        "past_v": normal(*shape, seed=1),
        "seqlens": np.array([past + tokens - 1], np.int32),
        "total": np.array(past + tokens, np.int32),
    }


FEEDS = [feed(4, 5), feed(1, 9)]
INPUTS = "float[B,T,64] x, float[B,2,16,8] past_k, float[B,2,16,8] past_v, int32[B] seqlens, int32 total"


def attention(parts: str, split: str = "Split<axis = -1>(x, sizes)", more: str = "") -> str:
    return f"""agraph ({INPUTS}) => (float[B,T,32] y{", float[B,T,U] z" if more else ""})
    <int64[3] sizes = {{32, 16, 16}}> {{
        q, k, v = {split}
        y, new_k, new_v = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>(
            {parts}, past_k, past_v, seqlens, total)
        {more}
    }}"""


def test_the_split_goes() -> None:
    model = graph(attention("q, k, v"))
    assert apply(PackQkv(), model, FEEDS)
    assert kinds(model) == {"GroupQueryAttention": 1}
    node = only(model, "GroupQueryAttention")
    assert list(node.inputs[:3]) == [model.graph.inputs[0], None, None]


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_another_reader_of_a_part_keeps_it(part: str) -> None:
    model = graph(attention("q, k, v", more=f"z = Neg({part})"))
    assert not apply(PackQkv(), model, FEEDS)
    assert kinds(model) == {"Split": 1, "GroupQueryAttention": 1, "Neg": 1}


def test_another_order_keeps_it() -> None:
    """Keys and values exchanged still run, but packed they would be read the wrong way round."""
    model = graph(attention("q, v, k"))
    assert not apply(PackQkv(), model, FEEDS)
    assert kinds(model) == {"Split": 1, "GroupQueryAttention": 1}


def test_parts_that_were_changed_on_the_way_keep_it() -> None:
    model = graph(attention("q, n, v").replace("y, new_k", "n = Neg(k)\n        y, new_k"))
    assert not apply(PackQkv(), model, FEEDS)
    assert kinds(model) == {"Split": 1, "GroupQueryAttention": 1, "Neg": 1}


def test_a_split_without_attention_stays() -> None:
    model = graph(
        "agraph (float[B,T,64] x) => (float[B,T,32] y) { q, k = Split<axis = -1, num_outputs = 2>(x)\n y = Add(q, k) }"
    )
    assert not apply(PackQkv(), model, [{"x": normal(1, 2, 64)}])
