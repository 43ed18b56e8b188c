"""Attention dialect `scatter`, for TensorRT and for batches: standard operators of opset 24.

TensorScatter writes the new keys and values into the cache, Attention reads all of it under an additive mask as wide as
its capacity C, which is made in the graph from `tree_mask` and `past_length`. Each text of a batch has its own length.

The graph computes in the dtype of the model's parameters, which is the cache's too; norms and softmax are float32
inside, and so is everything that the contract gives out. `cast_model` makes a copy of a model in fewer bits. `next_ids`
is -1 where the largest logit is no finite number, so that greedy decoding can do without the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

from speccompile.graphs import contract
from speccompile.graphs.attention import Trace, describe_layer
from speccompile.graphs.target import (
    ANY_BATCH,
    ANY_TOKENS,
    EXAMPLE_BATCH,
    EXAMPLE_TOKENS,
    Argument,
    Survey,
    Tail,
    TargetModule,
    shared_arguments,
    trace_module,
)

OPSET = 24
LARGEST_LOGIT = 3e38
"""Beyond it lies only infinity. A comparison is false for what is not a number."""


def cast_model(model: Any, dtype: torch.dtype) -> Any:
    """`model`, or a copy of it with parameters in `dtype`.

    Buffers stay as they are: a table of rotary frequencies in sixteen bits would turn far positions by wrong angles.
    """
    if all(parameter.dtype == dtype for parameter in model.parameters()):
        return model
    known: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(dtype), False) for p in model.parameters()}
    return copy.deepcopy(model, known)


def scatter_attention(trace: Trace) -> Callable[..., tuple[Tensor, None]]:
    """Attention as two TensorScatters, whose results are the presents, and one Attention that reads them."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        layer = describe_layer(module, query, key, value, options)
        past = trace.past[len(trace.present) // 2]

        def written(cache: Tensor, rows: Tensor) -> Tensor:
            inputs, attributes = [cache, rows, trace.past_length], {"axis": -2, "mode": "linear"}
            return torch.onnx.ops.symbolic(
                "TensorScatter", inputs, attributes, dtype=cache.dtype, shape=cache.shape, version=OPSET
            )

        keys, values = written(past[0], key), written(past[1], value)
        attributes: dict[str, Any] = {"scale": layer.scale}
        if layer.softcap:
            attributes["softcap"] = layer.softcap
        out = torch.onnx.ops.symbolic(
            "Attention",
            [query, keys, values, trace.biases[layer.window]],
            attributes,
            dtype=query.dtype,
            shape=query.shape,
            version=OPSET,
        )
        trace.present += [keys, values]
        return out.transpose(1, 2), None

    return attend


class ScatterModule(TargetModule):
    """The contract as it is."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        past_length: Tensor,
        logit_rows: Tensor,
        past: Sequence[Tensor],
        features: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        assert self.survey is not None
        capacity = past[0].shape[2]
        biases = {
            window: mask_of_capacity(tree_mask, position_ids, past_length, capacity, window, self.dtype)
            for window in self.survey.windows
        }
        self.trace.biases, self.trace.past_length = biases, past_length
        first = biases[self.survey.windows[0]]
        next_ids, logits, *rest = self.answer(input_ids, position_ids, first, logit_rows, past, features)
        finite = logits.amax(-1).abs() < LARGEST_LOGIT
        return (torch.where(finite, next_ids, -1), logits, *rest)


def mask_of_capacity(
    tree_mask: Tensor, position_ids: Tensor, past_length: Tensor, capacity: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """What `tree_mask` says about the newest M rows, as an additive mask over all slots of the cache.

    Rows older than those are visible, slots behind them are not. In a window of W positions a query sees what is less
    than W positions before it. An older row lies in the slot of its own position. Among the newest rows, what a token
    sees is one path, so that the distance to a row is the number of rows on it that come later.

    Args:
        tree_mask: bool [B,T,M].
        position_ids: int64 [B,T].
        past_length: int64 [B].

    Returns:
        `dtype` [B,1,T,capacity]: 0, or its lowest number where nothing is seen.
    """
    tokens, masked = tree_mask.shape[1:]
    slots = torch.arange(capacity)
    older = past_length + tokens - masked  # the rows before the newest M
    if window is not None:
        on_path = tree_mask.long()
        later = on_path.sum(-1, keepdim=True) - on_path.cumsum(-1)
        tree_mask = tree_mask & (later < window)
    lowest = torch.finfo(dtype).min
    bias = torch.where(tree_mask, 0.0, lowest).to(dtype)
    edges = torch.zeros_like(bias[..., :1])
    columns = torch.cat((edges, bias, edges + lowest), -1)  # what is older, the newest M, what is not written yet
    place = (slots - older[:, None] + 1).clamp(0, masked + 1)  # [B,C]
    bias = columns.gather(-1, place[:, None].expand(-1, tokens, -1))
    if window is not None:
        far = (position_ids[:, :, None] - slots >= window) & (slots < older[:, None])[:, None]
        bias = torch.where(far, lowest, bias).to(dtype)
    return bias[:, None]


def trace_scatter(model: nn.Module, survey: Survey, tail: Tail, features: int | None = None) -> ir.Model:
    """Trace `model`, as it is or from `cast_model`; `survey` may be of what it was cast from.

    Args:
        features: width of the features that an EAGLE head reads beside its tokens; its graph has an input for them.
    """
    trace = Trace()
    module = ScatterModule(model, trace, survey, tail)
    ids, positions, rows, rest = shared_arguments(module, features)
    batch, tokens, masked = EXAMPLE_BATCH, EXAMPLE_TOKENS, EXAMPLE_TOKENS + 2
    sizes = {0: ANY_BATCH, 1: ANY_TOKENS, 2: Dim("M", min=1, max=65536)}
    mask = Argument([contract.TREE_MASK], torch.ones(batch, tokens, masked, dtype=torch.bool), sizes)
    past_length = Argument([contract.PAST_LENGTH], torch.full((batch,), 9), {0: ANY_BATCH})
    return trace_module(module, scatter_attention(trace), [ids, positions, mask, past_length, rows, *rest], OPSET)
