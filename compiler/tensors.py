"""Tensors on disk: the files a checkpoint may consist of, and matrices as int8 with a scale for each row."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from speccompile.graphs.errors import CheckpointError

Choose = Callable[[Iterable[str]], list[str]]

SCALE = ".scale"
DTYPES = ("fp16", "int8")
INT8_MAX = 127
LARGEST_ROUNDING = 0.03  # of a matrix, as a share of its norm; rows of normal weights lose 0.01


# ---- files ----


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one when there is no such file.

    Raises:
        CheckpointError: when it is no JSON, or no object.
    """
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}).") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(config).__name__}.")
    return config


def read_file(file: Path, choose: Choose) -> dict[str, torch.Tensor]:
    """The tensors that `choose` picks by name, of a `.safetensors`, `.pt` or `.bin` file or an `.index.json` of shards.

    Pickle files are read with `weights_only=True`: code in them is refused, not run. Of an index only the shards that
    hold chosen tensors are opened.

    Raises:
        CheckpointError: when a file is damaged, holds code, or lacks what its index promises.
    """
    return _read_sharded(file, choose) if file.name.endswith(".index.json") else _read_one(file, choose)


def _read_one(file: Path, choose: Choose) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors":
        state = _load_pickle(file)
        return {key: state[key] for key in choose(state)}
    try:
        with safe_open(file, framework="pt") as reader:
            return {key: reader.get_tensor(key) for key in choose(reader.keys())}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: damaged or no safetensors file ({error}); fetch it again.") from error


def _read_sharded(index: Path, choose: Choose) -> dict[str, torch.Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is missing or does not map tensors to files.")
    keys = choose(weight_map)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted({weight_map[key] for key in keys}):
        if Path(name).name != name:
            raise CheckpointError(f"{index}: shard '{name}' is not a plain file name.")
        tensors |= _read_one(index.parent / name, choose)
    if missing := sorted(set(keys) - set(tensors)):
        raise CheckpointError(f"{index}: tensor '{missing[0]}' is not in shard {weight_map[missing[0]]}.")
    return tensors


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        # Only torch's zip format can be mapped, so that a merged model's other tensors are not read.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # damaged or hostile bytes make the unpickler raise nearly anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            reason = "the unpickler refuses it"  # torch's own advice is to run the code
        raise CheckpointError(
            f"{file}: not a plain tensor file ({reason}); it is damaged, or holds code, which is never run: "
            f"fetch it again or have it converted to safetensors."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CheckpointError(f"{file}: expected a dict of tensors, as torch.save(state_dict) writes.")
    return state


# ---- values ----


def float32(file: Path, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy as float32.

    Raises:
        CheckpointError: for integers and single numbers.
    """
    if not tensor.is_floating_point():
        raise CheckpointError(f"{file}: tensor '{key}' is {tensor.dtype}; quantised heads are not supported.")
    if tensor.dim() == 0:
        raise CheckpointError(f"{file}: tensor '{key}' is a single number; expected a matrix or a vector.")
    # A copy: the tensor may be a view of a memory-mapped file that is replaced while we hold it.
    return tensor.detach().to(torch.float32, copy=True)


def check_finite(file: Path, key: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor with NaN or infinite values."""
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{file}: tensor '{key}' holds NaN or infinite values; the file is damaged.")


def check_token_ids(name: str, token_ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse token ids (int64 [Vd]) that are none, outside the target's vocabulary, or repeated."""
    if not len(token_ids):
        raise CheckpointError(f"{name} is empty.")
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(outside):
        raise CheckpointError(f"{name} holds id {int(outside[0])}, outside the target's {vocab_size} tokens.")
    values, counts = token_ids.unique(return_counts=True)
    if len(values) != len(token_ids):
        raise CheckpointError(f"{name} holds id {int(values[counts > 1][0])} more than once.")


# ---- int8 ----


def check_packing(what: str, dtype: str) -> None:
    """Refuse a dtype that `pack` cannot write."""
    if dtype not in DTYPES:
        raise CheckpointError(f"{what}: dtype '{dtype}' is unknown; use one of {', '.join(DTYPES)}.")


def pack(what: str, tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Tensors ready for safetensors.

    Args:
        dtype: "fp16", or "int8": matrices as int8, each row with a scale of its largest value / 127 in `NAME.scale`
            (float32 [..., 1]), so that a weight moves by half a scale at most. Vectors stay fp16, and so do matrices
            whose rows are a few large values among small ones, which such a scale would wipe out (an EAGLE head's `fc`
            that starts as an identity).

    Raises:
        CheckpointError: when the dtype is unknown, or a weight too large for it.
    """
    check_packing(what, dtype)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().float().cpu()
        if dtype == "int8" and value.dim() > 1:
            scale = (value.abs().amax(-1, keepdim=True) / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
            steps = (value / scale).round()
            if (steps * scale - value).norm() <= LARGEST_ROUNDING * value.norm():
                packed[name] = steps.to(torch.int8).contiguous()
                packed[name + SCALE] = scale.contiguous()
                continue
        packed[name] = value.half().contiguous()
        if not torch.isfinite(packed[name]).all():
            raise CheckpointError(
                f"{what}: {name} reaches {float(value.abs().max()):.4g}, too large for fp16; write int8."
            )
    return packed


def unpack(file: Path, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo `pack`: int8 matrices become float32, their scales go; all else stays as it is.

    Raises:
        CheckpointError: when a scale is missing or misshapen.
    """
    tensors = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            scale = stored.get(name + SCALE)
            if scale is None:
                raise CheckpointError(f"{file}: tensor '{name}{SCALE}' is missing; write the checkpoint again.")
            if scale.shape != (*tensor.shape[:-1], 1):
                raise CheckpointError(
                    f"{file}: '{name}{SCALE}' has shape {list(scale.shape)}; expected "
                    f"{[*tensor.shape[:-1], 1]}, one scale per row of '{name}'."
                )
            tensors[name] = tensor.float() * scale.float()
        elif not name.endswith(SCALE) or name.removesuffix(SCALE) not in stored:
            tensors[name] = tensor
    return tensors
