"""What the passes share: reading constants and following values in an onnx_ir graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that makes `value`, if it is this operator."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain == domain else None


def is_weight(value: ir.Value | None) -> bool:
    """Whether `value` is an initializer that no caller can replace."""
    return value is not None and value.is_initializer() and not value.is_graph_input()


def transposed_weight(value: ir.Value | None) -> ir.Value | None:
    """W, when `value` is Transpose(W) of an initializer W [N, K]."""
    node = producer(value, "Transpose")
    source = node.inputs[0] if node is not None else None
    if node is None or source is None or not is_weight(source) or source.shape is None or len(source.shape) != 2:
        return None
    order = node.attributes.get("perm")
    return source if order is None or list(order.as_ints()) == [1, 0] else None


def constant(value: ir.Value | None) -> npt.NDArray[np.generic] | None:
    """The array behind an initializer or Constant node, or None for a computed value."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def only_use(value: ir.Value) -> ir.Node | None:
    """The single node that reads `value`; None when several do, or when it is a graph output."""
    uses = value.uses()
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def weight(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Register `tensor` as an initializer called `name` (made unique)."""
    unique, number = name, 1
    while unique in graph.initializers:
        unique, number = f"{name}_{number}", number + 1
    value = ir.Value(name=unique, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)  # type: ignore[arg-type]
    graph.register_initializer(value)
    return value


def number(graph: ir.Graph, name: str, array: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> ir.Value:
    """A small constant as an initializer; the same name and contents are reused."""
    data = np.asarray(array, dtype)
    known = graph.initializers.get(name)
    if known is not None and known.const_value is not None:
        old = known.const_value.numpy()
        if old.dtype == data.dtype and old.shape == data.shape and np.array_equal(old, data):
            return known
    return weight(graph, name, ir.tensor(data, name=name))


def lazy(
    make: Callable[[], npt.NDArray[np.generic]], dtype: ir.DataType, shape: Iterable[int], name: str
) -> ir.LazyTensor:
    """A tensor computed when it is written, so that fusing does not hold a second copy of all weights."""
    return ir.LazyTensor(
        lambda: ir.tensor(make(), dtype=dtype, name=name), dtype=dtype, shape=ir.Shape(shape), name=name
    )


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether both shapes are known and equal, symbolic sizes compared by name."""
    return a.shape is not None and b.shape is not None and None not in (*a.shape,) and a.shape == b.shape


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let `new` stand for `old` everywhere, under its name, with its shape and dtype, as a graph output too."""
    new.shape, name = old.shape, old.name
    if old.dtype is not None:
        new.dtype = old.dtype
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name, new.name = f"{name}.replaced", name
