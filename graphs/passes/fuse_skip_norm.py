"""Residual add and norm in one kernel."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes.matching import is_weight, producer, replace, same_shape


class FuseSkipNorm(ir.passes.InPlacePass):
    """Accepts RMSNormalization or LayerNormalization (axis -1, with bias) of Add(x, y), x and y of one shape.

    Becomes com.microsoft SkipSimplifiedLayerNormalization or SkipLayerNormalization, whose fourth output is the
    sum that the next residual reads.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if node.domain == "" and node.op_type in ("RMSNormalization", "LayerNormalization"):
                modified |= self._fuse(model.graph, node)
        if modified:
            model.graph.opset_imports[MICROSOFT] = 1
        return ir.passes.PassResult(model, modified)

    def _fuse(self, graph: ir.Graph, norm: ir.Node) -> bool:
        add = producer(norm.inputs[0], "Add")
        simplified = norm.op_type == "RMSNormalization"
        if add is None or not all(map(is_weight, norm.inputs[1:])) or len(norm.inputs) != (2 if simplified else 3):
            return False
        axis = norm.attributes.get("axis")
        if axis is not None and axis.as_int() not in (-1, 2):  # of three, see below
            return False
        x, y, total, out = add.inputs[0], add.inputs[1], add.outputs[0], norm.outputs[0]
        if (
            x is None
            or y is None
            or not same_shape(x, y)
            or out.shape is None
            or len(out.shape) != 3
            or total.is_graph_output()
        ):
            return False
        epsilon = norm.attributes.get("epsilon")
        fused = ir.node(
            "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization",
            [x, y, *norm.inputs[1:]],
            {"epsilon": epsilon.as_float() if epsilon else 1e-5},
            domain=MICROSOFT,
            num_outputs=4,
        )
        normed, mean, deviation, summed = fused.outputs
        mean.name = deviation.name = ""
        # At the Add's place: every reader of the sum and of the norm stands behind it.
        graph.insert_before(add, fused)
        replace(out, normed)
        replace(total, summed)
        graph.remove([norm], safe=True)
        graph.remove([add], safe=True)
        return True
