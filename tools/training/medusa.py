"""Medusa heads trained on what the target said, its weights frozen.

Features and answers come from `conversations`; head h at answer position j learns answer token j+1+h, since
`features[j]` is the hidden state that chose `answer[j]` and head h looks `head_offset(h)` past the state's own
token. Only answer tokens are ever labels. The loss is the sum over heads of 0.8^h times cross-entropy
(FasterDecoding/Medusa, train_legacy.py), through the target's own lm_head, cut down to the draft vocabulary.

Channels of a hidden state differ widely in size, so the blocks are trained in a scaled space, where every
input channel has unit RMS, and folded back on the way out: what is written is plain layout B.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy, silu

from speccompile.compiler.medusa_heads import MedusaHeads, head_offset
from speccompile.graphs.errors import CheckpointError
from speccompile.graphs.medusa import MedusaModule
from speccompile.tools.training import checkpoint as checkpoints
from speccompile.tools.training.checkpoint import product_dtype
from speccompile.tools.training.conversations import Conversation, read_shard, shard_paths

CHECKPOINT_FILE = "medusa-training.pt"
HELD_OUT_SHARE = 0.05
HEAD_DECAY = 0.8
WARM_UP = 0.05
GRADIENT_CLIP = 1.0
SHUFFLE_SHARDS = 6  # held in memory together, their positions mixed

NO_LABEL = -100  # cross_entropy's own mark for "do not count"
MISSED = 99  # a rank: the true token is outside the draft vocabulary, or worse than RANKS guesses
UNKNOWN = -1  # a rank: the answer ends before the token that this head predicts
RANKS = 10

Features = npt.NDArray[np.float16]
Ids = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Settings:
    """What decides the result, besides the shards. `batch` is in positions.

    `logit_scale` multiplies the logits before the softmax. Some targets (SmolLM2) have features and lm_head so
    large that a wrong guess costs tens of nats; a head, unlike the target, is often unsure, and learns much faster
    when it can say so. It ships with the heads, whose log-probabilities are honest only with it.
    """

    heads: int = 4
    layers: int = 1
    draft_vocabulary: int = 8192
    epochs: int = 3
    lr: float = 4e-3
    logit_scale: float = 0.4
    batch: int = 1024
    seed: int = 0


# ---- data ----


def is_held_out(item: Conversation) -> bool:
    """Whether a conversation is kept for measuring. Decided by its prompt, so that a question asked twice is
    never on both sides, and adding shards moves nothing."""
    return zlib.crc32(item.prompt.tobytes()) < HELD_OUT_SHARE * 2**32


def labels_of(answer: npt.NDArray[np.int32], heads: int) -> Ids:
    """int64 [N,heads]: the token each head has to predict at each position, NO_LABEL past the answer's end."""
    # head_offset counts from the position before answer[j], whose own next token is answer[j].
    shifts = [head_offset(head) - 1 for head in range(heads)]
    padded = np.concatenate([answer.astype(np.int64), np.full(max(shifts), NO_LABEL)])
    return np.stack([padded[shift : shift + len(answer)] for shift in shifts], axis=1)


def read_positions(path: Path, heads: int, held_out: bool) -> tuple[Features, Ids]:
    """Features [N,F] and labels [N,heads] of one shard's training or held-out conversations.

    Raises:
        CheckpointError: when the file is not a shard.
    """
    items = read_shard(path)
    kept = [item for item in items if is_held_out(item) == held_out]
    if not kept:
        return items[0].features[:0], np.zeros((0, heads), np.int64)
    labels = np.concatenate([labels_of(item.answer, heads) for item in kept])
    return np.concatenate([item.features for item in kept]), labels


