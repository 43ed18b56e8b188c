"""EAGLE heads trained on what the target said, as they will be used: on their own states.

`conversations` hold greedy answers and, for every answer token, the post-norm hidden state that chose it, which makes
the soft labels: `lm_head(features)` are the target's own logits. What a head reads is cached beside them, for every
position of prompt and answer (`make_features`).

Training-time test (EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE `eagle/traineagle3/cnets.py`): after a first pass on the
target's features, the head goes over the same text again, one token further on and on the states that it gave out
itself, `unroll` passes in all. In pass s row i stands for a node s levels below position i: it attends to the first
pass up to its own row (true features), and from every later pass only to its own row (its ancestors and itself). The
loss is the divergence from the target over the draft vocabulary, `decay` times less with every pass.

Version 1 may add EAGLE-1's own loss (arXiv 2401.15077): SmoothL1 between what the lm_head would read and what it reads
in the target, channels scaled to unit size; and noise on the features.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad, scaled_dot_product_attention, smooth_l1_loss
from transformers import LlamaConfig, Qwen3Config

from speccompile.compiler.checkpoint import Source
from speccompile.compiler.draft_model import DraftModel, cut_lm_head, cut_model
from speccompile.compiler.eagle_head import EagleHead, make_head
from speccompile.compiler.eagle_layouts import SHAREABLE
from speccompile.graphs.attention import foreign_attention
from speccompile.graphs.eagle import EagleForm, EagleModel
from speccompile.graphs.errors import CheckpointError
from speccompile.graphs.single_ops import probe_rms_norm
from speccompile.graphs.target import decoder_layers, tapping
from speccompile.tools.training.checkpoint import product_dtype
from speccompile.tools.training.conversations import Conversation, read_shard, shard_paths
from speccompile.tools.training.draft import LENGTH_STEP, SOFTENINGS, final_norm, logits_of, shuffle
from speccompile.tools.training.medusa import DataSummary, is_held_out, schedule, survey
from speccompile.tools.training.steps import RelativeSteps, relative_size

CHECKPOINT_FILE = "eagle-training.pt"
FEATURE_BATCH = 16
CHUNK = 256  # answer tokens whose logits exist at once, in every pass
FEATURE_GAIN = 16.0
LARGEST_FP16 = 65504.0
MEASURED_DEPTH = 8
MISSED = 1 << 32  # a rank: the true token is outside the draft vocabulary
UNKNOWN = -1  # a rank: the answer does not reach so far back
STARTS = ("first", "last")


@dataclass(frozen=True)
class Settings:
    """What decides the result, besides the shards. `batch` is in conversations, `lr` a share of a tensor's size.

    Args:
        version: 1 or 3, see `graphs.eagle`.
        layers: of the head. Behind a trunk (a draft model given as `init`), the trunk's own last layer is the one that
            the features join before.
        start: which of the target's layers the head's start as: "first" or "last".
        unroll: passes of training-time test; 1 is none.
        decay: weight of a pass, from one to the next.
        feature_loss: weight of SmoothL1 on features.
        noise: largest uniform noise on a stream, as a share of its root mean square.
    """

    version: int = 3
    layers: int = 1
    start: str = "first"
    draft_vocabulary: int = 8192
    epochs: int = 3
    lr: float = 1e-2
    batch: int = 8
    unroll: int = 3
    decay: float = 0.8
    feature_loss: float = 0.0
    noise: float = 0.0
    seed: int = 0


def default_taps(layers: int) -> tuple[int, ...]:
    """The three streams that EAGLE-3 reads: entering layers 2, L/2 and L-3 (SafeAILab/EAGLE `modeling_llama_kv.py`);
    those that there are where a target has less than seven layers."""
    return tuple(sorted({2, layers // 2, layers - 3} & set(range(layers + 1))))


# ---- features ----


def make_features(
    source: Source,
    shards: Path,
    folder: Path,
    taps: Sequence[int],
    device: str = "cpu",
    report: Callable[[int, int], None] = lambda done, shards: None,
) -> None:
    """Run the target over all conversations; one file of features in `folder` for every shard. What is there stays.

    Args:
        taps: streams to keep; none keeps the post-norm hidden state.
        report: called with the number of shards done and of all.

    Raises:
        CheckpointError: when `folder` holds features of another target or other taps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = shard_paths(shards)
    model = source.model.to(device)
    for number, path in enumerate(paths):
        report(number, len(paths))
        if (file := folder / path.name).exists():
            _check_features(file, source, taps)
            continue
        items = read_shard(path)
        order = sorted(range(len(items)), key=lambda index: _rows(items[index]))
        features: dict[int, torch.Tensor] = {}
        for start in range(0, len(order), FEATURE_BATCH):
            chosen = order[start : start + FEATURE_BATCH]
            for index, kept in zip(chosen, _run_target(model, [items[i] for i in chosen], taps), strict=True):
                features[index] = kept
        partial = file.with_suffix(".partial")
        save_file({"features": torch.cat([features[i] for i in range(len(items))])}, partial, _made_of(source, taps))
        partial.rename(file)
    source.model.cpu()


