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


class PackInt8(ir.passes.InPlacePass):
    """Accepts MatMul(x, W) with W float32 [K,N] an initializer, and makes it com.microsoft.MatMulNBits with 8 bits.

    Symmetric, one scale per output channel: a checkpoint that was rounded to int8 that way keeps its numbers exactly.
    The operator wants a scale per block of 64 weights; those of a channel are all the same.

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

        def scales() -> npt.NDArray[np.float32]:
            return channel_scales(tensor.numpy())

        def packed() -> npt.NDArray[np.uint8]:
            rows = np.full((outer, blocks * BLOCK), ZERO, np.uint8)
            rows[:, :inner] = (np.rint(tensor.numpy() / scales()) + ZERO).T
            return rows.reshape(outer, blocks, BLOCK)

        name = f"{table.name}.int8"
        integers = weight(graph, name, lazy(packed, ir.DataType.UINT8, (outer, blocks, BLOCK), name))
        name = f"{table.name}.scale"
        factors = weight(
            graph,
            name,
            lazy(lambda: np.repeat(scales()[:, None], blocks, 1), ir.DataType.FLOAT, (outer, blocks), name),
        )
        attributes = {"K": inner, "N": outer, "bits": 8, "block_size": BLOCK, "accuracy_level": INT8_ACCURACY}
        product = ir.node("MatMulNBits", [node.inputs[0], integers, factors], attributes, domain=MICROSOFT)
        graph.insert_before(node, [product])
        replace(node.outputs[0], product.outputs[0])
        graph.remove(node, safe=True)
        graph.opset_imports.setdefault(MICROSOFT, 1)


def channel_scales(table: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:  # type: ignore[type-arg]
    """float32 [N]: what one step of int8 is worth in each column of [K,N]."""
    scales = np.abs(table).max(0).astype(np.float32) / np.float32(LARGEST)
    return np.where(scales == 0, np.float32(1), scales)
