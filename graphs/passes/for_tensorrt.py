"""Say what TensorRT's parser would refuse, or read as something else, in words that it takes as they are meant."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.graphs import contract
from speccompile.graphs.errors import EngineError
from speccompile.graphs.passes.matching import number, replace

DOMAIN = "trt"
"""Of the operators below. The parser goes by an operator's type alone; in ONNX's own domain they would be none."""

ATTENTION = "TRT_Attention"
QUERY, KEY, VALUE, MASK, QUERY_LENGTHS, KEY_LENGTHS = range(6)
LARGEST_FUSED_HEAD = 256
KNOWN_ATTRIBUTES = ("scale", "softcap", "is_causal")


class ForTensorrt(ir.passes.InPlacePass):
    """Accepts a graph of the `scatter` dialect with a fixed capacity. What comes out is parsed by TensorRT, never run.

    1. Attention becomes TRT_Attention, which is told how many rows of the cache are used (int32 [B], past + T), so that
       its cost follows the text's length and not the capacity. Its parser reads neither `scale` nor `is_causal`
       (shared/reference/tensorrt.md, tried with TensorRT-RTX 1.7.1): the scale goes into the queries. Where TensorRT
       has no fused kernel, in float32 and for heads larger than 256, it is allowed to take the layer apart.
    2. Attention with `softcap`, which the parser refuses, becomes plain operators: softcap * tanh(score / softcap),
       then the mask, then softmax in float32.
    3. ArgMax of a vector becomes that of a matrix with one row, for TensorRT wants a second axis.

    Raises:
        EngineError: for an Attention that the dialect does not write.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        lengths: ir.Value | None = None
        for node in list(graph):
            if node.op_type == "Attention" and node.domain == "":
                _check(node)
                if _softcap(node):
                    _capped(graph, node)
                else:
                    lengths = lengths or _used_rows(graph)
                    _length_limited(graph, node, lengths)
                    model.opset_imports[DOMAIN] = 1
                modified = True
            elif node.op_type == "ArgMax" and node.inputs[0] is not None and _rank(node.inputs[0]) == 1:
                _two_axes(graph, node)
                modified = True
        return ir.passes.PassResult(model, modified)


def _check(node: ir.Node) -> None:
    inputs = [slot for slot, value in enumerate(node.inputs) if value is not None]
    unknown = [name for name in node.attributes if name not in KNOWN_ATTRIBUTES]
    causal = node.attributes.get("is_causal")
    query = node.inputs[QUERY]
    if inputs != [QUERY, KEY, VALUE, MASK] or len(node.outputs) > 1 or unknown or (causal and causal.as_int()):
        raise EngineError(
            f"{node.name}: an Attention with inputs in slots {inputs}, {len(node.outputs)} outputs and attributes "
            f"{', '.join(node.attributes)}; the scatter dialect has inputs 0 to 3, one output and no causality."
        )
    if query is None or query.shape is None or _rank(query) != 4 or not isinstance(query.shape[3], int):
        raise EngineError(f"{node.name}: an Attention whose queries are not known to be [B,H,T,D]; trace it again.")


def _used_rows(graph: ir.Graph) -> ir.Value:
    """int32 [B]: past_length + T."""
    inputs = {value.name: value for value in graph.inputs}
    tokens = ir.node("Shape", [inputs[contract.INPUT_IDS]], {"start": 1, "end": 2})
    used = ir.node("Add", [inputs[contract.PAST_LENGTH], tokens.outputs[0]])
    cast = ir.node("Cast", [used.outputs[0]], {"to": ir.DataType.INT32.value})
    cast.outputs[0].name = "used_rows"
    graph.insert_before(next(iter(graph)), [tokens, used, cast])
    return cast.outputs[0]


def _length_limited(graph: ir.Graph, node: ir.Node, lengths: ir.Value) -> None:
    query = node.inputs[QUERY]
    assert query is not None
    scaled = _scaled(graph, node)
    attributes: dict[str, str | int] = {"causal_kind": "none"}
    if query.dtype == ir.DataType.FLOAT or _head_size(node) > LARGEST_FUSED_HEAD:
        attributes["TRT_decomposable"] = 1
    inputs = [scaled.outputs[0], node.inputs[KEY], node.inputs[VALUE], node.inputs[MASK], None, lengths]
    limited = ir.node(ATTENTION, inputs, attributes, domain=DOMAIN, name=node.name)
    _put(graph, node, [scaled, limited])


