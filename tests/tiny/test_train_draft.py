"""Distilling a draft out of a tiny target, on conversations that the target really wrote."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.compiler.checkpoint import Source, read_model
from speccompile.compiler.draft_model import cut_lm_head, cut_model, own_tensors, read_draft, set_lm_head, write_draft
from speccompile.graphs.errors import CheckpointError
from speccompile.graphs.tree import AdaptiveChain, load_tree
from speccompile.tools.training import draft as training
from speccompile.tools.training import pipeline
from speccompile.tools.training.conversations import Conversation, shard_paths, write_shard
from speccompile.tools.training.draft import (
    Distillation,
    Measured,
    Settings,
    choose_layers,
    cost_ratio,
    divergence,
    figures,
    final_norm,
    logits_of,
    make_batch,
    measure,
    read_side,
    recommend,
    shuffled_batches,
    states_of,
    train_draft,
    walk,
)
from speccompile.tools.training.medusa import is_held_out
from speccompile.tools.training.pipeline import train_draft_model
from tests.tiny.models import VOCAB, tiny_model

PROMPT, SHORTEST, LONGEST = 6, 12, 30
SETTINGS = Settings(layers=2, spacing="even", draft_vocabulary=VOCAB, epochs=14, lr=2e-2, batch=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """`tiny_checkpoint`, surer of what it says, as trained models are."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("checkpoint") / "sure")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Source:
    return read_model(checkpoint)


