"""One MatMul in place of several that read the same activation: Q, K and V, or gate and up."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs.passes.matching import is_weight, lazy, number, only_use, replace, transposed_weight, weight


@dataclass
class _Linear:
    """x @ transpose(weight) (+ bias): `out` is the last node, `weight` is [N, K] as torch keeps it."""

    matmul: ir.Node
    weight: ir.Value
    bias: ir.Value | None
    out: ir.Node


class FuseParallelMatMuls(ir.passes.InPlacePass):
    """Accepts MatMul(x, Transpose(W)) with W [N, K] an initializer, optionally followed by Add(bias [N]).

    All such nodes with the same x, dtype and presence of a bias become one MatMul with the weights stacked, one
    Add and one Split. MatMuls whose W has another reader (a tied lm_head) are left alone.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, groups = model.graph, defaultdict(list)
        for node in graph:
            if linear := _match(node):
                groups[(id(node.inputs[0]), linear.weight.dtype, linear.bias is None)].append(linear)
        fused = [group for group in groups.values() if len(group) > 1]
        for group in fused:
            self._fuse(graph, group)
        return ir.passes.PassResult(model, bool(fused))

    def _fuse(self, graph: ir.Graph, group: list[_Linear]) -> None:
        first = group[0]
        sizes = [int(linear.weight.shape[0]) for linear in group]  # type: ignore[index,arg-type]
        stacked = _stack(graph, [linear.weight for linear in group])
        transpose = ir.node("Transpose", [stacked], {"perm": [1, 0]})
        matmul = ir.node("MatMul", [first.matmul.inputs[0], transpose.outputs[0]])
        nodes, result = [transpose, matmul], matmul.outputs[0]
        if first.bias is not None:
            add = ir.node("Add", [result, _stack(graph, [linear.bias for linear in group if linear.bias is not None])])
            nodes, result = [*nodes, add], add.outputs[0]
        split = ir.node(
            "Split",
            [result, number(graph, f"split_{'_'.join(map(str, sizes))}", sizes)],
            {"axis": -1},
            num_outputs=len(group),
        )
        source = first.out.outputs[0]
        if source.shape is not None:
            result.shape = ir.Shape([*source.shape[:-1], sum(sizes)])
        result.dtype = source.dtype
        graph.insert_before(first.matmul, [*nodes, split])
        for linear, part in zip(group, split.outputs, strict=True):
            replace(linear.out.outputs[0], part)
        for linear in group:
            graph.remove([linear.out] if linear.out is linear.matmul else [linear.out, linear.matmul], safe=True)


def _match(node: ir.Node) -> _Linear | None:
    if node.op_type != "MatMul":
        return None
    source = transposed_weight(node.inputs[1])
    if source is None or source.shape is None or len(source.uses()) != 1:
        return None
    after = only_use(node.outputs[0])
    if after is not None and after.op_type == "Add":
        other = after.inputs[1] if after.inputs[0] is node.outputs[0] else after.inputs[0]
        if other is not None and is_weight(other) and other.shape is not None and [*other.shape] == [source.shape[0]]:
            return _Linear(node, source, other, after)
    return None if node.outputs[0].is_graph_output() else _Linear(node, source, None, node)


def _stack(graph: ir.Graph, values: list[ir.Value]) -> ir.Value:
    tensors = [value.const_value for value in values]
    name = "+".join(str(value.name) for value in values)
    shape = [sum(int(value.shape[0]) for value in values), *map(int, list(values[0].shape)[1:])]  # type: ignore[index,arg-type,misc]

    def make() -> npt.NDArray[np.generic]:
        return np.concatenate([tensor.numpy() for tensor in tensors if tensor is not None])

    assert values[0].dtype is not None
    return weight(graph, name, lazy(make, values[0].dtype, shape, name))
