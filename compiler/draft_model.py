"""Draft models: a small model of its own, or layers cut out of the target; reading, checking, writing.

A draft model on disk is either any model `checkpoint.read_model` reads, or the slim form that `train draft` makes:

    config.json        the transformers config of the small model, and under "speccompile_draft":
                       target_fingerprint, layers (indices in the target) and shares (["embedding", "lm_head"])
    model.safetensors  its tensors under their transformers names, less the shared ones, which are the target's;
                       fp16, or matrices as int8 with `NAME.scale` float32 [..., 1] (one per row of the last axis);
                       optionally token_map int64 [Vd], ascending: the target ids that it drafts

The slim form has no tokenizer: token ids are the target's. A model of its own must have the target's tokenizer.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from speccompile.compiler.checkpoint import Source, read_model
from speccompile.compiler.tensors import check_finite, check_packing, pack, read_file, unpack
from speccompile.graphs.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
CONFIG_KEY = "speccompile_draft"
SHARES = ["embedding", "lm_head"]
TOKEN_MAP = "token_map"

# Where tokenizers with equal vocabularies still differ: splitting, spaces, digits, normal forms, rare scripts.
SAMPLE_TEXTS = (
    "The quick brown fox doesn't jump over 12 lazy dogs; it'll cost $1,234.50 (20% off)!",
    "  two  spaces,\ttabs\t\tand\n\n\nnew lines  \r\n  ",
    "def f(x):\n    return {'a': [x**2, 0x1F, 3.14e-10]}  # comment",
    "don't DON'T we'Ve I\u2019m",
    "1234567890 3,141,592 2024-02-29",
    "caf\u00e9 cafe\u0301 \ufb01ne \u00bd \u212b",  # composed and decomposed forms
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \u200b\u00a0|",
)


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts for a target, float32, in eval mode, with eager attention.

    Args:
        path: where it was read, or the target's path for one cut out of it.
        model: the transformers model, with its whole lm_head; what it shares is the target's memory.
        fingerprint: sha256 of its own weights as float32 and of `token_ids`.
        token_ids: int64 [Vd], target ids of the lm_head rows that may be drafted, ascending; None when the rows are
            the target's whole vocabulary.
        taken: the target's layers that it was cut out of; empty for a model of its own.
        target_fingerprint: the target it was made for, if it names one.
        warnings: sentences about what looks odd.
    """

    path: Path
    model: Any
    fingerprint: str
    token_ids: torch.Tensor | None
    taken: tuple[int, ...] = ()
    target_fingerprint: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @property
    def layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def max_length(self) -> int | None:
        """Positions the model knows; None when its positions have no limit."""
        config = self.model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


# ---- reading ----


def read_draft(path: Path, target: Source) -> DraftModel:
    """Load a draft model and check that it can draft for `target`.

    No id outside the target's vocabulary is ever drafted, and every id of the target can be fed: a wider vocabulary
    (padding, mostly) loses its last lm_head rows through `token_ids`, a narrower embedding gets rows of zeros.

    Raises:
        CheckpointError: when it cannot be read, was made for another target, does not fit its width or vocabulary,
            or has another tokenizer.
    """
    about = _slim_part(path)
    draft = _read_whole(path, target) if about is None else _read_slim(path, about, target)
    own, theirs = (sum(p.numel() for p in model.parameters()) for model in (draft.model, target.model))
    if own < theirs:
        return draft
    sentence = f"{path}: the draft model has {own:,} parameters and the target {theirs:,}; drafting with it cannot pay."
    return replace(draft, warnings=(*draft.warnings, sentence))


def slim_facts(path: Path) -> dict[str, Any] | None:
    """What a slim draft's config says of it, as JSON; None when `path` is something else.

    Raises:
        CheckpointError: when it is one, but of another version.
    """
    about = _slim_part(path)
    if about is None:
        return None
    config = json.loads((path / "config.json").read_text("utf-8"))
    facts = {name: config.get(name) for name in ("architectures", "hidden_size", "vocab_size")}
    return {**facts, **{name: about.get(name) for name in ("layers", "shares", "target_fingerprint")}}


