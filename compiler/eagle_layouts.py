"""The public layouts of EAGLE heads: what a folder holds, told by its tensors first and by config.json second.

    speculators_model_type in config.json      vllm-project/speculators: "eagle3", or the older "eagle" for version 1
    midlayer.*, or layers.0.hidden_norm.weight version 3
    fc.weight [H, 2H]                          version 1 (EAGLE-1 and EAGLE-2, whose heads are the same)

    layout             tensors (version 1: embedding, feature, input and output norm where they are there)
    official           fc, layers.0.*; version 3: fc, midlayer.*, norm, lm_head, d2t, t2d (SafeAILab/EAGLE `cnets*.py`)
    HASS               version 1 + embed_layernorm, hidden_layernorm, lm_head_layernorm
    SpecForge          version 3 as official + fc_norm.{i} (sgl-project/SpecForge `llama3_eagle.py`)
    ModelOpt           version 1 + enorm, hnorm, layers.{i}.input_layernorm, norm, d2t, lm_head; version 3 as official,
                       d2t without t2d, deeper ones midlayer.{i}.* (NVIDIA ModelOpt `export/plugins/`)
    speculators        version 3 with layers.{i}.*, + input_norm or fc_norm.{i} (`models/eagle3/`)
    speculators-eagle1 fusion_fc, transformer.*, embedding_layernorm, pre_lm_head_layernorm (`convert/eagle/`)

Biases and norms are used where the file holds them; when config.json denies one the file still counts, with a warning.
A norm that config.json promises must be there. `norm_before_residual` and `norm_output` change no tensor, so where a
writer's config leaves one open it has to be named (`OPEN_NORMS`).

Captured layers: official and speculators count what enters layer j, SpecForge and ModelOpt what leaves it; here they
are what enters. Without a list they are 2, L//2, L-3 of the target's L layers for every writer.

`d2t` holds offsets: target id = draft id + d2t[draft id]. Our token ids ascend: of equal logits the lowest comes first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speccompile.compiler.checkpoint import Source
from speccompile.compiler.tensors import check_finite, check_token_ids, float32, read_file, read_json, unpack
from speccompile.graphs.eagle import EagleForm, EagleModel
from speccompile.graphs.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
CANDIDATE_FILES = (
    "model.safetensors.index.json",
    WEIGHTS_FILE,
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
CONFIG_KEY = "speccompile_eagle"
SHAREABLE = ("embedding", "lm_head")
OPEN_NORMS = ("norm_before_residual", "norm_output")
DEFAULT_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# Layers of these types are Llama's, or Qwen3's where there are query norms. EAGLE's "mixtral" has a dense MLP.
MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")

TAP_KEY = "eagle_aux_hidden_state_layer_ids"
_OUTPUT_IDS = ("SpecForge", "ModelOpt")  # layouts whose layer ids name outputs
_SPECULATORS = {"eagle": "speculators-eagle1", "eagle3": "speculators"}
_MODELOPT_SWITCHES = ("use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm")
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\..*|verifier_(norm|lm_head)\.weight")
_LAYER = re.compile(r"(?:layers|midlayer)\.(\d+)\.")
_LINEAR = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)

# Of one of our names, what the layouts call it: official first, speculators second, then the others.
_SPELLINGS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "embedding_norm.": ("embed_layernorm.", "embedding_layernorm.", "enorm."),
        "feature_norm.": ("hnorm.",),
        "norm.": ("lm_head_layernorm.", "pre_lm_head_layernorm.", "norm."),
        "fc.": ("fc.", "fusion_fc."),
        "layers.0.input_layernorm.": (
            "layers.0.input_layernorm.",
            "transformer.input_layernorm.",
            "hidden_layernorm.",
        ),
        "layers.0.": ("layers.0.", "transformer."),
    },
    3: {"fusion.": ("",), "layers.0.": ("midlayer.", "layers.0.", "midlayer.0.")},
}


def spellings(name: str, version: int) -> tuple[str, ...]:
    for prefix, others in _SPELLINGS[version].items():
        if name.startswith(prefix):
            return tuple(other + name.removeprefix(prefix) for other in others)
    return (
        (f"midlayer.{name.removeprefix('layers.')}", name) if version == 3 and name.startswith("layers.") else (name,)
    )


def looks_like_eagle(path: Path) -> bool:
    """Whether a folder is for `read_eagle` to read or to refuse; by its config and the names of its tensors."""
    try:
        config = read_json(path / "config.json")
        if CONFIG_KEY in config or "speculators_model_type" in config:
            return True
        file = _weights_file(path)
        return file is not None and any(_telling(name) for name in _names(file))
    except CheckpointError:
        return False  # whatever it is, others will say what is wrong with it


def _weights_file(path: Path) -> Path | None:
    return next((path / name for name in CANDIDATE_FILES if (path / name).is_file()), None)


def _names(file: Path) -> list[str]:
    seen: list[str] = []

    def look(names: Iterable[str]) -> list[str]:
        seen.extend(names)
        return []

    read_file(file, look)
    return seen


def _telling(name: str) -> bool:
    return name.startswith(("midlayer.", "fusion_fc.")) or name in ("fc.weight", "layers.0.hidden_norm.weight")


class Reader:
    """One reading of one folder: what it holds, what was decided about it and why."""

    def __init__(self, path: Path, target: Source | None, norms: dict[str, bool]) -> None:
        self.path, self.target, self.norms = path, target, norms
        file = _weights_file(path)
        if file is None:
            raise CheckpointError(f"{path}: no EAGLE head found; expected one of {', '.join(CANDIDATE_FILES)}.")
        self.file, self.config_file = file, path / "config.json"
        self.config = read_json(self.config_file)
        if not self.config:
            raise CheckpointError(f"{self.config_file}: missing or empty; an EAGLE head needs its sizes from there.")
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.raw = {name: value for name, value in read_file(file, list).items() if not _HARMLESS.fullmatch(name)}
        self.about: dict[str, Any] = self._part(self.config, CONFIG_KEY)
        self.eagle_config = self._part(self.config, "eagle_config")
        self.version, self.layout = self._recognise()
        speculators = self.layout.startswith("speculators")
        self.sizes = self._part(self.config, "transformer_layer_config") if speculators else self.config
        self.map_ids, self.map_mask = (self.raw.pop(name, None) for name in ("d2t", "t2d"))
        self.raw = unpack(file, self.raw)

    def read(self) -> tuple[EagleModel, torch.Tensor | None, tuple[str, ...]]:
        """The head (float32, eval, frozen), target ids of its lm_head's rows, and what of it is the target's."""
        self._check_fingerprint()
        width = self._rows("fc.weight" if self.version == 1 else "fusion.fc.weight")
        layers = self._layers()
        shares = self._shares()
        vocabulary = self._vocabulary()
        ids, order = self._token_ids(vocabulary, None if "lm_head" in shares else self._rows("lm_head.weight"))
        rows = len(order) if order is not None else self._target_rows(vocabulary)
        target_width = self._target_width(width)
        form = self._form(target_width)
        config = self._layer_config(width, layers, vocabulary, form)
        biases = [name for name in self._linear(layers) if self._find(f"{name}.bias") is not None]
        self._check_biases(biases)
        if "lm_head" in shares and self.target is not None and self.target.lm_head.bias is not None:
            biases.append("lm_head")
        with torch.device("meta"):
            model = EagleModel(config, form, target_width, rows, biases)
        model.rotary_emb = LlamaRotaryEmbedding(config)
        own = self._take(model, shares)
        if order is not None:
            own |= {name: own[name][order] for name in own if name.startswith("lm_head.")}
        model.load_state_dict(own, strict=False, assign=True)
        if self.target is not None:
            self._fill(model, self.target, ids, shares)
        if not self.target_fingerprint:
            self.warnings.append(
                f"{self.path}: the head does not say which weights it was trained on; a wrong target shows only as low "
                f"acceptance."
            )
        return model.requires_grad_(False).eval(), ids, shares

    # -- what it is --

    def _recognise(self) -> tuple[int, str]:
        names, fc = self.raw, self.raw.get("fc.weight")
        if "speculators_model_type" in self.config:
            kind = self.config["speculators_model_type"]
            if kind not in _SPECULATORS:
                raise CheckpointError(
                    f"{self.config_file}: speculators_model_type is {kind!r}; heads that can be read are "
                    f"{' and '.join(map(repr, _SPECULATORS))}."
                )
            version, reason = (3 if kind == "eagle3" else 1), f"config.json has speculators_model_type {kind!r}"
            self.reasons.append(f"EAGLE-{version}, speculators: {reason}")
            return version, _SPECULATORS[kind]
        telling = sorted(
            name for name in names if name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight"
        )
        if telling:
            version, reason = 3, f"there is a tensor '{telling[0]}'"
        elif fc is not None and fc.dim() == 2 and fc.shape[1] == 2 * fc.shape[0]:
            version, reason = 1, f"fc.weight is {list(fc.shape)}, [H, 2H], and there is no hidden_norm"
        elif fc is not None and fc.dim() == 2:
            version, reason = 3, f"fc.weight is {list(fc.shape)}, not [H, 2H]"
        else:
            raise CheckpointError(
                f"{self.file}: no EAGLE head: neither 'midlayer.*' nor an fc.weight among its {len(names)} tensors."
            )
        self.reasons.append(f"EAGLE-{version}: {reason}")
        layout, reason = self._writer(version)
        self.reasons.append(f"layout {layout}: {reason}")
        return version, layout

    def _writer(self, version: int) -> tuple[str, str]:
        if CONFIG_KEY in self.config:
            return "official", f"config.json has {CONFIG_KEY}"
        if switch := next((name for name in _MODELOPT_SWITCHES if name in self.eagle_config), None):
            return "ModelOpt", f"eagle_config has {switch}"
        if version == 3:
            if deep := next((name for name in sorted(self.raw) if re.match(r"midlayer\.\d", name)), None):
                return "ModelOpt", f"there is a tensor '{deep}'"
            if "LlamaForCausalLMEagle3" in (self.config.get("architectures") or ()):
                return "SpecForge", "architectures names LlamaForCausalLMEagle3"
            if self.eagle_config:
                return "SpecForge", "config.json has eagle_config"
            return "official", "config.json names no other writer"
        for layout, telling in (
            ("HASS", ("embed_layernorm", "lm_head_layernorm", "hidden_layernorm")),
            ("ModelOpt", ("enorm", "hnorm", "layers.0.input_layernorm", "norm")),
        ):
            if norm := next((name for name in telling if f"{name}.weight" in self.raw), None):
                return layout, f"there is a tensor '{norm}.weight'"
        return "official", "there is no further norm"

    def _layers(self) -> int:
        held = 1 + max((int(match[1]) for name in self.raw if (match := _LAYER.match(name))), default=0)
        claimed = self._count(self.sizes, "num_hidden_layers", held)
        if claimed > held:
            raise CheckpointError(
                f"{self.file}: config.json says num_hidden_layers {claimed} but the file holds {held}; the file is "
                f"incomplete, or config.json belongs to another head."
            )
        if claimed < held:
            self.warnings.append(f"{self.file}: config.json says num_hidden_layers {claimed}, the file holds {held}.")
        return held

    # -- vocabulary --

    def _vocabulary(self) -> int:
        """Rows of the embedding: the target's vocabulary as the head knows it."""
        held = self._rows("embed_tokens.weight") if self._has("embed_tokens") else None
        said = self.sizes.get("vocab_size")
        if held is not None and isinstance(said, int) and held != said:
            self.warnings.append(
                f"{self.file}: config.json says vocab_size {said}, embed_tokens.weight has {held} rows."
            )
        mask = None if self.map_mask is None else self.map_mask.numel()
        size = held or self._count(self.sizes, "vocab_size", said or mask or self._target_rows(None))
        if self.target is None:
            return size
        ours = {len(self.target.model.get_input_embeddings().weight), self._target_rows(None)}
        if size not in ours:
            raise CheckpointError(
                f"{self.file}: the head is for a vocabulary of {size} tokens but the target has {min(ours)}; use a "
                f"head made for this model."
            )
        return len(self.target.model.get_input_embeddings().weight)

    def _target_rows(self, otherwise: int | None) -> int:
        """Rows of the target's lm_head."""
        if self.target is not None:
            return len(self.target.lm_head.weight)  # type: ignore[arg-type]
        if otherwise is None:
            raise CheckpointError(f"{self.config_file}: vocab_size is missing, and no tensor tells it.")
        return otherwise

    def _token_ids(self, vocabulary: int, rows: int | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Target ids of the lm_head's rows, ascending, and the order of its rows that makes them so.

        Args:
            rows: of an lm_head of its own.
        """
        whole, offsets = self._target_rows(vocabulary), self.map_ids
        said = self.sizes.get("draft_vocab_size", self.config.get("draft_vocab_size"))
        if offsets is None:
            held = rows if rows is not None else said if isinstance(said, int) and self.version == 3 else whole
            if held > whole:
                raise CheckpointError(
                    f"{self.file}: lm_head.weight has {held} rows but the target {whole} tokens; use a head made for "
                    f"this model."
                )
            if held < whole or (self.map_mask is not None and not self.map_mask.bool().all()):
                raise CheckpointError(
                    f"{self.file}: tensor 'd2t' is missing, though the head drafts {held} of {whole} tokens; without "
                    f"it draft ids cannot be mapped to the target's: fetch the head again."
                )
            return None, None
        name = f"{self.file}: d2t"
        if offsets.is_floating_point() or offsets.dtype == torch.bool or offsets.dim() != 1:
            raise CheckpointError(
                f"{name} is {offsets.dtype} {list(offsets.shape)}; expected int64 [draft vocabulary]."
            )
        if rows is not None and len(offsets) != rows:
            raise CheckpointError(f"{name} has {len(offsets)} entries but lm_head.weight has {rows} rows.")
        if isinstance(said, int) and said != len(offsets):
            self.warnings.append(
                f"{self.file}: config.json says draft_vocab_size {said}, d2t has {len(offsets)} entries."
            )
        ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
        check_token_ids(f"{name}, read as offsets (target id = draft id + d2t[draft id]),", ids, whole)
        if self.map_mask is not None:
            self._check_mask(ids, whole)
        order = ids.argsort()
        ids = ids[order]
        self.reasons.append(f"drafts {len(ids)} of {whole} tokens: there is a d2t")
        return (None if len(ids) == whole else ids), order

    def _check_mask(self, ids: torch.Tensor, whole: int) -> None:
        assert self.map_mask is not None
        mask = self.map_mask.bool()
        if mask.dim() != 1 or len(mask) != whole:
            raise CheckpointError(
                f"{self.file}: t2d is {list(mask.shape)} but the target has {whole} tokens; use a head made for this "
                f"model."
            )
        if int(mask.sum()) != len(ids) or not mask[ids].all():
            stray = ids[~mask[ids]]
            what = f"names target id {int(stray[0])}, which t2d lacks" if len(stray) else f"names {len(ids)} ids"
            raise CheckpointError(
                f"{self.file}: d2t {what}, t2d has {int(mask.sum())}; the two do not belong together: fetch the head "
                f"again."
            )

    # -- form --

    def _target_width(self, width: int) -> int:
        said = self.config.get("target_hidden_size")
        if self.target is None:
            if isinstance(said, int) and self.version == 3:
                return said
            given = self.about.get("taps") or self.eagle_config.get(TAP_KEY) or self.config.get(TAP_KEY) or (0, 0, 0)
            columns = int(self._tensor("fusion.fc.weight").shape[-1]) if self.version == 3 else width
            return columns // len(given) if self.version == 3 and isinstance(given, list | tuple) else width
        actual = int(self.target.model.config.get_text_config().hidden_size)
        wanted, what = (width, "hidden_size") if self.version == 1 else (said, "target_hidden_size")
        if wanted is not None and wanted != actual:
            raise CheckpointError(
                f"{self.file}: the head reads features of {what} {wanted} but the target's are {actual} wide; use a "
                f"head made for this model."
            )
        return actual

    def _form(self, target_width: int) -> EagleForm:
        query_norm = self._has("layers.0.self_attn.q_norm")
        if self.layout.startswith("speculators") and self.sizes.get("model_type") == "qwen3":
            query_norm = True
        if self.version == 1:
            for name in self.norms:
                raise CheckpointError(f"--norm {name}: this is an EAGLE-1 head, which leaves no norm open; drop it.")
            return EagleForm(
                1,
                self._taps(target_width) if self._has("fusion.fc") else (),
                join=self._join(),
                fusion_norm=self._fusion_norm() if self._has("fusion.fc") else "none",
                embedding_norm=self._norm("embedding_norm", "use_mtp_layernorm", "layernorms"),
                feature_norm=self._norm("feature_norm", "use_mtp_layernorm"),
                input_norm=self._norm("layers.0.input_layernorm", "use_input_layernorm_in_first_layer", "layernorms"),
                output_norm=self._norm("norm", "use_last_layernorm", "layernorms"),
                query_norm=query_norm,
            )
        fusion_norm = self._fusion_norm()
        return EagleForm(
            3,
            self._taps(target_width),
            fusion_norm=fusion_norm,
            query_norm=query_norm,
            **self._open_norms(fusion_norm == "each"),
        )

    def _fusion_norm(self) -> str:
        each, whole = self._norm("fusion.fc_norm.0", "fc_norm"), self._norm("fusion.input_norm", "norm_before_fc")
        if each and whole:
            raise CheckpointError(f"{self.file}: has both fc_norm and input_norm (norm_before_fc); a head has one.")
        return "each" if each else "whole" if whole else "none"

    def _join(self) -> int:
        """Layers before the features join; ours alone."""
        join = self._part(self.about, "form").get("join", 0)
        if type(join) is not int or not 0 <= join < self._layers():
            raise CheckpointError(
                f"{self.config_file}: {CONFIG_KEY}.form.join is {join!r}; expected one of the head's layers, 0 .. "
                f"{self._layers() - 1}."
            )
        return join

    def _claim(self, config: Mapping[str, Any], key: str) -> bool | None:
        value = config.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.config_file}: {key} is {value!r}; expected true or false.")
        return value

    def _norm(self, module: str, *switches: str) -> bool:
        """A norm is used when the file holds it, and must be there when a switch in config.json promises it."""
        held, config = self._has(module), {**self.config, **self.eagle_config}
        said = {switch: self._claim(config, switch) for switch in switches}
        if held and True not in said.values():
            name = self._find(f"{module}.weight")
            for switch in (switch for switch, value in said.items() if value is False):
                self.warnings.append(f"{self.config_file}: {switch} is false, but the file holds '{name}'; it is used.")
        return held or True in said.values()

    def _open_norms(self, each: bool) -> dict[str, bool]:
        """The norms that change no tensor: as named, else as config.json says, else as the writer always has it."""
        for name in self.norms:
            if name not in OPEN_NORMS:
                raise CheckpointError(
                    f"--norm {name}: not a norm that a head leaves open; those are {' and '.join(OPEN_NORMS)}, the "
                    f"others are told by the tensors."
                )
        why_open: dict[str, str] = {}
        if self.layout == "speculators":  # whose readers all take a missing norm_output for false
            why_open["norm_before_residual"] = "which vLLM takes for true and speculators for false"
        elif each:
            why_open["norm_output"] = "though the head has fc_norm, as EAGLE-3.1 heads with and without it have"
        form = self._part(self.about, "form")
        chosen = {}
        for name in OPEN_NORMS:
            said = self._claim({**self.config, **self.eagle_config, **form}, name)
            named = self.norms.get(name)
            if named is None and said is None and name in why_open:
                sentence = (
                    f"{self.config_file}: {name} is missing, {why_open[name]}, and the tensors do not tell; say "
                    f"--norm {name}=true or --norm {name}=false."
                )
                if self.target is not None:
                    raise CheckpointError(sentence)
                self.warnings.append(sentence)
            if named is not None and said is not None and named != said:
                self.warnings.append(
                    f"{self.config_file}: {name} is {json.dumps(said)}, the command line says {json.dumps(named)} and "
                    f"counts."
                )
            chosen[name] = bool(said if named is None else named)
            if named is not None or said is not None:
                source = "config.json" if named is None else "the command line"
                self.reasons.append(f"{name} {json.dumps(chosen[name])}: {source} says so")
        if self.layout == "SpecForge" and chosen["norm_output"] and "norm_output" not in self.norms:
            self.warnings.append(
                f"{self.config_file}: norm_output is true, which meant something else in SpecForge before September "
                f"2026 (PR 879); if acceptance is low, try --norm norm_output=false."
            )
        return chosen

    def _taps(self, target_width: int) -> tuple[int, ...]:
        """The target layers whose incoming stream is read."""
        key = TAP_KEY
        shift = int(self.layout in _OUTPUT_IDS)
        given, where = self.eagle_config.get(key) or self.config.get(key), key
        if self.about.get("taps"):
            given, where = self.about["taps"], f"{CONFIG_KEY}.taps"
        layers = None if self.target is None else int(self.target.model.config.get_text_config().num_hidden_layers)
        if not given:
            if layers is None:
                taps: tuple[int, ...] = (-1, -1, -1)
            else:
                taps = (2, layers // 2, layers - 3)
                if not 2 < layers // 2 < layers - 3:
                    raise CheckpointError(
                        f"{self.config_file}: {key} is missing, and 2, L//2, L-3 are no three layers of a target of "
                        f"{layers}; use a head made for this model."
                    )
            self.reasons.append("taps what enters layers 2, L//2, L-3 of the target's L: no list in config.json")
        else:
            if not isinstance(given, list) or not all(type(index) is int for index in given):
                raise CheckpointError(f"{self.config_file}: {where} is {given!r}; expected a list of layer numbers.")
            taps = tuple(index + shift for index in given)
            last = max(taps) if layers is None else layers
            if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > last:
                have = "" if layers is None else f", out of the target's {layers}"
                raise CheckpointError(
                    f"{self.config_file}: {where} is {given}; expected different layers, ascending{have}."
                )
            means = "leaves" if shift else "enters"
            self.reasons.append(f"taps what enters layers {list(taps)}: {where} is {given}, what {means} a layer")
        columns = self._tensor("fusion.fc.weight").shape[-1]
        if columns != len(taps) * target_width:
            raise CheckpointError(
                f"{self.file}: fc.weight reads {columns} numbers but {len(taps)} layers of a target {target_width} "
                f"wide make {len(taps) * target_width}; use a head made for this model."
            )
        return taps

    # -- sizes --

    def _layer_config(self, width: int, layers: int, vocabulary: int, form: EagleForm) -> Any:
        sizes, model_type = self.sizes, self.sizes.get("model_type")
        if model_type is not None and model_type not in MODEL_TYPES:
            raise CheckpointError(
                f"{self.config_file}: model_type '{model_type}' is not supported; heads have layers of "
                f"{', '.join(MODEL_TYPES)}."
            )
        if sizes.get("use_sliding_window") or "sliding_attention" in (sizes.get("layer_types") or ()):
            raise CheckpointError(f"{self.config_file}: heads with sliding-window attention are not supported.")
        activation = sizes.get("hidden_act", "silu")
        if activation not in ACT2FN:
            raise CheckpointError(f"{self.config_file}: hidden_act '{activation}' is unknown.")
        # speculators leaves out what is transformers' default.
        heads = self._count(sizes, "num_attention_heads", 32 if self.layout.startswith("speculators") else None)
        queries, keys = (self._rows(f"layers.0.self_attn.{name}_proj.weight") for name in "qk")
        head_dim = self._count(sizes, "head_dim", max(1, queries // heads))
        values: dict[str, Any] = {
            "vocab_size": vocabulary,
            "hidden_size": self._count(sizes, "hidden_size", width),
            "intermediate_size": self._count(sizes, "intermediate_size", self._rows("layers.0.mlp.gate_proj.weight")),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._count(sizes, "num_key_value_heads", max(1, keys // head_dim)),
            "head_dim": head_dim,
            "hidden_act": activation,
            "rms_norm_eps": sizes.get("rms_norm_eps", 1e-6),
            "max_position_embeddings": self._count(
                sizes, "max_position_embeddings", self._count(sizes, "max_sequence_length", 2048)
            ),
            "rope_parameters": self._rope(),
            "attention_bias": False,  # biases are added by name
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "attn_implementation": "eager",
        }
        try:
            config = (Qwen3Config if form.query_norm else LlamaConfig)(**values)
            LlamaRotaryEmbedding(config)
        except Exception as error:  # transformers raises many kinds for one mistake
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300].strip().rstrip(".")
            raise CheckpointError(f"{self.config_file}: not a usable layer ({reason}).") from error
        return config

    def _rope(self) -> dict[str, Any]:
        """The head's own rope, never the target's (transformers 5 keeps it under rope_parameters)."""
        sizes = self.sizes
        given = sizes.get("rope_parameters") or sizes.get("rope_scaling") or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise CheckpointError(f"{self.config_file}: rope settings {given!r} are of no known form.")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise CheckpointError(
                f"{self.config_file}: rope type '{kind}' is unknown; known are {', '.join(ROPE_TYPES)}."
            )
        if (part := given.get("partial_rotary_factor", sizes.get("partial_rotary_factor", 1.0))) != 1.0:
            raise CheckpointError(f"{self.config_file}: partial_rotary_factor is {part}; only 1.0 is supported.")
        theta = given.get("rope_theta", sizes.get("rope_theta"))
        if theta is None:
            theta = DEFAULT_THETA
            self.reasons.append(f"rope_theta {theta:g}: config.json has none")
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            raise CheckpointError(f"{self.config_file}: rope_theta is {theta!r}; expected a positive number.")
        named = {key: value for key, value in given.items() if key not in ("type", "partial_rotary_factor")}
        return {**named, "rope_type": kind, "rope_theta": float(theta)}

    def _linear(self, layers: int) -> list[str]:
        names = [f"layers.{index}.{name}" for index in range(layers) for name in _LINEAR]
        return ["fc" if self.version == 1 else "fusion.fc", *names, "lm_head"]

    def _check_biases(self, biases: Sequence[str]) -> None:
        """Biases are used where they are; one that config.json says something else of is worth a word."""
        for key, name in (
            ("bias", "fc"),
            ("fusion_bias", "fc"),
            ("qkv_bias", "layers.0.self_attn.q_proj"),
            ("attention_bias", "layers.0.self_attn.q_proj"),
            ("mlp_bias", "layers.0.mlp.gate_proj"),
        ):
            if key == "bias" and self.version == 3:
                continue
            said = self._claim({**self.config, **self.sizes}, key)
            if key == "bias" and self.layout == "official" and said is None:
                said = True  # what the official reader takes a missing one for
            if said is not None and said != (name in biases):
                holds = "holds" if name in biases else "has no"
                self.warnings.append(
                    f"{self.config_file}: {key} is {json.dumps(said)}, but the file {holds} '{name}.bias'; the file "
                    f"counts."
                )

    # -- tensors --

    def _take(self, model: EagleModel, shares: Sequence[str]) -> dict[str, torch.Tensor]:
        """The head's own tensors by our names, all of them and no others, in the shapes that config.json says."""
        own = {}
        left = set(self.raw)
        shared = {"embedding": "embed_tokens.", "lm_head": "lm_head."}
        for name, expected in model.state_dict().items():
            if any(name.startswith(shared[part]) for part in shares):
                continue
            key = self._find(name)
            if key is None:
                wanted = self._usual(name)
                raise CheckpointError(f"{self.file}: tensor '{wanted}' is missing; the head is incomplete.")
            left.remove(key)
            own[name] = float32(self.file, key, self.raw[key])
            if own[name].shape != expected.shape:
                raise CheckpointError(
                    f"{self.file}: tensor '{key}' has shape {list(own[name].shape)} but config.json makes it "
                    f"{list(expected.shape)}; the two do not belong together."
                )
            check_finite(self.file, key, own[name])
        if left:
            raise CheckpointError(f"{self.file}: tensor '{min(left)}' is in no known EAGLE-{self.version} layout.")
        return own

    def _fill(self, model: EagleModel, target: Source, ids: torch.Tensor | None, shares: Sequence[str]) -> None:
        embedding = target.model.get_input_embeddings().weight.detach()
        parts = {"embedding": ("embed_tokens", embedding), "lm_head": ("lm_head", target.lm_head.weight.detach())}
        for part in shares:
            name, weight = parts[part]
            if weight.shape[1] != model.feature_width:
                raise CheckpointError(
                    f"{self.file}: has no {name}.weight, and the target's is {list(weight.shape)} but the head is "
                    f"{model.feature_width} wide; use a head made for this model."
                )
            rows = ids if part == "lm_head" else None
            module = model.get_submodule(name)
            module.weight = nn.Parameter(weight if rows is None else weight[rows], requires_grad=False)
            if getattr(module, "bias", None) is not None:
                bias = target.lm_head.bias.detach()
                module.bias = nn.Parameter(bias if rows is None else bias[rows], requires_grad=False)

    def _find(self, name: str) -> str | None:
        """What the file calls one of our tensors."""
        return next((key for key in spellings(name, self.version) if key in self.raw), None)

    def _usual(self, name: str) -> str:
        """What the file would call it."""
        keys = spellings(name, self.version)
        used = {key.partition(".")[0] for key in self.raw}
        place = {"speculators-eagle1": 1, "ModelOpt": -1}.get(self.layout, 0)
        return next((key for key in keys if key.partition(".")[0] in used), keys[min(place, len(keys) - 1)])

    def _has(self, module: str) -> bool:
        return self._find(f"{module}.weight") is not None

    def _tensor(self, name: str) -> torch.Tensor:
        key = self._find(name)
        if key is None:
            raise CheckpointError(f"{self.file}: tensor '{self._usual(name)}' is missing; the head is incomplete.")
        return self.raw[key]

    def _rows(self, name: str) -> int:
        tensor = self._tensor(name)
        if not tensor.dim():
            raise CheckpointError(f"{self.file}: tensor '{self._find(name)}' is a single number; expected a matrix.")
        return len(tensor)

    # -- config.json --

    def _part(self, config: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{self.config_file}: {key} is {value!r}; expected an object.")
        return value or {}

    def _count(self, config: Mapping[str, Any], key: str, otherwise: int | None) -> int:
        value = config.get(key)
        if value is None:
            if otherwise is None:
                raise CheckpointError(f"{self.config_file}: {key} is missing.")
            return otherwise
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self.config_file}: {key} is {value!r}; expected a positive integer.")
        return value

    def _shares(self) -> tuple[str, ...]:
        """What the file lacks and the target has; version 3 has an lm_head of its own unless we wrote otherwise."""
        said = self.about.get("shares", [])
        if not isinstance(said, list) or not set(said) <= set(SHAREABLE):
            raise CheckpointError(
                f"{self.config_file}: {CONFIG_KEY}.shares is {said!r}; expected some of {', '.join(SHAREABLE)}."
            )
        shares = []
        for part, name in zip(SHAREABLE, ("embed_tokens.weight", "lm_head.weight"), strict=True):
            if self._find(name) is None and (part == "embedding" or self.version == 1 or part in said):
                shares.append(part)
                self.reasons.append(f"the {part} is the target's: the file has no {name}")
        return tuple(shares)

    @property
    def target_fingerprint(self) -> str | None:
        """The target that the head names."""
        said = self.about.get("target_fingerprint")
        if said is not None and not isinstance(said, str):
            raise CheckpointError(f"{self.config_file}: target_fingerprint is {said!r}; expected a string.")
        return said

    def _check_fingerprint(self) -> None:
        said = self.target_fingerprint
        if said and self.target is not None and said != self.target.fingerprint:
            raise CheckpointError(
                f"{self.path}: the head was made for the target with fingerprint {said} but this target's is "
                f"{self.target.fingerprint}; use the model it was trained on, or train a new head."
            )


__all__ = ["CONFIG_KEY", "OPEN_NORMS", "SHAREABLE", "WEIGHTS_FILE", "Reader", "looks_like_eagle", "spellings"]
