"""Weights in fewer bits, made whole again in the graph by standard operators, as TensorRT reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from speccompile.graphs import contract
from speccompile.graphs.errors import TraceError
from speccompile.graphs.passes.matching import is_weight, lazy, transposed_weight, weight
from speccompile.graphs.passes.pack_weights import WORTH_PACKING, Rounding
from speccompile.graphs.rounding import FloatArray, Rounded, in_blocks

KINDS = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4, "fp8": ir.DataType.FLOAT8E4M3FN}
INT4_BLOCKS = (128, 64, 32)  # weights of a scale: the largest that divides K
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FP8_LARGEST = 448  # arXiv 2209.05433, E4M3: no infinities, so all that is larger would be NaN
MOST_LEFT = 0.1  # of the weights in floating point
HOLDERS = ("MatMul", "Gemm", "Transpose", "Gather", "GatherND", "DequantizeLinear")  # what reads weights
SHARES = tuple(share / 40 for share in range(28, 41))  # of the reach that cuts nothing off
PART = 1 << 22  # weights rounded at once

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Product:
    """A MatMul and its table: [K,N], or [N,K] that it reads through a Transpose."""

    node: ir.Node
    table: ir.Value
    turned: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """(K, N)."""
        first, last = (int(size) for size in self.table.shape)  # type: ignore[union-attr,arg-type]
        return (last, first) if self.turned else (first, last)


class WeightOnly(ir.passes.InPlacePass):
    """Accepts MatMul(x, W) and MatMul(x, Transpose(U)) with W [K,N] or U [N,K] an initializer in floating point, and
    makes the table DequantizeLinear(levels [K,N], scales) in the dtype that it had:

        int8   -127 .. 127, a scale for each output channel: scales [N]
        int4   -8 .. 7, a scale for each block of 128 weights along K (64 or 32 where K is no multiple): [K / block, N]
        fp8    E4M3, a scale for each output channel

    The tables of lm_heads, which decide between neighbouring logits, take int8 where the rest takes int4, and so does
    one whose K no block divides. There are no zero points, which TensorRT refuses. An embedding stays as it is: it is
    read row by row. Needs opset 21. What no product reads any more is left to `clean`.

    Folding constants undoes all of it, so it must come before. ONNX Runtime fuses levels and products to MatMulNBits,
    which rounds activations as well, unless session.disable_quant_qdq lets it fold.

    Args:
        kind: of `KINDS`.
        rounding: rounds a table that takes `kind`, int8 or int4, with the block that it has here and without zeros;
            called while the graph is written. Default: to the nearest levels.
        accepts: leaves the products that it says no to as they are.

    Raises:
        TraceError: when more than a tenth of the weights is in operators that it does not know; nothing is changed.
    """

    def __init__(
        self, kind: str, rounding: Rounding | None = None, *, accepts: Callable[[ir.Node], bool] = lambda _: True
    ) -> None:
        super().__init__()
        self.kind, self.rounding, self.accepts = kind, rounding, accepts
        # Levels and scales of a table are written one after the other: only the last one is kept.
        self._last: tuple[object, tuple[Array, FloatArray]] | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = products(model)
        _require_reach(model, found, self.kind)
        heads, made = lm_heads(model), dict[tuple[int, str], ir.Value]()
        for product in found:
            if not self.accepts(product.node):
                continue
            inner = product.sizes[0]
            eight = self.kind == "int4" and (product.node in heads or inner % INT4_BLOCKS[-1])
            kind = "int8" if eight else self.kind
            key = id(product.table), kind
            if key not in made:
                made[key] = self._dequantised(model.graph, product, kind)
            turn = product.node.inputs[1].producer() if product.turned else None  # type: ignore[union-attr]
            product.node.replace_input_with(1, made[key])
            if turn is not None and not turn.outputs[0].uses():
                model.graph.remove(turn, safe=True)
        return ir.passes.PassResult(model, bool(made))

    def _dequantised(self, graph: ir.Graph, product: Product, kind: str) -> ir.Value:
        """The table, from levels and scales that are made as they are written."""
        table, (inner, outer) = product.table, product.sizes
        tensor, dtype, name, key = table.const_value, table.dtype, str(table.name), object()
        assert tensor is not None and dtype is not None
        block = int4_block(inner) if kind == "int4" else inner

        def rounded() -> tuple[Array, FloatArray]:
            if self._last is None or self._last[0] is not key:
                read = tensor.numpy()
                rows = np.ascontiguousarray(read if product.turned else read.T, np.float32)
                self._last = key, self._rounded(name, rows, kind, block, dtype.numpy())
            return self._last[1]

        shape = (inner // block, outer) if kind == "int4" else (outer,)
        levels = lazy(lambda: np.ascontiguousarray(rounded()[0].T), KINDS[kind], (inner, outer), f"{name}.{kind}")
        scales = lazy(lambda: _as(dtype, rounded()[1].T.reshape(shape)), dtype, shape, f"{name}.{kind}.scale")
        node = ir.node(
            "DequantizeLinear",
            [weight(graph, f"{name}.{kind}", levels), weight(graph, f"{name}.{kind}.scale", scales)],
            {"axis": 0, "block_size": block} if kind == "int4" else {"axis": 1},
        )
        whole = node.outputs[0]
        whole.name, whole.dtype, whole.shape = f"{name}.{kind}.whole", dtype, ir.Shape((inner, outer))
        graph.insert_before(product.node, [node])
        return whole

    def _rounded(
        self, name: str, rows: FloatArray, kind: str, block: int, dtype: npt.DTypeLike
    ) -> tuple[Array, FloatArray]:
        """Levels [N,K] and scales float32 [N, K / block], for weights [N,K]."""
        if kind == "fp8":
            return nearest_fp8(rows, dtype)
        if self.rounding is not None and kind == self.kind:
            found = self.rounding(name, rows)
        else:
            found = nearest(rows, int(kind[3:]), block, dtype)
        assert found.zeros is None and found.integers.shape[-1] == block
        middle = np.uint8(1 << (found.bits - 1))
        return (found.integers - middle).view(np.int8).reshape(rows.shape), found.scales


def int4_block(inner: int) -> int:
    """Weights of a scale, along K = `inner`, which the smallest of `INT4_BLOCKS` divides."""
    return next(block for block in INT4_BLOCKS if inner % block == 0)


# ---- which products ----


def products(model: ir.Model) -> list[Product]:
    """MatMul nodes with a table large enough that rounding it pays."""
    found = []
    for node in model.graph:
        if node.op_type != "MatMul" or node.domain != "":
            continue
        turned = transposed_weight(node.inputs[1])
        table = turned or node.inputs[1]
        if table is not None and is_weight(table) and _is_large(table) and len(table.shape) == 2:  # type: ignore[arg-type]
            found.append(Product(node, table, turned is not None))
    return found


def lm_heads(model: ir.Model) -> set[ir.Node]:
    """The products behind a model's logits and log-probabilities, with no other product between."""
    ends = (contract.LOGITS, contract.TOPK_LOGPROBS)
    waiting: list[ir.Value | None] = [value for value in model.graph.outputs if value.name in ends]
    found, seen = set[ir.Node](), set[int]()
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type in ("MatMul", "Gemm"):
            found.add(node)
        else:
            waiting += node.inputs
    return found


