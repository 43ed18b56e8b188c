"""Rotary embedding and RMS norm as one operator each, where a model's own code computes exactly that.

Every architecture writes these two out in a dozen small tensor operations of its own. A numeric probe on
random data decides whether they are what their name says; only then is the operator emitted while tracing.
What the probe does not recognise is traced as it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

APPLY_ROTARY = "apply_rotary_pos_emb"


# ---- rotary embedding ----


@dataclass
class RotaryTables:
    """cos and sin of every position, as the model's own rotary modules compute them.

    Args:
        calls: for each distinct call of a rotary module seen in the survey, (name of the module in the model, extra
            arguments).
        tables: (cos, sin) of the call with the same index, [positions, rotary_dim] each, float32.
    """

    calls: list[tuple[str, Hashable]] = field(default_factory=list)
    tables: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that turn positions into (cos, sin), by name."""
    return {name: m for name, m in model.named_modules() if type(m).__name__.endswith("RotaryEmbedding")}


@contextmanager
def record_rotary(model: nn.Module, positions: int, found: RotaryTables) -> Iterator[None]:
    """While `model` runs eagerly, tabulate each rotary module for positions 0 .. positions-1."""

    def wrap(name: str, module: nn.Module) -> Callable[[], None]:
        original = module.forward

        def forward(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
            call = (name, (args, tuple(sorted(options.items()))))
            if call not in found.calls:
                every = torch.arange(positions, device=position_ids.device)[None]
                out = original(x.float(), every, *args, **options)
                if isinstance(out, tuple) and len(out) == 2 and out[0].ndim == 3:
                    found.calls.append(call)
                    found.tables.append((out[0][0].detach().clone(), out[1][0].detach().clone()))
            return original(x, position_ids, *args, **options)

        module.forward = forward  # type: ignore[method-assign]
        return lambda: delattr(module, "forward")

    with _undoing([wrap(*item) for item in rotary_modules(model).items()]):
        yield


@contextmanager
def emit_rotary(
    model: nn.Module, found: RotaryTables, current: Callable[[int], tuple[Tensor, Tensor, Tensor]]
) -> Iterator[None]:
    """While `model` is traced, emit ai.onnx RotaryEmbedding (opset 23) for each call of `apply_rotary_pos_emb`
    whose cos and sin come straight from a tabulated module.

    Args:
        current: table index -> (cos [positions, rotary_dim / 2], sin, position_ids int64 [B,T]) of this trace.
    """
    handed_out: dict[int, tuple[Tensor, int]] = {}  # id of cos -> (cos, kept alive so that the id stays its own; table)

    def wrap_module(name: str, module: nn.Module) -> Callable[[], None]:
        original = module.forward

        def forward(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
            out = original(x, position_ids, *args, **options)
            call = (name, (args, tuple(sorted(options.items()))))
            if call in found.calls:
                handed_out[id(out[0])] = (out[0], found.calls.index(call))
            return out

        module.forward = forward  # type: ignore[method-assign]
        return lambda: delattr(module, "forward")

    def wrap_apply(source: Any) -> Callable[[], None]:
        original = getattr(source, APPLY_ROTARY)
        interleaved = probe_rotary(original)

        def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
            if interleaved is None or id(cos) not in handed_out or args or options or q.ndim != 4:
                return original(q, k, cos, sin, *args, **options)
            half_cos, half_sin, position_ids = current(handed_out[id(cos)][1])

            def rotate(x: Tensor) -> Tensor:
                rotary_dim = 2 * half_cos.shape[-1]
                attributes = {"interleaved": int(interleaved)}
                if rotary_dim != x.shape[-1]:
                    attributes["rotary_embedding_dim"] = rotary_dim
                inputs = [x, half_cos, half_sin, position_ids]
                return torch.onnx.ops.symbolic(
                    "RotaryEmbedding", inputs, attributes, dtype=x.dtype, shape=x.shape, version=23
                )

            return rotate(q), rotate(k)

        setattr(source, APPLY_ROTARY, apply)
        return lambda: setattr(source, APPLY_ROTARY, original)

    sources = {type(m).__module__ for m in model.modules()}
    undo = [wrap_apply(sys.modules[s]) for s in sorted(sources) if hasattr(sys.modules[s], APPLY_ROTARY)]
    with _undoing(undo + [wrap_module(*item) for item in rotary_modules(model).items()]):
        yield


def half_table(table: Tensor) -> Tensor:
    """The distinct half of a [positions, rotary_dim] table: every angle is in it twice, as halves or as pairs."""
    half = table.shape[1] // 2
    return (table[:, :half] if torch.equal(table[:, :half], table[:, half:]) else table[:, 0::2]).contiguous()


def probe_rotary(apply: Callable[..., Any]) -> bool | None:
    """Whether `apply(q, k, cos, sin)` is plain RoPE over the first cos.shape[-1] channels of q and k.

    Returns:
        False for half rotation (pairs i, i + D/2), True for interleaved (pairs 2i, 2i + 1), None for neither.
    """
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 3, 4, generator=generator)
    for interleaved in (False, True):
        wide = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
        for head_dim in (8, 12):  # the second: partial rotation, the rest passes through
            q, k = (torch.randn(1, 2, 3, head_dim, generator=generator) for _ in range(2))
            try:
                got = apply(q, k, wide.cos(), wide.sin())
                want = [_rope(x, angles, interleaved) for x in (q, k)]
                same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))
            except (RuntimeError, TypeError, ValueError):
                same = head_dim != 8  # no partial rotation inside this function: it is then never called with it
            if not same:
                break
        else:
            return interleaved
    return None


