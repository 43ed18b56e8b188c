"""One size for the cache, wherever the graph speaks of it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.graphs.errors import EngineError
from speccompile.graphs.passes import FixCapacity
from tests.tiny.passes import graph, normal, run

TEXT = """agraph (float[B,T,4] x, float[B,2,C,4] past_k, float[B,2,C,4] past_v)
        => (int64[1] size, float[B,2,C,4] present)
        <float[B,2,C,4] both> {
            size = Shape<start = 2, end = 3>(past_k)
            both = Add(past_k, past_v)
            present = Neg(both)
        }"""


def caches(text: str = TEXT) -> ir.Model:
    model = graph(text)
    for value in model.graph.inputs:
        part = {"past_k": "key", "past_v": "value"}.get(str(value.name))
        if part:
            value.name = f"past_key_values.0.{part}"
    return model


def test_every_shape_gets_the_number() -> None:
    model = caches()
    past = {"past_key_values.0.key": normal(1, 2, 6, 4), "past_key_values.0.value": normal(1, 2, 6, 4, seed=1)}
    before = run(model, {"x": normal(1, 3, 4), **past})
    assert FixCapacity(6)(model).modified
    values = [*model.graph.inputs[1:], *(node.outputs[0] for node in list(model.graph)[1:])]
    shapes = [list(value.shape) for value in values]
    assert [shape[1:] for shape in shapes] == [[2, 6, 4]] * 4
    assert [str(shape[0]) for shape in shapes] == ["B"] * 4
    for got, wanted in zip(run(model, {"x": normal(1, 3, 4), **past}), before, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert not FixCapacity(6)(model).modified


def test_another_number_than_the_one_it_has_is_refused() -> None:
    model = caches(TEXT.replace("C", "8"))
    with pytest.raises(EngineError, match="its caches have capacity 8, which cannot become 16; build the bundle again"):
        FixCapacity(16)(model)
    assert not FixCapacity(8)(model).modified


def test_caches_of_two_sizes_are_refused() -> None:
    with pytest.raises(EngineError, match=r"its caches have capacity (C, E|E, C), which cannot become 16"):
        FixCapacity(16)(caches(TEXT.replace("float[B,2,C,4] past_v", "float[B,2,E,4] past_v")))


def test_a_graph_without_a_cache_stays() -> None:
    model = graph("agraph (float[B,C,4] hidden) => (float[B,C,4] y) { y = Neg(hidden) }")
    assert not FixCapacity(16)(model).modified