def _require_reach(model: ir.Model, found: list[Product], kind: str) -> None:
    """Raise TraceError when much of the model would stay as it is."""
    reached = {id(product.table) for product in found}
    total = left = 0
    for value in model.graph.initializers.values():
        readers = [use.node for use in value.uses() if use.node.op_type in HOLDERS]
        if value.const_value is None or value.const_value.size < WORTH_PACKING or not readers:
            continue
        if all(_looks_up(node, value) for node in readers):
            continue
        total += value.const_value.size
        if value.dtype in FLOATS and id(value) not in reached:
            left += value.const_value.size
    if left > MOST_LEFT * total:
        raise TraceError(
            f"--precision: {left / total:.0%} of the model's weights are in operators that fewer bits do not reach "
            "(such as stacks of experts); use --precision fp16."
        )


def _looks_up(node: ir.Node, table: ir.Value) -> bool:
    """Whether this is an embedding of `table`."""
    axis = node.attributes.get("axis")
    return node.op_type == "Gather" and len(table.shape) == 2 and (axis is None or axis.as_int() == 0)  # type: ignore[arg-type]


def _is_large(table: ir.Value) -> bool:
    known = table.const_value is not None and table.shape is not None and table.dtype in FLOATS
    return known and table.const_value.size >= WORTH_PACKING  # type: ignore[union-attr]


