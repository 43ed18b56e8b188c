"""Attention dialect `gqa`, for ONNX Runtime: com.microsoft.GroupQueryAttention with the mask in `attention_bias`.

Past and present may be one buffer. The window of a sliding layer counts positions, and a tree puts several slots at one
position, so windows live in the bias and never in the operator's `local_window_size`, which counts slots.

The bias is as wide as past + T, a size that depends on data. So the trace has inputs for it and for the operator's
lengths, which `passes.derive_gqa_inputs` replaces by nodes that compute them from the contract's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

from speccompile.graphs import contract
from speccompile.graphs.attention import Trace, describe_layer
from speccompile.graphs.errors import TraceError
from speccompile.graphs.passes.derive_gqa_inputs import SEQLENS_K, TOTAL_LENGTH, bias_name
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

OPSET = 23
HEAD_STEP = 8  # GroupQueryAttention refuses other head sizes when it runs


def gqa_attention(trace: Trace) -> Callable[..., tuple[Tensor, None]]:
    """Attention as one GroupQueryAttention; past and present are [B,Hkv,C,D] and may be one buffer."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        layer = describe_layer(module, query, key, value, options)
        past_key, past_value = trace.past[len(trace.present) // 2]
        batch, tokens = query.shape[0], query.shape[2]

        def flat(states: Tensor) -> Tensor:
            return states.transpose(1, 2).reshape(batch, tokens, -1)

        attributes: dict[str, Any] = {"num_heads": layer.heads, "kv_num_heads": layer.kv_heads, "scale": layer.scale}
        if layer.softcap:
            attributes["softcap"] = layer.softcap
        inputs = [flat(query), flat(key), flat(value), past_key, past_value, trace.seqlens_k, trace.total]
        inputs += [None, None, None, trace.biases[layer.window]]
        out, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            f"{contract.MICROSOFT}::GroupQueryAttention",
            inputs,
            attributes,
            dtypes=[query.dtype] * 3,
            shapes=[(batch, tokens, layer.heads * layer.head_dim), tuple(past_key.shape), tuple(past_value.shape)],
            version=1,
        )
        trace.present += [present_key, present_value]
        return out.reshape(batch, tokens, layer.heads, layer.head_dim), None

    return attend


class GqaModule(TargetModule):
    """The contract with lengths and biases still explicit."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logit_rows: Tensor,
        seqlens_k: Tensor,
        total: Tensor,
        biases: Sequence[Tensor],
        past: Sequence[Tensor],
        features: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        assert self.survey is not None
        self.trace.biases = dict(zip(self.survey.windows, biases, strict=True))
        self.trace.seqlens_k, self.trace.total = seqlens_k, total
        return self.answer(input_ids, position_ids, biases[0], logit_rows, past, features)


def trace_gqa(model: nn.Module, survey: Survey, tail: Tail, features: int | None = None) -> ir.Model:
    """Trace `model`; the graph still has the derived inputs (see the module).

    Args:
        features: width of the features that an EAGLE head reads beside its tokens; its graph has an input for them.

    Raises:
        TraceError: when the dialect's operator does not take heads of this size.
    """
    head_dim, windows = survey.layers[0].head_dim, survey.windows
    if head_dim % HEAD_STEP:
        raise TraceError(
            f"{type(model).__name__}: heads have {head_dim} channels, but ONNX Runtime's attention takes multiples of "
            f"{HEAD_STEP} only."
        )
    trace = Trace()
    module = GqaModule(model, trace, survey, tail)
    batch, total = EXAMPLE_BATCH, EXAMPLE_TOKENS + 7
    ids, positions, rows, rest = shared_arguments(module, features)
    any_total = Dim("S", min=1, max=1 << 20)
    biases = Argument(
        [bias_name(window) for window in windows],
        [torch.zeros(batch, 1, EXAMPLE_TOKENS, total, dtype=module.dtype) for _ in windows],
        [{0: ANY_BATCH, 2: ANY_TOKENS, 3: any_total} for _ in windows],
    )
    lengths = [
        Argument([SEQLENS_K], torch.full((batch,), total - 1, dtype=torch.int32), {0: ANY_BATCH}),
        Argument([TOTAL_LENGTH], torch.tensor(total, dtype=torch.int32), None),
    ]
    return trace_module(module, gqa_attention(trace), [ids, positions, rows, *lengths, biases, *rest], OPSET)