def conversations(target: Source, count: int, seed: int) -> list[Conversation]:
    """Prompts that differ in little, so that answers have something in common, and the target's greedy answers."""
    rng = np.random.default_rng(seed)
    prompts = np.tile(np.arange(40, 40 + PROMPT, dtype=np.int64), (count, 1))
    prompts[:, -3:-1] = rng.integers(100, 112, size=(count, 2))
    ids = torch.from_numpy(prompts)
    for _ in range(LONGEST):
        with torch.no_grad():
            ids = torch.cat([ids, target.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    with torch.no_grad():
        out = target.model(ids[:, :-1], output_hidden_states=True)
    features = out.hidden_states[-1][:, PROMPT - 1 :].numpy()  # transformers gives it after the final norm
    answers = ids[:, PROMPT:].numpy().astype(np.int32)
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=count)
    return [
        Conversation(prompt.astype(np.int32), answer[:length], feature[:length].astype(np.float16))
        for prompt, answer, feature, length in zip(prompts, answers, features, lengths, strict=True)
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, target: Source) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(3):
        write_shard(folder / f"shard-{number:05d}.safetensors", conversations(target, 40, number))
    return folder


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without bfloat16, whatever this one has."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


# ---- the whole way ----


def test_distillation_makes_the_draft_agree_with_the_target(target: Source, shards: Path, tmp_path: Path) -> None:
    paths = shard_paths(shards)
    before = figures(measure(cut_model(target, [0, 2]), paths))
    draft, report = train_draft(shards, target, work=tmp_path, settings=SETTINGS)
    after = figures(measure(draft, paths))
    # A random target says little about prompts it was not asked yet; on those it was, the draft knows it nearly.
    assert before["agreement"] < 0.2 and after["agreement"] > before["agreement"] + 0.15
    assert after["divergence"] < before["divergence"] / 2
    gained = [found["mean_accepted_tokens_by_chain"]["4"] - 1 for found in (before, after)]
    assert gained[1] > 2 * gained[0]
    assert report["layers"] == [0, 2] and draft.taken == (0, 2) and draft.token_ids is None
    assert len(report["loss"]) == SETTINGS.epochs and report["loss"][-1] < report["loss"][0] / 8
    assert report["coverage"] == 1.0 and json.loads(json.dumps(report)) == report
    # What it shares is still the target's, and what it does not is no longer what was cut.
    assert draft.model.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    start = own_tensors(cut_model(target, [0, 2]).model)
    assert all(not torch.equal(tensor, start[name]) for name, tensor in own_tensors(draft.model).items())
    write_draft(draft, tmp_path / "draft")
    again = measure(read_draft(tmp_path / "draft", target), paths)
    assert figures(again)["agreement"] == pytest.approx(after["agreement"], abs=0.02)

    # A chain really drafted token by token has accepted what the teacher-forced pass says.
    items = sorted((item for path in paths for item in read_side(path, True)), key=lambda item: len(item.answer))
    rounds, emitted = drafted_by_hand(draft.model, items, longest=3)
    found = walk(measure(draft, paths), 3)
    assert (found.rounds, found.emitted) == (rounds, emitted)


def drafted_by_hand(model: Any, items: Sequence[Conversation], longest: int) -> tuple[int, int]:
    """Rounds and tokens of greedy decoding with chains, each guess read back before the next."""
    rounds = emitted = 0
    for item in items:
        text, answer = item.prompt.tolist(), item.answer.tolist()
        done = 1
        while done < len(answer):
            read, accepted = text + answer[:done], 0
            for step in range(min(longest, len(answer) - done)):
                with torch.no_grad():
                    guess = int(model(torch.tensor([read])).logits[0, -1].argmax())
                if guess != answer[done + step]:
                    break
                read.append(guess)
                accepted += 1
            out = min(accepted + 1, len(answer) - done)
            rounds, emitted, done = rounds + 1, emitted + out, done + out
    return rounds, emitted


def test_an_interrupted_run_ends_with_the_same_weights(target: Source, shards: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, epochs=2, draft_vocabulary=50)
    whole, report = train_draft(shards, target, work=tmp_path / "whole", settings=settings)
    steps: list[int] = []

    def stop_at(last: int, step: int) -> None:
        steps.append(step)
        if step == last:
            raise KeyboardInterrupt

    per_epoch = sum(len(read_side(path, False)) for path in shard_paths(shards)) // settings.batch
    for last in (5, per_epoch + 3):  # in the first epoch, in the second
        with pytest.raises(KeyboardInterrupt):
            train_draft(
                shards,
                target,
                work=tmp_path / "cut",
                settings=settings,
                checkpoint_seconds=0,
                report=lambda step, steps, loss, last=last: stop_at(last, step),
            )
    cut, again = train_draft(shards, target, work=tmp_path / "cut", settings=settings)
    assert steps.count(5) == 2 and max(steps) == per_epoch + 3 and len(steps) == per_epoch + 4  # 5 was not saved yet
    assert cut.fingerprint == whole.fingerprint != cut_model(target, [0, 2], whole.token_ids).fingerprint
    assert again["loss"] == report["loss"]
    done, _ = train_draft(
        shards, target, work=tmp_path / "cut", settings=settings, report=lambda *_: pytest.fail("trained on")
    )
    assert done.fingerprint == whole.fingerprint
    with pytest.raises(
        CheckpointError, match=r"draft-training\.pt: made with settings .* give the same again to go on"
    ):
        train_draft(shards, target, work=tmp_path / "cut", settings=replace(settings, lr=1e-5))
    (tmp_path / "cut" / training.CHECKPOINT_FILE).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        train_draft(shards, target, work=tmp_path / "cut", settings=settings)


def test_the_seed_decides_the_order(target: Source, shards: Path, tmp_path: Path) -> None:
    short = replace(SETTINGS, epochs=1, draft_vocabulary=50)
    runs = [
        train_draft(shards, target, work=tmp_path / str(run), settings=replace(short, seed=seed))[0].fingerprint
        for run, seed in enumerate((0, 0, 1))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_training_goes_on_from_a_given_draft(target: Source, shards: Path, tmp_path: Path) -> None:
    first, report = train_draft(
        shards, target, work=tmp_path / "a", settings=replace(SETTINGS, epochs=3, draft_vocabulary=50)
    )
    write_draft(first, tmp_path / "first")
    still = replace(SETTINGS, epochs=1, lr=0.0)
    init = read_draft(tmp_path / "first", target)
    second, again = train_draft(shards, target, work=tmp_path / "b", settings=still, init=init)
    assert second.fingerprint == read_draft(tmp_path / "first", target).fingerprint
    assert second.token_ids is not None and len(second.token_ids) == 50
    assert again["loss"][0] < report["loss"][-1] < report["loss"][0]
    with pytest.raises(CheckpointError, match=r"layers \[0, 2\] cannot start a training of layers \[0, 1\]"):
        train_draft(shards, target, work=tmp_path / "c", settings=replace(still, spacing="first"), init=init)


def test_bfloat16_where_the_hardware_has_it(
    target: Source, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(SETTINGS, epochs=2)
    _, plain = train_draft(shards, target, work=tmp_path / "a", settings=short)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    draft, half = train_draft(shards, target, work=tmp_path / "b", settings=short)
    assert (plain["training_dtype"], half["training_dtype"]) == ("float32", "bfloat16")
    assert half["loss"] == pytest.approx(plain["loss"], rel=0.05) and half["loss"] != plain["loss"]
    assert {tensor.dtype for tensor in own_tensors(draft.model).values()} == {torch.float32}


# ---- its parts ----


@pytest.mark.parametrize(
    ("count", "layers", "spacing", "taken"),
    [
        (30, 1, "even", (0,)),
        (30, 2, "even", (0, 29)),
        (30, 4, "even", (0, 10, 19, 29)),
        (30, 3, "first", (0, 1, 2)),
        (3, 2, "even", (0, 2)),
        (5, 4, "even", (0, 1, 3, 4)),
    ],
)
def test_choice_of_layers(count: int, layers: int, spacing: str, taken: tuple[int, ...]) -> None:
    assert choose_layers(count, layers, spacing) == taken


def test_choices_of_layers_that_are_none() -> None:
    for layers in (0, -1, 3, 9):
        with pytest.raises(CheckpointError, match=rf"layers: {layers} asked for; a draft takes 1 \.\. 2 of this"):
            choose_layers(3, layers, "even")
    with pytest.raises(CheckpointError, match="spacing: 'last' is unknown; use one of even, first"):
        choose_layers(3, 2, "last")
    for count in range(2, 40):  # evenly spaced layers never meet
        for layers in range(2, count):
            taken = choose_layers(count, layers, "even")
            assert (
                len(set(taken)) == layers and (taken[0], taken[-1]) == (0, count - 1) and list(taken) == sorted(taken)
            )


def test_soft_labels_are_what_transformers_says_on_that_vocabulary(target: Source) -> None:
    items = conversations(target, 4, seed=9)
    batch = make_batch(items)
    token_ids = torch.arange(1, VOCAB, 5)
    draft = cut_model(target, [0, 2]).model
    cut_lm_head(draft, token_ids)
    with torch.no_grad():
        found = logits_of(draft, batch.features.float()).softmax(-1)
    place = 0
    for item in items:
        ids = torch.from_numpy(np.concatenate([item.prompt, item.answer])).long()[None]
        with torch.no_grad():
            logits = target.model(ids).logits[0, PROMPT - 1 : -1]
        expected = logits[:, token_ids].softmax(-1)
        torch.testing.assert_close(found[place : place + len(expected)], expected, rtol=0, atol=5e-3)
        assert logits.argmax(-1).tolist() == item.answer.tolist()
        place += len(expected)
    assert place == len(found)
    assert found.max(-1).values.mean() > 0.2  # far from flat, or the bound would say nothing


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "phi", "gpt2"])
def test_logits_of_states_are_the_models_own(name: str) -> None:
    """With soft-caps, scales, a bias: what an architecture does behind its lm_head."""
    model: Any = tiny_model(name)
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    wanted = torch.zeros(2, 9, dtype=torch.bool)
    wanted[0, 3:7] = wanted[1, 8] = True
    with torch.no_grad():
        expected = model(ids).logits[wanted]
        found = logits_of(model, states_of(model, ids, wanted))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_divergence_and_its_gradient_against_float64() -> None:
    rng = np.random.default_rng(3)
    labels, guesses, weights = (
        rng.normal(size=(5, 7)) * 4,
        rng.normal(size=(5, 7)) * 4,
        np.array([0.5, 0, 0.2, 0.2, 0.1]),
    )
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (labels, guesses))
    expected = float((weights[:, None] * p * np.log(p / q)).sum())
    leaf = torch.from_numpy(guesses).float().requires_grad_()
    loss = divergence(leaf, torch.from_numpy(labels).float(), torch.from_numpy(weights).float())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), weights[:, None] * (q - p), atol=1e-6)