def shuffled_batches(
    paths: Sequence[Path], heads: int, batch: int, seed: int, epoch: int
) -> Iterator[tuple[Features, Ids]]:
    """Training positions of one epoch: shards in random order, positions mixed across a few shards at a time.

    Every batch is full; what is left at the end (less than a batch) is dropped. The order depends on `seed` and
    `epoch` alone.
    """
    rng = np.random.default_rng([seed, epoch])
    order = [paths[index] for index in rng.permutation(len(paths))]
    rest: list[tuple[Features, Ids]] = []
    for start in range(0, len(order), SHUFFLE_SHARDS):
        window = [read_positions(path, heads, held_out=False) for path in order[start : start + SHUFFLE_SHARDS]]
        features, labels = (np.concatenate(parts) for parts in zip(*rest, *window, strict=True))
        mixed = rng.permutation(len(labels))
        full = len(mixed) - len(mixed) % batch
        for first in range(0, full, batch):
            rows = mixed[first : first + batch]
            yield features[rows], labels[rows]
        rest = [(features[mixed[full:]], labels[mixed[full:]])]


@dataclass(frozen=True)
class DataSummary:
    """What one pass over the shards finds.

    Args:
        training, held_out: positions.
        token_ids: int64 [Vd], the draft vocabulary, ascending.
        coverage: share of held-out answer tokens that are in it.
        scale: float32 [F], RMS of every feature channel.
    """

    training: int
    held_out: int
    token_ids: torch.Tensor
    coverage: float
    scale: torch.Tensor


def survey(
    paths: Sequence[Path], vocab_size: int, draft_vocabulary: int, token_ids: torch.Tensor | None = None
) -> DataSummary:
    """Count tokens, choose the draft vocabulary (unless `token_ids` gives it), measure the features.

    The most frequent answer tokens make the vocabulary; should there be too few, the most frequent prompt
    tokens follow, then low ids, which byte-pair encoders give to frequent pieces.

    Raises:
        CheckpointError: for shards without training or held-out conversations, an id outside the target's
            vocabulary, or a draft vocabulary that does not fit the target's.
    """
    if not 1 <= draft_vocabulary <= vocab_size:
        raise CheckpointError(f"draft vocabulary: {draft_vocabulary} tokens asked for, the target has {vocab_size}.")
    answers = {held_out: np.zeros(vocab_size, np.int64) for held_out in (False, True)}
    prompts = np.zeros(vocab_size, np.int64)
    squares: npt.NDArray[np.float64] | float = 0.0
    for path in paths:
        for item in read_shard(path):
            if max(item.answer.max(), item.prompt.max()) >= vocab_size:
                raise CheckpointError(
                    f"{path}: a token id is not among the target's {vocab_size}; the shard is another model's."
                )
            held_out = is_held_out(item)
            answers[held_out] += np.bincount(item.answer, minlength=vocab_size)
            if not held_out:
                prompts += np.bincount(item.prompt, minlength=vocab_size)
                squares = squares + np.square(item.features, dtype=np.float32).sum(0, dtype=np.float64)
    training, held_out_count = int(answers[False].sum()), int(answers[True].sum())
    if not training or not held_out_count:
        raise CheckpointError(
            f"shards: {training} training and {held_out_count} held-out positions; make more data, both are needed."
        )
    chosen = np.sort(np.lexsort((np.arange(vocab_size), -prompts, -answers[False]))[:draft_vocabulary])
    chosen = chosen if token_ids is None else token_ids.numpy()
    scale = torch.from_numpy(np.sqrt(np.asarray(squares) / training)).float().clamp_min(1e-3)
    coverage = float(answers[True][chosen].sum() / held_out_count)
    return DataSummary(training, held_out_count, torch.from_numpy(chosen), coverage, scale)


# ---- model ----


