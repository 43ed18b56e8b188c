"""Remove Reshape and Transpose nodes that undo each other."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.graphs.passes.matching import constant, producer, same_shape


class CancelLayout(ir.passes.InPlacePass):
    """Three rules, to a fixed point, on graphs whose values carry (symbolic) shapes:

    1. Transpose of a Transpose whose permutations compose to the identity: use the source;
    2. Reshape of a Reshape: read the first one's source, since elements keep their order (not where a 0 in the
       second one's shape copies an axis of the first one's result);
    3. Reshape whose output shape equals its input shape: use the input.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        while self._sweep(model.graph):
            modified = True
        return ir.passes.PassResult(model, modified)

    def _sweep(self, graph: ir.Graph) -> bool:
        modified = False
        for node in list(graph):
            if node.op_type == "Transpose" and (inner := producer(node.inputs[0], "Transpose")):
                outer_order, inner_order = _order(node), _order(inner)
                if outer_order and inner_order and [inner_order[axis] for axis in outer_order] == sorted(inner_order):
                    modified |= _bypass(graph, node, inner.inputs[0])
            elif node.op_type == "Reshape" and not node.outputs[0].is_graph_output():
                inner = producer(node.inputs[0], "Reshape")
                sources = [inner.inputs[0], node.inputs[0]] if inner else [node.inputs[0]]
                same = next((s for s in sources if s is not None and same_shape(s, node.outputs[0])), None)
                if same is not None:
                    modified |= _bypass(graph, node, same)
                elif inner and not _copies_axes(node):
                    node.replace_input_with(0, inner.inputs[0])
                    modified = True
        return modified


def _copies_axes(reshape: ir.Node) -> bool:
    """Whether its shape holds a 0 that stands for the input's size on that axis."""
    shape, literal = constant(reshape.inputs[1]), reshape.attributes.get("allowzero")
    return shape is not None and not shape.all() and (literal is None or literal.as_int() == 0)


def _order(node: ir.Node) -> list[int]:
    attribute = node.attributes.get("perm")
    return list(attribute.as_ints()) if attribute else []


def _bypass(graph: ir.Graph, node: ir.Node, source: ir.Value | None) -> bool:
    if source is None or node.outputs[0].is_graph_output():
        return False
    ir.convenience.replace_all_uses_with(node.outputs[0], source)
    graph.remove(node, safe=True)
    return True
