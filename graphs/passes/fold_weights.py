"""Store each weight the way its MatMul reads it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs.passes.matching import lazy, transposed_weight, weight


class FoldWeights(ir.passes.InPlacePass):
    """Accepts MatMul(x, Transpose(W)) with W [N, K] an initializer, and stores Transpose(W) in its place.

    A tied table, which a Gather reads too, is thereby stored twice. One copy would do on disk (Gemm reads either
    order), but not in memory: ONNX Runtime packs what a product reads and gives the original back, unless it is shared.
    Then all of it stays mapped beside the packed copy; a table that only a Gather reads is paged in row by row.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            source, readers = transposed_weight(node.outputs[0]), [use.node for use in node.outputs[0].uses()]
            if source is None or not readers or node.outputs[0].is_graph_output():
                continue
            if any(r.op_type != "MatMul" or r.inputs[1] is not node.outputs[0] for r in readers):
                continue
            self._transpose(graph, node, source)
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
