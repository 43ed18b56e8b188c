"""The embedding and the lm_head in eight bits: a tied table is stored once and read by both."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes.matching import is_weight, lazy, producer, replace, weight
from speccompile.graphs.passes.pack_weights import matmul_nbits
from speccompile.graphs.rounding import Rounded, nearest_int8

BLOCK = 32


class PackTables(ir.passes.InPlacePass):
    """Accepts Gather(W, ids) on axis 0 with W float32 [V,F] an initializer and F a multiple of the block, and makes it
    com.microsoft.GatherBlockQuantized. MatMul(x, Transpose(U)) with U float32 [V,F], W itself or another table of its
    shape, becomes com.microsoft.MatMulNBits.

    Both operators read a channel's blocks one behind the other: for a tied table their initializers differ in shape
    only and hold the same bytes, which are written once (`compiler.write_graph`). An lm_head decides between
    neighbouring logits: rounded to four bits, SmolLM2's alone cost 6 % of perplexity, to eight none that showed.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        gathers = [node for node in graph if _is_embedding(node)]
        shapes = {_shape(node.inputs[0]) for node in gathers}
        heads = [node for node in graph if (table := _transposed(node)) is not None and _shape(table) in shapes]
        scales: dict[int, ir.Value] = {}
        for node in gathers:
            self._pack_embedding(graph, node, scales)
        for node in heads:
            self._pack_head(graph, node, scales)
        if gathers:
            graph.opset_imports.setdefault(MICROSOFT, 1)
        return ir.passes.PassResult(model, bool(gathers))

    def _pack_embedding(self, graph: ir.Graph, node: ir.Node, scales: dict[int, ir.Value]) -> None:
        table, ids = node.inputs
        assert table is not None
        rounded, (rows, width), name = _rounding(table), _shape(table), f"{table.name}.rows"
        if id(table) not in scales:
            steps = lazy(lambda: rounded().scales, ir.DataType.FLOAT, (rows, width // BLOCK), f"{table.name}.scale")
            scales[id(table)] = weight(graph, f"{table.name}.scale", steps)
        integers = lazy(lambda: rounded().integers.reshape(rows, width), ir.DataType.UINT8, (rows, width), name)
        gather = ir.node(
            "GatherBlockQuantized",
            [weight(graph, name, integers), ids, scales[id(table)]],
            {"bits": 8, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1},
            domain=MICROSOFT,
        )
        graph.insert_before(node, [gather])
        replace(node.outputs[0], gather.outputs[0])
        graph.remove(node, safe=True)

    def _pack_head(self, graph: ir.Graph, node: ir.Node, scales: dict[int, ir.Value]) -> None:
        table, source = _transposed(node), node.inputs[0]
        assert table is not None and source is not None
        rounded, shape = _rounding(table), _shape(table)
        product = matmul_nbits(graph, source, str(table.name), rounded, shape, 8, BLOCK, zeros=False)
        if id(table) in scales:
            product.replace_input_with(2, scales[id(table)])
        graph.insert_before(node, [product])
        replace(node.outputs[0], product.outputs[0])
        graph.remove(node, safe=True)


def _rounding(table: ir.Value) -> Callable[[], Rounded]:
    tensor = table.const_value
    assert tensor is not None
    return lambda: nearest_int8(tensor.numpy(), BLOCK)


def _shape(table: ir.Value | None) -> tuple[int, int]:
    assert table is not None and table.shape is not None
    rows, width = (int(size) for size in table.shape)  # type: ignore[arg-type]
    return rows, width


def _is_embedding(node: ir.Node) -> bool:
    if node.op_type != "Gather" or node.domain != "":
        return False
    table, axis = node.inputs[0], node.attributes.get("axis")
    return _is_table(table) and (axis is None or axis.as_int() == 0)


def _transposed(node: ir.Node) -> ir.Value | None:
    """U of MatMul(x, Transpose(U))."""
    turned = producer(node.inputs[1], "Transpose") if node.op_type == "MatMul" and node.domain == "" else None
    table = turned.inputs[0] if turned is not None else None
    return table if _is_table(table) else None


def _is_table(value: ir.Value | None) -> bool:
    if value is None or not is_weight(value) or value.dtype != ir.DataType.FLOAT or value.shape is None:
        return False
    return len(value.shape) == 2 and value.const_value is not None and int(value.shape[1]) % BLOCK == 0  # type: ignore[arg-type]