class ScaledBlocks(torch.nn.Module):
    """The residual blocks of all heads, as they are trained.

    A block of layout B is `y = x + SiLU(W x + b)`. Here `W = diag(scale) V diag(1/scale)` and
    `b = scale * c`: V meets channels of unit RMS and writes at the channels' own size, so one learning rate
    suits all of them. V starts near zero and c at zero: at first every head says what the lm_head says.

    Args:
        scale: float32 [F], RMS of every channel.
    """

    scale: torch.Tensor

    def __init__(self, heads: int, layers: int, scale: torch.Tensor, generator: torch.Generator) -> None:
        super().__init__()
        width = len(scale)
        start = torch.randn(layers, heads, width, width, generator=generator) * (0.1 / math.sqrt(width))
        self.weight = torch.nn.Parameter(start)  # V, transposed
        self.bias = torch.nn.Parameter(torch.zeros(layers, heads, 1, width))
        self.register_buffer("scale", scale.clone())

    def unfold(self, heads: MedusaHeads) -> None:
        """Start from heads of layout B: the inverse of `fold`."""
        with torch.no_grad():
            for head, blocks in enumerate(heads.blocks):
                for layer, (weight, bias) in enumerate(blocks):
                    self.weight[layer, head] = (weight * self.scale / self.scale[:, None]).T
                    self.bias[layer, head] = 0 if bias is None else bias / self.scale

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[N,F] -> [heads,N,F]: the states that meet the lm_head."""
        states = features.expand(self.weight.shape[1], *features.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            states = states + silu(self.scale * (torch.baddbmm(bias, states / self.scale, weight)))
        return states

    def fold(self) -> tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], ...]:
        """Per head, its blocks as the (W [F,F], b [F]) of layout B."""
        scale = self.scale.double()
        weights = (self.weight.detach().double() * scale / scale[:, None]).mT.float().cpu()
        biases = (self.bias.detach().double() * scale).float().squeeze(2).cpu()
        by_head = zip(weights.unbind(1), biases.unbind(1), strict=True)
        return tuple(tuple((weight.contiguous(), bias) for weight, bias in zip(*head, strict=True)) for head in by_head)


def heads_loss(states: torch.Tensor, labels: torch.Tensor, lm_head: torch.Tensor, bias: torch.Tensor | None) -> float:
    """Sum over heads of 0.8^h times cross-entropy; its gradient is left in `states.grad`.

    Args:
        states: float32 [heads,N,F], a leaf that requires a gradient.
        labels: int64 [N,heads], draft ids or NO_LABEL.
        lm_head: [Vd,F], in the dtype to multiply in.
        bias: float32 [Vd] or None.

    One head at a time, each freed before the next: the logits [N,Vd] are the largest tensors of the training.
    """
    total = 0.0
    for head, state in enumerate(states):
        logits = (state.to(lm_head.dtype) @ lm_head.T).float()
        logits = logits if bias is None else logits + bias
        wanted = labels[:, head]
        counted = (wanted != NO_LABEL).sum().clamp_min(1)  # a batch may have no label at all
        loss = cross_entropy(logits, wanted, ignore_index=NO_LABEL, reduction="sum") * (HEAD_DECAY**head / counted)
        loss.backward()
        total += loss.item()
    return total


# ---- training ----


def train_medusa(
    shards: Path,
    lm_head: torch.Tensor,
    *,
    work: Path,
    lm_head_bias: torch.Tensor | None = None,
    settings: Settings = Settings(),
    init: MedusaHeads | None = None,
    device: str = "cpu",
    target_fingerprint: str | None = None,
    base_model: str | None = None,
    checkpoint_seconds: float = 60.0,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> tuple[MedusaHeads, dict[str, Any]]:
    """Train heads on the feature shards of a folder.

    Killed and called again with the same arguments, it goes on from its last checkpoint and ends with the same
    weights as a run that was left alone.

    Args:
        shards: folder of `conversations`.
        lm_head: [V,F], the target's.
        work: folder for the checkpoint.
        init: heads to start from, with their draft vocabulary; they must use the target's lm_head.
        lm_head_bias: [V], the target's, if it has one.
        device: "cpu" or "cuda".
        checkpoint_seconds: time between checkpoints.
        report: called after each step with its number, the number of all steps and the loss.

    Returns:
        the heads, and a JSON-able report: settings, data, loss per epoch and the figures of `accuracy`.

    Raises:
        CheckpointError: for unusable shards, or a checkpoint in `work` that other settings or data made.
    """
    paths = shard_paths(shards)
    if not paths:
        raise CheckpointError(f"{shards}: holds no feature shards; make training data first.")
    began = time.monotonic()
    if init is not None:
        _check_init(init, settings)
    data = survey(paths, len(lm_head), settings.draft_vocabulary, None if init is None else init.token_map)
    if len(data.scale) != lm_head.shape[1]:
        raise CheckpointError(f"{shards}: features have width {len(data.scale)}, the lm_head has {lm_head.shape[1]}.")
    training = Training(settings, data, device)
    if init is not None:
        training.blocks.unfold(init)
    epoch_steps = data.training // settings.batch
    if not epoch_steps:
        raise CheckpointError(
            f"{shards}: {data.training} training positions are less than one batch of {settings.batch}; make more data."
        )
    made_of = {
        "settings": asdict(settings),
        "target_fingerprint": target_fingerprint,
        "init": init and init.fingerprint,
        "shards": {path.name: path.stat().st_size for path in paths},
    }
    checkpoint = work / CHECKPOINT_FILE
    training.resume(checkpoint, made_of)
    matrix = (settings.logit_scale * lm_head[data.token_ids]).to(device, product_dtype(device))
    bias = None if lm_head_bias is None else settings.logit_scale * lm_head_bias[data.token_ids].to(device).float()
    draft_id = torch.full((len(lm_head) + 1,), NO_LABEL)  # the last row serves NO_LABEL itself
    draft_id[data.token_ids] = torch.arange(len(data.token_ids))

    steps, saved = epoch_steps * settings.epochs, time.monotonic()
    for epoch in range(training.step // epoch_steps, settings.epochs):
        batches = shuffled_batches(paths, settings.heads, settings.batch, settings.seed, epoch)
        for number, (features, labels) in enumerate(batches, epoch * epoch_steps):
            if number < training.step:
                continue  # done before the run was interrupted
            draft_labels = draft_id[torch.from_numpy(labels).clamp_min(-1)].to(device)
            rate = settings.lr * schedule(number, steps)
            loss = training.update(torch.from_numpy(features).to(device).float(), draft_labels, matrix, bias, rate)
            report(training.step, steps, loss)
            if time.monotonic() - saved >= checkpoint_seconds:
                training.save(checkpoint, made_of)
                saved = time.monotonic()
    training.save(checkpoint, made_of)

    heads = MedusaHeads(
        hidden_size=lm_head.shape[1],
        blocks=training.blocks.fold(),
        token_map=data.token_ids,
        target_fingerprint=target_fingerprint,
        base_model=base_model,
        logit_scale=settings.logit_scale,
        source="trained heads",
    )
    ranks = held_out_ranks(heads, paths, lm_head, lm_head_bias, device=device)
    losses = np.array(training.losses).reshape(settings.epochs, epoch_steps).mean(1)
    return heads, {
        "settings": asdict(settings),
        "training_tokens": data.training,
        "held_out_tokens": data.held_out,
        "coverage": data.coverage,
        "loss": losses.tolist(),
        "seconds": time.monotonic() - began,
        **accuracy(ranks),
    }


def _check_init(init: MedusaHeads, settings: Settings) -> None:
    shape = (init.num_heads, init.num_layers)
    if init.lm_heads is not None or shape != (settings.heads, settings.layers):
        own = " with an lm_head of their own" if init.lm_heads is not None else ""
        raise CheckpointError(
            f"{init.source}: {shape[0]} heads of {shape[1]} blocks{own} cannot start a training of {settings.heads} "
            f"heads of {settings.layers} blocks on the target's lm_head; give the same counts."
        )


class Training:
    """Blocks, optimiser and progress: what a checkpoint holds."""

    def __init__(self, settings: Settings, data: DataSummary, device: str) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        self.blocks = ScaledBlocks(settings.heads, settings.layers, data.scale, generator).to(device)
        self.optimizer = torch.optim.AdamW(self.blocks.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.losses: list[float] = []  # one per step

    @property
    def step(self) -> int:
        return len(self.losses)

    def update(
        self,
        features: torch.Tensor,
        labels: torch.Tensor,
        lm_head: torch.Tensor,
        bias: torch.Tensor | None,
        rate: float,
    ) -> float:
        """One step at learning rate `rate` (the other arguments as in `heads_loss`); returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        states = self.blocks(features)
        leaf = states.detach().requires_grad_()
        self.losses.append(heads_loss(leaf, labels, lm_head, bias))
        self.optimizer.zero_grad()
        states.backward(leaf.grad)
        torch.nn.utils.clip_grad_norm_(self.blocks.parameters(), GRADIENT_CLIP)
        self.optimizer.step()
        return self.losses[-1]

    def save(self, file: Path, made_of: dict[str, Any]) -> None:
        """Write the checkpoint."""
        state = {"blocks": self.blocks.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses}
        checkpoints.save(file, state, made_of)

    def resume(self, file: Path, made_of: dict[str, Any]) -> None:
        """Go on from the checkpoint, if there is one. Errors as in `checkpoint.resume`."""
        if (state := checkpoints.resume(file, made_of)) is not None:
            self.blocks.load_state_dict(state["blocks"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.losses = state["losses"]


def schedule(step: int, steps: int) -> float:
    """Share of the full learning rate at `step`: a linear warm-up, then a cosine down to zero."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


# ---- measuring ----


def held_out_ranks(
    heads: MedusaHeads,
    paths: Sequence[Path],
    lm_head: torch.Tensor,
    lm_head_bias: torch.Tensor | None = None,
    *,
    device: str = "cpu",
    chunk: int = 256,
) -> Ranks:
    """int8 [P,heads]: the rank of the true token among each head's guesses, at every held-out position.

    MISSED when it is none of the first RANKS, UNKNOWN when the answer ends before it. Measured in float32, with
    the module that is exported, so that a wrong fold or offset would show.
    """
    module = MedusaModule(
        heads.blocks,
        heads.lm_heads,
        min(RANKS, heads.draft_vocabulary or len(lm_head)),
        token_map=heads.token_map,
        target_lm_head=lm_head.float(),
        target_lm_head_bias=lm_head_bias,
    ).to(device)
    found = [np.zeros((0, heads.num_heads), np.int8)]
    for path in paths:
        features, labels = read_positions(path, heads.num_heads, held_out=True)
        for start in range(0, len(labels), chunk):
            true = torch.from_numpy(labels[start : start + chunk]).to(device)
            with torch.no_grad():
                guesses, _ = module(torch.from_numpy(features[start : start + chunk]).to(device).float()[None])
            right = guesses[0] == true[..., None]  # [N,heads,K]
            ranks = torch.where(right.any(-1), right.int().argmax(-1), MISSED)
            found.append(torch.where(true == NO_LABEL, UNKNOWN, ranks).to(torch.int8).cpu().numpy())
    return np.concatenate(found)


def accuracy(ranks: Ranks) -> dict[str, Any]:
    """Held-out figures, JSON-able, of `held_out_ranks`.

    Returns:
        `accuracy` [heads][RANKS]: how often the true token is the guess of that rank; `chain` [heads]: how often
        the first guesses of heads 0..h are all right; `chain_mean_accepted_tokens`: bonus included.
    """
    per_head = [[float(np.mean(column[column != UNKNOWN] == rank)) for rank in range(RANKS)] for column in ranks.T]
    complete = ranks[(ranks != UNKNOWN).all(1)]
    chain = np.logical_and.accumulate(complete == 0, axis=1).mean(0)
    return {
        "positions": len(ranks),
        "accuracy": per_head,
        "chain": chain.tolist(),
        "chain_mean_accepted_tokens": 1 + float(chain.sum()),
    }
