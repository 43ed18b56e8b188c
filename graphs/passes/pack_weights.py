"""Weights of a graph in four or eight bits each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes.matching import is_weight, lazy, replace, weight
from speccompile.graphs.rounding import Rounded, nearest_int8

BLOCK = 64
INT8_ACCURACY = 4  # MatMulNBits: the activations of each row are rounded to int8 as well, block by block
WORTH_PACKING = 1 << 14  # weights

Rounding = Callable[[str, npt.NDArray[np.float32]], Rounded]
"""(name of the weights, weights float32 [N,K]) -> what stands for them."""


def to_int8(_name: str, rows: npt.NDArray[np.float32]) -> Rounded:
    """Eight bits in blocks of 64, which nearly any weights bear."""
    return nearest_int8(rows, BLOCK)


class PackWeights(ir.passes.InPlacePass):
    """Accepts MatMul(x, W) with W float32 [K,N] an initializer, and makes it com.microsoft.MatMulNBits.

    A row's result depends on that row alone. On two cores of a CPU with VNNI one row took a fifth of the time of the
    float32 product with eight bits, four rows a quarter (K = 576, N = 1536).

    Args:
        bits, block, zeros: what `rounding` gives: bits per weight, weights per scale, and whether blocks have a zero.
        rounding: rounds one table; called while the graph is written.
        accepts: leaves the products that it says no to as they are.
    """

    def __init__(
        self,
        rounding: Rounding = to_int8,
        *,
        bits: int = 8,
        block: int = BLOCK,
        zeros: bool = False,
        accepts: Callable[[ir.Node], bool] = lambda _: True,
    ) -> None:
        super().__init__()
        self.rounding, self.bits, self.block, self.zeros, self.accepts = rounding, bits, block, zeros, accepts
        # A table's integers, scales and zeros are written one after the other: only the last one is kept.
        self._last: tuple[ir.Node, Rounded] | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in products(model) if self.accepts(node)]
        for node in found:
            self._pack(model.graph, node)
        if found:
            model.graph.opset_imports.setdefault(MICROSOFT, 1)
        return ir.passes.PassResult(model, bool(found))

    def _pack(self, graph: ir.Graph, node: ir.Node) -> None:
        source, table = node.inputs
        assert source is not None and table is not None and table.const_value is not None
        tensor = table.const_value
        inner, outer = (int(size) for size in tensor.shape)  # type: ignore[call-overload]
        name = str(table.name)

        def rounded() -> Rounded:
            if self._last is None or self._last[0] is not node:
                self._last = node, self.rounding(name, np.ascontiguousarray(tensor.numpy().T))
            return self._last[1]

        product = matmul_nbits(graph, source, name, rounded, (outer, inner), self.bits, self.block, self.zeros)
        graph.insert_before(node, [product])
        replace(node.outputs[0], product.outputs[0])
        graph.remove(node, safe=True)


def products(model: ir.Model) -> list[ir.Node]:
    """MatMul nodes with a float32 table large enough that packing it pays."""
    found = []
    for node in model.graph:
        table = node.inputs[1] if node.op_type == "MatMul" and node.domain == "" else None
        if table is None or not is_weight(table) or table.dtype != ir.DataType.FLOAT or table.shape is None:
            continue
        if len(table.shape) == 2 and table.const_value is not None and table.const_value.size >= WORTH_PACKING:
            found.append(node)
    return found


def matmul_nbits(
    graph: ir.Graph,
    source: ir.Value,
    name: str,
    rounded: Callable[[], Rounded],
    shape: tuple[int, int],
    bits: int,
    block: int,
    zeros: bool,
) -> ir.Node:
    """The product of `source` and a rounded table [N,K], whose tensors become initializers called after `name`."""
    outer, inner = shape
    blocks = -(-inner // block)
    sizes = {f"int{bits}": (outer, blocks, block * bits // 8), "scale": (outer, blocks)}
    made: dict[str, Callable[[], npt.NDArray[np.generic]]] = {
        f"int{bits}": lambda: rounded().packed,
        "scale": lambda: rounded().scales,
    }
    if zeros:
        sizes["zero"] = (outer, blocks if bits == 8 else -(-blocks // 2))
        made["zero"] = partial(_zeros, rounded)
    inputs = [source]
    for part, size in sizes.items():
        dtype = ir.DataType.FLOAT if part == "scale" else ir.DataType.UINT8
        inputs.append(weight(graph, f"{name}.{part}", lazy(made[part], dtype, size, f"{name}.{part}")))
    attributes = {"K": inner, "N": outer, "bits": bits, "block_size": block, "accuracy_level": INT8_ACCURACY}
    return ir.node("MatMulNBits", inputs, attributes, domain=MICROSOFT)


def _zeros(rounded: Callable[[], Rounded]) -> npt.NDArray[np.uint8]:
    zeros = rounded().packed_zeros
    assert zeros is not None
    return zeros
