"""Hand GroupQueryAttention its queries, keys and values as the one tensor they were computed in."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes.matching import producer


class PackQkv(ir.passes.InPlacePass):
    """Accepts GroupQueryAttention whose query, key and value are the three outputs, in order, of one Split on the
    last axis that nothing else reads. The Split goes; the operator reads its input as packed QKV.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if node.op_type != "GroupQueryAttention" or node.domain != MICROSOFT:
                continue
            split = producer(node.inputs[0], "Split")
            if split is None or list(split.outputs) != list(node.inputs[:3]):
                continue
            if any(len(part.uses()) != 1 for part in split.outputs):
                continue
            node.replace_input_with(0, split.inputs[0])
            node.replace_input_with(1, None)
            node.replace_input_with(2, None)
            model.graph.remove(split, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified)
