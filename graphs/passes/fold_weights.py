"""Store each weight the way its MatMul reads it, once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs.passes.matching import lazy, number, replace, transposed_weight, weight


class FoldWeights(ir.passes.InPlacePass):
    """Accepts MatMul(x, Transpose(W)) with W [N, K] an initializer.

    1. W read by this Transpose alone: W is stored transposed.
    2. W shared (a tied embedding, read by a Gather): Gemm(transB=1) on x flattened to rows, so that the table
       is stored once and ONNX Runtime does not fold a second, transposed copy of it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            source, readers = transposed_weight(node.outputs[0]), [use.node for use in node.outputs[0].uses()]
            if source is None or not readers or node.outputs[0].is_graph_output():
                continue
            if any(r.op_type != "MatMul" or r.inputs[1] is not node.outputs[0] for r in readers):
                continue
            if len(source.uses()) == 1:
                self._transpose(graph, node, source)
            elif all(reader.inputs[0] is not None and reader.inputs[0].shape is not None for reader in readers):
                for reader in readers:
                    self._to_gemm(graph, reader, source)
                graph.remove(node, safe=True)
            else:
                continue
            modified = True
        return ir.passes.PassResult(model, modified)

    def _transpose(self, graph: ir.Graph, node: ir.Node, source: ir.Value) -> None:
        tensor, name = source.const_value, f"{source.name}.T"
        assert tensor is not None and source.dtype is not None and source.shape is not None

        def make() -> npt.NDArray[np.generic]:
            return np.ascontiguousarray(tensor.numpy().T)

        shape = [int(size) for size in reversed(list(source.shape))]  # type: ignore[call-overload]
        folded = weight(graph, name, lazy(make, source.dtype, shape, name))
        ir.convenience.replace_all_uses_with(node.outputs[0], folded)
        graph.remove(node, safe=True)

    def _to_gemm(self, graph: ir.Graph, matmul: ir.Node, table: ir.Value) -> None:
        x, out = matmul.inputs[0], matmul.outputs[0]
        assert x is not None and x.shape is not None and table.shape is not None
        rows = ir.node("Reshape", [x, number(graph, "rows_of_features", [-1, int(table.shape[1])])])  # type: ignore[arg-type]
        gemm = ir.node("Gemm", [rows.outputs[0], table], {"transB": 1})
        # Leading axes come from x itself: Shape(x)[:-1] + [N].
        shape = ir.node("Shape", [x], {"start": 0, "end": len(x.shape) - 1})
        full = ir.node("Concat", [shape.outputs[0], number(graph, "table_rows", [int(table.shape[0])])], {"axis": 0})  # type: ignore[arg-type]
        back = ir.node("Reshape", [gemm.outputs[0], full.outputs[0]])
        graph.insert_before(matmul, [rows, gemm, shape, full, back])
        replace(out, back.outputs[0])
        graph.remove(matmul, safe=True)