def test_only_answer_positions_teach(target: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient against a plain loop over conversations; prompts, padding and unknown tokens carry none."""
    monkeypatch.setattr(training, "CHUNK", 7)
    items = conversations(target, 5, seed=4)
    token_ids = torch.from_numpy(np.unique(np.concatenate([item.answer for item in items]))[::2].astype(np.int64))
    distillation = Distillation(cut_model(target, [0, 2]).model, token_ids, VOCAB, "cpu")
    batch = make_batch(items)
    longest = PROMPT + max(len(item.answer) for item in items) - 1
    assert batch.ids.shape[0] == 5 and longest <= batch.ids.shape[1] < longest + training.LENGTH_STEP
    assert batch.predicts.sum(1).tolist() == [len(item.answer) for item in items]
    assert not batch.predicts[:, : PROMPT - 1].any() and batch.predicts[:, PROMPT - 1].all()
    loss = distillation.backward(batch)
    gradients = {name: weight.grad.clone() for name, weight in distillation.trained.items()}
    assert set(gradients) == set(own_tensors(distillation.model)) and all(g.any() for g in gradients.values())

    fresh = cut_model(target, [0, 2]).model
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for item in items:
        ids = torch.from_numpy(np.concatenate([item.prompt, item.answer[:-1]])).long()[None]
        guesses = fresh(ids).logits[0, PROMPT - 1 :, token_ids].double().log_softmax(-1)
        states = torch.from_numpy(item.features).float()
        labels = (states @ target.lm_head.weight.detach().T)[:, token_ids].double().log_softmax(-1)  # type: ignore[union-attr]
        for place, token in enumerate(item.answer.tolist()):
            if token in token_ids:
                total = total + (labels[place].exp() * (labels[place] - guesses[place])).sum()
                counted += 1
    assert 0 < counted < len(batch.answers)
    assert loss == pytest.approx(float(total.detach()) / counted, rel=1e-4)
    (total / counted).backward()
    for name, weight in fresh.named_parameters():
        if name in gradients:
            bound = float(weight.grad.abs().max()) * 1e-3
            np.testing.assert_allclose(gradients[name], weight.grad, atol=bound, err_msg=name)
    # Labels that prompts might have: features of prompt positions do not exist, so other answers' may stand there.
    other = replace(batch, ids=batch.ids.masked_fill(_behind(batch.predicts), 77))
    for weight in distillation.trained.values():
        weight.grad = None
    assert distillation.backward(other) == pytest.approx(loss, rel=1e-6)  # what is padding reaches no answer


def _behind(predicts: torch.Tensor) -> torch.Tensor:
    """The padding of a batch: positions after the last that predicts."""
    return predicts.int().flip(1).cumsum(1).flip(1) == 0


def test_every_training_conversation_comes_once_an_epoch(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SHUFFLE_SHARDS", 2)  # the three shards take two windows

    def epoch(seed: int, number: int) -> list[list[bytes]]:
        batches = list(shuffled_batches(shard_paths(shards), 8, seed, number))
        assert all(len(items) == 8 and not any(map(is_held_out, items)) for items in batches)
        return [[item.prompt.tobytes() + item.features.tobytes() for item in items] for items in batches]

    every = [item for path in shard_paths(shards) for item in read_side(path, False)]
    keys = [item.prompt.tobytes() + item.features.tobytes() for item in every]
    first = epoch(0, 0)
    seen = [key for batch in first for key in batch]
    assert len(seen) == len(every) // 8 * 8
    assert all(seen.count(key) <= keys.count(key) for key in set(seen))
    assert epoch(0, 0) == first
    assert epoch(0, 1) != first != epoch(1, 0)
    spread = [max(map(len, items)) - min(map(len, items)) for items in _lengths(shards)]
    assert np.mean(spread) < (LONGEST - SHORTEST) / 2  # of about one length


def _lengths(shards: Path) -> list[list[range]]:
    return [[range(len(item.answer)) for item in items] for items in shuffled_batches(shard_paths(shards), 8, 0, 0)]


def test_a_step_moves_every_tensor_by_the_same_share_of_its_size(target: Source) -> None:
    model = cut_model(target, [0, 2]).model
    with torch.no_grad():
        model.model.norm.weight *= 40
    distillation = Distillation(model, torch.arange(VOCAB), VOCAB, "cpu")
    before = {name: weight.detach().clone() for name, weight in distillation.trained.items()}
    distillation.update(make_batch(conversations(target, 4, seed=2)), rate=1e-2)
    for name, weight in distillation.trained.items():  # Adam's first step is the sign of the gradient
        moved = (weight.detach() - before[name]).abs().median() / before[name].square().mean().sqrt()
        assert float(moved) == pytest.approx(1e-2, rel=0.05), name


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi", "opt"])
def test_the_final_norm_is_what_the_lm_head_reads(name: str) -> None:
    model: Any = tiny_model(name)
    ids, wanted = torch.arange(9)[None], torch.ones(1, 9, dtype=torch.bool)
    norm = final_norm(model)
    seen: list[torch.Tensor] = []
    norm.register_forward_hook(lambda _module, _args, out: seen.append(out))
    with torch.no_grad():
        assert torch.equal(states_of(model, ids, wanted), seen[0][0])


def test_too_sure_a_start_is_softened_and_a_good_one_is_not(target: Source) -> None:
    batch = make_batch(conversations(target, 6, seed=2))
    whole = cut_model(target, [0, 1, 2]).model  # says what the target says
    assert Distillation(whole, torch.arange(VOCAB), VOCAB, "cpu").soften(batch) == 1.0
    torch.testing.assert_close(whole.model.norm.weight, target.model.model.norm.weight, rtol=0, atol=0)
    with torch.no_grad():
        whole.model.norm.weight *= 4
    sure = Distillation(whole, torch.arange(VOCAB), VOCAB, "cpu")
    before = sure.backward(batch)
    assert sure.soften(batch) == 0.25  # the exact inverse is among the factors
    torch.testing.assert_close(whole.model.norm.weight, target.model.model.norm.weight, rtol=1e-6, atol=0)
    assert sure.backward(batch) < 1e-4 < before
    sizes = {id(group["params"][0]): group["size"] for group in sure.optimizer.param_groups}
    assert sizes[id(whole.model.norm.weight)] == pytest.approx(
        float(target.model.model.norm.weight.detach().square().mean() ** 0.5)
    )


def test_held_out_conversations_are_never_trained_on(
    target: Source, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: set[bytes] = set()
    make = training.make_batch

    def noting(items: Sequence[Conversation]) -> Any:
        trained.update(item.prompt.tobytes() for item in items)
        return make(items)

    monkeypatch.setattr(training, "make_batch", noting)
    train_draft(shards, target, work=tmp_path, settings=replace(SETTINGS, epochs=1))
    held_out = {item.prompt.tobytes() for path in shard_paths(shards) for item in read_side(path, True)}
    assert trained and held_out and not trained & held_out


def test_unusable_shards(target: Source, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match="holds no feature shards; make training data first"):
        train_draft(tmp_path / "none", target, work=tmp_path)
    items = conversations(target, 30, seed=0)
    few = replace(SETTINGS, batch=64)
    write_shard(tmp_path / "shard-00000.safetensors", items)
    with pytest.raises(CheckpointError, match="training conversations are less than one batch of 64; make more data"):
        train_draft(tmp_path, target, work=tmp_path, settings=few)
    narrow = [replace(item, features=item.features[:, :32]) for item in items]
    write_shard(tmp_path / "shard-00000.safetensors", narrow)
    with pytest.raises(CheckpointError, match="features have width 32, the lm_head has 64"):
        train_draft(tmp_path, target, work=tmp_path, settings=SETTINGS)
    with pytest.raises(CheckpointError, match="draft vocabulary: 321 tokens asked for, the target has 320"):
        train_draft(tmp_path, target, work=tmp_path, settings=replace(SETTINGS, draft_vocabulary=321))


# ---- measuring ----


def measured(right: Sequence[int], confidence: Sequence[float] | None = None) -> Measured:
    sure = np.ones(len(right)) if confidence is None else np.array(confidence)
    return Measured(np.array(right, np.bool_), sure.astype(np.float32), np.zeros(len(right), np.float32))


def test_walks_counted_by_hand() -> None:
    answer = measured([0, 1, 1, 0, 1, 1, 1, 0])  # the first place is never drafted
    # chains of 2: 1 2 right, 3 is the bonus; 4 5 right, 6 the bonus; 7 wrong.
    found = walk([answer], 2)
    assert (found.rounds, found.emitted, found.drafted) == (3, 7, 5)
    # chains of 1: 1, bonus 2; 3 wrong; 4, bonus 5; 6, bonus 7.
    found = walk([answer], 1)
    assert (found.rounds, found.emitted, found.drafted) == (4, 7, 4)
    assert found.mean_accepted_tokens == 7 / 4
    assert found.speedup(0.2, 0.1) == pytest.approx(7 / (4 + 4 * 0.3))
    # Unsure at 2 and 4: chains end there, with that guess drafted. 1 2 + bonus; 4 + bonus; 6 7 with 7 wrong.
    unsure = measured(answer.right.tolist(), [1, 1, 0.1, 1, 0.1, 1, 1, 1])
    found = walk([unsure], 4, 0.5)
    assert (found.rounds, found.emitted, found.drafted) == (3, 7, 2 + 1 + 2)
    assert walk([unsure], 4, 0.0).drafted == 4 + 4 + 1 - 1  # 1..4, 4..7; nothing is left


def test_figures_counted_by_hand() -> None:
    answers = [measured([1, 1, 1, 0, 1]), measured([0, 1, 0])]
    answers[0].divergence[:] = [9, 1, 2, math.nan, 3]
    found = figures(answers)
    assert found["positions"] == 6 and found["agreement"] == pytest.approx(4 / 6)
    assert found["chain"][:4] == pytest.approx([4 / 6, 1 / 4, 0, 0]) and found["chain"][4:] == [0.0] * 4
    assert found["divergence"] == pytest.approx(6 / 5)


def test_the_recommended_chain_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(40):
        right = rng.random(60) < 0.7
        answers.append(measured(right.tolist(), np.where(right, 0.75, 0.25).tolist()))
    # An honest drafter and dear rows: stop behind a doubtful guess. Free ones: the longest chain, whatever it says.
    tree, found = recommend(answers, 0.3, 0.1)
    assert 0.25 < tree.confidence <= 0.75 and found == walk(answers, tree.longest, tree.confidence)
    others = [walk(answers, n, c).speedup(0.3, 0.1) for n in range(1, 9) for c in training.CONFIDENCES]
    assert found.speedup(0.3, 0.1) == max(others) > walk(answers, 4).speedup(0.3, 0.1)
    free, _ = recommend(answers, 0.0, 0.0)
    assert (free.longest, free.confidence) == (8, 0.0)


def test_cost_ratio_counts_weights_read(target: Source) -> None:
    whole = cut_model(target, [0])
    layer = sum(p.numel() for p in target.model.model.layers[0].parameters())
    norm, head = 64, 64 * VOCAB
    assert cost_ratio(whole, target) == pytest.approx((layer + norm + head) / (3 * layer + norm + head))
    reduced = cut_model(target, [0], torch.arange(32))
    assert cost_ratio(reduced, target) == pytest.approx((layer + norm + 64 * 32) / (3 * layer + norm + head))


def test_measuring_leaves_the_draft_as_it_was(target: Source, shards: Path) -> None:
    draft = cut_model(target, [0, 2], torch.arange(0, VOCAB, 2))
    head = draft.model.get_output_embeddings()
    answers = measure(draft, shard_paths(shards))
    assert draft.model.get_output_embeddings() is head
    items = sorted(
        (item for path in shard_paths(shards) for item in read_side(path, True)), key=lambda item: len(item.answer)
    )
    assert [len(answer.right) for answer in answers] == [len(item.answer) for item in items]
    set_lm_head(draft.model, head)
    for answer, item in zip(answers, items, strict=True):
        odd = item.answer % 2 == 1  # outside the draft vocabulary: never right, no divergence
        assert not answer.right[odd].any() and np.isnan(answer.divergence[odd]).all()
        assert np.isfinite(answer.divergence[~odd]).all() and (answer.divergence[~odd] >= -1e-4).all()
        ids = torch.from_numpy(np.concatenate([item.prompt, item.answer[:-1]])).long()[None]
        with torch.no_grad():
            ours = draft.model(ids).logits[0, PROMPT - 1 :, ::2].softmax(-1)
        np.testing.assert_allclose(answer.confidence, ours.max(-1).values, rtol=1e-4)
        np.testing.assert_array_equal(answer.right, ours.argmax(-1).numpy() * 2 == item.answer)


# ---- the command ----


def test_a_draft_is_published_with_its_card_and_tree(
    checkpoint: Path, target: Source, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_make_data", lambda *_: 2345)
    work, out = tmp_path / "work", tmp_path / "draft"
    work.mkdir()
    (work / pipeline.CONVERSATIONS).symlink_to(shards)
    said: list[str] = []
    options: dict[str, Any] = {
        "layers": 2,
        "spacing": "even",
        "tokens": 2000,
        "draft_vocabulary": 60,
        "epochs": 2,
        "rows": 4,
        "seed": 0,
        "device": "cpu",
    }
    card = train_draft_model(checkpoint, out, work, **options, report=said.append)
    assert json.loads((out / "card.json").read_text()) == card
    assert sorted(file.name for file in out.iterdir()) == ["card.json", "config.json", "model.safetensors", "tree.json"]
    assert card["method"] == "draft" and card["target"] == "LlamaForCausalLM" and card["layers"] == [0, 2]
    assert card["target_fingerprint"] == target.fingerprint and card["dtype"] == "int8"
    assert card["data"] == {"source": "self-made", "answer_tokens": 2345, "seed": 0}
    assert card["settings"] == {
        "layers": 2,
        "spacing": "even",
        "draft_vocabulary": 60,
        "epochs": 2,
        "lr": Settings.lr,
        "batch": Settings.batch,
        "seed": 0,
    }
    held_out = sum(len(item.answer) for path in shard_paths(shards) for item in read_side(path, True))
    assert card["held_out_tokens"] == held_out and len(card["loss"]) == 2 and 0 < card["coverage"] <= 1
    assert len(card["chain"]) == 8 and card["chain"] == sorted(card["chain"], reverse=True)
    assert card["seconds"] > 0 and card["hours"] > 0

    draft = read_draft(out, target)
    assert draft.token_ids is not None and len(draft.token_ids) == 60
    answers = measure(draft, shard_paths(shards))  # what was written, not what was trained
    assert card["agreement"] == figures(answers)["agreement"] and card["divergence"] == figures(answers)["divergence"]
    tree = load_tree(out / "tree.json")
    assert isinstance(tree, AdaptiveChain) and tree.to_json() == {"adaptive": card["recommended"]["adaptive"]}
    assert card["recommended"]["assumed_costs"]["draft_token"] == cost_ratio(draft, target)
    best = walk(answers, tree.longest, tree.confidence)
    assert card["recommended"]["mean_accepted_tokens"] == best.mean_accepted_tokens
    assert said[0] == "reading the model" and any(text.startswith("training: step 1 of") for text in said)

    with pytest.raises(CheckpointError, match="dtype 'fp8' is unknown"):
        train_draft_model(checkpoint, tmp_path / "other", work, **options, dtype="fp8")
    assert not (tmp_path / "other").exists()