def _slim_part(path: Path) -> dict[str, Any] | None:
    """What config.json says under CONFIG_KEY; None for a model of its own, or for what `read_model` will refuse."""
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    about = config.get(CONFIG_KEY) if isinstance(config, dict) else None
    if about is None:
        return None
    layers = about.get("layers") if isinstance(about, dict) else None
    if not isinstance(layers, list) or not layers or not all(type(index) is int for index in layers):
        raise CheckpointError(f"{path}/config.json: {CONFIG_KEY} lists no layers; write the draft model again.")
    if about.get("shares") != SHARES:
        raise CheckpointError(
            f"{path}/config.json: {CONFIG_KEY} shares {about.get('shares')}; this version reads drafts that share "
            f"{SHARES} with their target."
        )
    return about


def _read_whole(path: Path, target: Source) -> DraftModel:
    source = read_model(path)
    compare_tokenizers(target, source)
    wanted, own = len(target.lm_head.weight), len(source.lm_head.weight)  # type: ignore[arg-type]
    embedding = source.model.get_input_embeddings()
    if len(embedding.weight) < wanted:
        padding = embedding.weight.new_zeros(wanted - len(embedding.weight), embedding.weight.shape[1])
        embedding.weight = nn.Parameter(torch.cat([embedding.weight.detach(), padding]), requires_grad=False)
        embedding.num_embeddings = wanted
    token_ids = None if own == wanted else torch.arange(min(own, wanted))
    return DraftModel(path, source.model, source.fingerprint, token_ids)


def _read_slim(path: Path, about: Mapping[str, Any], target: Source) -> DraftModel:
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        delattr(config, CONFIG_KEY)
    except Exception as error:  # transformers raises many kinds for one mistake
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")
        raise CheckpointError(f"{path}: not a draft model transformers knows ({reason}).") from error
    layers = config.get_text_config().num_hidden_layers
    if layers != len(about["layers"]):
        raise CheckpointError(
            f"{path}/config.json: num_hidden_layers is {layers} but {CONFIG_KEY} lists {len(about['layers'])} layers; "
            f"write the draft model again."
        )
    skeleton = _skeleton(config)
    names = shared_names(skeleton)
    shared = _shared_tensors(target)
    expected = skeleton.state_dict()
    for name in names:
        own, theirs = list(expected[name].shape), list(shared[name].shape) if name in shared else None
        if own != theirs:
            raise CheckpointError(
                f"{path}: the draft model's {name} would be {own} but the target's, which it shares, is {theirs}; "
                f"use a draft model made for this target."
            )
    if about.get("target_fingerprint") != target.fingerprint:
        raise CheckpointError(
            f"{path}: the draft model was made for the target with fingerprint {about.get('target_fingerprint')} but "
            f"this target's is {target.fingerprint}; use the model it was trained on, or train a new draft."
        )
    tensors = _read_tensors(path / WEIGHTS_FILE)
    token_ids = tensors.pop(TOKEN_MAP, None)
    if token_ids is not None:
        _check_token_map(path / WEIGHTS_FILE, token_ids, len(target.lm_head.weight))  # type: ignore[arg-type]
    wanted = {name: tensor for name, tensor in expected.items() if name not in names}
    _check_tensors(path / WEIGHTS_FILE, tensors, wanted)
    return _assemble(path, config, tensors, token_ids, about["layers"], target)


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a slim draft as float32 (token_map as it is), int8 matrices multiplied by their scales."""
    stored = read_file(file, list)
    return {name: tensor if name == TOKEN_MAP else tensor.float() for name, tensor in unpack(file, stored).items()}


def _check_tensors(file: Path, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise CheckpointError(f"{file}: tensor '{name}' is missing; the draft is incomplete, fetch it again.")
        if name not in expected:
            raise CheckpointError(f"{file}: tensor '{name}' is none of this model's; config.json does not fit it.")
        if tensors[name].shape != expected[name].shape:
            raise CheckpointError(
                f"{file}: tensor '{name}' has shape {list(tensors[name].shape)} but config.json says "
                f"{list(expected[name].shape)}; the two do not belong together."
            )
        check_finite(file, name, tensors[name])


def _check_token_map(file: Path, token_ids: torch.Tensor, vocab_size: int) -> None:
    if token_ids.dtype != torch.int64 or token_ids.dim() != 1 or not len(token_ids):
        raise CheckpointError(
            f"{file}: token_map is {token_ids.dtype} {list(token_ids.shape)}; expected int64 [draft vocabulary]."
        )
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(outside):
        raise CheckpointError(
            f"{file}: token_map holds id {int(outside[0])}, outside the target's {vocab_size} tokens."
        )
    steps = token_ids.diff()
    if (steps <= 0).any():
        place = int((steps <= 0).nonzero()[0])
        first, second = token_ids[place : place + 2].tolist()
        problem = f"holds id {first} twice" if first == second else f"has id {second} after {first}"
        raise CheckpointError(f"{file}: token_map {problem}; target ids must ascend. Write the draft model again.")


# ---- what is shared ----


def shared_names(model: Any) -> tuple[str, ...]:
    """State-dict names of the input embedding and the lm_head: what a slim draft takes from its target."""
    shared = (model.get_input_embeddings(), model.get_output_embeddings())
    return tuple(
        f"{name}.{part}"
        for name, module in model.named_modules()
        if any(module is one for one in shared)
        for part, _ in module.named_parameters(recurse=False)
    )


def _shared_tensors(target: Source) -> dict[str, torch.Tensor]:
    return {name: target.model.get_parameter(name) for name in shared_names(target.model)}


def _skeleton(config: Any) -> Any:
    """The model of a config without memory for its weights."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        return kind(copy.deepcopy(config))


