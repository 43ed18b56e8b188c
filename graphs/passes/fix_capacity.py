"""Give the cache of a graph one size, as TensorRT wants it."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.graphs import contract
from speccompile.graphs.errors import EngineError

SLOTS_AXIS = 2


class FixCapacity(ir.passes.InPlacePass):
    """Accepts a graph of the `scatter` dialect whose cache inputs [B,Hkv,C,D] have one symbolic size C.

    Wherever a shape says C, it then says the number. A graph without a cache (Medusa heads) stays as it is.

    Args:
        capacity: rows of the cache.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        names = contract.past_names(len(graph.inputs))
        past = [value for value in graph.inputs if value.name in names]
        sizes = {value.shape[SLOTS_AXIS] for value in past if value.shape is not None}
        if sizes <= {self.capacity}:
            return ir.passes.PassResult(model, False)
        symbol = next(iter(sizes))
        if len(sizes) > 1 or isinstance(symbol, int) or symbol.value is None:
            raise EngineError(
                f"{graph.name}: its caches have capacity {', '.join(map(str, sizes))}, which cannot become "
                f"{self.capacity}; build the bundle again."
            )
        values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
        for value in values:
            if value.shape is not None and symbol in list(value.shape):
                value.shape = ir.Shape([self.capacity if size == symbol else size for size in value.shape])
        return ir.passes.PassResult(model, True)
