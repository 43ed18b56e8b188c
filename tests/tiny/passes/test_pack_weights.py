"""Weights in few bits: what is representable stays exact, rows do not depend on each other, the rest stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.graphs.passes import PackWeights
from speccompile.graphs.passes.pack_weights import BLOCK
from speccompile.graphs.rounding import Rounded, in_blocks
from speccompile.runtime.backends.ort import open_session
from tests.tiny.passes import Array, Feed, graph, kinds, normal, only, run

ZERO = 128
INNER, OUTER = 200, 96  # not a multiple of the block, and enough weights to be worth it
BODY = f"""agraph (float[B,T,{INNER}] x) => (float[B,T,{OUTER}] y) {{
    y = MatMul(x, W)
}}"""


def stored(weights: Array) -> tuple[Array, Array]:
    """Integers [N,K] and scales [N,blocks] that the pass stores for weights [K,N]."""
    model = graph(BODY, W=weights)
    assert PackWeights()(model).modified
    node = only(model, "MatMulNBits")
    integers, scales = (value.const_value.numpy() for value in node.inputs[1:3])  # type: ignore[union-attr]
    assert (integers.shape, integers.dtype) == ((OUTER, -(-INNER // BLOCK), BLOCK), np.uint8)
    flat = integers.reshape(OUTER, -1).astype(np.int64) - ZERO
    assert not flat[:, INNER:].any()  # padding counts for nothing
    return flat[:, :INNER], scales


def as_loaded(model: ir.Model, folder: Path, *feeds: Feed) -> list[Array]:
    """The first output for each of `feeds`, from a session such as the runtime opens."""
    ir.save(model, folder / "graph.onnx")
    session = open_session(folder / "graph.onnx", threads=2)
    return [session.run(None, dict(feed))[0] for feed in feeds]


# ---- eight bits, as drafting graphs have them ----


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
    PackWeights()(model)
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


# ---- any bits, blocks and zeros ----

SHAPES = {
    "whole blocks": (192, 96),
    "an odd number of blocks": (224, 80),
    "a last block cut short": (200, 96),
    "an odd number, cut short": (213, 97),
    "one block cut short": (23, 800),
}
FORMS = {
    "4 bits with zeros": (4, 32, True),
    "4 bits": (4, 32, False),
    "4 bits in larger blocks": (4, 64, True),
    "8 bits": (8, 64, False),
    "8 bits in small blocks": (8, 32, False),
    "8 bits with zeros": (8, 32, True),
}


def random_table(inner: int, outer: int, bits: int, block: int, zeros: bool) -> Rounded:
    """Any integers, scales and zeros; the integers behind the last weight too."""
    rng = np.random.default_rng([inner, outer, bits, block])
    blocks, levels = -(-inner // block), 1 << bits
    return Rounded(
        bits,
        rng.integers(0, levels, (outer, blocks, block)).astype(np.uint8),
        rng.uniform(0.5, 2, (outer, blocks)).astype(np.float32) / levels,
        rng.integers(0, levels, (outer, blocks)).astype(np.uint8) if zeros else None,
    )


def packed(table: Rounded, inner: int, block: int) -> ir.Model:
    """The product with this table, whatever the weights were."""
    outer = len(table.scales)
    model = graph(
        f"agraph (float[B,T,{inner}] x) => (float[B,T,{outer}] y) {{ y = MatMul(x, W) }}", W=normal(inner, outer)
    )
    asked: list[tuple[str, tuple[int, ...]]] = []

    def rounding(weights: str, rows: Array) -> Rounded:
        asked.append((weights, rows.shape))
        return table

    assert PackWeights(rounding, bits=table.bits, block=block, zeros=table.zeros is not None)(model).modified
    assert asked == []  # nothing is rounded before it is written
    run(model, {"x": normal(1, 1, inner)})
    assert set(asked) == {("W", (outer, inner))}
    return model


def exact_weights(table: Rounded, inner: int) -> Array:
    """float64 [N,K], weight by weight."""
    outer, _, block = table.integers.shape
    weights = np.zeros((outer, inner))
    for channel, place in np.ndindex(outer, inner):
        at = channel, place // block
        zero = 2 ** (table.bits - 1) if table.zeros is None else int(table.zeros[at])
        weights[channel, place] = (int(table.integers[(*at, place % block)]) - zero) * float(table.scales[at])
    return weights


@pytest.mark.parametrize(("inner", "outer"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("bits", "block", "zeros"), FORMS.values(), ids=FORMS)
def test_products_are_those_of_the_rounded_weights(
    inner: int, outer: int, bits: int, block: int, zeros: bool, tmp_path: Path
) -> None:
    """Against float64: exact for activations that eight bits hold, and off by no more than half a step for others."""
    table = random_table(inner, outer, bits, block, zeros)
    model, weights = packed(table, inner, block), exact_weights(table, inner)
    rng = np.random.default_rng(0)
    whole = rng.integers(-127, 128, (1, 5, inner)).astype(np.float32)
    whole[..., ::block] = 127  # the largest of each block: its step is 1
    other = normal(1, 5, inner)
    for found in (run(model, {"x": whole})[0], *as_loaded(model, tmp_path, {"x": whole}, {"x": whole[:, :1]})):
        wanted = (whole.astype(np.float64) @ weights.T)[:, : found.shape[1]]
        np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(whole).max() * np.abs(weights).sum(1).max())
    steps = np.abs(in_blocks(other[0], block)).max(-1) / 127
    moved = np.repeat(steps, block, 1)[:, :inner] * 0.502
    found, wanted = run(model, {"x": other})[0][0], other[0].astype(np.float64) @ weights.T
    assert (np.abs(found - wanted) <= moved @ np.abs(weights.T) + 1e-4).all()
    # Errors of evenly spread halves of a step add up like random ones; seven bits would give twice as much.
    likely = np.sqrt((np.repeat(steps, block, 1)[:, :inner] ** 2 / 12) @ weights.T**2)
    assert 0.6 < np.sqrt((((found - wanted) / likely) ** 2).mean()) < 1.4


@pytest.mark.parametrize(("inner", "outer"), [(192, 96), (213, 97), (576, 200)])
@pytest.mark.parametrize("form", ["4 bits with zeros", "8 bits in small blocks", "8 bits"])
def test_a_row_is_the_same_alone_and_beside_others(inner: int, outer: int, form: str, tmp_path: Path) -> None:
    """Bit by bit, in the forms that targets have. (With 4 bits in blocks of 64, ONNX Runtime 1.31 adds up the blocks of
    a lone row in another order.)"""
    table = random_table(inner, outer, *FORMS[form])
    model = packed(table, inner, FORMS[form][1])
    x, loud = normal(1, 9, inner), normal(1, 9, inner, seed=1) * 1000
    rows = range(9)
    beside = [np.where(np.arange(9)[:, None] == row, x, loud) for row in rows]
    feeds = [*(x[:, row : row + 1] for row in rows), *(x[:, :count] for count in range(2, 10)), *beside]
    results = as_loaded(model, tmp_path, *({"x": rows} for rows in feeds))
    alone = np.concatenate(results[:9], 1)
    for together in results[9:17]:
        np.testing.assert_array_equal(together, alone[:, : together.shape[1]])
    for row, mixed in enumerate(results[17:]):
        np.testing.assert_array_equal(mixed[:, row], alone[:, row])


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
    assert not PackWeights()(model).modified
    assert kinds(model) == before