def _assemble(
    path: Path,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor | None,
    taken: Sequence[int],
    target: Source,
) -> DraftModel:
    """The model of `config` from its own `tensors` and what it shares with the target, which is not copied."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    shared = _shared_tensors(target)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict={**tensors, **{name: tensor.detach() for name, tensor in shared.items()}},
        dtype=torch.float32,
        attn_implementation="eager",
    )
    frozen = {id(tensor): nn.Parameter(tensor.detach(), requires_grad=False) for tensor in shared.values()}
    for name, tensor in shared.items():  # tied ones stay one parameter
        module, _, part = name.rpartition(".")
        setattr(model.get_submodule(module), part, frozen[id(tensor)])
    model.eval()
    return DraftModel(path, model, fingerprint_own(model, token_ids), token_ids, tuple(taken), target.fingerprint)


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """By state-dict name, the tensors a slim draft does not share with its target."""
    shared = shared_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in shared}


def fingerprint_own(model: Any, token_ids: torch.Tensor | None) -> str:
    """sha256 over the draft vocabulary and over name, shape and float32 bytes of what the draft does not share."""
    digest = hashlib.sha256(b"" if token_ids is None else token_ids.contiguous().numpy().tobytes())
    for name, tensor in sorted(own_tensors(model).items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().float().contiguous().numpy().data)
    return digest.hexdigest()


# ---- making ----


def cut_model(target: Source, taken: Sequence[int], token_ids: torch.Tensor | None = None) -> DraftModel:
    """A draft model of some of the target's layers (indices, ascending) between its embedding and its final norm.

    Layers and norm are copies; embedding and lm_head are the target's memory.

    Raises:
        CheckpointError: for layers that the target does not have, or an architecture whose layers cannot be found.
    """
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config()
    count = text.num_hidden_layers
    if not taken or list(taken) != sorted(set(taken)) or not 0 <= taken[0] <= taken[-1] < count:
        raise CheckpointError(
            f"{target.path}: layers {list(taken)} cannot be taken; give different ones, ascending, out of 0 .. "
            f"{count - 1}."
        )
    stacks = [
        name
        for name, module in target.model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not stacks:
        raise CheckpointError(f"{target.path}: {target.architecture} keeps its layers in no list of {count}.")
    for name, value in text.to_dict().items():  # such as layer_types: what the config says layer by layer
        if isinstance(value, list) and len(value) == count and "layer" in name:
            setattr(text, name, [value[index] for index in taken])
    text.num_hidden_layers = len(taken)
    place = {str(index): new for new, index in enumerate(taken)}
    stem = f"{stacks[0]}."  # the outermost one
    shared = shared_names(target.model)
    tensors = {}
    for name, tensor in target.model.state_dict().items():
        if name.startswith(stem):
            index, _, rest = name.removeprefix(stem).partition(".")
            if index in place:
                tensors[f"{stem}{place[index]}.{rest}"] = tensor.clone()
        elif name not in shared:
            tensors[name] = tensor.clone()
    return _assemble(target.path, config, tensors, token_ids, taken, target)


def cut_lm_head(model: Any, token_ids: torch.Tensor) -> None:
    """Give `model` an lm_head of only the rows `token_ids` (int64 [Vd]); an embedding tied to the old one stays."""
    head = model.get_output_embeddings()
    cut = nn.Linear(head.weight.shape[1], len(token_ids), head.bias is not None, device="meta")
    cut.weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
    set_lm_head(model, cut)


def set_lm_head(model: Any, head: nn.Module) -> None:
    """Put `head` in the place of the model's lm_head."""
    old = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is old)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, head)


