"""`speccompile train`: model -> graph -> conversations with features -> heads, draft model or EAGLE head, and card."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speccompile.compiler.build import EAGLE_TREE, Plan, write_target
from speccompile.compiler.checkpoint import Source, read_model
from speccompile.compiler.draft_model import DraftModel, check_dtype, read_draft, slim_facts, write_draft
from speccompile.compiler.eagle_head import EagleHead, read_eagle, write_eagle
from speccompile.compiler.medusa_heads import read_heads, write_heads
from speccompile.compiler.publish import staged
from speccompile.graphs.errors import CheckpointError
from speccompile.graphs.target import TargetTail, survey
from speccompile.graphs.tree import DraftTree
from speccompile.runtime.backends.ort import OrtTarget
from speccompile.tools.training.conversations import (
    OPENINGS,
    TurnTokens,
    converse,
    make_conversations,
    read_questions,
    shard_paths,
)
from speccompile.tools.training.draft import (
    ROW_COST,
    choose_layers,
    cost_ratio,
    figures,
    measure,
    recommend,
    train_draft,
)
from speccompile.tools.training.draft import Settings as DraftSettings
from speccompile.tools.training.eagle import Settings as EagleSettings
from speccompile.tools.training.eagle import check_settings, default_taps, make_features, train_eagle
from speccompile.tools.training.eagle import figures as eagle_figures
from speccompile.tools.training.eagle import measure as measure_eagle
from speccompile.tools.training.medusa import Settings, held_out_ranks, train_medusa
from speccompile.tools.training.tree_search import best_tree_measured, mean_accepted_tokens, path_frequencies

USER_WORDS = "USER WORDS GO HERE"
TREE_SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 64)  # nodes, the root included
DATA_LENGTH = 2048  # positions of the graph that makes data
CONVERSATIONS = "conversations"  # folder of the shards

Report = Callable[[str], None]


def train_medusa_heads(
    model: Path,
    out: Path,
    work: Path,
    *,
    tokens: int,
    heads: int,
    layers: int,
    draft_vocabulary: int,
    epochs: int,
    tree_nodes: int,
    rows: int,
    seed: int,
    device: str,
    data: Path | None = None,
    init: Path | None = None,
    lr: float = Settings.lr,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Train Medusa heads for a model on its own answers and publish them at `out`.

    Args:
        work: folder of the data and of training checkpoints; a second call goes on where the first stopped.
        tokens: answer tokens to make; what `work` holds already counts.
        data: JSONL file of user turns to answer instead of self-made ones.
        init: heads to start from, with their counts and draft vocabulary.
        tree_nodes: size of the tree recommended beside the heads, the root included.

    Returns:
        the card: settings, counts, held-out accuracy per head and rank, seconds.

    Raises:
        CheckpointError: when `out` exists already or the model has no chat template to make data with.
    """
    started = time.monotonic()

    def check_heads(source: Source) -> None:
        _check_vocabulary(draft_vocabulary, source)
        if init is not None:
            read_heads(init)

    with staged(out) as folder:
        source, made = _prepare(model, work, tokens, rows, seed, data, report, check_heads)
        lm_head = source.lm_head.weight.detach()
        settings = Settings(
            heads=heads,
            layers=layers,
            draft_vocabulary=draft_vocabulary or len(lm_head),  # type: ignore[arg-type]
            epochs=epochs,
            lr=lr,
            seed=seed,
        )
        trained, results = train_medusa(
            work / CONVERSATIONS,
            lm_head,  # type: ignore[arg-type]
            lm_head_bias=bias.detach() if (bias := getattr(source.lm_head, "bias", None)) is not None else None,
            work=work / "checkpoint",
            settings=settings,
            init=None if init is None else read_heads(init),
            device=_device(device),
            target_fingerprint=source.fingerprint,
            report=_show_steps(report),
        )
        report("measuring trees")
        shards = shard_paths(work / CONVERSATIONS)
        ranks = held_out_ranks(trained, shards, lm_head)  # type: ignore[arg-type]
        tree = best_tree_measured(ranks, tree_nodes - 1)
        sizes = [size for size in TREE_SIZES if size - 1 <= len(path_frequencies(ranks))]
        fixed = {str(n): mean_accepted_tokens(best_tree_measured(ranks, n - 1), ranks) for n in sizes}
        card = {
            **_about("medusa", source, data, made, seed),
            **results,
            "mean_accepted_tokens_by_tree_nodes": fixed,
            "hours": (time.monotonic() - started) / 3600,
        }
        write_heads(trained, folder)
        _write_beside(folder, tree, card)
    return card


