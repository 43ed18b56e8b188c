"""Medusa heads on disk: reads every public layout into one `MedusaHeads`, checks it, writes it.

A head is n residual blocks `y = x + SiLU(W x + b)` on the target's post-norm hidden state, then a matrix to
the vocabulary: the head's own or the target's lm_head (FasterDecoding/Medusa `medusa/model/medusa_model.py`).
Head h (0-based) at position t predicts token t + `head_offset(h)`.

Layouts, told apart by their keys alone (h head, l block, n blocks per head):

    A         {h}.{l}.linear.weight/.bias, {h}.{n}.weight    medusa_lm_head.pt or .safetensors (also TGI)
    B         {h}.{l}.linear.weight/.bias                    the same files; the target's lm_head (also TGI)
    C         medusa_head. + A, beside the target's own tensors
    ModelOpt  medusa_heads. + A
    vLLM      blocks.{h}.layers.{l}.weight[/.bias], lm_heads.{h}.weight or one lm_head.weight,
              optionally token_map, optionally all under medusa_heads.

`token_map` (draft id -> target id) is vLLM's; here it may also stand beside the keys of A and B. Next
to B it says which rows of the target's lm_head make up the draft vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from speccompile.compiler.tensors import check_token_ids, float32, read_file, read_json
from speccompile.graphs.errors import CheckpointError

Block = tuple[torch.Tensor, torch.Tensor | None]

HEADS_FILE = "medusa_lm_head.safetensors"
CANDIDATE_FILES = (
    HEADS_FILE,
    "medusa_lm_head.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
PREFIXES = ("medusa_head.", "medusa_heads.")
MERGED_LAYOUTS = ("C", "ModelOpt")

_BLOCK = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.linear\.(?P<part>weight|bias)")
_MATRIX = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.weight")
_VLLM_BLOCK = re.compile(r"blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.(?P<part>weight|bias)")
_VLLM_MATRIX = re.compile(r"lm_heads\.(?P<head>\d+)\.weight")


def head_offset(head: int) -> int:
    """How far ahead of its hidden state head `head` (0-based) predicts; the lm_head is at 1, head 0 at 2."""
    return head + 2


@dataclass(frozen=True, eq=False)
class MedusaHeads:
    """Medusa heads of H hidden units and Vd draft tokens.

    Args:
        hidden_size: H.
        blocks: per head, its residual blocks as (weight float32 [H,H], bias float32 [H] or None).
        lm_heads: float32 [Vd,H], one per head, or a single one that all heads share; None for the target's.
        token_map: int64 [Vd], draft id -> target id; None when the draft vocabulary is the target's.
        layout: the layout the heads were read from (see the module).
        config_heads: head count that config.json claims; the published v1.3 configs say 2 for files of 5.
        target_fingerprint: fingerprint of the model the heads were trained on.
        base_model: its name.
        logit_scale: factor on the logits that makes their softmax honest; config.json key `logit_scale`, ours.
        source: what error messages call these heads.

    Raises:
        CheckpointError: when a shape, a dtype or a count does not fit the others, or a weight is not finite.
    """

    hidden_size: int
    blocks: tuple[tuple[Block, ...], ...]
    lm_heads: tuple[torch.Tensor, ...] | None = None
    token_map: torch.Tensor | None = None
    layout: str = "B"
    config_heads: int | None = None
    target_fingerprint: str | None = None
    base_model: str | None = None
    logit_scale: float = 1.0
    source: str = "medusa heads"

    def __post_init__(self) -> None:
        if not self.blocks or not self.blocks[0]:
            raise CheckpointError(f"{self.source}: holds no residual block; Medusa heads need at least one.")
        for head, blocks in enumerate(self.blocks):
            if len(blocks) != self.num_layers:
                raise CheckpointError(
                    f"{self.source}: head {head} has {len(blocks)} residual blocks but head 0 has {self.num_layers}."
                )
            for layer, (weight, bias) in enumerate(blocks):
                name = f"head {head} block {layer}"
                self._check(f"{name} weight", weight, (self.hidden_size, self.hidden_size))
                if (bias is None) != (self.blocks[0][0][1] is None):
                    raise CheckpointError(f"{self.source}: {name} and head 0 block 0 differ in having a bias.")
                if bias is not None:
                    self._check(f"{name} bias", bias, (self.hidden_size,))
        if self.lm_heads is not None:
            if len(self.lm_heads) not in (1, self.num_heads):
                raise CheckpointError(
                    f"{self.source}: {self.num_heads} heads but {len(self.lm_heads)} lm_head matrices; "
                    f"expected one per head or one for all."
                )
            for head, matrix in enumerate(self.lm_heads):
                self._check(f"head {head} lm_head", matrix, (self.lm_heads[0].shape[0], self.hidden_size))
        if self.token_map is not None:
            if self.token_map.dim() != 1 or self.token_map.dtype != torch.int64:
                raise CheckpointError(
                    f"{self.source}: token_map is {self.token_map.dtype} {list(self.token_map.shape)}; "
                    f"expected int64 [draft vocabulary]."
                )
            if self.lm_heads is not None and len(self.token_map) != len(self.lm_heads[0]):
                raise CheckpointError(
                    f"{self.source}: token_map has {len(self.token_map)} entries but the lm_head has "
                    f"{len(self.lm_heads[0])} rows."
                )

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.source}: {name} has shape {list(tensor.shape)}; expected {list(shape)}.")
        if tensor.dtype != torch.float32:
            raise CheckpointError(f"{self.source}: {name} is {tensor.dtype}; expected torch.float32.")
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self.source}: {name} holds NaN or infinite values; the file is damaged.")

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    @property
    def num_layers(self) -> int:
        return len(self.blocks[0])

    @property
    def draft_vocabulary(self) -> int | None:
        """Vd, or None when it is the target's whole vocabulary."""
        if self.token_map is not None:
            return len(self.token_map)
        return None if self.lm_heads is None else len(self.lm_heads[0])

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over name, dtype, shape and bytes of every tensor; the same in every layout."""
        digest = hashlib.sha256()
        for name, tensor in sorted(_named_tensors(self).items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy())
        return digest.hexdigest()


def _named_tensors(heads: MedusaHeads) -> dict[str, torch.Tensor]:
    """The tensors under the names of layout A (B when the lm_head is the target's)."""
    tensors: dict[str, torch.Tensor] = {}
    for head, blocks in enumerate(heads.blocks):
        for layer, (weight, bias) in enumerate(blocks):
            tensors[f"{head}.{layer}.linear.weight"] = weight
            if bias is not None:
                tensors[f"{head}.{layer}.linear.bias"] = bias
        if heads.lm_heads is not None:
            tensors[f"{head}.{heads.num_layers}.weight"] = heads.lm_heads[head % len(heads.lm_heads)]
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map
    return tensors


# ---- using heads ----


def check_against(heads: MedusaHeads, hidden_size: int, vocab_size: int, target_fingerprint: str | None) -> list[str]:
    """Check that the heads fit a target of `hidden_size`, `vocab_size` lm_head rows and `target_fingerprint`.

    Returns:
        Sentences about what could not be checked or looks odd.

    Raises:
        CheckpointError: for another hidden size, draft ids outside the target's vocabulary or repeated, or
            heads that name another target. Mismatched weights load without error and then draft badly.
    """
    source = heads.source
    if heads.hidden_size != hidden_size:
        raise CheckpointError(
            f"{source}: heads have hidden size {heads.hidden_size} but the target has {hidden_size}; "
            f"use heads made for this model."
        )
    if heads.target_fingerprint and target_fingerprint and heads.target_fingerprint != target_fingerprint:
        raise CheckpointError(
            f"{source}: heads were made for the target with fingerprint {heads.target_fingerprint} but this "
            f"target's is {target_fingerprint}; use the model they were trained on, or train new heads."
        )
    warnings = []
    if heads.token_map is not None:
        check_token_ids(f"{source}: token_map", heads.token_map, vocab_size)
    elif heads.draft_vocabulary is not None and heads.draft_vocabulary > vocab_size:
        raise CheckpointError(
            f"{source}: heads have a vocabulary of {heads.draft_vocabulary} tokens but the target has "
            f"{vocab_size}; use heads made for this model."
        )
    elif heads.draft_vocabulary is not None and heads.draft_vocabulary < vocab_size:
        warnings.append(
            f"{source}: heads have {heads.draft_vocabulary} lm_head rows and no token_map, the target has "
            f"{vocab_size}; target ids from {heads.draft_vocabulary} on will never be drafted."
        )
    if heads.config_heads is not None and heads.config_heads != heads.num_heads:
        warnings.append(
            f"{source}: config.json says {heads.config_heads} heads, the file holds {heads.num_heads}; the file counts."
        )
    if not heads.target_fingerprint:
        # Medusa-2 trains the backbone too: its heads do not fit the public base model, though the shapes do.
        merged = " (merged heads fit only the weights they lie beside)" if heads.layout in MERGED_LAYOUTS else ""
        warnings.append(
            f"{source}: heads do not say which weights they were trained on{merged}; a wrong target shows "
            f"only as low acceptance."
        )
    elif not target_fingerprint:
        warnings.append(
            f"{source}: the target's fingerprint is unknown, so the heads' {heads.target_fingerprint} was not compared."
        )
    return warnings


def reduce_vocabulary(heads: MedusaHeads, vocab_size: int, token_ids: Sequence[int] | torch.Tensor) -> MedusaHeads:
    """Heads that draft only `token_ids` (target ids) of a target with `vocab_size` tokens.

    Rows of own matrices are selected here; the target's lm_head is left to `MedusaModule`, which gathers its
    rows. Ids are kept in ascending order: of equal logits the lowest target id comes first, as in argmax.

    Raises:
        CheckpointError: when an id is repeated, outside the vocabulary, or not in the heads' present one.
    """
    wanted = torch.as_tensor(token_ids, dtype=torch.int64).sort().values
    check_token_ids(f"{heads.source}: reduced vocabulary", wanted, vocab_size)
    known = heads.token_map
    if known is None:
        known = torch.arange(vocab_size if heads.draft_vocabulary is None else heads.draft_vocabulary)
    row_of = torch.full((max(vocab_size, int(known.max()) + 1),), -1, dtype=torch.int64)
    row_of[known] = torch.arange(len(known))
    rows = row_of[wanted]
    if (rows < 0).any():
        raise CheckpointError(
            f"{heads.source}: token id {int(wanted[rows < 0][0])} is not in the heads' draft vocabulary of "
            f"{len(known)} tokens; choose among those."
        )
    lm_heads = None if heads.lm_heads is None else tuple(matrix[rows] for matrix in heads.lm_heads)
    return replace(heads, lm_heads=lm_heads, token_map=wanted)


# ---- writing ----


def write_heads(
    heads: MedusaHeads,
    folder: Path,
    config_extra: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write `medusa_lm_head.safetensors` and `config.json`: layout B, or A when the heads own their lm_head.

    `version` "2" tells Medusa's own reader to use the target's lm_head, so only B carries it. `config_extra`
    may set `base_model_name_or_path` and `target_fingerprint`, and add keys; the counts come from the heads.

    Raises:
        CheckpointError: when a weight is too large for `dtype`.
    """
    tensors = {}
    for name, tensor in _named_tensors(heads).items():
        # A copy: safetensors refuses tensors that share memory, as a matrix shared by all heads does.
        written_dtype = dtype if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to(written_dtype, copy=True).contiguous()
        if tensor.is_floating_point() and not torch.isfinite(tensors[name]).all():
            raise CheckpointError(
                f"{heads.source}: {name} reaches {float(tensor.abs().max()):.4g}, too large for {dtype}; "
                f"write bfloat16 or float32."
            )
    config = {
        "base_model_name_or_path": heads.base_model,
        "target_fingerprint": heads.target_fingerprint,
        **(config_extra or {}),
        "hidden_size": heads.hidden_size,
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "logit_scale": heads.logit_scale,
    }
    if heads.lm_heads is None:
        config["version"] = "2"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / HEADS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


# ---- reading ----


def read_heads(path: Path) -> MedusaHeads:
    """Read heads in any layout of the module, from a folder (alone, or merged into a model) or from one file.

    Of a merged model only the heads are loaded. Counts come from the keys. Pickle files are read with
    `weights_only=True`: code in them is refused, not run.

    Raises:
        CheckpointError: when there are no heads, a file is damaged or holds code, tensors are missing,
            unknown or misshapen, or config.json promises more heads or blocks than the file holds.
    """
    config = read_json((path if path.is_dir() else path.parent) / "config.json")
    file, tensors = _find_tensors(path)
    prefix = next((prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in tensors)), "")
    tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    vllm = any(_VLLM_BLOCK.fullmatch(key) for key in tensors)

    blocks = _take_blocks(file, tensors, _VLLM_BLOCK if vllm else _BLOCK)
    _check_config_counts(file, config, heads=len(blocks), layers=len(blocks[0]))
    token_map = _take_token_map(file, tensors, config)
    lm_heads = _take_lm_heads(file, tensors, vllm, config, heads=len(blocks), layers=len(blocks[0]))
    if tensors:
        raise CheckpointError(f"{file}: tensor '{prefix}{min(tensors)}' is in no known Medusa layout.")
    if lm_heads is not None and token_map is not None:
        # vLLM takes matrices of either size: already reduced, or whole and reduced on load.
        lm_heads = tuple(_select_rows(file, matrix, token_map) for matrix in lm_heads)
    by_prefix = {"": "B" if lm_heads is None else "A", "medusa_head.": "C", "medusa_heads.": "ModelOpt"}
    return MedusaHeads(
        hidden_size=blocks[0][0][0].shape[0],
        blocks=blocks,
        lm_heads=lm_heads,
        token_map=token_map,
        layout="vLLM" if vllm else by_prefix[prefix],
        config_heads=_config_counts(config)[0],
        target_fingerprint=_config_text(file, config, "target_fingerprint"),
        base_model=_config_text(file, config, "base_model_name_or_path"),
        logit_scale=_logit_scale(file, config),
        source=str(file),
    )


def _take_blocks(
    file: Path, tensors: dict[str, torch.Tensor], pattern: re.Pattern[str]
) -> tuple[tuple[Block, ...], ...]:
    """Remove the residual blocks from `tensors`; heads and blocks must be numbered without gaps."""
    found: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    for key in list(tensors):
        if match := pattern.fullmatch(key):
            layers = found.setdefault(int(match["head"]), {})
            layers.setdefault(int(match["layer"]), {})[match["part"]] = float32(file, key, tensors.pop(key))
    heads = max(found) + 1
    layers_per_head = 1 + max(max(layers) for layers in found.values())
    for head in range(heads):
        for layer in range(layers_per_head):
            if "weight" not in found.get(head, {}).get(layer, {}):
                raise CheckpointError(
                    f"{file}: head {head} block {layer} has no weight, though keys go up to head {heads - 1} "
                    f"and block {layers_per_head - 1}; the file is incomplete."
                )
    return tuple(
        tuple((block["weight"], block.get("bias")) for _, block in sorted(found[head].items())) for head in range(heads)
    )


def _take_lm_heads(
    file: Path,
    tensors: dict[str, torch.Tensor],
    vllm: bool,
    config: Mapping[str, Any],
    heads: int,
    layers: int,
) -> tuple[torch.Tensor, ...] | None:
    """Remove the heads' own matrices from `tensors`: one per head, one for all, or None."""
    if vllm and "lm_head.weight" in tensors:
        return (float32(file, "lm_head.weight", tensors.pop("lm_head.weight")),)
    found: dict[int, torch.Tensor] = {}
    for key in list(tensors):
        match = (_VLLM_MATRIX if vllm else _MATRIX).fullmatch(key)
        if match and (vllm or int(match["layer"]) == layers):
            found[int(match["head"])] = float32(file, key, tensors.pop(key))
    if not found:
        return None
    if vllm and config.get("original_lm_head") and 0 in found:
        return (found[0],)
    if missing := sorted(set(range(heads)) - set(found)):
        raise CheckpointError(f"{file}: head {missing[0]} has no lm_head, but head {min(found)} has one.")
    if extra := sorted(set(found) - set(range(heads))):
        raise CheckpointError(f"{file}: head {extra[0]} has an lm_head but no residual block.")
    matrices = tuple(found[head] for head in range(heads))
    return matrices[:1] if all(torch.equal(matrix, matrices[0]) for matrix in matrices[1:]) else matrices


def _take_token_map(file: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor | None:
    token_map = tensors.pop("token_map", None)
    truncated, full = config.get("truncated_vocab_size"), config.get("vocab_size")
    if token_map is None:
        if isinstance(truncated, int) and isinstance(full, int) and truncated < full:
            raise CheckpointError(
                f"{file}: config.json says truncated_vocab_size {truncated} of {full} but there is no "
                f"token_map tensor, so draft ids cannot be mapped to the target's."
            )
        return None
    if token_map.is_floating_point() or token_map.dtype == torch.bool:
        raise CheckpointError(f"{file}: token_map is {token_map.dtype}; expected integers.")
    return token_map.to(torch.int64, copy=True)


def _select_rows(file: Path, matrix: torch.Tensor, token_map: torch.Tensor) -> torch.Tensor:
    """The rows that a token_map names; a matrix no longer than the map has been reduced already."""
    if len(matrix) <= len(token_map):
        return matrix
    check_token_ids(f"{file}: token_map", token_map, len(matrix))
    return matrix[token_map]


# ---- config.json ----


def _config_counts(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Heads and blocks per head that a config claims: Medusa's keys, ModelOpt's `medusa` dict, or vLLM's."""
    if config.get("model_type") == "medusa":
        return config.get("num_heads"), config.get("num_hidden_layers")
    nested = config.get("medusa")
    counts = nested if isinstance(nested, dict) else config
    return (
        counts.get("medusa_num_heads", counts.get("num_medusa_heads")),
        counts.get("medusa_num_layers", counts.get("num_medusa_layers")),
    )


def _config_text(file: Path, config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{file}: config.json has {value!r} as {key}; expected a string.")
    return value


def _logit_scale(file: Path, config: Mapping[str, Any]) -> float:
    value = config.get("logit_scale", 1.0)
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{file}: config.json has {value!r} as logit_scale; expected a positive number.")
    return float(value)


def _check_config_counts(file: Path, config: Mapping[str, Any], heads: int, layers: int) -> None:
    claimed_heads, claimed_layers = _config_counts(config)
    for what, claimed, held in (("heads", claimed_heads, heads), ("blocks per head", claimed_layers, layers)):
        if claimed is None:
            continue
        if not isinstance(claimed, int):
            raise CheckpointError(f"{file}: config.json gives {claimed!r} as number of {what}; expected an integer.")
        if claimed > held:
            raise CheckpointError(
                f"{file}: config.json says {claimed} {what} but the file holds {held}; the file is "
                f"incomplete, or config.json belongs to other heads."
            )


# ---- files ----


def _find_tensors(path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file (or shard index) that holds heads, and its head tensors by full key."""
    candidates = [path / name for name in CANDIDATE_FILES] if path.is_dir() else [path]
    present = [file for file in candidates if file.is_file()]
    for file in present:
        tensors = read_file(file, _head_keys)
        if tensors:
            return file, tensors
    if present:
        raise CheckpointError(f"{path}: no Medusa heads in {', '.join(file.name for file in present)}.")
    raise CheckpointError(f"{path}: no heads found; expected one of {', '.join(CANDIDATE_FILES)}.")


def _head_keys(keys: Iterable[str]) -> list[str]:
    """The keys that belong to heads: all with a known prefix, else all of a file of nothing but heads."""
    keys = list(keys)
    for prefix in PREFIXES:
        bare = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        if any(_BLOCK.fullmatch(key) or _VLLM_BLOCK.fullmatch(key) for key in bare):
            return [prefix + key for key in bare]
    return keys if any(_BLOCK.fullmatch(key) or _VLLM_BLOCK.fullmatch(key) for key in keys) else []
