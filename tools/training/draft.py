"""A draft model cut out of its target and distilled on what the target said.

The draft is some of the target's layers between its embedding and its lm_head, both shared and frozen; layers and
final norm are trained. `conversations` hold greedy answers and, for every answer token, the post-norm hidden state
that chose it: `lm_head(features)` are the target's own logits, so soft labels cost no pass of the target. The loss is
the forward Kullback-Leibler divergence from target to draft over the draft vocabulary (DistillSpec, arXiv 2310.08461,
on data the target wrote), on answer positions only. Positions whose token is outside the draft vocabulary teach
nothing: a draft cannot be right there.

A greedy chain is accepted as long as each guess is the target's token, and behind right guesses the draft has read the
target's own tokens. So one teacher-forced pass tells exactly what chains of every length would have had accepted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from speccompile.compiler.checkpoint import Source
from speccompile.compiler.draft_model import DraftModel, cut_lm_head, cut_model, own_tensors, set_lm_head, shared_names
from speccompile.graphs.errors import CheckpointError
from speccompile.graphs.tree import AdaptiveChain
from speccompile.tools.training.conversations import Conversation, read_shard, shard_paths
from speccompile.tools.training.medusa import DataSummary, is_held_out, schedule, survey

CHECKPOINT_FILE = "draft-training.pt"
GRADIENT_CLIP = 1.0
SHUFFLE_SHARDS = 6  # held in memory together, their conversations mixed
CHUNK = 512  # positions whose logits exist at once
SPACINGS = ("even", "first")
LONGEST_CHAIN = 8
CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# What one more row of a target call costs, as a share of a plain step: SmolLM2-135M in fp32 on two CPU cores.
ROW_COST = 0.06


@dataclass(frozen=True)
class Settings:
    """What decides the result, besides the shards. `batch` is in conversations."""

    layers: int = 2
    spacing: str = "even"
    draft_vocabulary: int = 8192
    epochs: int = 3
    lr: float = 1e-3
    batch: int = 16
    seed: int = 0


def choose_layers(count: int, layers: int, spacing: str) -> tuple[int, ...]:
    """Which of the target's `count` layers to take: "first", or "even" from the first to the last.

    Raises:
        CheckpointError: for more layers than the target has, or another spacing.
    """
    if spacing not in SPACINGS:
        raise CheckpointError(f"spacing: '{spacing}' is unknown; use one of {', '.join(SPACINGS)}.")
    if not 1 <= layers < count:
        raise CheckpointError(f"layers: {layers} asked for; a draft takes 1 .. {count - 1} of this target's {count}.")
    if spacing == "first" or layers == 1:
        return tuple(range(layers))
    return tuple(int(index) for index in np.round(np.linspace(0, count - 1, layers)))


# ---- data ----


@dataclass(frozen=True)
class Batch:
    """Conversations side by side, padded on the right; what is padding never reaches a causal model's answer.

    Args:
        ids: int64 [B,T], prompt and answer, without the answer's last token.
        predicts: bool [B,T], the positions whose next token is an answer token: N of them.
        answers: int64 [N], those tokens, conversation by conversation.
        features: float16 [N,F], the target's post-norm hidden state at those positions.
    """

    ids: torch.Tensor
    predicts: torch.Tensor
    answers: torch.Tensor
    features: torch.Tensor


def make_batch(items: Sequence[Conversation]) -> Batch:
    """Conversations as one batch."""
    lengths = [len(item.prompt) + len(item.answer) - 1 for item in items]
    ids = torch.zeros(len(items), max(lengths), dtype=torch.int64)
    predicts = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (item, length) in enumerate(zip(items, lengths, strict=True)):
        ids[row, :length] = torch.from_numpy(np.concatenate([item.prompt, item.answer[:-1]]))
        predicts[row, len(item.prompt) - 1 : length] = True
    answers = torch.from_numpy(np.concatenate([item.answer for item in items])).long()
    return Batch(ids, predicts, answers, torch.from_numpy(np.concatenate([item.features for item in items])))


def read_side(path: Path, held_out: bool) -> list[Conversation]:
    """The training or the held-out conversations of one shard."""
    return [item for item in read_shard(path) if is_held_out(item) == held_out]


def shuffled_batches(paths: Sequence[Path], batch: int, seed: int, epoch: int) -> Iterator[list[Conversation]]:
    """Training conversations of one epoch, those of about one length together.

    Shards come in random order, a few are mixed at a time. Every batch is full; what is left at the end (less than a
    batch) is dropped. The order depends on `seed` and `epoch` alone.
    """
    rng = np.random.default_rng([seed, epoch])
    order = [paths[index] for index in rng.permutation(len(paths))]
    rest: list[Conversation] = []
    for start in range(0, len(order), SHUFFLE_SHARDS):
        window = rest + [item for path in order[start : start + SHUFFLE_SHARDS] for item in read_side(path, False)]
        mixed = [window[index] for index in rng.permutation(len(window))]
        full = len(mixed) - len(mixed) % batch
        rest = mixed[full:]
        by_length = sorted(mixed[:full], key=lambda item: len(item.prompt) + len(item.answer))
        for first in rng.permutation(full // batch) * batch:
            yield by_length[first : first + batch]


# ---- model ----


def states_of(model: Any, batch: Batch) -> torch.Tensor:
    """[N,F]: what the model's lm_head reads at the positions of a batch that predict its answers."""
    seen: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(args[0])
        return (args[0][:1, :1],)  # logits of the rest are not wanted

    with _before_lm_head(model, keep):
        model(input_ids=batch.ids, use_cache=False)
    return seen[0][batch.predicts]


