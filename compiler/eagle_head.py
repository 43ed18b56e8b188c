"""EAGLE heads on disk: one `EagleHead` from every public layout (see `eagle_layouts`), checked and written.

Heads written here are in the official layout (or speculators') and may have more than it allows:

    config.json "speccompile_eagle"  target_fingerprint; taps; shares: ["embedding"] or ["embedding", "lm_head"], what
                                     is the target's and not in the file; form: what differs from a plain `EagleForm`
    d2t, t2d in a version 1 head     its lm_head is the target's rows of these ids
    no lm_head in a version 3 head   likewise
    layers.{i}.* / midlayer.{i}.*    more layers than one
    fusion.* in a version 1 head     its features are fused from the streams of `taps`
    norms of a version 1 head        embed_layernorm, hnorm, layers.0.input_layernorm, lm_head_layernorm
    NAME as int8 with NAME.scale     see `tensors.pack`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from speccompile.compiler.checkpoint import Source
from speccompile.compiler.eagle_layouts import (
    CONFIG_KEY,
    OPEN_NORMS,
    SHAREABLE,
    WEIGHTS_FILE,
    Reader,
    looks_like_eagle,
    spellings,
)
from speccompile.compiler.tensors import check_token_ids, pack
from speccompile.graphs.eagle import EagleForm, EagleModel
from speccompile.graphs.errors import CheckpointError

LAYOUTS_WRITTEN = ("official", "speculators")


@dataclass(frozen=True, eq=False)
class EagleHead:
    """A head, checked.

    Args:
        path: its folder.
        model: float32, eval, frozen. What it shares with the target is the target's memory (rows of the lm_head are a
            copy); read without a target, shared parameters and their numbers are on the meta device.
        layout: the layout it was read from (see `eagle_layouts`).
        reasons: sentences on what decided about it.
        token_ids: int64 [Vd], target ids of the lm_head's rows, ascending; None when they are the target's vocabulary.
        shares: what of "embedding" and "lm_head" is the target's.
        target_fingerprint: the target it was made for, if it names one.
        taps_known: False where they depend on a target that was not given; `form.taps` then counts them only.
        warnings: sentences about what looks odd.
    """

    path: Path
    model: EagleModel
    layout: str
    reasons: tuple[str, ...]
    token_ids: torch.Tensor | None
    shares: tuple[str, ...]
    target_fingerprint: str | None = None
    taps_known: bool = True
    warnings: tuple[str, ...] = ()
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", _fingerprint(self) if self.taps_known else "")

    @property
    def form(self) -> EagleForm:
        return self.model.form

    @property
    def version(self) -> int:
        return self.form.version

    @property
    def layers(self) -> int:
        return len(self.model.layers)

    @property
    def draft_vocabulary(self) -> int:
        """Vd: rows of the lm_head."""
        return int(self.model.lm_head.weight.shape[0])

    @property
    def target_width(self) -> int:
        """Width of one of the target's streams."""
        if self.version == 1:
            return self.model.feature_width
        return int(self.model.fusion.fc.in_features) // len(self.form.taps)


def make_head(
    path: Path, model: EagleModel, target: Source, token_ids: torch.Tensor | None, shares: Sequence[str] = SHAREABLE
) -> EagleHead:
    """A head that was trained here for `target`. `shares`: what of it is the target's and need not be written.

    Raises:
        CheckpointError: when `token_ids` do not ascend or do not fit the lm_head or the target.
    """
    if token_ids is not None:
        check_token_ids(f"{path}: token_ids", token_ids, len(target.lm_head.weight))  # type: ignore[arg-type]
        if len(token_ids) != model.lm_head.out_features or (token_ids.diff() <= 0).any():
            raise CheckpointError(
                f"{path}: {len(token_ids)} token ids for {model.lm_head.out_features} lm_head rows; give one for each "
                f"row, ascending."
            )
    reasons = (f"EAGLE-{model.form.version}, trained here",)
    ids = None if token_ids is None else token_ids.to(torch.int64).cpu()
    return EagleHead(path, model, "official", reasons, ids, tuple(shares), target.fingerprint)


def own_tensors(head: EagleHead) -> dict[str, torch.Tensor]:
    """By state-dict name, what a head does not share with its target."""
    shared = tuple({"embedding": "embed_tokens.", "lm_head": "lm_head."}[part] for part in head.shares)
    return {name: tensor for name, tensor in head.model.state_dict().items() if not name.startswith(shared)}


