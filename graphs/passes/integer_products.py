"""Products of integers: each row of the activation rounded with a scale of its own, each channel of the weights too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes.matching import lazy, number, replace, weight
from speccompile.graphs.passes.pack_weights import products
from speccompile.graphs.rounding import int8_step

LARGEST = 127
ZERO = 128


class IntegerProducts(ir.passes.InPlacePass):
    """Accepts MatMul(x, W) with W float32 [K,N] an initializer. The nodes of its place, shared between products of the
    same x up to `q`:

        largest = ReduceMax(Abs(x), -1)                          [B,T,1]
        q       = QuantizeLinear(x / largest, 1/127, 128)        uint8 [B,T,K]
        y       = MatMulIntegerToFloat(q, W8, 1/127, scales, 128) * largest

    with W8 int8 [K,N], scales float32 [N]. The sums are of whole numbers and therefore exact: a row's result depends
    on that row alone, bit by bit, whatever kernel a CPU has. (u8 x s8 instructions of CPUs without VNNI saturate;
    ONNX Runtime avoids them under session.x64quantprecision, which the runtime sets.) DynamicQuantizeMatMul would be
    one node, but has one scale for all rows.

    A row of zeros divides by zero; what comes of it is multiplied by zero in the end.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, rounded = model.graph, dict[int, tuple[ir.Value, ir.Value]]()
        found = products(model)
        for node in found:
            source = node.inputs[0]
            assert source is not None
            if id(source) not in rounded:
                rounded[id(source)] = self._round(graph, node, source)
            self._multiply(graph, node, *rounded[id(source)])
        if found:
            graph.opset_imports.setdefault(MICROSOFT, 1)
        return ir.passes.PassResult(model, bool(found))

    def _round(self, graph: ir.Graph, before: ir.Node, source: ir.Value) -> tuple[ir.Value, ir.Value]:
        """uint8 and float32 [B,T,1]: x rounded, and the largest of each row."""
        size = ir.node("Abs", [source])
        largest = ir.node("ReduceMax", [size.outputs[0], number(graph, "last_axis", [-1])], {"keepdims": 1})
        share = ir.node("Div", [source, largest.outputs[0]])
        step, zero = number(graph, "step", 1 / LARGEST, np.float32), number(graph, "middle", ZERO, np.uint8)
        integers = ir.node("QuantizeLinear", [share.outputs[0], step, zero])
        graph.insert_before(before, [size, largest, share, integers])
        return integers.outputs[0], largest.outputs[0]

    def _multiply(self, graph: ir.Graph, node: ir.Node, integers: ir.Value, largest: ir.Value) -> None:
        table = node.inputs[1]
        assert table is not None and table.const_value is not None
        tensor, name = table.const_value, str(table.name)
        inner, outer = (int(size) for size in tensor.shape)  # type: ignore[call-overload]
        rows = lazy(lambda: _rounded(tensor.numpy()), ir.DataType.INT8, (inner, outer), f"{name}.int8")
        scales = lazy(lambda: channel_scales(tensor.numpy()), ir.DataType.FLOAT, (outer,), f"{name}.scale")
        product = ir.node(
            "MatMulIntegerToFloat",
            [
                integers,
                weight(graph, f"{name}.int8", rows),
                number(graph, "step", 1 / LARGEST, np.float32),
                weight(graph, f"{name}.scale", scales),
                number(graph, "middle", ZERO, np.uint8),
            ],
            domain=MICROSOFT,
        )
        whole = ir.node("Mul", [product.outputs[0], largest])
        graph.insert_before(node, [product, whole])
        replace(node.outputs[0], whole.outputs[0])
        graph.remove(node, safe=True)


def channel_scales(table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 [N]: what one step of int8 is worth in each column of [K,N]."""
    return int8_step(np.abs(table).max(0))


def _rounded(table: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    return np.rint(table / channel_scales(table)).astype(np.int8)
