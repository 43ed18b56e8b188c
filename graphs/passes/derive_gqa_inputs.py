"""Compute what GroupQueryAttention wants (lengths, additive masks) from the contract's inputs, inside the graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.graphs import contract
from speccompile.graphs.passes.matching import number
from speccompile.graphs.passes.rotary_into_gqa import POSITIONS

SEQLENS_K = "seqlens_k"
TOTAL_LENGTH = "total_sequence_length"


def bias_name(window: int | None) -> str:
    """Trace-time input that carries the additive mask of the layers with this window."""
    return "attention_bias" if window is None else f"attention_bias_window_{window}"


class DeriveGqaInputs(ir.passes.InPlacePass):
    """Accepts a graph with inputs seqlens_k, total_sequence_length and attention_bias[_window_W].

    They are replaced by nodes over `tree_mask` and `past_length`, which become inputs:

        total   = max(past_length) + T
        seqlens = past_length + T - 1
        visible = [all rows older than the newest M | tree_mask]            [B,T,total]
        bias    = 0 where visible (and q - k < W in windowed layers), else the lowest finite number

    The window test needs q - k, the distance in positions. For older rows it is position_ids less the slot. Among the
    newest M, what a token sees is one path, parents before children, so the distance to a row is the number of rows on
    it that come later. A row's slots behind its own length are hidden by the operator itself, through seqlens. With
    B > 1 the operator takes T = 1 only.

    Args:
        one_as_two: lets a single token of a single text pass through attention twice, its twin behind it and unseen.
            ONNX Runtime's CPU kernel sums a lone row in another order than the rows of a larger call (MLAS has a GEMM
            of its own for M = 1); its other kernels do not. With this, a token's logits are the same bit by bit
            whatever is run beside it, which graphs that round activations need: where the last bit decides between two
            integers, a difference of 1e-7 grows to whole logits on its way through thirty layers. It costs two small
            nodes a layer, and one row of the cache behind the committed ones must be free.
    """

    def __init__(self, one_as_two: bool = False) -> None:
        super().__init__()
        self.one_as_two = one_as_two

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        inputs = {value.name: value for value in graph.inputs}
        if SEQLENS_K not in inputs:
            return ir.passes.PassResult(model, False)
        ids, positions = inputs[contract.INPUT_IDS], inputs[contract.POSITION_IDS]
        assert ids.shape is not None
        batch, tokens = ids.shape[0], ids.shape[1]
        tree_mask = ir.Value(
            name=contract.TREE_MASK, shape=ir.Shape([batch, tokens, "M"]), type=ir.TensorType(ir.DataType.BOOL)
        )
        past = ir.Value(name=contract.PAST_LENGTH, shape=ir.Shape([batch]), type=ir.TensorType(ir.DataType.INT64))
        build = _Builder(graph)

        count = tokens_in = build("Shape", ids, start=1, end=2)  # [1]: T
        rows = build("Shape", ids, start=0, end=1)  # [1]: B
        mask, places = tree_mask, positions
        if self.one_as_two:
            count, mask, places = self._twin(graph, build, tokens_in, ids, tree_mask, positions)
        longest = build("ReduceMax", past, build.ints("axis_0", [0]), keepdims=1)  # [1]
        total = build("Add", longest, count)
        one = build.ints("one_row", [1])
        seqlens = build("Cast", build("Sub", build("Add", past, count), one), to=ir.DataType.INT32.value)
        scalar_total = build("Squeeze", build("Cast", total, to=ir.DataType.INT32.value), build.ints("axis_0", [0]))
        older = build("Sub", total, build("Shape", mask, start=2, end=3))  # [1]: total - M
        always = build(
            "Expand", build.constant("true", [[[True]]], np.bool_), build("Concat", rows, count, older, axis=0)
        )
        visible = build("Concat", always, mask, axis=-1)

        replaced = {SEQLENS_K: seqlens, TOTAL_LENGTH: scalar_total}
        for name, value in inputs.items():
            if name and name.startswith("attention_bias"):
                window = None if name == bias_name(None) else int(name.rsplit("_", 1)[1])
                seen = visible if window is None else self._in_window(build, visible, places, mask, older, window)
                assert value.dtype is not None
                dtype = value.dtype.numpy()
                bias = build(
                    "Where",
                    build("Unsqueeze", seen, build.ints("axis_1", [1])),
                    build.constant("seen", 0, dtype),
                    build.constant("hidden_from", np.finfo(dtype).min, dtype),
                )
                replaced[name] = bias
        for name, value in replaced.items():
            ir.convenience.replace_all_uses_with(inputs[name], value)
        kept = [value for value in graph.inputs if value.name not in replaced]
        order = {name: index for index, name in enumerate(contract.TARGET_INPUTS)}
        kept = sorted([*kept, tree_mask, past], key=lambda value: order.get(str(value.name), len(order)))
        graph.inputs.clear()
        graph.inputs.extend(kept)
        first = next(iter(graph))
        graph.insert_before(first, build.nodes)
        return ir.passes.PassResult(model, True)

    def _twin(
        self,
        graph: ir.Graph,
        build: _Builder,
        count: ir.Value,
        ids: ir.Value,
        tree_mask: ir.Value,
        positions: ir.Value,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Rows as attention gets them: their number, what they see and their positions."""
        one, zero = build.ints("one_row", [1]), build.ints("axis_0", [0])
        lone = build("Equal", build("Size", ids), one)  # [1]: B = T = 1
        extra = build("Cast", lone, to=ir.DataType.INT64.value)
        doubled = build("Add", count, extra)
        scalar_zero, scalar_one = build.constant("zero", 0, np.int64), build.constant("one", 1, np.int64)
        order = build("Range", scalar_zero, build("Squeeze", doubled, zero), scalar_one)
        order = build("Min", order, build("Sub", count, one))  # 0 .. T-1, or 0 and 0
        columns = build("Concat", zero, extra, axis=0)
        unseen, last = build.constant("false", False, np.bool_), build.ints("axis_2", [2])
        mask = build("Pad", build("Gather", tree_mask, order, axis=1), columns, unseen, last)
        placed = build("Gather", positions, order, axis=1)
        for node in list(graph):
            if node.op_type != "GroupQueryAttention":
                continue
            for slot in range(3):
                if (source := node.inputs[slot]) is not None:
                    twice = ir.node("Gather", [source, order], {"axis": 1})
                    graph.insert_before(node, twice)
                    node.replace_input_with(slot, twice.outputs[0])
            once = ir.node("Slice", [node.outputs[0], zero, count, one])
            ir.convenience.replace_all_uses_with(node.outputs[0], once.outputs[0])
            once.replace_input_with(0, node.outputs[0])
            once.outputs[0].shape, once.outputs[0].dtype = node.outputs[0].shape, node.outputs[0].dtype
            node.outputs[0].shape = None
            graph.insert_after(node, once)
            if len(node.inputs) > POSITIONS and node.inputs[POSITIONS] is positions:
                node.replace_input_with(POSITIONS, placed)
        return doubled, mask, placed

    def _in_window(
        self,
        build: _Builder,
        visible: ir.Value,
        positions: ir.Value,
        tree_mask: ir.Value,
        older: ir.Value,
        window: int,
    ) -> ir.Value:
        zero, one = build.constant("zero", 0, np.int64), build.constant("one", 1, np.int64)
        slots = build("Range", zero, build("Squeeze", older, build.ints("axis_0", [0])), one)
        to_older = build("Sub", build("Unsqueeze", positions, build.ints("axis_2", [2])), slots)
        on_path = build("Cast", tree_mask, to=ir.DataType.INT64.value)
        later = build("CumSum", on_path, build.constant("last_axis", 2, np.int64), exclusive=1, reverse=1)
        distance = build("Concat", to_older, later, axis=-1)
        return build("And", visible, build("Less", distance, build.constant(f"window_{window}", window, np.int64)))


class _Builder:
    """Collects nodes; each call makes one and returns its output."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.nodes = graph, list[ir.Node]()

    def __call__(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes)
        node.outputs[0].name = f"mask.{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def ints(self, name: str, values: list[int]) -> ir.Value:
        return number(self.graph, f"mask.{name}", values)

    def constant(self, name: str, value: object, dtype: type) -> ir.Value:
        return number(self.graph, f"mask.{name}", value, dtype)  # type: ignore[arg-type]
