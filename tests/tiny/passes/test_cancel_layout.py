"""Reshapes and transposes that undo each other."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.graphs.passes import CancelLayout
from tests.tiny.passes import apply, graph, kinds, normal, only

FEEDS = [{"x": normal(2, 3, 8)}, {"x": normal(1, 5, 8)}]


def test_a_round_trip_through_heads_goes() -> None:
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,8] y)
        <int64[4] split = {0, 0, 2, 4}, float[B,T,2,4] a, float[B,2,T,4] b, float[B,T,2,4] c, float[B,T,8] d> {
            joined = Shape(x)
            a = Reshape(x, split)
            b = Transpose<perm = [0, 2, 1, 3]>(a)
            c = Transpose<perm = [0, 2, 1, 3]>(b)
            d = Reshape(c, joined)
            y = Neg(d)
        }"""
    )
    assert apply(CancelLayout(), model, FEEDS)
    assert only(model, "Neg").inputs[0] is model.graph.inputs[0]


def test_permutations_that_compose_to_the_identity_go_even_when_they_differ() -> None:
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,8] y) <float[T,8,B] a, float[B,T,8] b> {
            a = Transpose<perm = [1, 2, 0]>(x)
            b = Transpose<perm = [2, 0, 1]>(a)
            y = Neg(b)
        }"""
    )
    assert apply(CancelLayout(), model, FEEDS)
    assert list(model.graph)[-1].inputs[0] is model.graph.inputs[0]


def test_a_transpose_that_others_read_stays_for_them() -> None:
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,8] y, float[T,B,8] z) <float[T,B,8] a, float[B,T,8] b> {
            a = Transpose<perm = [1, 0, 2]>(x)
            b = Transpose<perm = [1, 0, 2]>(a)
            y = Neg(b)
            z = Neg(a)
        }"""
    )
    assert apply(CancelLayout(), model, FEEDS)
    assert kinds(model) == {"Transpose": 1, "Neg": 2}


def test_a_reshape_reads_the_source_of_a_reshape() -> None:
    model = graph(
        """agraph (float[B,T,8] x) => (float[K] y)
        <int64[2] rows = {-1, 8}, int64[1] flat = {-1}, float[N,8] a, float[K] b> {
            a = Reshape(x, rows)
            b = Reshape(a, flat)
            y = Neg(b)
        }"""
    )
    assert apply(CancelLayout(), model, FEEDS)
    reshapes = [node for node in model.graph if node.op_type == "Reshape" and node.outputs[0].uses()]
    assert len(reshapes) == 1
    assert reshapes[0].inputs[0] is model.graph.inputs[0]


@pytest.mark.parametrize(
    ("first", "second", "middle", "end"),
    [("1, 2, 0", "1, 2, 0", "T,8,B", "8,B,T"), ("0, 2, 1", "1, 0, 2", "B,8,T", "8,B,T")],
)
def test_other_permutations_stay(first: str, second: str, middle: str, end: str) -> None:
    model = graph(
        f"""agraph (float[B,T,8] x) => (float[{end}] y) <float[{middle}] a, float[{end}] b> {{
            a = Transpose<perm = [{first}]>(x)
            b = Transpose<perm = [{second}]>(a)
            y = Neg(b)
        }}"""
    )
    assert not apply(CancelLayout(), model, FEEDS)
    assert kinds(model) == {"Transpose": 2, "Neg": 1}


@pytest.mark.parametrize("shape", ["<float[B,8,T] a>", "<float[T,B,8] a>", "<float[B,T,U] a>", ""])
def test_a_reshape_to_another_or_an_unknown_shape_stays(shape: str) -> None:
    model = graph(
        f"""agraph (float[B,T,8] x, int64[3] wanted) => (float[U,V,W] y) {shape} {{
            a = Reshape(x, wanted)
            y = Neg(a)
        }}"""
    )
    wanted = {"<float[B,8,T] a>": [0, 8, -1], "<float[T,B,8] a>": [-1, 2, 8]}.get(shape, [0, -1, 8])
    assert not apply(CancelLayout(), model, [{"x": normal(2, 3, 8), "wanted": np.array(wanted)}])
    assert kinds(model) == {"Reshape": 1, "Neg": 1}


def test_a_reshape_that_copies_an_axis_keeps_the_one_it_copies_from() -> None:
    """A 0 in its shape is the size of its own input there, which its input's source does not have."""
    model = graph(
        """agraph (float[B,T,8] x) => (float[N,2,4] y)
        <int64[2] rows = {-1, 8}, int64[3] cut = {0, 2, 4}, float[N,8] a, float[N,2,4] b> {
            a = Reshape(x, rows)
            b = Reshape(a, cut)
            y = Neg(b)
        }"""
    )
    assert not apply(CancelLayout(), model, FEEDS)
    assert kinds(model) == {"Reshape": 2, "Neg": 1}


def test_a_reshape_back_to_the_source_goes_though_it_copies_axes() -> None:
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,8] y)
        <int64[4] split = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, float[B,T,2,4] a, float[B,T,8] b> {
            a = Reshape(x, split)
            b = Reshape(a, joined)
            y = Neg(b)
        }"""
    )
    assert apply(CancelLayout(), model, FEEDS)
    assert only(model, "Neg").inputs[0] is model.graph.inputs[0]


def test_a_graph_output_keeps_its_node() -> None:
    model = graph(
        """agraph (float[B,T,8] x) => (float[B,T,8] y) <float[T,B,8] a> {
            a = Transpose<perm = [1, 0, 2]>(x)
            y = Transpose<perm = [1, 0, 2]>(a)
        }"""
    )
    assert not apply(CancelLayout(), model, FEEDS)
    assert kinds(model) == {"Transpose": 2}