def logits_of(model: Any, states: torch.Tensor) -> torch.Tensor:
    """[N,F] -> [N,Vd] float32: the model's logits for what its lm_head reads, its soft-caps and scales included.

    Architectures do more than an lm_head at their end, each in its own way; so the model itself runs, on one token,
    and is given `states` in place of that token's.
    """
    with _before_lm_head(model, lambda _module, _args: (states[None],)):
        out = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=states.device), use_cache=False)
    logits: torch.Tensor = out.logits[0].float()
    return logits


@contextmanager
def _before_lm_head(model: Any, hook: Callable[..., tuple[torch.Tensor, ...]]) -> Iterator[None]:
    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def divergence(guesses: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over N positions of KL(softmax(labels) || softmax(guesses)), for logits float32 [N,Vd].

    Left in `guesses.grad` is nothing; its gradient, weights * (softmax(guesses) - softmax(labels)), comes with
    `backward`. Written out because logits of thousands of positions are what this training spends its time on.
    """
    result: torch.Tensor = _Divergence.apply(guesses, labels, weights)
    return result


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guesses: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        p, q = labels.softmax(-1), guesses.softmax(-1)
        # log of the two normalisers, from the largest probability and its logit
        tops = [logits.amax(-1) - probabilities.amax(-1).log() for logits, probabilities in ((labels, p), (guesses, q))]
        rows = torch.linalg.vecdot(p, labels - guesses) - (tops[0] - tops[1])
        ctx.save_for_backward(q.sub_(p).mul_(weights[:, None]))
        return torch.dot(rows, weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return ctx.saved_tensors[0] * gradient, None, None


# ---- training ----


class Distillation:
    """Draft, optimiser and progress: what a checkpoint holds."""

    def __init__(self, draft: DraftModel, data: DataSummary, vocab_size: int, device: str) -> None:
        self.model, self.device = draft.model.to(device), torch.device(device)
        cut_lm_head(self.model, data.token_ids.to(device))
        shared = shared_names(self.model)
        self.trained = {name: p for name, p in self.model.named_parameters() if name not in shared}
        self.optimizer = torch.optim.AdamW(self.trained.values(), betas=(0.9, 0.95), weight_decay=0.0)
        self.losses: list[float] = []  # one per step
        self.known = torch.zeros(vocab_size, dtype=torch.bool)
        self.known[data.token_ids] = True
        native = device != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False)
        self.dtype = torch.bfloat16 if native else torch.float32

    @property
    def step(self) -> int:
        return len(self.losses)

    def update(self, batch: Batch, rate: float) -> float:
        """One step at learning rate `rate`; returns the loss before it: the divergence per position, in nats."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        counted = self.known[batch.answers].to(self.device)
        weights = counted / counted.sum().clamp_min(1)
        batch = Batch(*(part.to(self.device) for part in (batch.ids, batch.predicts, batch.answers, batch.features)))
        total = 0.0
        self.optimizer.zero_grad()
        # The logits are the largest tensors of the training: a chunk at a time, each freed before the next.
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            states = states_of(self.model, batch)
            leaf = states.detach().float().requires_grad_()
            for start in range(0, len(leaf), CHUNK):
                rows = slice(start, start + CHUNK)
                with torch.no_grad():
                    labels = logits_of(self.model, batch.features[rows].float())
                loss = divergence(logits_of(self.model, leaf[rows]), labels, weights[rows])
                loss.backward()
                total += loss.item()
        states.backward(leaf.grad.to(states.dtype))
        torch.nn.utils.clip_grad_norm_(self.trained.values(), GRADIENT_CLIP)
        self.optimizer.step()
        self.losses.append(total)
        return total
