"""Writing a graph and its weights; what another graph of the bundle has already stored is read from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

WORTH_SHARING = 1 << 16  # bytes


def write_graph(graph: ir.Model, folder: Path, name: str, owner: str | None = None) -> None:
    """Write NAME.onnx, and NAME.onnx.data with its weights.

    Args:
        owner: a graph of the same folder, written before; weights equal to one of its own are not written again
            (a draft model's embedding is often the target's).
    """
    path, data = folder / f"{name}.onnx", f"{name}.onnx.data"
    if owner is None:
        ir.save(graph, path, external_data=data)
        return
    stored = _large_weights(ir.load(folder / f"{owner}.onnx"))
    for value in graph.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < WORTH_SHARING:
            continue
        for other in stored:
            same_kind = other.dtype == tensor.dtype and other.shape == tensor.shape
            if same_kind and np.array_equal(other.numpy(), tensor.numpy()):
                value.const_value = ir.ExternalTensor(
                    other.location,
                    other.offset,
                    other.length,
                    other.dtype,
                    shape=other.shape,
                    name=str(value.name),
                    base_dir=folder,
                )
                break
    own = [
        value
        for value in graph.graph.initializers.values()
        if value.const_value is not None
        and value.const_value.nbytes > 256
        and not isinstance(value.const_value, ir.ExternalTensor)
    ]
    tensors = [value.const_value for value in own if value.const_value is not None]
    for value, tensor in zip(own, ir.external_data.convert_tensors_to_external(tensors, folder, data), strict=True):
        value.const_value = tensor
    ir.save(graph, path)


def _large_weights(model: ir.Model) -> list[ir.ExternalTensor]:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= WORTH_SHARING]
