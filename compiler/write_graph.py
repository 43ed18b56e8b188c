"""Writing a graph and its weights; what another graph of the bundle has already stored is read from there."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx_ir as ir

WORTH_SHARING = 1 << 16  # bytes
SMALL = 256  # bytes that stay in the graph


def write_graph(graph: ir.Model, folder: Path, name: str, owner: str | None = None) -> None:
    """Write NAME.onnx, and NAME.onnx.data with its weights.

    A tied table that two operators read in two shapes is written once.

    Args:
        owner: a graph of the same folder, written before; weights equal to one of its own are not written again
            (a draft model's embedding is often the target's).
    """
    path, data = folder / f"{name}.onnx", f"{name}.onnx.data"
    stored = _large_weights(ir.load(folder / f"{owner}.onnx")) if owner is not None else []
    for value in graph.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < WORTH_SHARING:
            continue
        for other in stored:
            same_kind = other.dtype == tensor.dtype and other.shape == tensor.shape
            if same_kind and np.array_equal(other.numpy(), tensor.numpy()):
                _refer(value, other, folder)
                break
    own = [
        value
        for value in graph.graph.initializers.values()
        if value.const_value is not None
        and value.const_value.nbytes > SMALL
        and not _is_here(value.const_value, folder)
    ]
    twins = _twins(own)
    own = [value for value in own if id(value) not in twins]
    tensors = [value.const_value for value in own if value.const_value is not None]
    written = dict(zip(map(id, own), ir.external_data.convert_tensors_to_external(tensors, folder, data), strict=True))
    for value in own:
        value.const_value = written[id(value)]
    for value, twin in twins.values():
        _refer(value, written[id(twin)], folder)
    ir.save(graph, path)


def _is_here(tensor: ir.TensorProtocol, folder: Path) -> bool:
    """Whether it reads a file of this folder; the graph may have been written to another one before."""
    return isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) == folder


def _twins(values: list[ir.Value]) -> dict[int, tuple[ir.Value, ir.Value]]:
    """By id, values with the bytes of an earlier one in another shape (a tied table in eight bits), and that one."""
    twins: dict[int, tuple[ir.Value, ir.Value]] = {}
    kinds: dict[tuple[ir.DataType, int], list[ir.Value]] = defaultdict(list)
    for value in values:
        tensor = value.const_value
        if tensor is None or tensor.nbytes < WORTH_SHARING or tensor.dtype != ir.DataType.UINT8:
            continue
        for other in kinds[tensor.dtype, tensor.nbytes]:
            known = other.const_value
            if known is None or known.shape == tensor.shape:
                continue
            if np.array_equal(known.numpy().ravel(), tensor.numpy().ravel()):
                twins[id(value)] = value, other
                break
        else:
            kinds[tensor.dtype, tensor.nbytes].append(value)
    return twins


def _refer(value: ir.Value, stored: ir.ExternalTensor, folder: Path) -> None:
    """Let `value` read the bytes of `stored`, in its own shape."""
    assert value.const_value is not None
    value.const_value = ir.ExternalTensor(
        stored.location,
        stored.offset,
        stored.length,
        stored.dtype,
        shape=value.const_value.shape,  # type: ignore[arg-type]
        name=str(value.name),
        base_dir=folder,
    )


def _large_weights(model: ir.Model) -> list[ir.ExternalTensor]:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= WORTH_SHARING]
