"""A target's weights in fewer bits, chosen so that its layers' outputs change least on text of its own.

    int8   activations rounded row by row, weights channel by channel: `passes.integer_products`, smoothed; what narrows
           (a feed-forward layer's way back) in blocks
    int4   weights in blocks of 32 with a zero each: GPTQ (arXiv 2210.17323); in eight bits around attention, where four
           cost most and a quarter of the weights is

The embedding and an lm_head of its shape take eight bits in both. Whatever the precision, speculation is exact against
plain decoding of the same quantised graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import Tensor

from speccompile.compiler.calibrate import Activations
from speccompile.graphs.errors import TraceError
from speccompile.graphs.passes import (
    FoldWeights,
    IntegerProducts,
    PackTables,
    PackWeights,
    Smooth,
    WeightOnly,
    clean,
    smoothable,
    weight_only,
)
from speccompile.graphs.passes.integer_products import LARGEST, channel_scales
from speccompile.graphs.passes.matching import transposed_weight
from speccompile.graphs.passes.pack_weights import WORTH_PACKING, products
from speccompile.graphs.rounding import Rounded, in_blocks

PRECISIONS = ("fp32", "int8", "int4")
INT4_BLOCK = 32
SAMPLED_ROWS = 512  # of each activation, to choose how much to smooth
MIGRATIONS = tuple(step / 20 for step in range(6, 20))  # SmoothQuant's alpha
HESSIAN_BYTES = 1 << 30  # as many at once; more are gathered in several runs over the texts
DAMPING = 0.01  # of the mean of a Hessian's diagonal, as in the paper
MOST_LEFT = 0.1  # of the weights in float32
HOLDERS = ("MatMul", "Gemm", "Transpose", "Gather", "GatherND")  # what reads weights that rounding is for
GPTQ_COLUMNS = 128  # whose errors reach the columns behind them in one product

Array = npt.NDArray[Any]
Report = Callable[[str], None]


def quantise_target(
    graph: ir.Model, precision: str, exact: Path, texts: Sequence[Sequence[int]], report: Report
) -> None:
    """Round the weights of a finished target of dialect gqa.

    Args:
        graph: fresh from `passes.finish_gqa_target`.
        precision: "int8" or "int4".
        exact: the same graph in float32, written with its weights folded.
        texts: what it is calibrated on; without any, weights go to the nearest levels, and nothing is smoothed.

    Raises:
        TraceError: when much of the model is not in products that these passes know (stacks of experts, Gemm).
    """
    before = _unrounded(graph)
    PackTables()(graph)
    FoldWeights(part_bytes=None)(graph)
    PackWeights(accepts=for_drafting)(graph)
    if precision == "int8":
        PackWeights(accepts=narrows)(graph)
        if len(texts):
            report("smoothing activations")
            Smooth(smoothing_factors(graph, exact, texts))(graph)
        IntegerProducts()(graph)
    else:
        PackWeights(accepts=around_attention)(graph)
        if len(texts):
            rounded = gptq(folded_tables(graph), exact, texts, report)
            PackWeights(lambda name, _: rounded[name], bits=4, block=INT4_BLOCK, zeros=True)(graph)
        else:
            PackWeights(lambda _, rows: nearest_int4(rows), bits=4, block=INT4_BLOCK, zeros=True)(graph)
    clean(graph)
    if (left := _unrounded(graph)) > MOST_LEFT * before:
        raise TraceError(
            f"--precision: {left / before:.0%} of the model's weights are in operators that {precision} does not reach "
            "(such as stacks of experts); use --precision fp32."
        )


def quantise_scatter(
    graph: ir.Model, precision: str, exact: Path, texts: Sequence[Sequence[int]], report: Report
) -> None:
    """Round the weights of a finished target of dialect scatter, which are multiplied in the sixteen bits it computes
    in.

    Args:
        graph: fresh from `passes.finish_scatter`.
        precision: "int8", "int4" or "fp8".
        exact, texts: as in `quantise_target`; only int4 is calibrated.

    Raises:
        TraceError: as in `quantise_target`.
    """
    rounded: dict[str, Rounded] = {}
    if precision == "int4":
        WeightOnly("int8", accepts=around_attention)(graph)
        clean(graph)  # what no product reads any more would seem left out
        if len(texts):
            rounded = gptq(_four_bit_tables(graph), exact, texts, report, even=True)
    rounding = (lambda name, _: rounded[name]) if rounded else None
    WeightOnly(precision, rounding, accepts=lambda product: not for_drafting(product))(graph)
    clean(graph)


def folded_tables(graph: ir.Model) -> list[Table]:
    """The products of a graph of dialect gqa that are not rounded yet."""
    found = []
    for node in products(graph):
        table = node.inputs[1]
        assert table is not None and table.shape is not None
        inner, rows = int(table.shape[0]), partial(_turned, node)  # type: ignore[arg-type]
        found.append(Table(node, str(table.name), inner, rows))
    return found


def _turned(node: ir.Node) -> Array:
    return _table(node).T


def _four_bit_tables(graph: ir.Model) -> list[Table]:
    heads, found = weight_only.lm_heads(graph), list[Table]()
    for product in weight_only.products(graph):
        tensor = product.table.const_value
        if product.node in heads or for_drafting(product.node) or tensor is None:
            continue
        if (inner := product.sizes[0]) % weight_only.INT4_BLOCKS[-1]:
            continue

        def rows(tensor: ir.TensorProtocol = tensor, turned: bool = product.turned) -> Array:
            read = tensor.numpy().astype(np.float32)
            return read if turned else read.T

        found.append(Table(product.node, str(product.table.name), inner, rows))
    return found


def _unrounded(graph: ir.Model) -> int:
    """Float32 weights in tables and products."""
    return sum(
        value.const_value.size
        for value in graph.graph.initializers.values()
        if value.const_value is not None
        and value.dtype == ir.DataType.FLOAT
        and value.const_value.size >= WORTH_PACKING
        and any(use.node.op_type in HOLDERS for use in value.uses())
    )


def for_drafting(product: ir.Node) -> bool:
    """Whether this product fuses features for an EAGLE head, whose weights bear one scale per block of 64 at most."""
    table = transposed_weight(product.inputs[1]) or product.inputs[1]
    return str(table.name).startswith("tail.")  # type: ignore[union-attr]


# ---- int8 ----


def narrows(product: ir.Node) -> bool:
    """Whether this product gives fewer channels than it reads. What it reads, gates times values, has a few channels so
    large that one scale per row leaves little for the others, smoothed or not. SmolLM2-135M: with a scale per block of
    64 instead, KL against float32 falls from 0.011 to 0.006 nats a token."""
    inner, outer = product.inputs[1].shape  # type: ignore[union-attr,misc]
    return int(inner) > int(outer)


def smoothing_factors(graph: ir.Model, exact: Path, texts: Sequence[Sequence[int]]) -> dict[str, Array]:
    """By activation, float32 [K]: what to divide its channels by.

    SmoothQuant's factor is largest(x) ** alpha / largest(W) ** (1 - alpha) per channel. Its alpha is chosen for each
    activation, by the error of the rounded product on rows of it; doing nothing is among the choices.
    """
    places = smoothable(graph)
    if not places:
        return {}
    every = max(1, sum(map(len, texts)) // SAMPLED_ROWS)
    rows: dict[str, list[Array]] = {name: [] for name in places}
    largest: dict[str, Array] = {}
    for found in Activations(exact, list(places)).of(texts):
        for name, values in found.items():
            top = np.abs(values).max(0)
            largest[name] = np.maximum(largest.get(name, top), top)
            rows[name].append(values[every // 2 :: every].copy())
    factors = {}
    for name, place in places.items():
        table = np.concatenate([_table(node) for node in place.readers], 1)
        factor = best_factor(np.concatenate(rows[name]), largest[name], table)
        if factor is not None:
            factors[name] = factor
    return factors


def best_factor(rows: Array, largest: Array, table: Array) -> Array | None:
    """float32 [K], or None when no smoothing is best, for activations [P,K] with these largest sizes [K] and weights
    [K,N]."""
    x, w = torch.from_numpy(rows), torch.from_numpy(table)
    exact = x @ w
    ceiling = torch.from_numpy(largest).clamp_min(1e-5)
    reach = w.abs().amax(1).clamp_min(1e-5)
    best, least = None, float(((_whole_rows(x) @ _whole_channels(w) - exact) ** 2).sum())
    for alpha in MIGRATIONS:
        factor = ceiling**alpha / reach ** (1 - alpha)
        factor = factor / (factor.max() * factor.min()).sqrt()
        error = float(((_whole_rows(x / factor) @ _whole_channels(w * factor[:, None]) - exact) ** 2).sum())
        if error < least:
            best, least = factor, error
    return None if best is None else best.numpy()


def _whole_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / LARGEST
    return torch.round(x / scale.clamp_min(1e-30)) * scale


def _whole_channels(w: Tensor) -> Tensor:
    scale = torch.from_numpy(channel_scales(w.numpy()))
    return torch.round(w / scale) * scale


# ---- int4 ----


def around_attention(product: ir.Node) -> bool:
    """Whether attention reads this product, or it reads attention, with no other product between them.

    SmolLM2-135M, feed-forward in four bits: KL against float32 is 0.13 nats a token with the products around attention
    in four bits too, 0.06 with them in eight.
    """

    def reaches(start: ir.Value | None, forward: bool) -> bool:
        waiting, seen = [start], set[int]()
        while waiting:
            value = waiting.pop()
            if value is None or id(value) in seen:
                continue
            seen.add(id(value))
            producer = value.producer()
            for node in [use.node for use in value.uses()] if forward else [producer] if producer else []:
                if node.op_type in ("GroupQueryAttention", "Attention"):
                    return True
                if node.op_type not in ("MatMul", "MatMulNBits"):
                    waiting += node.outputs if forward else node.inputs
        return False

    return reaches(product.outputs[0], True) or reaches(product.inputs[0], False)


@dataclass(frozen=True)
class Table:
    """Weights of a product: its node, their name, K, and what gives them as float32 [N,K]."""

    node: ir.Node
    name: str
    inner: int
    rows: Callable[[], Array]


def gptq(
    tables: Sequence[Table], exact: Path, texts: Sequence[Sequence[int]], report: Report, even: bool = False
) -> dict[str, Rounded]:
    """By name, what tables are rounded to.

    Args:
        even: see `round_with_hessian`, as is the block that goes with it.
    """
    readers: dict[str, list[Table]] = defaultdict(list)
    for table in tables:
        readers[str(table.node.inputs[0].name)].append(table)  # type: ignore[union-attr]
    rounded: dict[str, Rounded] = {}
    for names in _groups({name: readers[name][0].inner for name in readers}):
        report(f"gathering second moments of {len(names)} activations")
        hessians: dict[str, Tensor] = {}
        for found in Activations(exact, names).of(texts):
            for name, values in found.items():
                x = torch.from_numpy(values)
                hessians[name] = hessians[name].addmm_(x.T, x) if name in hessians else x.T @ x
        for name in names:
            hessian = hessians.pop(name)
            if not bool(hessian.isfinite().all()):
                raise TraceError(
                    f"--precision: what '{name}' holds is no finite number; in sixteen bits the model overflows, use "
                    "--precision bf16 or fp32."
                )
            for table in readers[name]:
                report(f"rounding weights, {len(rounded) + 1} of {len(tables)}")
                weights = torch.from_numpy(np.ascontiguousarray(table.rows()))
                block = weight_only.int4_block(weights.shape[1]) if even else INT4_BLOCK
                rounded[table.name] = round_with_hessian(weights, hessian, block, even)
    return rounded


def round_with_hessian(weights: Tensor, hessian: Tensor, block: int = INT4_BLOCK, even: bool = False) -> Rounded:
    """GPTQ: columns are rounded one by one, the one that matters most first, and what each was rounded by is made good
    by those still to come. The ranges of all blocks are chosen before (its "act-order" with "static groups").

    SmolLM2-135M, blocks of 32: perplexity rises by 20 % with the nearest levels, by 9 % with columns in their order and
    by 5 % so.

    Args:
        weights: float32 [N,K].
        hessian: float32 [K,K], the sum of x xT over the activations x.
        even: levels lie evenly around zero, without zeros of their own, and scales are numbers of float16.
    """
    outer, inner = weights.shape
    blocks = torch.from_numpy(in_blocks(weights.numpy(), block))
    if even:
        scales = torch.from_numpy(weight_only.nearest(weights.numpy(), 4, block, np.float16).scales)
        zeros = torch.full_like(scales, 8)
    else:
        scales, zeros = (part.reshape(outer, -1) for part in block_range(blocks.reshape(-1, block)))
    hessian = hessian.clone()
    silent = hessian.diagonal() == 0
    hessian[silent, silent] = 1
    order = hessian.diagonal().argsort(descending=True)
    left, hessian = weights[:, order].clone(), hessian[order][:, order]
    hessian += torch.eye(inner) * DAMPING * hessian.diagonal().mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian.double()))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    whole = torch.zeros(outer, inner)
    for first in range(0, inner, GPTQ_COLUMNS):
        last = min(first + GPTQ_COLUMNS, inner)
        part, errors = left[:, first:last], torch.zeros(outer, last - first)
        for column in range(last - first):
            place = int(order[first + column]) // block
            scale, zero, exact = scales[:, place], zeros[:, place], part[:, column]
            level = (torch.round(exact / scale) + zero).clamp(0, 15)
            whole[:, first + column] = level
            errors[:, column] = (exact - (level - zero) * scale) / upper[first + column, first + column]
            part[:, column + 1 :] -= errors[:, column, None] * upper[first + column, first + column + 1 : last]
        left[:, last:] -= errors @ upper[first:last, last:]
    integers = np.zeros((outer, blocks.shape[1] * block), np.uint8)
    integers[:, order.numpy()] = whole.numpy().astype(np.uint8)
    own = None if even else zeros.numpy().astype(np.uint8)
    return Rounded(4, integers.reshape(outer, -1, block), scales.numpy(), own)


def nearest_int4(rows: Array) -> Rounded:
    """The nearest of sixteen levels, for weights [N,K]."""
    blocks = torch.from_numpy(in_blocks(rows, INT4_BLOCK))
    scales, zeros = (part.reshape(len(rows), -1) for part in block_range(blocks.reshape(-1, INT4_BLOCK)))
    whole = (torch.round(blocks / scales[..., None]) + zeros[..., None]).clamp(0, 15)
    return Rounded(4, whole.numpy().astype(np.uint8), scales.numpy(), zeros.numpy().astype(np.uint8))


def block_range(weights: Tensor, shrinks: int = 13) -> tuple[Tensor, Tensor]:
    """(scale, zero) float32 [N] each, for weights [N, block]: of ranges a little narrower or wider than theirs, the one
    whose sixteen levels are nearest to them."""
    low, high = weights.amin(-1).clamp_max(0), weights.amax(-1).clamp_min(0)
    best = scales = zeros = torch.empty(0)
    for share in torch.linspace(0.75, 1.05, shrinks):
        scale = ((high - low) * share / 15).clamp_min(1e-12)
        zero = torch.round(-low * share / scale).clamp(0, 15)
        level = (torch.round(weights / scale[:, None]) + zero[:, None]).clamp(0, 15)
        error = (((level - zero[:, None]) * scale[:, None] - weights).abs() ** 2.4).sum(
            -1
        )  # the power GPTQ's code uses
        if not len(best):
            best, scales, zeros = error, scale, zero
        else:
            better = error < best
            best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
            zeros = torch.where(better, zero, zeros)
    return scales, zeros


def _table(node: ir.Node) -> Array:
    """Weights [K,N] of a product."""
    value = node.inputs[1]
    assert value is not None and value.const_value is not None
    table: Array = value.const_value.numpy()
    return table


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names whose K x K matrices fit in memory together."""
    group, held = list[str](), 0
    for name, inner in sizes.items():
        if group and held + 4 * inner**2 > HESSIAN_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += 4 * inner**2
    if group:
        yield group
