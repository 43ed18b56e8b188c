"""Weights of a drafting graph in one byte each: guesses may be a little off, the target decides anyway."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes.matching import is_weight, lazy, replace, weight

BLOCK = 64
ZERO = 128  # what MatMulNBits takes for zero when no zero point is given
LARGEST = 127
INT8_ACCURACY = 4  # MatMulNBits: the activations of each row are rounded to int8 as well, block by block
WORTH_PACKING = 1 << 14  # weights
ROUNDED = 1e-3  # steps: a table this near to whole ones has been rounded before


class PackInt8(ir.passes.InPlacePass):
    """Accepts MatMul(x, W) with W float32 [K,N] an initializer, and makes it com.microsoft.MatMulNBits with 8 bits.

    Symmetric, with a scale for each block of 64 weights of an output channel: a few large weights (an EAGLE head's `fc`
    may hold an identity) cost their own block its precision and no other. A checkpoint that was rounded to int8 with
    one scale per channel keeps its numbers exactly: there, all blocks of a channel have that scale.

    A row's result depends on that row alone. On two cores of a CPU with VNNI one row took a fifth of the time of the
    float32 product, four rows a quarter (K = 576, N = 1536).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            table = node.inputs[1] if node.op_type == "MatMul" and node.domain == "" else None
            if table is None or not is_weight(table) or table.dtype != ir.DataType.FLOAT or table.shape is None:
                continue
            if len(table.shape) != 2 or table.const_value is None or table.const_value.size < WORTH_PACKING:
                continue
            self._pack(graph, node, table)
            modified = True
        return ir.passes.PassResult(model, modified)

    def _pack(self, graph: ir.Graph, node: ir.Node, table: ir.Value) -> None:
        tensor = table.const_value
        assert tensor is not None
        inner, outer = (int(size) for size in tensor.shape)  # type: ignore[call-overload]
        blocks = -(-inner // BLOCK)

        def packed() -> npt.NDArray[np.uint8]:
            table = in_blocks(tensor.numpy())
            return (np.rint(table / block_scales(table)[..., None]) + ZERO).astype(np.uint8)

        name = f"{table.name}.int8"
        integers = weight(graph, name, lazy(packed, ir.DataType.UINT8, (outer, blocks, BLOCK), name))
        name = f"{table.name}.scale"
        factors = weight(
            graph,
            name,
            lazy(lambda: block_scales(in_blocks(tensor.numpy())), ir.DataType.FLOAT, (outer, blocks), name),
        )
        attributes = {"K": inner, "N": outer, "bits": 8, "block_size": BLOCK, "accuracy_level": INT8_ACCURACY}
        product = ir.node("MatMulNBits", [node.inputs[0], integers, factors], attributes, domain=MICROSOFT)
        graph.insert_before(node, [product])
        replace(node.outputs[0], product.outputs[0])
        graph.remove(node, safe=True)
        graph.opset_imports.setdefault(MICROSOFT, 1)


def in_blocks(table: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:  # type: ignore[type-arg]
    """[K,N] -> float32 [N, blocks, BLOCK], zeros behind the last weight of a channel."""
    inner, outer = table.shape
    rows = np.zeros((outer, -(-inner // BLOCK) * BLOCK), np.float32)
    rows[:, :inner] = table.T
    return rows.reshape(outer, -1, BLOCK)


def block_scales(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 [N, blocks]: what one step of int8 is worth in each block of [N, blocks, BLOCK]."""
    largest = np.abs(rows).max(-1)
    channel = _step(largest.max(-1, keepdims=True))
    steps = rows / channel[..., None]
    if np.abs(steps - np.rint(steps)).max() < ROUNDED:
        return np.repeat(channel, rows.shape[1], 1)
    return _step(largest)


def _step(largest: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(largest == 0, np.float32(1), largest / np.float32(LARGEST))
