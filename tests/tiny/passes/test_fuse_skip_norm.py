"""Residual add and norm in one kernel."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from speccompile.graphs.passes import FuseSkipNorm
from tests.tiny.passes import apply, graph, kinds, normal, only

FEEDS = [{"x": normal(2, 3, 8), "y": normal(2, 3, 8, seed=1)}, {"x": normal(1, 1, 8), "y": normal(1, 1, 8, seed=1)}]
RMS = "RMSNormalization<axis = -1, epsilon = 0.01>(s, W)"
LAYER = "LayerNormalization<axis = -1, epsilon = 0.01>(s, W, c)"
FUSED = {RMS: "SkipSimplifiedLayerNormalization", LAYER: "SkipLayerNormalization"}


def residual(norm: str, outputs: str, body: str, shape: str = "B,T,8") -> ir.Model:
    """s = x + y, n = norm(s), then `body`."""
    weights = {"W": normal(8)} | ({"c": normal(8, seed=1)} if norm is LAYER else {})
    return graph(
        f"""agraph (float[B,T,8] x, float[{shape}] y) => ({outputs}) <float[B,T,8] s, float[B,T,8] n> {{
            s = Add(x, y)
            n = {norm}
            {body}
        }}""",
        **weights,
    )


@pytest.mark.parametrize("norm", [RMS, LAYER])
def test_the_sum_alone_is_read_by_the_norm(norm: str) -> None:
    model = residual(norm, "float[B,T,8] out", "out = Neg(n)")
    assert apply(FuseSkipNorm(), model, FEEDS)
    assert kinds(model) == {FUSED[norm]: 1, "Neg": 1}
    assert only(model, FUSED[norm]).attributes["epsilon"].as_float() == pytest.approx(0.01)


@pytest.mark.parametrize("norm", [RMS, LAYER])
def test_the_next_residual_reads_the_kernels_own_sum(norm: str) -> None:
    model = residual(norm, "float[B,T,8] out", "out = Sub(s, n)")
    assert apply(FuseSkipNorm(), model, FEEDS)
    assert kinds(model) == {FUSED[norm]: 1, "Sub": 1}
    fused = only(model, FUSED[norm])
    assert list(only(model, "Sub").inputs) == [fused.outputs[3], fused.outputs[0]]


def test_a_whole_stack_of_residuals() -> None:
    model = graph(
        """agraph (float[B,T,8] x, float[B,T,8] y) => (float[B,T,8] out)
        <float[B,T,8] s, float[B,T,8] n, float[B,T,8] a, float[B,T,8] u, float[B,T,8] m, float[B,T,8] b,
         float[B,T,8] w> {
            s = Add(x, y)
            n = RMSNormalization<axis = -1, epsilon = 0.01>(s, W)
            a = Neg(n)
            u = Add(s, a)
            m = RMSNormalization<axis = -1>(u, W)
            b = Neg(m)
            w = Add(u, b)
            out = RMSNormalization<axis = -1>(w, W)
        }""",
        W=normal(8),
    )
    assert apply(FuseSkipNorm(), model, FEEDS)
    assert kinds(model) == {"SkipSimplifiedLayerNormalization": 3, "Neg": 2}


def test_the_norm_may_be_a_graph_output() -> None:
    model = residual(RMS, "float[B,T,8] n", "")
    assert apply(FuseSkipNorm(), model, FEEDS)
    assert kinds(model) == {FUSED[RMS]: 1}


def test_two_norms_of_one_sum_share_it() -> None:
    """Parallel attention and MLP, each with a norm of its own: the second reads the first one's sum."""
    model = residual(RMS, "float[B,T,8] out", "m = LayerNormalization<axis = -1>(s, W, W)\n out = Sub(n, m)")
    assert apply(FuseSkipNorm(), model, FEEDS)
    assert kinds(model) == {FUSED[RMS]: 1, "LayerNormalization": 1, "Sub": 1}


def test_a_sum_that_leaves_the_graph_stays() -> None:
    model = residual(RMS, "float[B,T,8] s, float[B,T,8] n", "")
    assert not apply(FuseSkipNorm(), model, FEEDS)
    assert kinds(model) == {"Add": 1, "RMSNormalization": 1}


@pytest.mark.parametrize("shape", ["8", "1,1,8", "B,1,8", "B,U,8"])
def test_a_sum_that_broadcasts_stays(shape: str) -> None:
    model = residual(RMS, "float[B,T,8] out", "out = Neg(n)", shape)
    sizes = {"8": (8,), "1,1,8": (1, 1, 8), "B,1,8": (2, 1, 8), "B,U,8": (2, 1, 8)}[shape]
    assert not apply(FuseSkipNorm(), model, [{"x": normal(2, 3, 8), "y": normal(*sizes)}])
    assert kinds(model) == {"Add": 1, "RMSNormalization": 1, "Neg": 1}


@pytest.mark.parametrize(
    "norm",
    [
        "LayerNormalization<axis = -1>(s, W)",  # no bias
        "LayerNormalization<axis = 1>(s, W, W)",  # over two axes
        "RMSNormalization<axis = -1>(s, r)",  # its scale is computed
        "RMSNormalization<axis = -1>(x, W)",  # of no sum
    ],
)
def test_other_norms_stay(norm: str) -> None:
    model = graph(
        f"""agraph (float[B,T,8] x, float[B,T,8] y, float[8] r) => (float[B,T,8] out)
        <float[B,T,8] s, float[B,T,8] n> {{
            s = Add(x, y)
            n = {norm}
            out = Sub(s, n)
        }}""",
        W=normal(8),
    )
    before = kinds(model)
    assert not apply(FuseSkipNorm(), model, [{**feed, "r": normal(8)} for feed in FEEDS])
    assert kinds(model) == before
