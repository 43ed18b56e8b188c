"""x * sigmoid(x) in one kernel."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes.matching import only_use, replace


class FuseSilu(ir.passes.InPlacePass):
    """Accepts Mul(x, Sigmoid(x)), the sigmoid read by nothing else, and makes it com.microsoft.QuickGelu with alpha 1.

    ONNX Runtime would do so itself while it loads the graph; done here, the file already says what runs.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            if node.op_type != "Sigmoid" or node.domain != "" or node.inputs[0] is None:
                continue
            source, product = node.inputs[0], only_use(node.outputs[0])
            if product is None or product.op_type != "Mul" or source not in product.inputs:
                continue
            if source.dtype != ir.DataType.FLOAT:
                continue
            silu = ir.node("QuickGelu", [source], {"alpha": 1.0}, domain=MICROSOFT)
            graph.insert_before(product, [silu])
            replace(product.outputs[0], silu.outputs[0])
            graph.remove(product, safe=True)
            graph.remove(node, safe=True)
            modified = True
        if modified:
            graph.opset_imports.setdefault(MICROSOFT, 1)
        return ir.passes.PassResult(model, modified)
