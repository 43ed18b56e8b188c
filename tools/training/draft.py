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

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from speccompile.compiler.checkpoint import Source
from speccompile.compiler.draft_model import (
    DraftModel,
    cut_lm_head,
    cut_model,
    fingerprint_own,
    own_tensors,
    set_lm_head,
    shared_names,
)
from speccompile.graphs.errors import CheckpointError
from speccompile.graphs.tree import AdaptiveChain
from speccompile.tools.training.conversations import Conversation, read_shard, shard_paths
from speccompile.tools.training.medusa import is_held_out, schedule, survey
from speccompile.tools.training.steps import RelativeSteps

T = TypeVar("T")

CHECKPOINT_FILE = "draft-training.pt"
SOFTENINGS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18)
SHUFFLE_SHARDS = 6  # held in memory together, their conversations mixed
CHUNK = 256  # positions whose logits exist at once
# oneDNN keeps tens of megabytes for every shape of a bfloat16 product it has met (9 GB in an hour): let them be few.
LENGTH_STEP = 32
SPACINGS = ("even", "first")
LONGEST_CHAIN = 8
CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# What one more row of a target call costs, as a share of a plain step: SmolLM2-135M in fp32 on two CPU cores.
ROW_COST = 0.06


@dataclass(frozen=True)
class Settings:
    """What decides the result, besides the shards. `batch` is in conversations, `lr` a share of a tensor's size."""

    layers: int = 4
    spacing: str = "first"
    draft_vocabulary: int = 8192
    epochs: int = 3
    lr: float = 1e-2
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
    ids = torch.zeros(len(items), -(-max(lengths) // LENGTH_STEP) * LENGTH_STEP, dtype=torch.int64)
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
    return shuffle(
        paths, lambda path: read_side(path, False), lambda item: len(item.prompt) + len(item.answer), batch, seed, epoch
    )


def shuffle(
    paths: Sequence[Path],
    read: Callable[[Path], list[T]],
    length: Callable[[T], int],
    batch: int,
    seed: int,
    epoch: int,
) -> Iterator[list[T]]:
    """The batches of `shuffled_batches`, of whatever `read` finds in a shard; `length` tells what goes together."""
    rng = np.random.default_rng([seed, epoch])
    order = [paths[index] for index in rng.permutation(len(paths))]
    rest: list[T] = []
    for start in range(0, len(order), SHUFFLE_SHARDS):
        window = rest + [item for path in order[start : start + SHUFFLE_SHARDS] for item in read(path)]
        mixed = [window[index] for index in rng.permutation(len(window))]
        full = len(mixed) - len(mixed) % batch
        rest = mixed[full:]
        by_length = sorted(mixed[:full], key=length)
        for first in rng.permutation(full // batch) * batch:
            yield by_length[first : first + batch]


# ---- model ----


def states_of(model: Any, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[N,F]: what the model's lm_head reads at the N `wanted` positions (bool [B,T]) of `ids` (int64 [B,T])."""
    seen: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(args[0])
        return (args[0][:1, :1],)  # logits of the rest are not wanted

    with _before_lm_head(model, keep):
        model(input_ids=ids, use_cache=False)
    return seen[0][wanted]


def final_norm(model: Any) -> torch.nn.Module:
    """The module of nothing but vectors that runs last before the lm_head."""
    seen: list[torch.nn.Module] = []
    handles = [
        module.register_forward_hook(lambda module, _args, _out: seen.append(module))
        for module in model.modules()
        if (own := list(module.parameters(recurse=False))) and all(weight.dim() == 1 for weight in own)
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen[-1]


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

    Its gradient is weights * (softmax(guesses) - softmax(labels)), written out because passes over the logits are what
    this training spends its time on. `labels` and `weights` (float32 [N]) get none.
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


def train_draft(
    shards: Path,
    target: Source,
    *,
    work: Path,
    settings: Settings = Settings(),
    init: DraftModel | None = None,
    device: str = "cpu",
    checkpoint_seconds: float = 60.0,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> tuple[DraftModel, dict[str, Any]]:
    """Cut a draft out of `target` and train it on the shards of a folder.

    Killed and called again with the same arguments, it goes on from its last checkpoint and ends with the same
    weights as a run that was left alone.

    Args:
        shards: folder of `conversations` that the target wrote.
        work: folder for the checkpoint.
        init: draft to start from, with its draft vocabulary; it must have the layers that `settings` choose.
        device: "cpu" or "cuda".
        checkpoint_seconds: time between checkpoints.
        report: called after each step with its number, the number of all steps and the loss.

    Returns:
        the draft, and a JSON-able report: settings, layers, data, loss per epoch, seconds.

    Raises:
        CheckpointError: for unusable shards or settings, or a checkpoint in `work` that others of them made.
    """
    paths = shard_paths(shards)
    if not paths:
        raise CheckpointError(f"{shards}: holds no feature shards; make training data first.")
    began = time.monotonic()
    config = target.model.config.get_text_config()
    taken = choose_layers(config.num_hidden_layers, settings.layers, settings.spacing)
    if init is not None and init.taken != taken:
        raise CheckpointError(
            f"{init.path}: a draft of the target's layers {list(init.taken)} cannot start a training of layers "
            f"{list(taken)}; give the same."
        )
    vocab_size, width = target.lm_head.weight.shape  # type: ignore[misc,union-attr]
    chosen = None if init is None else init.token_ids
    if init is not None and chosen is None:
        chosen = torch.arange(vocab_size)
    data = survey(paths, vocab_size, settings.draft_vocabulary, chosen)
    if len(data.scale) != width:
        raise CheckpointError(f"{shards}: features have width {len(data.scale)}, the lm_head has {width}.")
    training_items = sum(len(read_side(path, False)) for path in paths)
    epoch_steps = training_items // settings.batch
    if not epoch_steps:
        raise CheckpointError(
            f"{shards}: {training_items} training conversations are less than one batch of {settings.batch}; "
            f"make more data."
        )
    made_of = {
        "settings": asdict(settings),
        "target_fingerprint": target.fingerprint,
        "init": init and init.fingerprint,
        "shards": {path.name: path.stat().st_size for path in paths},
    }
    token_ids = None if len(data.token_ids) == vocab_size else data.token_ids
    draft = init or cut_model(target, taken, token_ids)
    head = draft.model.get_output_embeddings()
    training = Distillation(draft.model, data.token_ids, vocab_size, device)
    checkpoint = work / CHECKPOINT_FILE
    if init is None and not checkpoint.exists():
        training.soften(make_batch(next(shuffled_batches(paths, settings.batch, settings.seed, 0))))
    training.resume(checkpoint, made_of)

    steps, saved = epoch_steps * settings.epochs, time.monotonic()
    for epoch in range(training.step // epoch_steps, settings.epochs):
        batches = shuffled_batches(paths, settings.batch, settings.seed, epoch)
        for number, items in enumerate(batches, epoch * epoch_steps):
            if number < training.step:
                continue  # done before the run was interrupted
            loss = training.update(make_batch(items), settings.lr * schedule(number, steps))
            report(training.step, steps, loss)
            if time.monotonic() - saved >= checkpoint_seconds:
                training.save(checkpoint, made_of)
                saved = time.monotonic()
        training.save(checkpoint, made_of)

    set_lm_head(draft.model.cpu(), head.cpu())
    draft = replace(draft, token_ids=token_ids, fingerprint=fingerprint_own(draft.model, token_ids))
    return draft, {
        "settings": asdict(settings),
        "layers": list(taken),
        "training_tokens": data.training,
        "held_out_tokens": data.held_out,
        "coverage": data.coverage,
        "loss": np.array(training.losses).reshape(settings.epochs, epoch_steps).mean(1).tolist(),
        "training_dtype": str(training.dtype).removeprefix("torch."),
        "seconds": time.monotonic() - began,
    }


class Distillation(RelativeSteps[float]):
    """A draft in training.

    Args:
        model: the draft; its lm_head is cut to the draft vocabulary here.
        token_ids: int64 [Vd], the draft vocabulary.
        vocab_size: tokens of the target.
    """

    def __init__(self, model: Any, token_ids: torch.Tensor, vocab_size: int, device: str) -> None:
        cut_lm_head(model, token_ids)
        self.model = model.to(device)
        shared = shared_names(model)
        super().__init__({name: weight for name, weight in model.named_parameters() if name not in shared}, device)
        self.known = torch.zeros(vocab_size, dtype=torch.bool)
        self.known[token_ids] = True

    def soften(self, batch: Batch) -> float:
        """Multiply the final norm by the one of SOFTENINGS with which the draft is nearest to the target; return it.

        Some targets (SmolLM2) have a final norm so large that a wrong guess costs tens of nats. The draft is not as
        sure as they are, and steps that only bring its norm down are better spent on what it says.
        """
        norm = final_norm(self.model)
        starts = [parameter.detach().clone() for parameter in norm.parameters(recurse=False)]

        def scale(factor: float) -> None:
            with torch.no_grad():
                for parameter, start in zip(norm.parameters(recurse=False), starts, strict=True):
                    parameter.copy_(start * factor)

        def loss(factor: float) -> float:
            scale(factor)
            with torch.no_grad(), self.autocast():
                states = states_of(self.model, batch.ids.to(self.device), batch.predicts.to(self.device))
                return sum(part.item() for part in self.divergences(states.float(), batch))

        best = min(SOFTENINGS, key=loss)
        scale(best)
        self.measure_sizes()
        return best

    def update(self, batch: Batch, rate: float) -> float:
        """One step, in which each tensor moves by about `rate` of its size.

        Returns:
            the loss before it: the divergence per position, in nats.
        """
        self.begin(rate)
        return self.finish(self.backward(batch))

    def backward(self, batch: Batch) -> float:
        """The divergence of a batch per position; its gradient is added to the trained weights' own."""
        with self.autocast():
            states = states_of(self.model, batch.ids.to(self.device), batch.predicts.to(self.device))
            leaf = states.detach().float().requires_grad_()
            total = 0.0
            for part in self.divergences(leaf, batch):
                part.backward()
                total += part.item()
        assert leaf.grad is not None
        states.backward(leaf.grad.to(states.dtype))
        return total

    def divergences(self, states: torch.Tensor, batch: Batch) -> Iterator[torch.Tensor]:
        """Parts of the divergence of `states` [N,F], the lm_head's input at a batch's answers, from the target.

        The logits are the largest tensors of the training: a chunk of positions at a time, each freed before the next.
        """
        counted = self.known[batch.answers]
        weights = (counted / counted.sum().clamp_min(1)).to(self.device)
        features = batch.features.to(self.device)
        for start in range(0, len(states), CHUNK):
            ours, theirs = (_full(rows[start : start + CHUNK]) for rows in (states, features.float()))
            with torch.no_grad():
                labels = logits_of(self.model, theirs)
            yield divergence(logits_of(self.model, ours), labels, _full(weights[start : start + CHUNK]))


def _full(rows: torch.Tensor) -> torch.Tensor:
    """CHUNK rows: zeros follow those there are."""
    return torch.cat([rows, rows.new_zeros(CHUNK - len(rows), *rows.shape[1:])]) if len(rows) < CHUNK else rows


# ---- measuring ----


@dataclass(frozen=True)
class Measured:
    """What the draft says along one held-out answer of N tokens, having read the tokens before.

    Args:
        right: bool [N]: its first guess is the answer's token.
        confidence: float32 [N]: the probability it gives that guess.
        divergence: float32 [N]: from the target to it over the draft vocabulary, in nats; NaN where the answer's token
            is outside.
    """

    right: npt.NDArray[np.bool_]
    confidence: npt.NDArray[np.float32]
    divergence: npt.NDArray[np.float32]


def measure(draft: DraftModel, paths: Sequence[Path], *, device: str = "cpu", batch: int = 16) -> list[Measured]:
    """The draft on every held-out answer, in float32, as the runtime has it."""
    model, head = draft.model, draft.model.get_output_embeddings()
    token_ids = torch.arange(len(head.weight)) if draft.token_ids is None else draft.token_ids
    known = torch.zeros(len(head.weight), dtype=torch.bool)
    known[token_ids] = True
    items = sorted((item for path in paths for item in read_side(path, True)), key=lambda item: len(item.answer))
    found: list[Measured] = []
    cut_lm_head(model, token_ids)
    try:
        model.to(device)
        for start in range(0, len(items), batch):
            side = items[start : start + batch]
            data = make_batch(side)
            with torch.no_grad():
                states = states_of(model, data.ids.to(device), data.predicts.to(device))
                columns = [
                    _guesses(model, states[first : first + CHUNK], data.features[first : first + CHUNK].to(device))
                    for first in range(0, len(states), CHUNK)
                ]
            guesses, confidence, divergence = (torch.cat(parts) for parts in zip(*columns, strict=True))
            right = token_ids[guesses] == data.answers
            divergence[~known[data.answers]] = float("nan")
            ends = np.cumsum([len(item.answer) for item in side])[:-1]
            parts = (np.split(column.numpy(), ends) for column in (right, confidence, divergence))
            found += [Measured(*columns) for columns in zip(*parts, strict=True)]
    finally:
        set_lm_head(model.cpu(), head.cpu())
    return found


def _guesses(model: Any, states: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Per position: the best draft id, its probability, the divergence from the target; on the CPU."""
    ours, theirs = (logits_of(model, rows.float()).log_softmax(-1) for rows in (states, features))
    best = ours.max(-1)
    return best.indices.cpu(), best.values.exp().cpu(), (theirs.exp() * (theirs - ours)).sum(-1).cpu()


@dataclass(frozen=True)
class Walk:
    """Greedy decoding of the measured answers with chains: rounds, tokens out of them, tokens drafted."""

    rounds: int
    emitted: int
    drafted: int

    @property
    def mean_accepted_tokens(self) -> float:
        """Bonus included."""
        return self.emitted / max(self.rounds, 1)

    def speedup(self, draft_cost: float, row_cost: float) -> float:
        """Over plain decoding, whose steps cost 1, when a drafted token costs `draft_cost` and its row `row_cost`."""
        return self.emitted / max(self.rounds + self.drafted * (draft_cost + row_cost), 1e-9)


def walk(answers: Sequence[Measured], longest: int, confidence: float = 0.0) -> Walk:
    """What chains of up to `longest` tokens, ending behind a guess less sure than `confidence`, come to.

    The first token of an answer comes with the prompt; nothing is drafted past the last.
    """
    rounds = emitted = drafted = 0
    for answer in answers:
        count = len(answer.right)
        until_wrong = _distance(~answer.right)
        until_unsure = _distance(answer.confidence < confidence) + 1  # the unsure guess is drafted
        place = 1
        while place < count:
            length = min(longest, int(until_unsure[place]), count - place)
            out = min(min(int(until_wrong[place]), length) + 1, count - place)
            rounds, emitted, drafted, place = rounds + 1, emitted + out, drafted + length, place + out
    return Walk(rounds, emitted, drafted)


def _distance(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """int64 [N]: steps from each place to the next mark, its own included; to the end when there is none."""
    places = np.arange(len(marks))
    following = np.where(marks, places, len(marks))
    return np.minimum.accumulate(following[::-1])[::-1] - places


def recommend(answers: Sequence[Measured], draft_cost: float, row_cost: float = ROW_COST) -> tuple[AdaptiveChain, Walk]:
    """The chain with the best speed-up on the measured answers, and what it comes to."""
    options = [AdaptiveChain(length, sure) for length in range(1, LONGEST_CHAIN + 1) for sure in CONFIDENCES]
    walks = [walk(answers, option.longest, option.confidence) for option in options]
    best = max(range(len(options)), key=lambda index: walks[index].speedup(draft_cost, row_cost))
    return options[best], walks[best]


def cost_ratio(draft: DraftModel, target: Source) -> float:
    """Weights read to draft a token over weights read by a plain step: small models spend their time reading them."""
    rows = draft.model.get_output_embeddings().weight.numel()
    cut = rows if draft.token_ids is None else rows * len(draft.token_ids) // len(target.lm_head.weight)  # type: ignore[arg-type]
    own = sum(tensor.numel() for tensor in own_tensors(draft.model).values()) + cut
    whole = sum(weight.numel() for weight in target.model.parameters())
    if target.model.get_input_embeddings().weight is not target.lm_head.weight:
        whole -= target.model.get_input_embeddings().weight.numel()  # of an embedding one row is read
    return own / whole


def figures(answers: Sequence[Measured]) -> dict[str, Any]:
    """Held-out figures, JSON-able. An answer's first token, which is never drafted, is left out.

    Returns:
        `agreement`: how often the first guess is the target's token; `chain` [LONGEST_CHAIN]: how often the first
        1, 2, ... guesses of a chain are all right, from every position with that many tokens behind it;
        `divergence`: nats per token; `mean_accepted_tokens_by_chain`: of chains of a fixed length, bonus included.
    """
    right = [answer.right[1:] for answer in answers]
    chain = []
    for length in range(1, LONGEST_CHAIN + 1):
        windows = [np.lib.stride_tricks.sliding_window_view(row, length).all(-1) for row in right if len(row) >= length]
        chain.append(float(np.concatenate(windows).mean()) if windows else 0.0)
    return {
        "positions": sum(map(len, right)),
        "agreement": float(np.concatenate(right).mean()),
        "divergence": float(np.nanmean(np.concatenate([answer.divergence[1:] for answer in answers]))),
        "chain": chain,
        "mean_accepted_tokens_by_chain": {
            str(length): walk(answers, length).mean_accepted_tokens for length in range(1, LONGEST_CHAIN + 1)
        },
    }
