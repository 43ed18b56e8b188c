"""Reading a target model: a transformers folder or a .gguf file, with its tokenizer and fingerprints."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from speccompile.graphs.errors import CheckpointError

# What a config says about a file or a library rather than about the model.
_VOLATILE_CONFIG = ("_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "architectures")


@dataclass(frozen=True)
class Source:
    """A target model as the compiler needs it: float32, in eval mode, with eager attention.

    Args:
        fingerprint: sha256 of the weights as float32, by name; the same model read from a folder and from a
            lossless conversion of it has the same.
        config_fingerprint: sha256 of its config, less what names files and libraries.
        eos_ids: every token that ends a text (Llama-3 has several).
    """

    path: Path
    model: Any
    tokenizer: Any
    fingerprint: str
    config_fingerprint: str
    eos_ids: tuple[int, ...]

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @property
    def lm_head(self) -> nn.Module:
        head: nn.Module = self.model.get_output_embeddings()
        return head


def read_model(path: Path) -> Source:
    """Load a model.

    Raises:
        CheckpointError: when it is not there, of an unknown architecture, needs code of its own, is damaged,
            lacks tensors, holds NaN, or has no fast tokenizer.
    """
    location = _locate(path)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(**location, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for one mistake
        raise CheckpointError(f"{path}: not a model transformers knows ({_first_sentence(error)}).") from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"{path}: architecture '{config.model_type}' is not a causal language model of transformers "
            f"{transformers.__version__}; only those can be compiled."
        )
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            **location,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            trust_remote_code=False,
        )
    except Exception as error:
        reason = "they hold code, which is never run" if _is_pickle(error) else _first_sentence(error)
        raise CheckpointError(
            f"{path}: the weights cannot be loaded ({reason}); fetch the checkpoint again, as safetensors."
        ) from error
    problems = [*sorted(info["missing_keys"]), *(str(item[0]) for item in sorted(info["mismatched_keys"]))]
    if problems:
        raise CheckpointError(
            f"{path}: tensor '{problems[0]}' is missing or of another shape than config.json says "
            f"({len(problems)} such tensors); the checkpoint is incomplete, fetch it again."
        )
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise CheckpointError(
                f"{path}: tensor '{name}' holds NaN or infinite values; the checkpoint is damaged, fetch it again."
            )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**location, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"{path}: no usable tokenizer ({_first_sentence(error)}).") from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"{path}: only a slow tokenizer exists; the runtime needs a tokenizer.json.")
    return Source(
        path,
        model.eval(),
        tokenizer,
        fingerprint_weights(model),
        fingerprint_config(model.config.to_dict()),
        _eos_ids(model, tokenizer),
    )


def _locate(path: Path) -> dict[str, str]:
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; give a transformers folder or a .gguf file.")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a transformers folder or a .gguf file.")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: has no config.json; give a transformers folder or a .gguf file.")
    return {"pretrained_model_name_or_path": str(path)}


def fingerprint_weights(model: nn.Module) -> str:
    """sha256 over name, shape and float32 bytes of every parameter, each tied tensor once, in order of name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().float().contiguous().numpy().data)
    return digest.hexdigest()


def fingerprint_config(config: dict[str, Any]) -> str:
    """sha256 of a config's JSON, less the fields that name files and libraries."""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG and key != "quantization_config"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """End-of-text ids: the generation config's, else the config's, else the tokenizer's."""
    for owner in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def _is_pickle(error: BaseException | None) -> bool:
    """Whether torch's unpickler refused a file; its own advice is to run the code."""
    while error is not None and not isinstance(error, pickle.UnpicklingError):
        error = error.__cause__ or error.__context__
    return error is not None


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__
