"""Weights in a few bits each, block by block, as com.microsoft.MatMulNBits and GatherBlockQuantized read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

ALREADY_ROUNDED = 1e-3  # steps: a table this near to whole ones has been rounded before


@dataclass(frozen=True)
class Rounded:
    """A table of N channels, each of `blocks` blocks of weights: weight = (integer - zero) * scale.

    Args:
        integers: uint8 [N, blocks, block], below 2 ** bits.
        scales: float32 [N, blocks].
        zeros: uint8 [N, blocks]; None stands for 2 ** (bits - 1) everywhere.
    """

    bits: int
    integers: ByteArray
    scales: FloatArray
    zeros: ByteArray | None = None

    @property
    def packed(self) -> ByteArray:
        """uint8 [N, blocks, block * bits / 8]; of two 4-bit numbers in a byte the first is the low one."""
        return self.integers if self.bits == 8 else _in_pairs(self.integers)

    @property
    def packed_zeros(self) -> ByteArray | None:
        """uint8 [N, blocks] or, for 4 bits, [N, ceil(blocks / 2)]."""
        if self.zeros is None or self.bits == 8:
            return self.zeros
        return _in_pairs(np.pad(self.zeros, ((0, 0), (0, self.zeros.shape[1] % 2))))

    def weights(self, inner: int) -> FloatArray:
        """float32 [N, inner]: the numbers that the integers stand for."""
        zero = 1 << (self.bits - 1) if self.zeros is None else self.zeros[..., None]
        table = (self.integers.astype(np.float32) - np.asarray(zero, np.float32)) * self.scales[..., None]
        return table.reshape(len(table), -1)[:, :inner]


def nearest_int8(rows: FloatArray, block: int) -> Rounded:
    """The nearest of 255 levels that lie evenly around zero, with a scale for each block.

    A few large weights (an EAGLE head's `fc` may hold an identity) cost their own block its precision and no other. A
    table that was rounded with one scale per channel keeps its numbers exactly: there, all blocks of a channel have
    that scale.

    Args:
        rows: float32 [N, K].
    """
    blocks = in_blocks(rows, block)
    largest = np.abs(blocks).max(-1)
    channel = int8_step(largest.max(-1, keepdims=True))
    steps = blocks / channel[..., None]
    if np.abs(steps - np.rint(steps)).max() < ALREADY_ROUNDED:
        scales = np.repeat(channel, blocks.shape[1], 1)
    else:
        scales = int8_step(largest)
    return Rounded(8, (np.rint(blocks / scales[..., None]) + 128).astype(np.uint8), scales)


def in_blocks(rows: FloatArray, block: int) -> FloatArray:
    """[N, K] -> float32 [N, blocks, block], zeros behind the last weight of a channel."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // block) * block), np.float32)
    padded[:, : rows.shape[1]] = rows
    return padded.reshape(len(rows), -1, block)


def int8_step(largest: FloatArray) -> FloatArray:
    """What one step is worth when `largest` is 127 of them; 1 where it is 0."""
    return np.where(largest == 0, np.float32(1), largest / np.float32(127))


def _in_pairs(integers: ByteArray) -> ByteArray:
    return integers[..., 0::2] | (integers[..., 1::2] << np.uint8(4))