def _rope(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """RoPE (arXiv 2104.09864) on the first 2 * angles.shape[-1] channels of x [B,N,T,D], angles [B,T,rotary_dim/2]."""
    turning, passing = x[..., : 2 * angles.shape[-1]], x[..., 2 * angles.shape[-1] :]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = turning.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned, passing), -1)


# ---- RMS norm ----


def probe_rms_norm(module: nn.Module) -> tuple[Tensor, float] | None:
    """(weight, epsilon) such that `module(x)` is x / sqrt(mean(x^2) + epsilon) * weight over the last axis, or None."""
    weight = getattr(module, "weight", None)
    epsilon = next((e for e in (getattr(module, n, None) for n in ("variance_epsilon", "eps", "epsilon")) if e), None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon is None:
        return None
    x = torch.randn(2, 3, weight.shape[0], generator=torch.Generator().manual_seed(0))
    x[1] *= epsilon**0.5  # so small that epsilon, and its place in the formula, shows
    unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    with torch.no_grad():
        got, stored = module(x), weight.float()
        for scale in (stored, stored + 1):  # Gemma stores the weight less one
            if torch.allclose(got, unit * scale, rtol=1e-5, atol=1e-6):
                return weight if scale is stored and weight.dtype == x.dtype else scale.detach().clone(), float(epsilon)
    return None


@contextmanager
def emit_rms_norm(model: nn.Module) -> Iterator[None]:
    """While `model` is traced, emit ai.onnx RMSNormalization (opset 23) for each module that the probe recognises."""

    def wrap(module: nn.Module, weight: Tensor, epsilon: float) -> Callable[[], None]:
        plain = weight is module.weight
        if not plain:
            module.register_buffer("traced_scale", weight, persistent=False)

        def forward(x: Tensor) -> Tensor:
            scale = module.weight if plain else module.traced_scale
            attributes: dict[str, Any] = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
            # The operator can keep its statistics in float32 itself; a cast leaves no reader of the graph a choice.
            inputs = [x.float(), scale]
            normed = torch.onnx.ops.symbolic(
                "RMSNormalization", inputs, attributes, dtype=torch.float32, shape=x.shape, version=23
            )
            return normed.to(x.dtype)

        def undo() -> None:
            delattr(module, "forward")
            if not plain:
                delattr(module, "traced_scale")

        module.forward = forward  # type: ignore[method-assign]
        return undo

    probed = [(module, probe_rms_norm(module)) for module in model.modules()]
    with _undoing([wrap(module, *norm) for module, norm in probed if norm]):
        yield


@contextmanager
def _undoing(undo: list[Callable[[], None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for step in undo:
            stack.callback(step)
        yield