# ---- to which levels ----


def nearest(rows: FloatArray, bits: int, block: int, dtype: npt.DTypeLike = np.float32) -> Rounded:
    """The nearest levels around zero, block by block. The largest weight of a block is the last level of int8; in int4,
    of several ranges that cut a little off, the one with the least squared error is taken.

    Args:
        rows: float32 [N,K], K a multiple of the block.
        dtype: what scales will be stored in. Levels are chosen for what that keeps of them, which matters: scales of
            many layers are subnormal in float16.
    """
    integers = np.empty((len(rows), rows.shape[1] // block, block), np.uint8)
    scales = np.empty(integers.shape[:2], np.float32)
    step = max(1, PART // rows.shape[1])
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        levels, scales[part] = _nearest(in_blocks(rows[part], block), bits, dtype)
        integers[part] = levels + (1 << (bits - 1))
    return Rounded(bits, integers, scales)


def _nearest(blocks: FloatArray, bits: int, dtype: npt.DTypeLike) -> tuple[FloatArray, FloatArray]:
    """Levels, as float32 [N, blocks, block], and scales [N, blocks]."""
    highest = (1 << (bits - 1)) - 1
    if bits == 8:
        scales = _stored(np.abs(blocks).max(-1) / highest, dtype)
        return np.rint(blocks / scales[..., None]).clip(-highest, highest), scales
    reach = np.maximum(blocks.max(-1) / highest, blocks.min(-1) / -(highest + 1))
    best, chosen, scales = blocks, np.full_like(reach, np.inf), reach
    for share in SHARES:
        tried = _stored(reach * share, dtype)
        levels = np.rint(blocks / tried[..., None]).clip(-highest - 1, highest)
        error = np.square(levels * tried[..., None] - blocks).sum(-1)
        better = error < chosen
        best = np.where(better[..., None], levels, best)
        chosen, scales = np.where(better, error, chosen), np.where(better, tried, scales)
    return best, scales


def nearest_fp8(rows: FloatArray, dtype: npt.DTypeLike = np.float32) -> tuple[Array, FloatArray]:
    """Numbers of E4M3 [N,K] and scales float32 [N,1], as `dtype` holds them, for weights [N,K]: the largest of a
    channel is the largest number."""
    scales = _stored(np.abs(rows).max(-1, keepdims=True) / FP8_LARGEST, dtype)
    numbers = (rows / scales).clip(-FP8_LARGEST, FP8_LARGEST)
    return numbers.astype(ir.DataType.FLOAT8E4M3FN.numpy()), scales


def _stored(scales: FloatArray, dtype: npt.DTypeLike) -> FloatArray:
    """What is left of scales in `dtype`; 1 where that is 0, which no weight can be divided by."""
    kept = scales.astype(dtype).astype(np.float32)
    return np.where(kept == 0, np.float32(1), kept)


def _as(dtype: ir.DataType, scales: FloatArray) -> Array:
    found: Array = np.ascontiguousarray(scales.astype(dtype.numpy()))
    return found