def _rows(item: Conversation) -> int:
    """Positions that a conversation has features for: all but the last answer token's."""
    return len(item.prompt) + len(item.answer) - 1


def _run_target(model: Any, items: Sequence[Conversation], taps: Sequence[int]) -> list[torch.Tensor]:
    lengths = [_rows(item) for item in items]
    ids = torch.zeros(FEATURE_BATCH, -(-max(lengths) // LENGTH_STEP) * LENGTH_STEP, dtype=torch.int64)
    for row, item in zip(ids, items, strict=False):  # always as many rows, for the sake of LENGTH_STEP
        row[: _rows(item)] = torch.from_numpy(np.concatenate([item.prompt, item.answer[:-1]]))
    seen: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(args[0])
        return (args[0][:1, :1],)  # logits are not wanted

    dtype = product_dtype(model.device.type)
    hook = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        with (
            torch.no_grad(),
            torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32),
            tapping(model, taps) as streams,
        ):
            model(input_ids=ids.to(model.device), use_cache=False)
            found = torch.cat([streams[tap] for tap in taps] or seen, -1)
    finally:
        hook.remove()
    # What is beyond float16 is a sink token's channel or two: cut off, they still say that they are huge.
    found = found.float().clamp(-LARGEST_FP16, LARGEST_FP16).half().cpu()
    return [row[:length] for row, length in zip(found, lengths, strict=False)]


def _made_of(source: Source, taps: Sequence[int]) -> dict[str, str]:
    return {"target": source.fingerprint, "taps": " ".join(map(str, taps))}


def _check_features(file: Path, source: Source, taps: Sequence[int]) -> None:
    try:
        with safe_open(file, "pt") as opened:
            found = opened.metadata() or {}
    except Exception as error:
        raise _no_features(file, error) from error
    for key, value in _made_of(source, taps).items():
        if found.get(key) != value:
            raise CheckpointError(
                f"{file}: features with {key} '{found.get(key)}', this run wants '{value}'; delete the folder or give "
                "another --work."
            )


def _no_features(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: no features ({error}); delete it and make them again.")


# ---- data ----

Item = tuple[Conversation, torch.Tensor]
"""A conversation and its features, float16 [rows,F]."""


@dataclass(frozen=True)
class Batch:
    """Conversations side by side, padded on the right: padding never reaches the rows of a causal model's answer.

    Args:
        ids: int64 [B,T+unroll-1], the token behind each row's own position, and those that later passes need.
        features: float32 [B,T,F].
        rows: int64 [unroll,N]: for every pass and answer token the flat row (of B*T) that guesses it: one row earlier
            for each pass. -1 where a short prompt has none.
        answers: int64 [N], those tokens.
        labels: float16 [N,F]: the target's post-norm hidden states that chose them.
    """

    ids: torch.Tensor
    features: torch.Tensor
    rows: torch.Tensor
    answers: torch.Tensor
    labels: torch.Tensor


def make_batch(items: Sequence[Item], unroll: int) -> Batch:
    """Conversations as one batch."""
    length = -(-max(len(features) for _, features in items) // LENGTH_STEP) * LENGTH_STEP
    ids = torch.zeros(len(items), length + unroll - 1, dtype=torch.int64)
    features = torch.zeros(len(items), length, items[0][1].shape[1])
    rows = []
    for row, (item, own) in enumerate(items):
        text = np.concatenate([item.prompt, item.answer])
        ids[row, : len(text) - 1] = torch.from_numpy(text[1:])
        features[row, : len(own)] = own
        # Row i reads token i + 1 and guesses token i + 2, s tokens later in pass s.
        guesses = len(item.prompt) + np.arange(len(item.answer)) - 2 - np.arange(unroll)[:, None]
        rows.append(np.where(guesses >= 0, row * length + guesses, -1))
    return Batch(
        ids,
        features,
        torch.from_numpy(np.concatenate(rows, 1)),
        torch.from_numpy(np.concatenate([item.answer for item, _ in items])).long(),
        torch.from_numpy(np.concatenate([item.features for item, _ in items])),
    )


def read_side(path: Path, features: Path, held_out: bool) -> list[Item]:
    """The training or the held-out conversations of one shard, with their features.

    Raises:
        CheckpointError: when there are no features for them.
    """
    items, file = read_shard(path), features / path.name
    try:
        stored = load_file(file)["features"]
    except Exception as error:
        raise _no_features(file, error) from error
    ends = np.cumsum([_rows(item) for item in items])
    if ends[-1] != len(stored):
        raise CheckpointError(f"{file}: {len(stored)} rows, but {path} has {ends[-1]}; delete it and make them again.")
    pairs = zip(items, torch.tensor_split(stored, ends[:-1].tolist()), strict=True)
    return [(item, own) for item, own in pairs if is_held_out(item) == held_out]


def shuffled_batches(paths: Sequence[Path], features: Path, batch: int, seed: int, epoch: int) -> Iterator[list[Item]]:
    """Training conversations of one epoch, those of about one length together; as in `draft.shuffled_batches`."""
    return shuffle(
        paths, lambda path: read_side(path, features, held_out=False), lambda pair: len(pair[1]), batch, seed, epoch
    )


# ---- model ----


class PassAttention:
    """Attention of training-time test (see the module): the first pass is causal; a later one sees the first up to its
    own row, and its own row in those between."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_options: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        passes = self._seen.setdefault(module.layer_idx, [])
        passes.append((key, value))
        first_key, first_value = passes[0]
        if len(passes) == 1:
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
            return out.transpose(1, 2), None
        count = query.shape[2]
        scores = (query @ first_key.mT).float().masked_fill(_later(count, query.device), float("-inf"))
        own = torch.stack([(query * past).float().sum(-1) for past, _ in passes[1:]], -1)
        weights = (torch.cat((scores, own), -1) * scaling).softmax(-1).to(query.dtype)
        out = weights[..., :count] @ first_value
        for place, (_, past) in enumerate(passes[1:], count):
            out = out + weights[..., place : place + 1] * past
        return out.transpose(1, 2), None


def _later(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(count, count, dtype=torch.bool, device=device).triu(1)


def unrolled(model: EagleModel, ids: torch.Tensor, features: torch.Tensor, passes: int) -> list[torch.Tensor]:
    """What the lm_head reads [B,T,H] in each pass.

    Args:
        ids: int64 [B,T+passes-1], see `Batch`.
        features: [B,T,H], already fused.
    """
    length = features.shape[1]
    states = []
    with foreign_attention(model, PassAttention()):
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        words, (cos, sin) = model.read(ids, positions, attention_mask=None)
        state = features
        for start in range(passes):
            window = slice(start, start + length)
            rotary = cos[:, window], sin[:, window]
            state = model.advance(words[:, window], state, rotary, attention_mask=None)
            states.append(model.norm(state))
            state = states[-1] if model.form.norm_output else state
    return states


def check_settings(
    settings: Settings, source: Source, taps: Sequence[int], init: EagleHead | DraftModel | None = None
) -> None:
    """Refuse what cannot be trained, before hours of making data.

    Raises:
        CheckpointError: naming the setting, its value and what fits.
    """
    count = source.model.config.get_text_config().num_hidden_layers
    if settings.version not in (1, 3):
        raise CheckpointError(f"version: {settings.version} is unknown; use 1 (EAGLE-1 and EAGLE-2) or 3.")
    if settings.start not in STARTS:
        raise CheckpointError(f"start: '{settings.start}' is unknown; use one of {', '.join(STARTS)}.")
    if init is None and not 1 <= settings.layers < count:
        raise CheckpointError(
            f"layers: {settings.layers} asked for; a head takes 1 .. {count - 1} of this target's {count}."
        )
    if settings.unroll < 1:
        raise CheckpointError(f"unroll: {settings.unroll} passes asked for; use 1 or more.")
    if settings.epochs < 1:
        raise CheckpointError(f"epochs: {settings.epochs} asked for; use 1 or more.")
    for name, value in (("feature_loss", settings.feature_loss), ("noise", settings.noise)):
        if not 0 <= value < float("inf"):
            raise CheckpointError(f"{name}: {value} asked for; use 0 (none) or more.")
    if list(taps) != sorted(set(taps)) or (taps and not 0 <= taps[0] <= taps[-1] <= count):
        raise CheckpointError(
            f"taps: {list(taps)}; expected different layers, ascending, out of the target's 0 .. {count}."
        )
    if settings.version == 3 and not taps:
        raise CheckpointError("taps: version 3 reads streams of the target; name at least one layer.")
    if isinstance(init, DraftModel) and (settings.version != 1 or not init.taken):
        raise CheckpointError(
            f"{init.path}: only a version 1 head can stand on a draft model, and only on one that was cut out of its "
            "target (`train draft`)."
        )
    if not isinstance(init, EagleHead):
        _check_layer(decoder_layers(source.model)[0])
        rope = getattr(source.model.config.get_text_config(), "rope_parameters", None) or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise CheckpointError("head: the target's layers differ in their rope settings; a head has one for all.")
    if isinstance(init, EagleHead) and (init.version != settings.version or init.form.taps != tuple(taps)):
        raise CheckpointError(
            f"{init.path}: a version {init.version} head on layers {list(init.form.taps)} cannot start a version "
            f"{settings.version} head on {list(taps)}; give the same."
        )
    if isinstance(init, EagleHead) and settings.feature_loss and "lm_head" not in init.shares:
        raise CheckpointError(
            f"{init.path}: its lm_head is its own and reads no feature of the target; set feature_loss to 0."
        )


def new_head(
    source: Source, data: DataSummary, settings: Settings, taps: Sequence[int], trunk: DraftModel | None = None
) -> EagleModel:
    """A head to start from: the target's embedding and lm_head rows (frozen), layers of the target or of a draft model.

    Version 3 is EAGLE-3 with a norm on every stream. Version 1 has norms wherever it can: targets differ in the size of
    their channels by a factor of a hundred, and steps relative to a tensor's size need channels of about one.

    Raises:
        CheckpointError: for settings that do not fit, or a target whose layers are not a Llama's.
    """
    check_settings(settings, source, taps, trunk)
    config = source.model.config.get_text_config()
    layers = settings.layers if trunk is None else trunk.layers
    form = (
        EagleForm(3, tuple(taps), fusion_norm="each")
        if settings.version == 3
        else EagleForm(
            1,
            tuple(taps),
            fusion_norm="each" if taps else "none",
            join=0 if trunk is None else layers - 1,
            embedding_norm=trunk is None,
            feature_norm=True,
            input_norm=True,
            output_norm=True,
        )
    )
    given = decoder_layers(source.model if trunk is None else trunk.model)
    chosen = list(given)[:layers] if trunk is not None or settings.start == "first" else list(given)[-layers:]
    form = replace(form, query_norm=hasattr(chosen[0].self_attn, "q_norm"))
    biases = [
        f"layers.{index}.{name}"
        for index, like in enumerate(chosen)
        for name in _MATRICES
        if like.get_submodule(name).bias is not None
    ]
    # A wide first layer has to carry the whole token through its values, so version 3 shares none between heads.
    heads = config.num_attention_heads
    kv_heads = heads if settings.version == 3 else getattr(config, "num_key_value_heads", None) or heads
    own = (Qwen3Config if form.query_norm else LlamaConfig)(
        vocab_size=len(source.model.get_input_embeddings().weight),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_act=getattr(config, "hidden_act", "silu"),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=getattr(config, "rope_parameters", None),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=False,
    )
    torch.manual_seed(settings.seed)
    model = EagleModel(own, form, config.hidden_size, len(data.token_ids), biases)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
        model.embed_tokens.weight.copy_(source.model.get_input_embeddings().weight)
        model.lm_head.weight.copy_(source.lm_head.weight[data.token_ids])  # type: ignore[index]
        model.norm.weight.copy_(_scale(final_norm(source.model)))  # type: ignore[operator]
        for layer, like in zip(model.layers, chosen, strict=True):
            _copy_layer(layer, like)
        if form.version == 1 and trunk is not None:
            width = config.hidden_size
            model.fc.weight.copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), 1))
            # The identity makes `fc` large and its steps with it small where features enter: let those be larger.
            model.feature_norm.weight.fill_(FEATURE_GAIN)  # type: ignore[operator]
            model.norm.weight.copy_(_scale(final_norm(trunk.model)))  # type: ignore[operator]
    return model


_MATRICES = (*(f"mlp.{name}_proj" for name in ("gate", "up", "down")), *(f"self_attn.{name}_proj" for name in "qkvo"))
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QUERY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def _check_layer(like: torch.nn.Module) -> None:
    held = {name.rpartition(".")[0] for name, _ in like.named_parameters()}
    for what, names in (("no", {*_MATRICES, *_NORMS} - held), ("a", held - {*_MATRICES, *_NORMS, *_QUERY_NORMS})):
        if names:
            raise CheckpointError(
                f"head: the target's layers are not like a Llama's ({what} '{min(names)}'); it cannot start as them."
            )


def _scale(norm: Any) -> torch.Tensor:
    """What an RMS norm multiplies with; Gemma stores it less one."""
    probed = probe_rms_norm(norm)
    scale: torch.Tensor = norm.weight if probed is None else probed[0]
    return scale


def _copy_layer(layer: Any, like: Any) -> None:
    """Give a head's layer the weights of a Llama layer; a wide one reads the embedding as that layer would, and at
    first little of the feature. Key and value heads are repeated where the head shares none."""
    for name in (*_NORMS, *(_QUERY_NORMS if hasattr(like.self_attn, "q_norm") else ())):
        layer.get_submodule(name).weight.copy_(_scale(like.get_submodule(name)))
    for name in _MATRICES:
        ours, theirs = layer.get_submodule(name).weight, like.get_submodule(name).weight
        if (bias := like.get_submodule(name).bias) is not None:
            own = layer.get_submodule(name).bias
            size = len(bias) if len(own) == len(bias) else layer.self_attn.head_dim
            own.copy_(bias.unflatten(0, (-1, size)).repeat_interleave(len(own) // len(bias), 0).flatten())
        if name.startswith("mlp.") or name.endswith(".o_proj"):
            ours.copy_(theirs)
            continue
        theirs = theirs.unflatten(0, (-1, layer.self_attn.head_dim))
        theirs = theirs.repeat_interleave(ours.shape[0] // theirs.shape[:2].numel(), 0).flatten(0, 1)
        ours[:, : theirs.shape[1]] = theirs
        ours[:, theirs.shape[1] :] *= 0.1 * relative_size(theirs) / relative_size(ours)


# ---- training ----


def train_eagle(
    shards: Path,
    features: Path,
    source: Source,
    taps: Sequence[int],
    *,
    work: Path,
    settings: Settings = Settings(),
    init: EagleHead | DraftModel | None = None,
    device: str = "cpu",
    checkpoint_seconds: float = 60.0,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> tuple[EagleHead, dict[str, Any]]:
    """Train a head on the shards of a folder and their features.

    Killed and called again with the same arguments, it goes on from its last checkpoint and ends with the same
    weights as a run that was left alone.

    Args:
        features: folder that `make_features` filled with `taps`.
        work: folder for the checkpoint.
        init: a head to go on from, or a draft model of the same target to stand on (version 1).
        device: "cpu" or "cuda".
        checkpoint_seconds: time between checkpoints.
        report: called after each step with its number, the number of all steps and the loss of the first pass.

    Returns:
        the head, and a JSON-able report: settings, data, loss per epoch and pass, seconds.

    Raises:
        CheckpointError: for unusable shards, features or settings, or a checkpoint in `work` that others of them made.
    """
    paths = shard_paths(shards)
    if not paths:
        raise CheckpointError(f"{shards}: holds no conversations; make training data first.")
    began = time.monotonic()
    vocab_size = len(source.lm_head.weight)  # type: ignore[arg-type]
    chosen = None if init is None else init.token_ids
    if init is not None and chosen is None:
        chosen = torch.arange(vocab_size)
    data = survey(paths, vocab_size, settings.draft_vocabulary, chosen)
    width = source.lm_head.weight.shape[1]  # type: ignore[union-attr]
    if len(data.scale) != width:
        raise CheckpointError(f"{shards}: features have width {len(data.scale)}, the lm_head has {width}.")
    for path in paths:
        _check_features(features / path.name, source, taps)
    items = sum(len(read_side(path, features, held_out=False)) for path in paths)
    epoch_steps = items // settings.batch
    if not epoch_steps:
        raise CheckpointError(
            f"{shards}: {items} training conversations are less than one batch of {settings.batch}; make more data."
        )
    made_of = {
        "settings": asdict(settings),
        "taps": list(taps),
        "target_fingerprint": source.fingerprint,
        "init": init and init.fingerprint,
        "shards": {path.name: path.stat().st_size for path in paths},
    }
    if isinstance(init, EagleHead):
        check_settings(settings, source, taps, init)
        model = copy.deepcopy(init.model)
    else:
        model = new_head(source, data, settings, taps, init)
    training = Unrolling(model, source, data, settings, device)
    file = work / CHECKPOINT_FILE
    if not isinstance(init, EagleHead) and not file.exists():
        first = next(shuffled_batches(paths, features, settings.batch, settings.seed, 0))
        training.whiten(first)
        if init is None:  # a draft model has been softened before it was trained
            training.soften(make_batch(first, settings.unroll))
    training.resume(file, made_of)

    steps, saved = epoch_steps * settings.epochs, time.monotonic()
    for epoch in range(training.step // epoch_steps, settings.epochs):
        batches = shuffled_batches(paths, features, settings.batch, settings.seed, epoch)
        for number, side in enumerate(batches, epoch * epoch_steps):
            if number < training.step:
                continue  # done before the run was interrupted
            losses = training.update(make_batch(side, settings.unroll), settings.lr * schedule(number, steps))
            report(training.step, steps, losses[0])
            if time.monotonic() - saved >= checkpoint_seconds:
                training.save(file, made_of)
                saved = time.monotonic()
        training.save(file, made_of)

    model = model.cpu().eval().requires_grad_(False)
    token_ids = None if len(data.token_ids) == vocab_size else data.token_ids
    shares = init.shares if isinstance(init, EagleHead) else SHAREABLE
    head = make_head(source.path, model, source, token_ids, shares)
    losses = np.array(training.losses).reshape(settings.epochs, epoch_steps, settings.unroll).mean(1)
    used = replace(settings, layers=head.layers, draft_vocabulary=head.draft_vocabulary)  # `init` may have its own
    return head, {
        "settings": asdict(used),
        "form": {**asdict(model.form), "taps": list(taps)},
        "training_tokens": data.training,
        "held_out_tokens": data.held_out,
        "coverage": data.coverage,
        "loss": losses.tolist(),
        "training_dtype": str(training.dtype).removeprefix("torch."),
        "seconds": time.monotonic() - began,
    }


class Unrolling(RelativeSteps[list[float]]):
    """A head in training; a step's losses are those of its passes. Embedding and lm_head stay as they are."""

    def __init__(self, model: EagleModel, source: Source, data: DataSummary, settings: Settings, device: str) -> None:
        self.model, self.settings = model.to(device), settings
        self.token_ids = data.token_ids
        self.known = torch.zeros(len(source.lm_head.weight), dtype=torch.bool)  # type: ignore[arg-type]
        self.known[data.token_ids] = True
        self.scale = data.scale.to(device)
        self.target = cut_model(source, [0]).model  # its end is wanted: lm_head, soft-caps, scales
        cut_lm_head(self.target, data.token_ids)
        self.target.to(device)
        model.requires_grad_(True)
        for shared in (model.embed_tokens, model.lm_head):
            shared.requires_grad_(False)
        super().__init__({name: weight for name, weight in model.named_parameters() if weight.requires_grad}, device)

    def whiten(self, items: Sequence[Item]) -> None:
        """Set the norms that meet the target's streams so that every channel comes out at about unit size."""
        if self.model.form.fusion_norm != "each":
            return
        rows = torch.cat([own for _, own in items]).float().to(self.device)
        streams = rows.chunk(len(self.model.form.taps), -1)
        with torch.no_grad():
            for norm, stream in zip(self.model.fusion.fc_norm, streams, strict=True):
                unit = stream * stream.square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
                # The median row: a sink token's would hide all others.
                norm.weight.copy_(1 / unit.abs().median(0).values.clamp_min(0.02))
        self.measure_sizes()

    def soften(self, batch: Batch) -> float:
        """Multiply the last norm by the one of SOFTENINGS with which the loss is least; return it (see
        `draft.Distillation.soften`)."""
        weight: Any = getattr(self.model.norm, "weight", None)
        if weight is None:
            return 1.0
        start = weight.detach().clone()

        def loss(factor: float) -> float:
            with torch.no_grad():
                weight.copy_(start * factor)
                with self.autocast():
                    states = self.states(batch)
                return float(self.compare(states, batch)[0].sum())

        best = min(SOFTENINGS, key=loss)
        with torch.no_grad():
            weight.copy_(start * best)
        self.measure_sizes()
        return best

    def states(self, batch: Batch) -> torch.Tensor:
        """[unroll,N,H]: what the lm_head reads where the answer tokens are guessed, in each pass."""
        features = batch.features.to(self.device)
        streams = features.chunk(max(len(self.model.form.taps), 1), -1)
        if self.settings.noise:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
            noise = (torch.rand(features.shape, generator=generator) * 2 - 1).to(self.device) * self.settings.noise
            streams = tuple(
                stream + part * stream.square().mean(-1, keepdim=True).sqrt()
                for stream, part in zip(streams, noise.chunk(len(streams), -1), strict=True)
            )
        passes = unrolled(self.model, batch.ids.to(self.device), self.model.features(streams), self.settings.unroll)
        rows = batch.rows.to(self.device)
        # Where there is no row (-1) the last one stands: it counts nowhere.
        return torch.stack([states.flatten(0, 1)[own] for own, states in zip(rows, passes, strict=True)])

    def compare(self, states: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean divergence from the target in each pass [unroll], and the gradient of their weighted sum by `states`.

        The logits are the largest tensors of the training: a chunk of answer tokens at a time (zeros fill the last, see
        LENGTH_STEP), the target's once for all passes; the gradient of a softmax is written out, because passes over
        logits are what time is spent on.
        """
        passes, count = states.shape[:2]
        counted = self.known[batch.answers] & (batch.rows >= 0)
        missing = -count % CHUNK
        share = pad(counted / counted.sum(1, keepdim=True).clamp_min(1), (0, missing)).to(self.device)
        labels = pad(batch.labels, (0, 0, 0, missing)).to(self.device).float()
        decay = self.settings.decay ** torch.arange(passes, device=self.device, dtype=torch.float32)
        rows = self.model.lm_head.weight.to(self.dtype)
        gradients, losses = [], torch.zeros(passes, device=self.device)
        for part, weights, given in zip(
            pad(states, (0, 0, 0, missing)).to(self.dtype).split(CHUNK, 1),
            share.split(CHUNK, 1),
            labels.split(CHUNK),
            strict=True,
        ):
            with torch.no_grad(), self.autocast():
                theirs = logits_of(self.target, given).log_softmax(-1)
            wanted = theirs.exp()
            ours = (part.flatten(0, 1) @ rows.mT).float().log_softmax(-1).unflatten(0, (passes, -1))
            losses += ((wanted * (theirs - ours)).sum(-1) * weights).sum(-1)
            change = ours.exp_().sub_(wanted).mul_((weights * decay[:, None])[..., None])
            gradients.append((change.to(self.dtype).flatten(0, 1) @ rows).float().unflatten(0, (passes, -1)))
        return losses, torch.cat(gradients, 1)[:, :count]

    def feature_distance(self, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """SmoothL1 between `states` [unroll,N,H] and the target's, channels scaled to unit size; the mean over all."""
        wanted = (batch.labels.to(self.device).float() / self.scale).expand_as(states)
        there = (batch.rows >= 0).to(self.device)
        return smooth_l1_loss((states / self.scale)[there], wanted[there])

    def update(self, batch: Batch, rate: float) -> list[float]:
        """One step, in which each tensor moves by about `rate` of its size.

        Returns:
            the divergence of each pass before it, in nats.
        """
        self.begin(rate)
        with self.autocast():
            states = self.states(batch)
        leaf = states.detach().float().requires_grad_(bool(self.settings.feature_loss))
        losses, gradient = self.compare(leaf.detach(), batch)
        if self.settings.feature_loss:
            (self.feature_distance(leaf, batch) * self.settings.feature_loss).backward()
            assert leaf.grad is not None
            gradient = gradient + leaf.grad
        states.backward(gradient.to(states.dtype))
        return self.finish(losses.tolist())


# ---- measuring ----


def measure(
    head: EagleHead, shards: Path, features: Path, *, depth: int = MEASURED_DEPTH, batch: int = 16
) -> npt.NDArray[np.int64]:
    """int64 [depth,N]: rank of the true token among the head's guesses, for every held-out answer token (but the first
    of an answer, which is never drafted), guessed right behind the target's features and up to `depth` - 1 levels below
    them. MISSED outside the draft vocabulary, UNKNOWN where that would have to start in the prompt. In float32, as the
    runtime has it."""
    model, vocabulary = head.model, head.token_ids
    ids = torch.arange(len(model.lm_head.weight)) if vocabulary is None else vocabulary
    found = [np.zeros((depth, 0), np.int64)]
    for path in shard_paths(shards):
        items = sorted(read_side(path, features, held_out=True), key=lambda pair: len(pair[1]))
        for start in range(0, len(items), batch):
            side = items[start : start + batch]
            data = make_batch(side, depth)
            places = torch.cat([torch.arange(len(item.answer)) for item, _ in side])
            columns = torch.searchsorted(ids, data.answers).clamp_max(len(ids) - 1)
            known = ids[columns] == data.answers
            with torch.no_grad():
                streams = data.features.chunk(max(len(model.form.taps), 1), -1)
                passes = unrolled(model, data.ids, model.features(streams), depth)
                ranks = [
                    _ranks(model.lm_head, states.flatten(0, 1)[rows], columns)
                    .masked_fill(~known, MISSED)
                    .masked_fill(places <= level, UNKNOWN)
                    for level, (rows, states) in enumerate(zip(data.rows, passes, strict=True))
                ]
            found.append(torch.stack(ranks)[:, places > 0].numpy())
    return np.concatenate(found, 1)


def _ranks(lm_head: torch.nn.Module, states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int64 [N]: how many logits are larger than that of `columns` [N], for what the lm_head reads [N,H]."""
    ranks = []
    for part, own in zip(states.split(CHUNK), columns.split(CHUNK), strict=True):
        logits = lm_head(part)
        ranks.append((logits > logits.gather(1, own[:, None])).sum(-1))
    return torch.cat(ranks)


def figures(ranks: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Held-out figures of `measure`, JSON-able.

    Returns:
        `agreement`, `top3`, `top10`: how often the true token is among the first so many guesses right behind the
        target's own features; `by_depth`: the first guess, that many levels below them.
    """
    first = ranks[0]
    return {
        "positions": len(first),
        "agreement": float((first == 0).mean()),
        "top3": float((first < 3).mean()),
        "top10": float((first < 10).mean()),
        "by_depth": [float((row == 0).sum() / max((row != UNKNOWN).sum(), 1)) for row in ranks],
    }
