"""Weights in int8: what is representable stays exact, rows do not depend on each other, the rest stays."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.graphs.passes import PackInt8
from speccompile.graphs.passes.pack_int8 import BLOCK, ZERO
from tests.tiny.passes import Array, graph, kinds, normal, only, run

INNER, OUTER = 200, 96  # not a multiple of the block, and enough weights to be worth it
BODY = f"""agraph (float[B,T,{INNER}] x) => (float[B,T,{OUTER}] y) {{
    y = MatMul(x, W)
}}"""


def stored(weights: Array) -> tuple[Array, Array]:
    """Integers [N,K] and scales [N,blocks] that the pass stores for weights [K,N]."""
    model = graph(BODY, W=weights)
    assert PackInt8()(model).modified
    node = only(model, "MatMulNBits")
    integers, scales = (value.const_value.numpy() for value in node.inputs[1:3])  # type: ignore[union-attr]
    assert (integers.shape, integers.dtype) == ((OUTER, -(-INNER // BLOCK), BLOCK), np.uint8)
    flat = integers.reshape(OUTER, -1).astype(np.int64) - ZERO
    assert not flat[:, INNER:].any()  # padding counts for nothing
    return flat[:, :INNER], scales


def test_numbers_of_an_int8_checkpoint_are_kept_exactly() -> None:
    rng = np.random.default_rng(0)
    integers = rng.integers(-127, 128, (OUTER, INNER))
    integers[:, 0] = 127  # a row's largest, which its scale was made of
    scales = rng.uniform(1e-3, 1e-1, OUTER).astype(np.float32)
    found, found_scales = stored((integers * scales[:, None]).T.astype(np.float32))
    np.testing.assert_array_equal(found, integers)
    np.testing.assert_allclose(found_scales, np.repeat(scales[:, None], found_scales.shape[1], 1), rtol=1e-6)


def test_other_weights_are_rounded_to_the_nearest() -> None:
    weights = normal(INNER, OUTER)
    integers, scales = stored(weights)
    each = np.repeat(scales, BLOCK, 1)[:, :INNER]
    assert (np.abs(integers * each - weights.T) <= each * 0.501).all()
    blocks = np.pad(np.abs(integers), ((0, 0), (0, scales.shape[1] * BLOCK - INNER))).reshape(OUTER, -1, BLOCK)
    assert (blocks.max(-1) == 127).all()


def test_a_few_large_weights_cost_only_their_own_block() -> None:
    weights = normal(INNER, OUTER) * np.float32(0.001)
    weights[3] = 1.0  # one input of every channel
    integers, scales = stored(weights)
    elsewhere = integers[:, BLOCK:] * np.repeat(scales[:, 1:], BLOCK, 1)[:, : INNER - BLOCK]
    wrong = np.linalg.norm(elsewhere - weights.T[:, BLOCK:]) / np.linalg.norm(weights[BLOCK:])
    assert wrong < 0.01  # with one scale per channel nothing would be left of them


def test_products_are_near_and_each_row_is_its_own() -> None:
    weights = normal(INNER, OUTER)
    model = graph(BODY, W=weights)
    PackInt8()(model)
    x = normal(1, 6, INNER)
    (together,) = run(model, {"x": x})
    wanted = x.astype(np.float64) @ weights
    assert np.abs(together - wanted).max() < 0.02 * np.abs(wanted).max()
    assert np.abs(together - wanted).max() > 0  # it did round
    noisy = x.copy()
    noisy[:, 1:] *= 1000
    np.testing.assert_array_equal(run(model, {"x": noisy})[0][:, 0], together[:, 0])
    for row in range(6):
        alone = run(model, {"x": x[:, row : row + 1]})[0]
        np.testing.assert_allclose(alone[:, 0], together[:, row], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("y = MatMul(x, W)", (INNER, 8)),  # too small to be worth it
        ("y = MatMul(x, W)", (2, INNER, OUTER)),  # a stack, as of experts
        ("y = Add(x, W)", (INNER, INNER)),
    ],
)
def test_everything_else_stays(body: str, shape: tuple[int, ...]) -> None:
    model = graph(f"agraph (float[B,T,{INNER}] x) => (float[U,V,W] y) {{ {body} }}", W=normal(*shape))
    before = kinds(model)
    assert not PackInt8()(model).modified
    assert kinds(model) == before