def _capped(graph: ir.Graph, node: ir.Node) -> None:
    """Query heads that share keys lie side by side: [B,Hkv,G*T,D] against [B,Hkv,C,D]; the mask wants [B,Hkv,G,T,C]."""
    query, key, value, mask = node.inputs[:4]
    assert query is not None and key is not None and value is not None and mask is not None
    assert query.shape is not None and key.shape is not None and query.dtype is not None
    heads, size, shared, capacity = query.shape[1], query.shape[3], key.shape[1], key.shape[2]
    if not (isinstance(heads, int) and isinstance(shared, int) and isinstance(capacity, int)):
        raise EngineError(f"{node.name}: an Attention whose keys are not known to be [B,Hkv,C,D]; trace it again.")
    nodes: list[ir.Node] = [_scaled(graph, node)]

    def add(op_type: str, *inputs: ir.Value, **attributes: int | list[int]) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes))
        return nodes[-1].outputs[0]

    def shaped(of: ir.Value, *shape: int) -> ir.Value:
        """In a Reshape 0 is the size that was there, -1 what is left."""
        return add("Reshape", of, number(graph, f"softcap.shape.{'.'.join(map(str, shape))}", shape))

    cap = number(graph, f"softcap.{_softcap(node)}", _softcap(node), np.float32)
    rows = shaped(nodes[0].outputs[0], 0, shared, -1, int(size))
    scores = add("MatMul", rows, add("Transpose", key, perm=[0, 1, 3, 2]))
    scores = add("Cast", scores, to=ir.DataType.FLOAT.value)
    scores = add("Mul", add("Tanh", add("Div", scores, cap)), cap)
    scores = shaped(scores, 0, shared, heads // shared, -1, capacity)
    bias = add("Unsqueeze", add("Cast", mask, to=ir.DataType.FLOAT.value), number(graph, "softcap.axis", [2]))
    weights = add("Softmax", add("Add", scores, bias), axis=-1)
    weights = add("Cast", shaped(weights, 0, shared, -1, capacity), to=query.dtype.value)
    shaped(add("MatMul", weights, value), 0, heads, -1, int(size))
    _put(graph, node, nodes)


def _two_axes(graph: ir.Graph, node: ir.Node) -> None:
    keep = node.attributes.get("keepdims")
    first = number(graph, "argmax.axis", [0])
    matrix = ir.node("Unsqueeze", [node.inputs[0], first])
    attributes = {name: attribute for name, attribute in node.attributes.items() if name != "axis"}
    largest = ir.node("ArgMax", [matrix.outputs[0]], attributes | {"axis": ir.AttrInt64("axis", 1)}, name=node.name)
    assert keep is None or keep.as_int() in (0, 1)
    squeezed = ir.node("Squeeze", [largest.outputs[0], first])
    _put(graph, node, [matrix, largest, squeezed])


def _scaled(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """The queries times the scale, in their own dtype."""
    query = node.inputs[QUERY]
    assert query is not None and query.dtype is not None
    given = node.attributes.get("scale")
    scale = given.as_float() if given is not None else _head_size(node) ** -0.5
    factor = number(graph, f"attention.scale.{scale}", scale, query.dtype.numpy())
    product = ir.node("Mul", [query, factor])
    product.outputs[0].shape, product.outputs[0].dtype = query.shape, query.dtype
    return product


def _put(graph: ir.Graph, old: ir.Node, nodes: list[ir.Node]) -> None:
    """`nodes`, the last of which makes what `old` made, in its place."""
    graph.insert_before(old, nodes)
    replace(old.outputs[0], nodes[-1].outputs[0])
    graph.remove(old, safe=True)


def _softcap(node: ir.Node) -> float:
    attribute = node.attributes.get("softcap")
    return attribute.as_float() if attribute is not None else 0.0


def _head_size(node: ir.Node) -> int:
    query = node.inputs[QUERY]
    assert query is not None and query.shape is not None
    return int(query.shape[3])  # type: ignore[arg-type]


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)
