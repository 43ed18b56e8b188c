"""Store each weight the way its MatMul reads it."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs.passes.matching import lazy, replace, transposed_weight, weight

PART_BYTES = 32 << 20


class FoldWeights(ir.passes.InPlacePass):
    """Accepts MatMul(x, Transpose(W)) with W [N, K] an initializer, and stores Transpose(W) in its place.

    A large one (an lm_head) becomes several products side by side. ONNX Runtime packs weights one by one while it loads
    a graph, and each is in memory twice for a moment: with an lm_head of a fifth of the model, packed last, that moment
    would decide how much memory a machine must have.

    A tied table, which a Gather reads too, is thereby stored twice. One copy would do on disk (Gemm reads either
    order), but not in memory: ONNX Runtime packs what a product reads and gives the original back, unless it is shared.
    Then all of it stays mapped beside the packed copy; a table that only a Gather reads is paged in row by row.

    Args:
        part_bytes: largest size of a part; None leaves all weights whole.
    """

    def __init__(self, part_bytes: int | None = PART_BYTES) -> None:
        super().__init__()
        self.part_bytes = part_bytes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            source, readers = transposed_weight(node.outputs[0]), [use.node for use in node.outputs[0].uses()]
            if source is None or not readers or node.outputs[0].is_graph_output():
                continue
            if any(r.op_type != "MatMul" or r.inputs[1] is not node.outputs[0] for r in readers):
                continue
            tensor = source.const_value
            assert tensor is not None
            count = -(-tensor.nbytes // (self.part_bytes or tensor.nbytes))
            bounds = np.linspace(0, tensor.shape[0], count + 1).astype(int).tolist()  # type: ignore[call-overload]
            parts = [self._part(graph, source, *span) for span in itertools.pairwise(bounds)]
            if count == 1:
                ir.convenience.replace_all_uses_with(node.outputs[0], parts[0])
            else:
                for reader in readers:
                    self._side_by_side(graph, reader, parts)
            graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified)

    def _part(self, graph: ir.Graph, source: ir.Value, first: int, last: int) -> ir.Value:
        """Rows `first` to `last` of W, transposed; made when they are written."""
        tensor = source.const_value
        assert tensor is not None and source.dtype is not None
        rows, inner = (int(size) for size in tensor.shape)  # type: ignore[call-overload]
        name = f"{source.name}.T" if last - first == rows else f"{source.name}.T.{first}"

        def make() -> npt.NDArray[np.generic]:
            return np.ascontiguousarray(tensor.numpy()[first:last].T)

        return weight(graph, name, lazy(make, source.dtype, (inner, last - first), name))

    def _side_by_side(self, graph: ir.Graph, matmul: ir.Node, parts: list[ir.Value]) -> None:
        products = [ir.node("MatMul", [matmul.inputs[0], part]) for part in parts]
        whole = ir.node("Concat", [product.outputs[0] for product in products], {"axis": -1})
        graph.insert_before(matmul, [*products, whole])
        replace(matmul.outputs[0], whole.outputs[0])
        graph.remove(matmul, safe=True)