def _fingerprint(head: EagleHead) -> str:
    """sha256 over form, sizes and rope, draft vocabulary, and name, shape and float32 bytes of its own tensors."""
    config = head.model.config
    facts = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters")
    about = {"form": asdict(head.form), **{name: getattr(config, name) for name in facts}}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    digest.update(b"" if head.token_ids is None else head.token_ids.contiguous().numpy().tobytes())
    for name, tensor in sorted(own_tensors(head).items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


# ---- reading ----


def read_eagle(path: Path, target: Source | None, *, norms: Mapping[str, bool] | None = None) -> EagleHead:
    """Load a head in any layout of `eagle_layouts` and check that it fits `target`.

    Args:
        target: None only looks at the head: what needs a target is neither checked nor filled in.
        norms: by a name of `OPEN_NORMS`, what the head's maker says; counts before what config.json says.

    Raises:
        CheckpointError: when there is no head, a file is damaged, holds code, lacks tensors or has unknown ones, does
            not fit its config or the target, or leaves open a norm that `norms` does not name.
    """
    reader = Reader(path, target, dict(norms or {}))
    model, token_ids, shares = reader.read()
    return EagleHead(
        path,
        model,
        reader.layout,
        tuple(reader.reasons),
        token_ids,
        shares,
        reader.target_fingerprint,
        taps_known=all(tap >= 0 for tap in model.form.taps),
        warnings=tuple(reader.warnings),
    )


# ---- writing ----


def write_eagle(head: EagleHead, folder: Path, layout: str = "official", dtype: str = "fp16") -> None:
    """Write `model.safetensors` and `config.json`, less what the head shares with its target.

    Args:
        layout: "official" or "speculators".
        dtype: "fp16" or "int8", see `tensors.pack`.

    Raises:
        CheckpointError: for an unknown layout or dtype, a weight too large for it, or a head that the layout cannot
            hold.
    """
    if layout not in LAYOUTS_WRITTEN:
        raise CheckpointError(f"{head.path}: layout '{layout}' is unknown; use one of {', '.join(LAYOUTS_WRITTEN)}.")
    if not head.taps_known:
        raise CheckpointError(f"{head.path}: was read without its target, so its taps are unknown; read it with one.")
    speculators = layout == "speculators"
    if speculators and head.version == 1:
        _check_old_form(head)
    own = {_written_name(name, head, speculators): tensor for name, tensor in own_tensors(head).items()}
    tensors = pack(str(head.path), own, dtype)
    if head.token_ids is not None:
        ids = head.token_ids
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.model.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    config = _speculators_config(head) if speculators else _official_config(head)
    config[CONFIG_KEY] = {
        "target_fingerprint": head.target_fingerprint,
        "taps": list(head.form.taps),
        "shares": list(head.shares),
        "form": _unusual(replace(head.form, taps=())),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _check_old_form(head: EagleHead) -> None:
    norms = (head.form.embedding_norm, head.form.input_norm, head.form.output_norm)
    more = len(set(norms)) > 1 or head.form.feature_norm or head.form.taps or head.layers > 1
    if more or head.token_ids is not None:
        raise CheckpointError(
            f"{head.path}: speculators' form of EAGLE-1 has one layer, embedding, input and output norm all three or "
            f"none, no fused features and no draft vocabulary; write this head in the official layout."
        )


def _written_name(name: str, head: EagleHead, speculators: bool) -> str:
    if head.version == 3 and head.layers > 1 and name.startswith("layers."):
        return name if speculators else f"midlayer.{name.removeprefix('layers.')}"
    official, *others = spellings(name, head.version)
    return others[0] if speculators and others else official


def _unusual(form: EagleForm) -> dict[str, Any]:
    plain = asdict(EagleForm(form.version))
    return {name: value for name, value in asdict(form).items() if value != plain[name]}


def _layer_sizes(head: EagleHead) -> dict[str, Any]:
    config = head.model.config
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size"),
    )
    rope = {key: value for key, value in config.rope_parameters.items() if key not in ("rope_theta", "rope_type")}
    kind = config.rope_parameters["rope_type"]
    return {
        "model_type": "qwen3" if head.form.query_norm else "llama",
        **{name: getattr(config, name) for name in names},
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if kind == "default" else {"type": kind, "rope_type": kind, **rope},
        "attention_bias": head.model.layers[0].self_attn.q_proj.bias is not None,
        "mlp_bias": head.model.layers[0].mlp.gate_proj.bias is not None,
        "tie_word_embeddings": False,
    }


def _norms_written(form: EagleForm) -> dict[str, bool]:
    return {
        "norm_before_residual": form.norm_before_residual,
        "norm_output": form.norm_output,
        "fc_norm": form.fusion_norm == "each",
        "norm_before_fc": form.fusion_norm == "whole",
    }


def _official_config(head: EagleHead) -> dict[str, Any]:
    sizes = {"architectures": ["LlamaForCausalLM"], **_layer_sizes(head), "torch_dtype": "float16"}
    if head.version == 1:
        return {**sizes, "bias": head.model.fc.bias is not None, "qkv_bias": sizes["attention_bias"]}
    return {
        **sizes,
        "draft_vocab_size": head.draft_vocabulary,
        "target_hidden_size": head.target_width,
        "eagle_aux_hidden_state_layer_ids": list(head.form.taps),
        **_norms_written(head.form),
    }


def _speculators_config(head: EagleHead) -> dict[str, Any]:
    algorithm = "eagle3" if head.version == 3 else "eagle"
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config: dict[str, Any] = {
        "speculators_model_type": algorithm,
        "architectures": ["Eagle3Speculator" if head.version == 3 else "EagleSpeculator"],
        "transformer_layer_config": _layer_sizes(head),
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
    if head.version == 1:
        layer = {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": head.form.embedding_norm}
        return {**config, **layer, "fusion_bias": head.model.fc.bias is not None}
    return {
        **config,
        "draft_vocab_size": head.draft_vocabulary,
        "target_hidden_size": head.target_width,
        "eagle_aux_hidden_state_layer_ids": list(head.form.taps),
        **_norms_written(head.form),
    }


__all__ = ["OPEN_NORMS", "EagleHead", "looks_like_eagle", "make_head", "own_tensors", "read_eagle", "write_eagle"]
