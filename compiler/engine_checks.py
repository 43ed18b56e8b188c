"""What must hold of a network that TensorRT's parser made of a graph.

The parser and the builder go on where they should stop: an input they do not know is left out, an attribute they do not
read has its default, an attention layer that gets a mask it cannot have is built without one. Each of these is an
engine that answers wrongly, and none of them an exception. `shared/reference/tensorrt.md` lists what was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from speccompile.graphs.errors import EngineError
from speccompile.graphs.passes.for_tensorrt import ATTENTION, KEY, KEY_LENGTHS, MASK, QUERY, VALUE

READ_SLOTS = (QUERY, KEY, VALUE, MASK, KEY_LENGTHS)
READ_ATTRIBUTES = ("causal_kind", "TRT_decomposable")

Network = Any
"""INetworkDefinition of `tensorrt` or `tensorrt_rtx`; neither module can be imported everywhere."""


def check_log(name: str, doing: str, errors: Sequence[str]) -> None:
    """No line of the log is an error.

    Args:
        name: of the graph.
        doing: such as "parsing it".
        errors: lines of severity ERROR and INTERNAL_ERROR.
    """
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise EngineError(f"{name}: {doing}, TensorRT said: {' '.join(errors[0].split())}{more}")


def check_nodes(name: str, graph: ir.Graph) -> None:
    """No attention node has an input or an attribute that the parser would pass over."""
    for node in graph:
        if node.op_type == "Attention":
            raise EngineError(
                f"{name}: {node.name} is an Attention that knows no lengths; run the pass ForTensorrt on the graph."
            )
        if node.op_type != ATTENTION:
            continue
        filled = [slot for slot, value in enumerate(node.inputs) if value is not None]
        for slot in filled:
            if slot not in READ_SLOTS:
                raise EngineError(
                    f"{name}: input {slot} of {node.name} ({ATTENTION}) would be ignored; lengths belong in input "
                    f"{KEY_LENGTHS}."
                )
        for attribute in node.attributes:
            if attribute not in READ_ATTRIBUTES:
                raise EngineError(
                    f"{name}: attribute '{attribute}' of {node.name} ({ATTENTION}) would be ignored; a scale belongs "
                    "into the queries, causality into the mask."
                )


def check_inputs_used(name: str, network: Network) -> None:
    """Every input feeds some layer."""
    read = {tensor.name for layer in _layers(network) for tensor in _inputs(layer)}
    for tensor in _tensors(network.num_inputs, network.get_input):
        if tensor.name not in read:
            raise EngineError(
                f"{name}: input '{tensor.name}' feeds nothing in the network; the parser has dropped what read it."
            )


def attentions(trt: Any, network: Network) -> Iterator[tuple[str, Any]]:
    """(name, IAttention) of each; a layer's own type is only known by what `type` says."""
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            yield layer.name, layer.attention


def check_attention(trt: Any, name: str, network: Network, count: int) -> None:
    """There are `count` attention layers, each with a mask and lengths, none of them causal."""
    found = list(attentions(trt, network))
    if len(found) != count:
        raise EngineError(f"{name}: {len(found)} attention layers in the network, but {count} in the graph.")
    for layer, attention in found:
        if attention.causal_kind != trt.CausalMaskKind.NONE:
            kind = str(attention.causal_kind).rpartition(".")[2]
            raise EngineError(
                f"{name}: attention layer {layer} has the causal mask {kind}; tree masks need NONE and a mask input."
            )
        if attention.mask is None:
            raise EngineError(f"{name}: attention layer {layer} has no mask, so that every token sees all others.")
        if attention.key_value_lengths is None:
            raise EngineError(
                f"{name}: attention layer {layer} has no key_value_lengths; every step would cost the whole capacity."
            )


def check_cache(trt: Any, name: str, network: Network, aliases: Mapping[str, str]) -> None:
    """Every present is the output of a layer that updates its past in place.

    Args:
        aliases: past -> present.
    """
    updates = {
        layer.get_output(0).name: layer.get_input(0).name
        for layer in _layers(network)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE
    }
    outputs = {tensor.name for tensor in _tensors(network.num_outputs, network.get_output)}
    for past, present in aliases.items():
        if present not in outputs:
            raise EngineError(f"{name}: output '{present}' is missing in the network.")
        if updates.get(present) != past:
            raise EngineError(
                f"{name}: output '{present}' is not made by a cache update of '{past}', so that they cannot share a "
                "buffer; TensorScatter must write the graph's output itself."
            )


def check_contract(name: str, network: Network, graph: ir.Graph) -> None:
    """Inputs and outputs are the graph's: the same names, dtypes, ranks and static sizes."""
    for kind, values, tensors in (
        ("input", graph.inputs, _tensors(network.num_inputs, network.get_input)),
        ("output", graph.outputs, _tensors(network.num_outputs, network.get_output)),
    ):
        ours = {str(value.name): value for value in values}
        theirs = {tensor.name: tensor for tensor in tensors}
        if set(ours) != set(theirs):
            odd = sorted(set(ours) ^ set(theirs))
            raise EngineError(f"{name}: {kind} '{odd[0]}' is not in both the graph and the network.")
        for key, value in ours.items():
            assert value.dtype is not None and value.shape is not None
            wanted = dtype_name(value.dtype.name), [size if isinstance(size, int) else -1 for size in value.shape]
            found = dtype_name(theirs[key].dtype), list(theirs[key].shape)
            if wanted != found:
                raise EngineError(
                    f"{name}: {kind} '{key}' is {found[0]} {found[1]} in the network but {wanted[0]} {wanted[1]} in "
                    "the graph."
                )


def dtype_name(dtype: Any) -> str:
    """The sidecar's name of a `trt.DataType`, or of ONNX's."""
    name = str(dtype).rpartition(".")[2].lower()
    return {"float": "float32", "half": "float16", "bf16": "bfloat16"}.get(name, name)


def _layers(network: Network) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))


def _inputs(layer: Any) -> Iterator[Any]:
    return (tensor for tensor in _tensors(layer.num_inputs, layer.get_input) if tensor is not None)


def _tensors(count: int, get: Any) -> Iterator[Any]:
    return (get(index) for index in range(count))