# ---- comparing tokenizers ----


def compare_tokenizers(target: Source, draft: Source) -> None:
    """Check that both models mean the same by every token id and cut texts alike.

    Id by id, added tokens included; padding of the models' vocabularies is no matter. Equal vocabularies may still
    split texts differently (merges, normalizer, pre-tokenizer), and a draft model that never saw such splits drafts
    badly. Files of one tokenizer differ in form from version to version, so that is tested by what both do with
    `SAMPLE_TEXTS` and with every added token. Special tokens a tokenizer adds by itself and ends of text may differ:
    the target's are used.

    Raises:
        CheckpointError: naming the first id or the text where they differ.
    """
    ours, theirs = ({index: token for token, index in s.tokenizer.get_vocab().items()} for s in (target, draft))
    if ours != theirs:
        first = min(index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index))
        raise CheckpointError(
            f"{draft.path}: another tokenizer than the target's: token {first} is {_shown(theirs.get(first))} in the "
            f"draft model and {_shown(ours.get(first))} in the target; use a draft model with the target's tokenizer, "
            f"or make one with `speccompile train draft`."
        )
    added = " a".join(sorted(target.tokenizer.get_added_vocab()))
    for text in (*SAMPLE_TEXTS, added):
        ids, other = (s.tokenizer.encode(text, add_special_tokens=False) for s in (target, draft))
        if ids != other:
            place = next(_differences(ids, other))
            raise CheckpointError(
                f"{draft.path}: another tokenizer than the target's: the tokens have the same ids, but {text[:40]!r} "
                f"becomes {other[place : place + 3]} from its token {place} on in the draft model and "
                f"{ids[place : place + 3]} in the target; use a draft model with the target's tokenizer."
            )


def _differences(first: Sequence[int], second: Sequence[int]) -> Iterator[int]:
    for place in range(max(len(first), len(second))):
        if list(first[place : place + 1]) != list(second[place : place + 1]):
            yield place


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)


# ---- writing ----


def check_dtype(dtype: str) -> None:
    """Refuse what `write_draft` cannot write, before hours of training.

    Raises:
        CheckpointError: for an unknown dtype.
    """
    check_packing("draft model", dtype)


def write_draft(draft: DraftModel, folder: Path, dtype: str = "fp16") -> None:
    """Write a draft cut out of its target in the slim form (see the module).

    Args:
        dtype: "fp16" or "int8", see `tensors.pack`.

    Raises:
        CheckpointError: when a weight is too large for its dtype.
    """
    packed = pack("draft model", own_tensors(draft.model), dtype)
    if draft.token_ids is not None:
        packed[TOKEN_MAP] = draft.token_ids.to(torch.int64).contiguous()
    about = {"target_fingerprint": draft.target_fingerprint, "layers": list(draft.taken), "shares": SHARES}
    config = json.loads(draft.model.config.to_json_string(use_diff=True)) | {CONFIG_KEY: about}
    config["architectures"] = [draft.architecture]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(packed, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


__all__ = [
    "DraftModel",
    "check_dtype",
    "compare_tokenizers",
    "cut_lm_head",
    "cut_model",
    "fingerprint_own",
    "own_tensors",
    "read_draft",
    "set_lm_head",
    "shared_names",
    "write_draft",
]
