"""Checkpoints of a training: written so that an interruption leaves the one before, read only by the run they fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from speccompile.graphs.errors import CheckpointError


def save(file: Path, state: Mapping[str, Any], made_of: Mapping[str, Any]) -> None:
    """Write `state`, tensors and plain values, and what it was `made_of`: settings and data, as plain values."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save({**state, "made_of": dict(made_of)}, partial)
    partial.replace(file)


def resume(file: Path, made_of: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state in `file`; None when there is no such file.

    Raises:
        CheckpointError: when it is unreadable, or was made with other settings or data.
    """
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make the unpickler raise nearly anything
        raise CheckpointError(f"{file}: not a training checkpoint ({type(error).__name__}); delete it.") from error
    for key, value in made_of.items():
        if state["made_of"].get(key) != value:
            raise CheckpointError(
                f"{file}: made with {key} {state['made_of'].get(key)}, this run has {value}; "
                f"give the same again to go on, or delete the file to start over."
            )
    return state


def product_dtype(device: str) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, else float32."""
    native = device != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if native else torch.float32
