"""Move large channels of an activation into the weights that read it (SmoothQuant, arXiv 2211.10438)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs.passes.matching import constant, is_weight, lazy, producer
from speccompile.graphs.passes.pack_weights import products

NORMS = {
    "RMSNormalization": (1,),
    "LayerNormalization": (1, 2),
    "SkipSimplifiedLayerNormalization": (2,),
    "SkipLayerNormalization": (2, 3),
}
"""Norms, and which of their inputs are multiplied with or added to the normed rows."""


@dataclass(frozen=True)
class Smoothable:
    """An activation whose channels can be scaled without a node more.

    Args:
        readers: the products that read it; nothing else does.
        makers: (weight, first, last): the weights that give its channels, along their last axis.
    """

    readers: list[ir.Node]
    makers: list[tuple[ir.Value, int, int]]


class Smooth(ir.passes.InPlacePass):
    """Accepts products MatMul(x, W) of an x that a norm made with a weight of its own, or that is Mul(a, y) with y what
    another product gives, or a part of it, as in a gated feed-forward layer.

    Args:
        factors: by name of x, float32 [K]: x is divided by it, and the rows of W are multiplied by it, so that in exact
            arithmetic nothing changes. Names that are not smoothable in this model are passed over.
    """

    def __init__(self, factors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        super().__init__()
        self.factors = factors

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for name, place in smoothable(model).items():
            if (factor := self.factors.get(name)) is None:
                continue
            for table, first, last in place.makers:
                whole = np.ones(int(table.shape[-1]), np.float32)  # type: ignore[index,arg-type]
                whole[first:last] = factor
                _multiply(table, np.float32(1) / whole)
            for table in {id(node.inputs[1]): node.inputs[1] for node in place.readers}.values():
                assert table is not None
                _multiply(table, factor[:, None])
            modified = True
        return ir.passes.PassResult(model, modified)


def smoothable(model: ir.Model) -> dict[str, Smoothable]:
    """The activations that `Smooth` accepts, by name."""
    readers: dict[str, list[ir.Node]] = defaultdict(list)
    for node in products(model):
        if only_reader(node.inputs[1]):
            readers[str(node.inputs[0].name)].append(node)  # type: ignore[union-attr]
    found = {}
    for name, nodes in readers.items():
        source = nodes[0].inputs[0]
        assert source is not None
        if source.is_graph_output() or len(source.uses()) != len(nodes):
            continue
        if makers := _makers(source):
            found[name] = Smoothable(nodes, makers)
    return found


def only_reader(value: ir.Value | None) -> bool:
    """Whether one node reads this value, and nothing else does."""
    return value is not None and len(value.uses()) == 1 and not value.is_graph_output()


def _makers(source: ir.Value) -> list[tuple[ir.Value, int, int]]:
    node = source.producer()
    if node is None:
        return []
    if node.op_type in NORMS and source is node.outputs[0]:
        tables = [node.inputs[place] for place in NORMS[node.op_type] if place < len(node.inputs)]
        whole = [table for table in tables if table is not None]
        if all(is_weight(table) and only_reader(table) for table in whole):
            return [(table, 0, int(table.shape[-1])) for table in whole]  # type: ignore[index,arg-type]
    if node.op_type == "Mul" and node.domain == "":
        for value in node.inputs:
            if value is not None and only_reader(value) and (maker := _linear(value)):
                return [maker]
    return []


def _linear(value: ir.Value) -> tuple[ir.Value, int, int] | None:
    """The table and its columns that give `value`, when it is a product or a part of one."""
    first, last, whole = 0, None, value
    if (split := producer(value, "Split")) is not None:
        sizes = constant(split.inputs[1]) if len(split.inputs) > 1 else None
        source = split.inputs[0]
        if sizes is None or source is None or not only_reader(source):
            return None
        edges = [0, *np.cumsum(sizes).tolist()]
        place = list(split.outputs).index(value)
        first, last, whole = edges[place], edges[place + 1], source
    product = producer(whole, "MatMul")
    table = product.inputs[1] if product is not None else None
    if table is None or not is_weight(table) or not only_reader(table) or table.dtype != ir.DataType.FLOAT:
        return None
    return table, first, int(table.shape[-1]) if last is None else last  # type: ignore[index,arg-type]


def _multiply(table: ir.Value, factor: npt.NDArray[np.float32]) -> None:
    tensor = table.const_value
    assert tensor is not None and table.dtype is not None
    shape = [int(size) for size in tensor.shape]  # type: ignore[call-overload]
    table.const_value = lazy(lambda: tensor.numpy() * factor, table.dtype, shape, str(table.name))