def train_draft_model(
    model: Path,
    out: Path,
    work: Path,
    *,
    layers: int,
    spacing: str,
    tokens: int,
    draft_vocabulary: int,
    epochs: int,
    rows: int,
    seed: int,
    device: str,
    dtype: str = "int8",
    data: Path | None = None,
    init: Path | None = None,
    lr: float = DraftSettings.lr,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Cut a draft model out of a model, distil it on the model's own answers and publish it at `out`.

    Args:
        work, tokens, data: as in `train_medusa_heads`; both can go on in the same folder, with the same data.
        layers: how many of the model's layers to take.
        spacing: "even" (from the first to the last) or "first".
        draft_vocabulary: most frequent tokens to draft; 0 keeps all.
        dtype: what the weights are written as, "fp16" or "int8"; the card is measured on what was written.
        init: draft to start from, with its layers and draft vocabulary.

    Returns:
        the card: settings, counts, held-out agreement and chains, the recommended tree, seconds.

    Raises:
        CheckpointError: when `out` exists already, the model has no chat template to make data with, or the layers
            cannot be taken.
    """
    started = time.monotonic()

    def check_draft(source: Source) -> None:
        _check_vocabulary(draft_vocabulary, source)
        choose_layers(source.model.config.get_text_config().num_hidden_layers, layers, spacing)
        if init is not None:
            read_draft(init, source)

    with staged(out) as folder:
        check_dtype(dtype)
        source, made = _prepare(model, work, tokens, rows, seed, data, report, check_draft)
        chosen = _device(device)
        settings = DraftSettings(
            layers=layers,
            spacing=spacing,
            draft_vocabulary=draft_vocabulary or len(source.lm_head.weight),  # type: ignore[arg-type]
            epochs=epochs,
            lr=lr,
            seed=seed,
        )
        trained, results = train_draft(
            work / CONVERSATIONS,
            source,
            work=work / "checkpoint",
            settings=settings,
            init=None if init is None else read_draft(init, source),
            device=chosen,
            report=_show_steps(report),
        )
        write_draft(trained, folder, dtype)
        report("measuring chains")
        written = read_draft(folder, source)
        answers = measure(written, shard_paths(work / CONVERSATIONS), device=chosen)
        cost = cost_ratio(written, source)
        tree, walked = recommend(answers, cost)
        card = {
            **_about("draft", source, data, made, seed),
            **results,
            **figures(answers),
            "dtype": dtype,
            "recommended": {
                **tree.to_json(),
                "mean_accepted_tokens": walked.mean_accepted_tokens,
                "drafted_per_round": walked.drafted / max(walked.rounds, 1),
                "expected_speedup": walked.speedup(cost, ROW_COST),
                "assumed_costs": {"draft_token": cost, "row": ROW_COST},
            },
            "hours": (time.monotonic() - started) / 3600,
        }
        _write_beside(folder, tree, card)
    return card


def train_eagle_head(
    model: Path,
    out: Path,
    work: Path,
    *,
    version: int,
    layers: int,
    start: str,
    taps: Sequence[int] | None,
    tokens: int,
    draft_vocabulary: int,
    epochs: int,
    unroll: int,
    feature_loss: float,
    noise: float,
    rows: int,
    seed: int,
    device: str,
    dtype: str = "fp16",
    data: Path | None = None,
    init: Path | None = None,
    lr: float = EagleSettings.lr,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Train an EAGLE head for a model on the model's own answers and publish it at `out`.

    Args:
        work, tokens, data, draft_vocabulary, dtype: as in `train_draft_model`; the same folder and data serve.
        version, layers, start, unroll, feature_loss, noise: see `eagle.Settings`.
        taps: streams of the target to read; None takes EAGLE-3's three with version 3 and, with version 1, the
            post-norm hidden state.
        init: a head to go on from, or a draft model that `train draft` made, for a version 1 head to stand on.

    Returns:
        the card: settings, counts, held-out agreement by depth, seconds.

    Raises:
        CheckpointError: when `out` exists already, the model has no chat template to make data with, or the settings
            do not fit the model.
    """
    started = time.monotonic()
    settings = EagleSettings(
        version=version,
        layers=layers,
        start=start,
        epochs=epochs,
        lr=lr,
        unroll=unroll,
        feature_loss=feature_loss,
        noise=noise,
        seed=seed,
    )
    first: list[EagleHead | DraftModel | None] = []
    chosen_taps: list[tuple[int, ...]] = []

    def check_head(source: Source) -> None:
        _check_vocabulary(draft_vocabulary, source)
        given = None if init is None else _read_start(init, source)
        own = default_taps(source.model.config.get_text_config().num_hidden_layers) if version == 3 else ()
        kept = given.form.taps if isinstance(given, EagleHead) else own
        chosen_taps.append(kept if taps is None else tuple(taps))
        check_settings(settings, source, chosen_taps[0], given)
        first.append(given)

    with staged(out) as folder:
        check_dtype(dtype)
        source, made = _prepare(model, work, tokens, rows, seed, data, report, check_head)
        chosen = _device(device)
        features = work / ("features-" + ("-".join(map(str, chosen_taps[0])) or "last"))
        make_features(
            source,
            work / CONVERSATIONS,
            features,
            chosen_taps[0],
            chosen,
            lambda done, shards: report(f"running the target: shard {done} of {shards}"),
        )
        trained, results = train_eagle(
            work / CONVERSATIONS,
            features,
            source,
            chosen_taps[0],
            work=work / "checkpoint",
            settings=replace(settings, draft_vocabulary=draft_vocabulary or len(source.lm_head.weight)),  # type: ignore[arg-type]
            init=first[0],
            device=chosen,
            report=_show_steps(report),
        )
        write_eagle(trained, folder, dtype=dtype)
        report("measuring the head")
        written = read_eagle(folder, source)
        card = {
            **_about("eagle", source, data, made, seed),
            **results,
            **eagle_figures(measure_eagle(written, work / CONVERSATIONS, features)),
            "dtype": dtype,
            "hours": (time.monotonic() - started) / 3600,
        }
        _write_beside(folder, EAGLE_TREE, card)
    return card


def _read_start(path: Path, source: Source) -> EagleHead | DraftModel:
    return read_eagle(path, source) if slim_facts(path) is None else read_draft(path, source)


def turn_tokens(source: Source) -> TurnTokens:
    """The chat template around a user turn, as token ids.

    Raises:
        CheckpointError: when there is no template, or it does not leave the user's words as they are.
    """
    tokenizer = source.tokenizer
    if tokenizer.chat_template is None:
        raise CheckpointError(f"{source.path}: its tokenizer has no chat template; training data needs one.")
    message = [{"role": "user", "content": USER_WORDS}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    if text.count(USER_WORDS) != 1:
        raise CheckpointError(f"{source.path}: its chat template does not keep the user's words in one piece.")
    prefix, suffix = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(USER_WORDS))
    if not prefix or not suffix:
        raise CheckpointError(f"{source.path}: its chat template writes nothing before or after the user's words.")
    openings = tuple(tuple(tokenizer.encode(words, add_special_tokens=False)) for words in OPENINGS)
    return TurnTokens(prefix, suffix, frozenset({*source.eos_ids, suffix[0]}), openings)


def _prepare(
    model: Path,
    work: Path,
    tokens: int,
    rows: int,
    seed: int,
    data: Path | None,
    report: Report,
    check: Callable[[Source], None],
) -> tuple[Source, int]:
    """The model, once there are conversations of it in `work`, and their answer tokens. `check` raises what would be
    wrong with the training afterwards: making data takes an hour."""
    report("reading the model")
    source = read_model(model)
    check(source)
    work.mkdir(parents=True, exist_ok=True)
    return source, _make_data(source, work, tokens, rows, seed, data, report)


def _check_vocabulary(tokens: int, source: Source) -> None:
    vocabulary = len(source.lm_head.weight)  # type: ignore[arg-type]
    if not 0 <= tokens <= vocabulary:
        raise CheckpointError(f"draft vocabulary: {tokens} tokens asked for, the target has {vocabulary}; 0 takes all.")


def _device(wanted: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def _show_steps(report: Report) -> Callable[[int, int, float], None]:
    return lambda step, steps, loss: report(f"training: step {step:,} of {steps:,}, loss {loss:.2f}")


def _about(method: str, source: Source, data: Path | None, made: int, seed: int) -> dict[str, Any]:
    """How every card begins."""
    return {
        "method": method,
        "target": source.architecture,
        "target_fingerprint": source.fingerprint,
        "data": {"source": data.name if data else "self-made", "answer_tokens": made, "seed": seed},
    }


def _write_beside(folder: Path, tree: DraftTree, card: dict[str, Any]) -> None:
    (folder / "tree.json").write_text(json.dumps(tree.to_json()) + "\n", "utf-8")
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n", "utf-8")


def _make_data(source: Source, work: Path, tokens: int, rows: int, seed: int, data: Path | None, report: Report) -> int:
    graph = work / "graph"
    if not (graph / "target.onnx").is_file():
        with staged(graph, replace=True) as folder:
            limit = min(DATA_LENGTH, source.model.config.get_text_config().max_position_embeddings)
            plan = Plan(folder, limit, report=report)
            write_target(source, survey(source.model, limit), TargetTail(True), plan)
    folder = work / CONVERSATIONS
    shards = len(list(folder.glob("shard-*.safetensors")))
    questions: Iterator[list[int]] | None = None
    if data is not None:
        questions = read_questions(data, lambda text: source.tokenizer.encode(text, add_special_tokens=False))
    # A resumed run draws from a new stream, so that it does not make the same conversations again.
    source_of_data = converse(
        OrtTarget(graph / "target.onnx"),
        turn_tokens(source),
        np.random.default_rng([seed, shards]),
        rows=rows,
        questions=questions,
    )
    began, start = time.monotonic(), -1

    def show(done: int) -> None:
        nonlocal start
        start = done if start < 0 else start
        rate = (done - start) / max(time.monotonic() - began, 1e-9)
        report(f"making data: {done:,} of {tokens:,} answer tokens, {rate:.0f} a second")

    return make_conversations(source_of_data, folder, tokens, show)


__all__ = ["train_draft_model", "train_eagle_head", "train_medusa_heads", "turn_tokens"]
