"""Attention dialects: what a traced model emits in place of its own attention.

transformers lets a model be run with a foreign attention function (`AttentionInterface`). While a model is
traced, ours takes each layer's past from the `Trace` at hand, emits the dialect's operator, and hands the
present back to the `Trace`.

There are two dialects: `graphs.gqa` and `graphs.scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from speccompile.graphs.errors import TraceError

ATTENTION_NAME = "speccompile"


@dataclass(frozen=True)
class AttentionLayer:
    """What one attention layer asks of the cache and of the mask.

    Args:
        heads, kv_heads: query heads and key/value heads.
        head_dim: size of one head, the same for keys and values.
        scale: factor on the scores.
        softcap: c in c * tanh(score / c), or None.
        window: a query at position p sees keys at positions > p - window; None sees all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None


@dataclass
class Trace:
    """State of one pass through the model: what attention layers read and what they leave behind.

    Args:
        past: per layer (key, value) [B,Hkv,C,D]; empty while the model is only surveyed.
        biases: additive mask by window (None for full attention), [B,1,T,past+T] or [B,1,T,C] as the dialect has it.
        position_ids: int64 [B,T].
        past_length: `scatter`: int64 [B], where the new rows are written.
        seqlens_k, total: `gqa`: int32 [B] (tokens - 1) and scalar (largest past + T).
    """

    past: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    biases: dict[int | None, Tensor] = field(default_factory=dict)
    position_ids: Tensor | None = None
    past_length: Tensor | None = None
    seqlens_k: Tensor | None = None
    total: Tensor | None = None
    layers: list[AttentionLayer] = field(default_factory=list)
    present: list[Tensor] = field(default_factory=list)


class PassThroughCache(DynamicCache):
    """A cache that keeps nothing: the past reaches attention through the `Trace`, not through transformers."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def describe_layer(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> AttentionLayer:
    """Read a layer's needs from one attention call.

    Raises:
        TraceError: when the layer asks for something the dialects cannot express faithfully.
    """
    name = type(module).__name__
    for option in ("s_aux", "sinks", "position_bias", "alibi", "head_mask"):
        if options.get(option) is not None:
            raise TraceError(
                f"{name}: attention option '{option}' is not supported; this model cannot be traced faithfully."
            )
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise TraceError(f"{name}: attention is not causal; only causal language models can be compiled.")
    if key.shape[-1] != value.shape[-1] or key.shape[-1] != query.shape[-1]:
        raise TraceError(
            f"{name}: head sizes of query, key and value differ ({query.shape[-1]}, {key.shape[-1]}, "
            f"{value.shape[-1]}); latent attention is not supported."
        )
    head_dim = int(query.shape[-1])
    scaling = options.get("scaling")
    window = options.get("sliding_window")
    softcap = options.get("softcap")
    return AttentionLayer(
        heads=int(query.shape[1]),
        kv_heads=int(key.shape[1]),
        head_dim=head_dim,
        scale=float(scaling) if scaling is not None else head_dim**-0.5,
        softcap=float(softcap) if softcap else None,
        window=int(window) if window else None,
    )


def survey_attention(trace: Trace) -> Callable[..., tuple[Tensor, None]]:
    """An attention function that only writes down what each layer needs."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        trace.layers.append(describe_layer(module, query, key, value, options))
        return query.transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def foreign_attention(model: Any, attend: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Run `model` with `attend` for attention and without transformers' own masks; undone on exit.

    Raises:
        TraceError: when the architecture does not let its attention be replaced.
    """
    name = type(model).__name__
    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION_NAME)
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise TraceError(
            f"{name}: this architecture does not let its attention be replaced through transformers' "
            f"AttentionInterface ({error}); it cannot be compiled."
        ) from error
    try:
        yield
    finally:
        model.set_attn_implementation(before)
