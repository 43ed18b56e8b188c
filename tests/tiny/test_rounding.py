"""Rounded tables, against integers and float64 put together one by one."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.graphs.rounding import Rounded, in_blocks, nearest_int8
from tests.tiny.passes import normal


def table(bits: int, outer: int, blocks: int, block: int, zeros: bool = True) -> Rounded:
    rng = np.random.default_rng([bits, outer, blocks, block])
    return Rounded(
        bits,
        rng.integers(0, 1 << bits, (outer, blocks, block)).astype(np.uint8),
        rng.uniform(0.1, 2, (outer, blocks)).astype(np.float32),
        rng.integers(0, 1 << bits, (outer, blocks)).astype(np.uint8) if zeros else None,
    )


def test_four_bits_lie_two_in_a_byte_the_first_in_the_low_half() -> None:
    """The layout of MatMulNBits in onnxruntime's docs/ContribOperators.md."""
    rounded = Rounded(4, np.array([[[1, 2, 15, 0]]], np.uint8), np.ones((1, 1), np.float32))
    assert rounded.packed.tolist() == [[[0x21, 0x0F]]]
    assert rounded.packed_zeros is None


@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
def test_packed_numbers_can_be_read_back(blocks: int) -> None:
    rounded = table(4, 5, blocks, 32)
    assert (rounded.packed.shape, rounded.packed.dtype) == ((5, blocks, 16), np.uint8)
    for channel, place, position in np.ndindex(rounded.integers.shape):
        byte = int(rounded.packed[channel, place, position // 2])
        assert (byte >> 4 * (position % 2)) & 15 == rounded.integers[channel, place, position]
    zeros = rounded.packed_zeros
    assert zeros is not None and rounded.zeros is not None
    assert (zeros.shape, zeros.dtype) == ((5, (blocks + 1) // 2), np.uint8)
    for channel, place in np.ndindex(rounded.zeros.shape):
        assert (int(zeros[channel, place // 2]) >> 4 * (place % 2)) & 15 == rounded.zeros[channel, place]
    if blocks % 2:
        assert not (zeros[:, -1] >> 4).any()  # nothing behind the last


def test_eight_bits_are_packed_as_they_are() -> None:
    rounded = table(8, 4, 3, 16)
    assert rounded.packed is rounded.integers
    assert rounded.packed_zeros is rounded.zeros


@pytest.mark.parametrize(("bits", "middle"), [(4, 8), (8, 128)])
@pytest.mark.parametrize("zeros", [True, False])
def test_weights_are_steps_from_zero(bits: int, middle: int, zeros: bool) -> None:
    rounded, inner = table(bits, 3, 3, 16, zeros), 41  # the last block is cut short
    weights = rounded.weights(inner)
    assert (weights.shape, weights.dtype) == ((3, inner), np.float32)
    for channel, place in np.ndindex(weights.shape):
        at = channel, place // 16
        zero = middle if rounded.zeros is None else int(rounded.zeros[at])
        wanted = (int(rounded.integers[(*at, place % 16)]) - zero) * float(rounded.scales[at])
        assert weights[channel, place] == pytest.approx(wanted, rel=1e-6)


def test_blocks_are_filled_up_with_zeros() -> None:
    rows = normal(3, 41)
    blocks = in_blocks(rows, 16)
    assert (blocks.shape, blocks.dtype) == ((3, 3, 16), np.float32)
    np.testing.assert_array_equal(blocks.reshape(3, -1)[:, :41], rows)
    assert not blocks.reshape(3, -1)[:, 41:].any()
    np.testing.assert_array_equal(in_blocks(rows[:, :32], 16).reshape(3, -1), rows[:, :32])


@pytest.mark.parametrize("inner", [64, 41, 7])
def test_int8_is_the_nearest_of_its_levels(inner: int) -> None:
    """Every level of every block is tried, in float64."""
    rows = normal(6, inner) * np.geomspace(1e-3, 1e3, 6, dtype=np.float32)[:, None]
    rounded = nearest_int8(rows, 16)
    found = rounded.weights(inner)
    levels = np.arange(-127, 128)
    for channel, place in np.ndindex(rows.shape):
        first = place // 16 * 16
        step = float(np.abs(rows[channel, first : first + 16]).max()) / 127
        least = np.abs(levels * step - float(rows[channel, place])).min()
        assert abs(found[channel, place] - float(rows[channel, place])) <= least + 1e-4 * step
    assert rounded.bits == 8 and rounded.zeros is None
    assert rounded.integers.min() >= 1  # 255 levels: as many below zero as above


def test_int8_of_a_table_that_was_rounded_before_is_that_table() -> None:
    """One scale per channel, as int8 checkpoints have; the largest of a block may then be any number of steps."""
    rng = np.random.default_rng(0)
    integers = rng.integers(-127, 128, (5, 48))
    integers[:, 16:32] //= 9  # a quiet block
    integers[:, 3] = -127
    scales = rng.uniform(1e-3, 1, 5)
    rounded = nearest_int8((integers * scales[:, None]).astype(np.float32), 16)
    np.testing.assert_array_equal(rounded.integers.reshape(5, -1) - 128.0, integers)
    np.testing.assert_allclose(rounded.scales, np.repeat(scales[:, None], 3, 1), rtol=1e-6)


def test_int8_of_zeros() -> None:
    rows = normal(2, 48)
    rows[0, 16:32] = 0
    rows[1] = 0
    rounded = nearest_int8(rows, 16)
    assert np.isfinite(rounded.scales).all() and (rounded.scales > 0).all()
    found = rounded.weights(48)
    assert not found[0, 16:32].any() and not found[1].any()
    assert np.abs(found[0] - rows[0]).max() <= np.abs(rows[0]).max() / 127
