"""Training EAGLE heads: passes against plain recomputation, periodic text learnt at every depth, the whole command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import kl_div, smooth_l1_loss
from transformers import LlamaConfig, Qwen3Config

from speccompile.compiler.checkpoint import Source, read_model
from speccompile.compiler.draft_model import DraftModel, cut_model, fingerprint_own, write_draft
from speccompile.compiler.eagle_head import EagleHead, make_head, own_tensors, read_eagle, write_eagle
from speccompile.graphs.eagle import EagleForm, EagleModel
from speccompile.graphs.errors import CheckpointError
from speccompile.graphs.tree import load_tree
from speccompile.tools.training import eagle as training
from speccompile.tools.training import pipeline, steps
from speccompile.tools.training.conversations import Conversation, read_shard, shard_paths, write_shard
from speccompile.tools.training.draft import SOFTENINGS
from speccompile.tools.training.eagle import (
    MISSED,
    UNKNOWN,
    Batch,
    Item,
    Settings,
    Unrolling,
    check_settings,
    default_taps,
    figures,
    make_batch,
    make_features,
    measure,
    new_head,
    read_side,
    shuffled_batches,
    train_eagle,
    unrolled,
)
from speccompile.tools.training.medusa import DataSummary, is_held_out
from tests.tiny.conftest import Cli, write_tokenizer
from tests.tiny.models import VOCAB, tiny_model

WIDTH, LAYERS, PROMPT, SHORTEST, LONGEST = 64, 3, 6, 10, 24
TAPS = (0, 2, 3)
CYCLE = np.array([30, 45, 80, 110, 140, 170, 200], np.int32)
TOKENS = 8000
SETTINGS = Settings(draft_vocabulary=50, epochs=2, batch=8)


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without bfloat16, whatever this one has."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model sure of what it says, as trained models are, and long enough to make data with."""
    folder = tmp_path_factory.mktemp("checkpoint") / "sure"
    model: Any = tiny_model("llama", max_position_embeddings=512)
    with torch.no_grad():
        model.lm_head.weight *= 3
    model.generation_config.eos_token_id = [2, 4]
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Source:
    return read_model(checkpoint)


def conversations(target: Source, count: int, seed: int, prompt: int = PROMPT) -> list[Conversation]:
    """Prompts that differ in little and the target's greedy answers."""
    rng = np.random.default_rng(seed)
    prompts = np.tile(np.arange(40, 40 + prompt, dtype=np.int64), (count, 1))
    prompts[:, -3:] = rng.integers(100, 112, size=(count, min(prompt, 3)))
    ids = torch.from_numpy(prompts)
    with torch.no_grad():
        for _ in range(LONGEST):
            ids = torch.cat([ids, target.model(ids).logits[:, -1:].argmax(-1)], dim=1)
        out = target.model(ids[:, :-1], output_hidden_states=True)
    states = out.hidden_states[-1][:, prompt - 1 :].numpy()  # transformers gives it after the final norm
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=count)
    return [
        Conversation(own[:prompt], own[prompt : prompt + length], feature[:length].astype(np.float16))
        for own, length, feature in zip(ids.numpy().astype(np.int32), lengths, states, strict=True)
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, target: Source) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(3):
        write_shard(folder / f"shard-{number:05d}.safetensors", conversations(target, 30, number))
    return folder


def features_of(target: Source, shards: Path, folder: Path, taps: Sequence[int]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", dict)
        make_features(target, shards, folder, taps)
    return folder


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory, target: Source, shards: Path) -> Path:
    """Those of TAPS."""
    return features_of(target, shards, tmp_path_factory.mktemp("features") / "tapped", TAPS)


@pytest.fixture(scope="module")
def last_features(tmp_path_factory: pytest.TempPathFactory, target: Source, shards: Path) -> Path:
    """The post-norm hidden state."""
    return features_of(target, shards, tmp_path_factory.mktemp("features") / "last", ())


@pytest.fixture(scope="module")
def draft(target: Source) -> DraftModel:
    """A draft model of two layers whose own weights are no longer the target's."""
    made = cut_model(target, [0, 2], torch.arange(0, VOCAB, 3))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if weight.requires_grad or name == "model.norm.weight":
                weight += torch.randn(weight.shape, generator=generator) * 0.05
    return replace(made, fingerprint=fingerprint_own(made.model, made.token_ids))


def random_head(form: EagleForm, layers: int, kv_heads: int = 2, vocabulary: int = 40, seed: int = 0) -> EagleModel:
    """A head whose every weight matters."""
    kind = Qwen3Config if form.query_norm else LlamaConfig
    config = kind(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    config.mlp_bias = False  # LlamaMLP asks; Qwen3's config does not say
    torch.manual_seed(seed)
    model = EagleModel(config, form, WIDTH, vocabulary).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.15 + (weight.dim() == 1))
    return model


def run_head(model: EagleModel, ids: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [Vd] and state [H] at the end of one plain causal pass; `hidden` [T,H]."""
    count = len(ids)
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        out = model(torch.tensor([ids]), torch.arange(count)[None], hidden[None], attention_mask=mask)
    return out.logits[0, -1], out.hidden_states[0][0, -1]


def drafted_by_hand(model: EagleModel, text: Sequence[int], fused: torch.Tensor, row: int, passes: int) -> list[Any]:
    """Logits of a head that has the features up to `row` and then, token by token, its own states: all computed anew
    for every token."""
    hidden, found = fused[: row + 1], []
    for step in range(passes):
        logits, state = run_head(model, list(text[1 : row + 2 + step]), hidden)
        found.append(logits)
        hidden = torch.cat((hidden, state[None]))
    return found


def fuse(model: EagleModel, own: torch.Tensor) -> torch.Tensor:
    """What a head makes of stored features [rows,F]."""
    with torch.no_grad():
        return model.features(own.float().chunk(max(len(model.form.taps), 1), -1))


# ---- training-time test ----

FORMS = {
    "eagle3": (EagleForm(3, TAPS), 1, 2),
    "eagle3-deep": (EagleForm(3, TAPS, fusion_norm="each"), 3, 4),
    "eagle3.1": (EagleForm(3, TAPS, fusion_norm="whole", norm_before_residual=True, norm_output=True), 2, 2),
    "eagle3-qwen3": (EagleForm(3, TAPS, query_norm=True), 1, 1),
    "eagle1": (EagleForm(1), 1, 2),
    "eagle1-norms": (
        EagleForm(1, embedding_norm=True, feature_norm=True, input_norm=True, output_norm=True),
        2,
        2,
    ),
    "trunk": (EagleForm(1, TAPS, join=2, feature_norm=True, input_norm=True, output_norm=True), 3, 2),
}


@pytest.mark.parametrize("name", FORMS)
def test_passes_are_what_a_head_says_on_its_own_states(name: str) -> None:
    form, layers, kv_heads = FORMS[name]
    model = random_head(form, layers, kv_heads)
    rng = torch.Generator().manual_seed(1)
    passes, length = 4, 9
    texts = torch.randint(VOCAB, (2, length + passes), generator=rng)
    fused = torch.randn(2, length, WIDTH, generator=rng)
    with torch.no_grad():
        states = unrolled(model, texts[:, 1:], fused, passes)
        found = torch.stack([model.lm_head(state) for state in states], 2)  # [B,T,passes,Vd]
    assert found.shape == (2, length, passes, 40)
    for text, own, logits in zip(texts.tolist(), fused, found, strict=True):
        for row in range(length):
            expected = torch.stack(drafted_by_hand(model, text, own, row, passes))
            size = max(1.0, float(expected.abs().max()))  # without norms, states grow
            torch.testing.assert_close(logits[row] / size, expected / size, rtol=0, atol=1e-4)
    # What stands behind a row, padding among it, does not matter to it.
    kept = 5
    others, noise = texts.clone(), fused.clone()
    others[:, kept + passes :], noise[:, kept:] = 7, 3.0
    with torch.no_grad():
        again = unrolled(model, others[:, 1:], noise, passes)
    for before, after in zip(states, again, strict=True):
        torch.testing.assert_close(after[:, :kept], before[:, :kept], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(after[:, kept:], before[:, kept:], atol=1e-2)


def test_a_batch_says_which_row_guesses_which_token() -> None:
    """Every pass: the token of a row that guesses `answer` is the text's, `answer` follows it by two and its pass."""
    rng = np.random.default_rng(0)
    texts = [(1, 9), (3, 2), (7, 5)]  # lengths of prompt and answer, the first shorter than the passes
    items: list[Item] = []
    for prompt, answer in texts:
        ids = rng.permutation(VOCAB)[: prompt + answer].astype(np.int32)
        states = rng.normal(size=(answer, WIDTH)).astype(np.float16)
        own = torch.from_numpy(np.tile(ids[:-1, None], (1, 4))).half()  # the feature of a position is its token
        items.append((Conversation(ids[:prompt], ids[prompt:], states), own))
    unroll = 3
    batch = make_batch(items, unroll)
    assert batch.features.shape == (3, 32, 4) and batch.ids.shape == (3, 32 + unroll - 1)
    assert batch.rows.shape == (unroll, 16)
    features, ids = batch.features.flatten(0, 1), batch.ids
    for level in range(unroll):
        token = 0
        for number, (item, _) in enumerate(items):
            text = [*item.prompt.tolist(), *item.answer.tolist()]
            for answer in item.answer.tolist():
                row, place = int(batch.rows[level, token]), text.index(answer)
                assert int(batch.answers[token]) == answer
                if place < 2 + level:
                    assert row == -1
                else:
                    assert divmod(row, 32)[0] == number
                    assert int(features[row, 0]) == text[place - 2 - level]  # true features end there
                    assert int(ids[number, row % 32 + level]) == text[place - 1]  # the token read in this pass
                token += 1
    assert (batch.rows < 0).sum().tolist() == 1 + 2 + 3 + 0 + 0 + 1
    np.testing.assert_array_equal(batch.labels, np.concatenate([item.features for item, _ in items]))


# ---- what it learns ----


def states_that_say(target: Source, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
    """Hidden states whose lm_head argmax is `tokens`."""
    rows = target.lm_head.weight.detach().numpy()  # type: ignore[operator]
    states = rows[tokens] / np.linalg.norm(rows[tokens], axis=1, keepdims=True) * 4
    assert (np.argmax(states @ rows.T, axis=1) == tokens).all()
    return states.astype(np.float16)


@pytest.fixture(scope="module")
def periodic(tmp_path_factory: pytest.TempPathFactory, target: Source) -> Path:
    """Conversations whose answers run round CYCLE from anywhere, behind prompts of three random tokens."""
    folder, rng = tmp_path_factory.mktemp("periodic") / "shards", np.random.default_rng(0)
    folder.mkdir()
    items = []
    for _ in range(100):
        answer = CYCLE[(rng.integers(len(CYCLE)) + np.arange(rng.integers(12, 24))) % len(CYCLE)]
        prompt = rng.integers(VOCAB, size=3, dtype=np.int32)
        items.append(Conversation(prompt, answer, states_that_say(target, answer)))
    write_shard(folder / "shard-00000.safetensors", items)
    features_of(target, folder, folder.with_name("tapped"), TAPS)
    features_of(target, folder, folder.with_name("last"), ())
    return folder


def guesses_after(head: EagleHead, target: Source, text: Sequence[int], ahead: Sequence[int]) -> list[int]:
    """First guesses of `head` behind `text`, of which transformers gives the features, and then behind each of
    `ahead`."""
    with torch.no_grad():
        out = target.model(torch.tensor([text]), output_hidden_states=True)
    streams = [out.hidden_states[tap][0] for tap in head.form.taps] or [out.hidden_states[-1][0]]
    fused = head.model.features(streams)[:-1].detach()
    found = drafted_by_hand(head.model, [*text, *ahead], fused, len(text) - 2, len(ahead) + 1)
    ids = torch.arange(VOCAB) if head.token_ids is None else head.token_ids
    return [int(ids[logits.argmax()]) for logits in found]


@pytest.mark.parametrize(("version", "taps"), [(1, ()), (1, (0, 2)), (3, (0, 2))])
def test_periodic_answers_are_learnt_at_every_depth(
    target: Source, periodic: Path, tmp_path: Path, version: int, taps: tuple[int, ...]
) -> None:
    features = periodic.with_name("last")
    if taps:
        features = features_of(target, periodic, tmp_path / "features", taps)
    settings = Settings(version, draft_vocabulary=12, epochs=8, batch=8, unroll=4, feature_loss=0.1 * (version == 1))
    head, report = train_eagle(periodic, features, target, taps, work=tmp_path, settings=settings)
    found = figures(measure(head, periodic, features, depth=4))
    assert found["agreement"] == found["top3"] == 1.0 and found["by_depth"] == [1.0] * 4
    losses = np.array(report["loss"])
    assert losses.shape == (8, 4) and (losses[-1] < losses[0] / 10).all()
    assert report["coverage"] == 1.0 and json.loads(json.dumps(report)) == report
    assert head.version == version and head.form.taps == taps and head.draft_vocabulary == 12
    assert head.target_fingerprint == target.fingerprint
    # Said once more without any of the trainer's own counting, of a prompt that it has not seen.
    text = [9, 8, 7, *CYCLE[:3].tolist()]
    assert guesses_after(head, target, text, CYCLE[3:6].tolist()) == CYCLE[3:].tolist()


@pytest.mark.parametrize("wrong", [-1, 1])
def test_an_offset_off_by_one_shows(
    target: Source, periodic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    def shifted(items: Sequence[Item], unroll: int) -> Batch:
        batch = make_batch(items, unroll)
        return replace(batch, rows=torch.where(batch.rows < 1, -1, batch.rows + wrong))

    features = periodic.with_name("last")
    with monkeypatch.context() as patch:
        patch.setattr(training, "make_batch", shifted)
        settings = Settings(1, draft_vocabulary=12, epochs=5, batch=8)
        head, report = train_eagle(periodic, features, target, (), work=tmp_path, settings=settings)
        assert report["loss"][-1][0] < report["loss"][0][0] / 4  # it agrees with itself
    assert figures(measure(head, periodic, features, depth=2))["by_depth"] == [0.0, 0.0]
    text = [9, 8, 7, *CYCLE[:3].tolist()]
    assert guesses_after(head, target, text, []) == [int(CYCLE[3 - wrong])]


def test_answers_outside_the_draft_vocabulary(target: Source, periodic: Path, tmp_path: Path) -> None:
    settings = Settings(1, draft_vocabulary=5, epochs=4, batch=8)
    features = periodic.with_name("last")
    head, report = train_eagle(periodic, features, target, (), work=tmp_path, settings=settings)
    assert head.token_ids is not None and set(head.token_ids.tolist()) < set(CYCLE.tolist())
    ranks = measure(head, periodic, features, depth=3)
    assert set(np.unique(ranks)) == {UNKNOWN, 0, MISSED}
    found = figures(ranks)
    assert 0.6 < report["coverage"] < 0.8 and found["agreement"] == pytest.approx(report["coverage"], abs=0.05)
    assert found["by_depth"] == pytest.approx([found["agreement"]] * 3, abs=0.05)
    assert found["by_depth"][0] == found["agreement"] == found["top10"]


def test_held_out_conversations_are_never_trained_on(
    target: Source, shards: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: set[bytes] = set()

    def noting(items: Sequence[Item], unroll: int) -> Batch:
        trained.update(item.prompt.tobytes() for item, _ in items)
        return make_batch(items, unroll)

    monkeypatch.setattr(training, "make_batch", noting)
    train_eagle(shards, features, target, TAPS, work=tmp_path, settings=replace(SETTINGS, epochs=1))
    held_out = {item.prompt.tobytes() for path in shard_paths(shards) for item, _ in read_side(path, features, True)}
    assert trained and held_out and not trained & held_out


def test_every_training_conversation_comes_once_an_epoch_with_its_features(
    shards: Path, features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speccompile.tools.training.draft.SHUFFLE_SHARDS", 2)  # the three shards take two windows
    paths = shard_paths(shards)

    def epoch(seed: int, number: int) -> list[list[bytes]]:
        batches = list(shuffled_batches(paths, features, 8, seed, number))
        assert all(len(items) == 8 and not any(is_held_out(item) for item, _ in items) for items in batches)
        return [[item.prompt.tobytes() + own.numpy().tobytes() for item, own in items] for items in batches]

    every = {}
    for path in paths:
        stored, place = load_file(features / path.name)["features"], 0
        for item in read_shard(path):
            count = len(item.prompt) + len(item.answer) - 1
            if not is_held_out(item):
                every[item.prompt.tobytes() + stored[place : place + count].numpy().tobytes()] = len(item.answer)
            place += count
        assert place == len(stored)
    first = epoch(0, 0)
    seen = [key for batch in first for key in batch]
    assert set(seen) <= set(every) and len(seen) >= len(every) - 7
    assert epoch(0, 0) == first
    assert epoch(0, 1) != first != epoch(1, 0)
    spread = [max(every[key] for key in batch) - min(every[key] for key in batch) for batch in first]
    assert np.mean(spread) < (LONGEST - SHORTEST) / 2  # of about one length


# ---- the loss ----


def source_of(model: Any) -> Source:
    return Source(Path("model"), model.eval(), None, "fingerprint", "config", (2,))


def summary(token_ids: torch.Tensor, scale: torch.Tensor | None = None) -> DataSummary:
    return DataSummary(100, 10, token_ids, 1.0, torch.ones(WIDTH) if scale is None else scale)


def random_batch(count: int, unroll: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, 1, WIDTH),
        torch.randint(-1, 4, (unroll, count), generator=rng),
        torch.randint(VOCAB, (count,), generator=rng),
        (torch.randn(count, WIDTH, generator=rng) * 2).half(),
    )


ENDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "llama": lambda config, logits: logits,
    "phi": lambda config, logits: logits,  # with a bias
    "granite": lambda config, logits: logits / config.logits_scaling,
    "cohere": lambda config, logits: logits * config.logit_scale,
    "gemma2": lambda config, logits: config.final_logit_softcapping * (logits / config.final_logit_softcapping).tanh(),
}


@pytest.mark.parametrize("name", ENDS)
def test_divergence_and_gradient_against_autograd_in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHUNK", 7)
    token_ids = torch.arange(1, VOCAB, 4)
    source = source_of(tiny_model(name))
    head = random_head(EagleForm(1), 1, vocabulary=len(token_ids))
    settings = Settings(1, unroll=3, decay=0.6)
    unrolling = Unrolling(head, source, summary(token_ids), settings, "cpu")
    batch = random_batch(45, 3, seed=2)
    states = torch.randn(3, 45, WIDTH, generator=torch.Generator().manual_seed(3))
    losses, gradient = unrolling.compare(states, batch)

    lm_head: Any = source.lm_head
    logits = batch.labels.double() @ lm_head.weight.detach().double().T
    logits = logits if lm_head.bias is None else logits + lm_head.bias.detach().double()
    labels = ENDS[name](source.model.config, logits)[:, token_ids].log_softmax(-1)
    plain = logits[:, token_ids].log_softmax(-1)
    assert torch.allclose(labels, plain, atol=0.02) == (name in ("llama", "phi"))  # what stands behind it is seen
    leaf = states.double().requires_grad_()
    guesses = (leaf @ head.lm_head.weight.detach().double().T).log_softmax(-1)
    expected = []
    for level in range(3):
        counted = [n for n in range(45) if int(batch.answers[n]) in token_ids and int(batch.rows[level, n]) >= 0]
        assert 3 < len(counted) < 20
        parts = kl_div(guesses[level, counted], labels[counted], reduction="sum", log_target=True) / len(counted)
        expected.append(parts)
    sum(0.6**level * part for level, part in enumerate(expected)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(losses.double(), torch.stack(expected).detach(), rtol=1e-4, atol=1e-6)
    assert leaf.grad is not None
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-7)
    assert (gradient.abs().sum(-1) > 0).sum() == sum(
        int(batch.answers[n]) in token_ids and int(batch.rows[level, n]) >= 0 for level in range(3) for n in range(45)
    )


def test_products_have_few_shapes(target: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps memory for every shape of a bfloat16 product that it meets."""
    sizes: set[tuple[int, ...]] = set()
    ends = training.logits_of
    monkeypatch.setattr(training, "CHUNK", 16)
    monkeypatch.setattr(training, "logits_of", lambda model, given: (sizes.add((*given.shape,)), ends(model, given))[1])
    unrolling = Unrolling(random_head(EagleForm(1), 1), target, summary(torch.arange(40)), Settings(1, unroll=2), "cpu")
    for count in (3, 16, 17, 40):
        losses, gradient = unrolling.compare(torch.randn(2, count, WIDTH), random_batch(count, 2, seed=0))
        assert gradient.shape == (2, count, WIDTH) and losses.isfinite().all()
    assert sizes == {(16, WIDTH)}
    items, ids = conversations(target, 5, seed=0), set()
    embedding = target.model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _module, given: ids.add((*given[0].shape,)))
    try:
        for count in (1, 2, 5):
            assert len(training._run_target(target.model, items[:count], TAPS)) == count
    finally:
        hook.remove()
    assert ids == {(training.FEATURE_BATCH, 32)}


def test_nothing_known_teaches_nothing(target: Source) -> None:
    head = random_head(EagleForm(1), 1, vocabulary=2)
    unrolling = Unrolling(head, target, summary(torch.tensor([0, 1])), Settings(1, unroll=2), "cpu")
    batch = replace(random_batch(9, 2, seed=0), answers=torch.full((9,), 5))
    losses, gradient = unrolling.compare(torch.randn(2, 9, WIDTH), batch)
    assert losses.tolist() == [0.0, 0.0] and not gradient.any()


@pytest.mark.parametrize("name", ["eagle3-deep", "eagle1-norms", "trunk"])
def test_a_steps_gradient_against_plain_autograd(
    target: Source, shards: Path, features: Path, last_features: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Divergence and feature loss of all passes, from conversations to weights, each guess recomputed by itself."""
    monkeypatch.setattr(steps, "GRADIENT_CLIP", 1e9)
    form, layers, kv_heads = FORMS[name]
    token_ids = torch.arange(0, VOCAB, 2)
    head = random_head(form, layers, kv_heads, vocabulary=len(token_ids))
    with torch.no_grad():
        head.norm.weight.mul_(0.3)  # type: ignore[operator]
    scale = torch.linspace(0.2, 2, WIDTH)
    settings = Settings(form.version, unroll=2, decay=0.5, feature_loss=0.7)
    unrolling = Unrolling(head, target, summary(token_ids, scale), settings, "cpu")
    side = read_side(shard_paths(shards)[0], features if form.taps else last_features, held_out=False)[:3]
    losses = unrolling.update(make_batch(side, 2), rate=0.0)
    found = {key: weight.grad.clone() for key, weight in unrolling.trained.items() if weight.grad is not None}
    assert set(unrolling.trained) == {key for key, _ in head.named_parameters()} - {
        "embed_tokens.weight",
        "lm_head.weight",
    }
    assert set(found) == set(unrolling.trained)

    head.zero_grad()
    seen: list[torch.Tensor] = []  # what the lm_head reads
    hook = head.lm_head.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0, -1]))
    matrix = target.lm_head.weight.detach()[token_ids]  # type: ignore[index]
    divergences: list[list[torch.Tensor]] = [[], []]
    distances: list[torch.Tensor] = []
    for item, own in side:
        text = [*item.prompt.tolist(), *item.answer.tolist()]
        fused = head.features(own.float().chunk(max(len(form.taps), 1), -1))
        for place, token in enumerate(item.answer.tolist()):
            label = torch.from_numpy(item.features[place]).float()
            for level in range(2):
                row = len(item.prompt) + place - 2 - level
                hidden = fused[: row + 1]
                for step in range(level + 1):
                    count = row + 1 + step
                    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
                    ids = torch.tensor([text[1 : count + 1]])
                    out = head(ids, torch.arange(count)[None], hidden[None], attention_mask=mask)
                    hidden = torch.cat((hidden, out.hidden_states[0][0, -1:]))
                wanted = (matrix @ label).log_softmax(-1)
                distances.append((seen[-1] - label) / scale)
                if token in token_ids:
                    guesses = out.logits[0, -1].log_softmax(-1)
                    divergences[level].append((wanted.exp() * (wanted - guesses)).sum())
    hook.remove()
    assert 5 < len(divergences[0]) < len(distances) / 2
    means = [torch.stack(parts).mean() for parts in divergences]
    assert losses == pytest.approx([float(mean.detach()) for mean in means], rel=1e-4)
    stacked = torch.stack(distances)
    distance = smooth_l1_loss(stacked, torch.zeros_like(stacked))
    (means[0] + 0.5 * means[1] + 0.7 * distance).backward()
    for key, weight in unrolling.trained.items():
        assert weight.grad is not None
        bound = float(weight.grad.abs().max()) * 1e-3
        torch.testing.assert_close(found[key], weight.grad, rtol=0, atol=bound, msg=key)


def test_noise_is_bounded_and_drawn_from_seed_and_step(
    target: Source, shards: Path, features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = read_side(shard_paths(shards)[0], features, held_out=False)[:4]
    batch = make_batch(items, 1)
    head = random_head(EagleForm(3, TAPS), 1)
    seen: list[list[torch.Tensor]] = []
    features_of_head = head.features
    monkeypatch.setattr(head, "features", lambda streams: (seen.append(list(streams)), features_of_head(streams))[1])

    def streams(noise: float, seed: int, step: int) -> list[torch.Tensor]:
        unrolling = Unrolling(
            head, target, summary(torch.arange(40)), Settings(unroll=1, noise=noise, seed=seed), "cpu"
        )
        unrolling.losses = [[0.0]] * step
        with torch.no_grad():
            unrolling.states(batch)
        return seen.pop()

    plain = streams(0.0, 0, 3)
    for stream, tap in zip(plain, range(3), strict=True):
        assert torch.equal(stream, batch.features[..., tap * WIDTH : (tap + 1) * WIDTH])
    noisy = streams(0.2, 0, 3)
    for stream, own in zip(noisy, plain, strict=True):
        size = own.square().mean(-1, keepdim=True).sqrt()
        share = ((stream - own) / size.clamp_min(1e-9))[size.squeeze(-1) > 0]
        assert 0.19 < float(share.abs().max()) <= 0.2 * 1.001
        assert float(share.std()) == pytest.approx(0.2 / 3**0.5, rel=0.05)
        assert not (stream - own)[size.squeeze(-1) == 0].any()
    assert all(torch.equal(a, b) for a, b in zip(noisy, streams(0.2, 0, 3), strict=True))
    assert not torch.equal(noisy[0], streams(0.2, 1, 3)[0]) and not torch.equal(noisy[0], streams(0.2, 0, 4)[0])


# ---- features ----


def test_features_are_transformers_own_in_the_shards_order(target: Source, shards: Path, features: Path) -> None:
    norm = target.model.model.norm
    path = shard_paths(shards)[1]
    stored, place = load_file(features / path.name)["features"], 0
    assert stored.dtype == torch.float16 and stored.shape[1] == 3 * WIDTH
    lengths = []
    for item in read_shard(path):
        text = torch.from_numpy(np.concatenate([item.prompt, item.answer]))[None, :-1].long()
        with torch.no_grad():
            states = target.model(text, output_hidden_states=True).hidden_states
        own = stored[place : place + text.shape[1]].float()
        torch.testing.assert_close(own[:, :WIDTH], states[0][0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(own[:, WIDTH : 2 * WIDTH], states[2][0], rtol=1e-3, atol=2e-3)
        with torch.no_grad():  # transformers norms the last
            torch.testing.assert_close(norm(own[:, 2 * WIDTH :]), states[3][0], rtol=2e-3, atol=5e-3)
        place += text.shape[1]
        lengths.append(text.shape[1])
    assert place == len(stored) and lengths != sorted(lengths)


def test_without_taps_features_are_the_post_norm_state(target: Source, shards: Path, last_features: Path) -> None:
    for path in shard_paths(shards):
        for held_out in (False, True):
            for item, own in read_side(path, last_features, held_out):
                assert own.shape == (len(item.prompt) + len(item.answer) - 1, WIDTH)
                np.testing.assert_allclose(own[len(item.prompt) - 1 :].numpy(), item.features, atol=5e-3, rtol=2e-3)


def test_features_in_bfloat16_are_nearly_the_same(
    target: Source, shards: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    make_features(target, shards, tmp_path, TAPS)
    for path in shard_paths(shards):
        ours, theirs = (load_file(folder / path.name)["features"].float() for folder in (tmp_path, features))
        assert float((ours - theirs).abs().max()) < 0.1 * float(theirs.std()) * 3 and not torch.equal(ours, theirs)


def test_features_are_made_once(
    target: Source, shards: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def interrupt(done: int, count: int) -> None:
        seen.append((done, count))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_features(target, shards, tmp_path, TAPS, report=interrupt)
    assert seen == [(0, 3), (1, 3), (2, 3)] and len(list(tmp_path.iterdir())) == 2
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    make_features(target, shards, tmp_path, TAPS)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name for path in shard_paths(shards)]
    for path in shard_paths(shards):
        assert torch.equal(load_file(tmp_path / path.name)["features"], load_file(features / path.name)["features"])
    monkeypatch.setattr(training, "_run_target", lambda *_: pytest.fail("ran again"))
    make_features(target, shards, tmp_path, TAPS)


def test_features_of_others_are_refused(target: Source, shards: Path, features: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shard-00000.*features with taps '0 2 3', this run wants '0 2'; delete"):
        make_features(target, shards, features, (0, 2))
    other = dataclasses.replace(target, fingerprint="other")
    with pytest.raises(CheckpointError, match=r"features with target '\w+', this run wants 'other'; delete the folder"):
        make_features(other, shards, features, TAPS)
    with pytest.raises(CheckpointError, match=r"features with taps '0 2 3', this run wants ''"):
        train_eagle(shards, features, target, (), work=tmp_path, settings=replace(SETTINGS, version=1))
    for path in shard_paths(shards):
        (tmp_path / path.name).write_bytes((features / path.name).read_bytes())
    damaged = tmp_path / "shard-00001.safetensors"
    damaged.write_bytes(b"nonsense")
    for act in (
        lambda: make_features(target, shards, tmp_path, TAPS),
        lambda: train_eagle(shards, tmp_path, target, TAPS, work=tmp_path, settings=SETTINGS),
    ):
        with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors: no features \(.+\); delete it and make"):
            act()
    with safe_open(features / damaged.name, "pt") as opened:
        facts = opened.metadata()
    stored = load_file(features / damaged.name)["features"]
    save_file({"features": stored[:-1].contiguous()}, damaged, facts)
    with pytest.raises(CheckpointError, match=rf"00001.*: {len(stored) - 1} rows, but .* has {len(stored)}; delete it"):
        read_side(shard_paths(shards)[1], tmp_path, held_out=False)


def test_values_beyond_float16_are_cut_off(target: Source) -> None:
    items = conversations(target, 2, seed=0)
    layer = target.model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda _module, args: (args[0] * 1e7, *args[1:]))
    try:
        (own, _) = training._run_target(target.model, items, (2,))
    finally:
        hook.remove()
    assert own.isfinite().all() and own.abs().max() == 65504


# ---- heads to start from ----


def test_default_taps() -> None:
    assert default_taps(32) == (2, 16, 29) and default_taps(30) == (2, 15, 27) and default_taps(7) == (2, 3, 4)
    assert default_taps(3) == (0, 1, 2) and default_taps(4) == (1, 2) and default_taps(1) == (0,)


@pytest.mark.parametrize("start", ["first", "last"])
@pytest.mark.parametrize(("version", "taps", "layers"), [(3, TAPS, 1), (3, (2,), 2), (1, (), 2), (1, TAPS, 1)])
def test_a_new_head_is_made_of_the_targets_layers(
    target: Source, version: int, taps: tuple[int, ...], layers: int, start: str
) -> None:
    token_ids = torch.arange(0, VOCAB, 4)
    settings = Settings(version, layers, start)
    head = new_head(target, summary(token_ids), settings, taps)
    assert head.form.version == version and head.form.taps == taps and head.form.join == 0
    theirs = target.model.model.layers
    chosen = theirs[:layers] if start == "first" else theirs[-layers:]
    for ours, like in zip(head.layers, chosen, strict=True):
        for name in ("gate_proj", "up_proj", "down_proj"):
            assert torch.equal(getattr(ours.mlp, name).weight, getattr(like.mlp, name).weight)
        for name in ("input_layernorm", "post_attention_layernorm"):
            assert torch.equal(getattr(ours, name).weight, getattr(like, name).weight)
    assert torch.equal(head.embed_tokens.weight, target.model.model.embed_tokens.weight)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[token_ids])  # type: ignore[index]
    assert torch.equal(head.norm.weight, target.model.model.norm.weight)
    # Attention does what the layer it was copied from does, its keys and values shared or not.
    rng = torch.Generator().manual_seed(0)
    read = torch.randn(1, 7, WIDTH, generator=rng)
    rotary = target.model.model.rotary_emb(read, torch.arange(7)[None])
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    given = torch.cat((read, torch.zeros_like(read)), -1) if version == 3 else read  # the token without a feature
    with torch.no_grad():
        expected = chosen[0].self_attn(read, position_embeddings=rotary, attention_mask=mask)[0]
        found = head.layers[0].self_attn(given, position_embeddings=rotary, attention_mask=mask)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if version == 3:
        assert head.config.num_key_value_heads == 4  # each its own
        feature = head.layers[0].self_attn.q_proj.weight[:, WIDTH:]
        assert 0 < feature.std().item() < 0.2 * head.layers[0].self_attn.q_proj.weight[:, :WIDTH].std().item()


@pytest.mark.parametrize("taps", [(), TAPS])
def test_a_head_on_a_draft_model_says_at_first_what_that_says(
    target: Source, draft: DraftModel, taps: tuple[int, ...]
) -> None:
    assert draft.token_ids is not None
    head = new_head(target, summary(draft.token_ids), Settings(version=1), taps, draft)
    assert head.form.join == 1 and len(head.layers) == 2
    rng = torch.Generator().manual_seed(2)
    passes, length = 3, 8
    text = torch.randint(VOCAB, (2, length + passes), generator=rng)
    streams = [torch.randn(2, length, WIDTH, generator=rng) * 9 for _ in taps or (0,)]
    with torch.no_grad():
        expected = draft.model(text[:, 1:]).logits[..., draft.token_ids]
        for level, states in enumerate(unrolled(head, text[:, 1:], head.features(streams), passes)):
            found = head.lm_head(states)
            torch.testing.assert_close(found, expected[:, level : level + length], rtol=1e-4, atol=1e-4)
        head.fc.weight[:, WIDTH:] += 0.1
        state = unrolled(head, text[:, 1:], head.features(streams), 1)[0]
    assert not torch.allclose(head.lm_head(state), expected[:, :length], atol=0.1)  # features have a way in


def test_whitening_brings_channels_to_about_one(target: Source, shards: Path, features: Path) -> None:
    items = read_side(shard_paths(shards)[0], features, held_out=False)
    sizes = torch.logspace(-1, 1, WIDTH).repeat(3)
    items = [(item, own * sizes.half()) for item, own in items]
    head = new_head(target, summary(torch.arange(40)), Settings(), TAPS)
    unrolling = Unrolling(head, target, summary(torch.arange(40)), Settings(), "cpu")

    def spread() -> tuple[float, float]:
        rows = torch.cat([own for _, own in items]).float().chunk(3, -1)
        with torch.no_grad():
            normed = [norm(stream) for norm, stream in zip(head.fusion.fc_norm, rows, strict=True)]
        size = torch.cat([stream.square().mean(0).sqrt() for stream in normed])
        return float(size.min()), float(size.max())

    before = spread()
    assert before[1] / before[0] > 50
    unrolling.whiten(items)
    after = spread()
    assert after[0] > 0.7 and after[1] < 4
    groups = {id(group["params"][0]): group["size"] for group in unrolling.optimizer.param_groups}
    weight = head.fusion.fc_norm[1].weight
    assert groups[id(weight)] == pytest.approx(float(weight.detach().square().mean().sqrt()))
    plain = random_head(EagleForm(1), 1)
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    Unrolling(plain, target, summary(torch.arange(40)), Settings(1), "cpu").whiten(items)
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize("size", [0.1, 4.0])
def test_softening_takes_the_factor_with_the_least_loss(
    target: Source, shards: Path, features: Path, size: float
) -> None:
    batch = make_batch(read_side(shard_paths(shards)[0], features, held_out=False)[:6], 2)
    head = new_head(target, summary(torch.arange(VOCAB)), Settings(), TAPS)
    with torch.no_grad():
        head.norm.weight *= size
    start = head.norm.weight.detach().clone()
    unrolling = Unrolling(head, target, summary(torch.arange(VOCAB)), Settings(unroll=2), "cpu")
    matrix = target.lm_head.weight.detach()  # type: ignore[union-attr]
    wanted = (batch.labels.float() @ matrix.T).double().log_softmax(-1)  # type: ignore[operator]
    losses = []
    with torch.no_grad():
        states = unrolling.states(batch)
    for factor in SOFTENINGS:  # the norm's weight scales the logits
        guesses = (states * factor @ matrix.T).double().log_softmax(-1)  # type: ignore[operator]
        losses.append(float((wanted.exp() * (wanted - guesses)).sum(-1).mean(1).sum()))
    best = SOFTENINGS[int(np.argmin(losses))]
    assert unrolling.soften(batch) == best
    torch.testing.assert_close(head.norm.weight, start * best)
    assert (best < 1) == (size > 1)  # a head that is unsure already is left as it is
    groups = {id(group["params"][0]): group["size"] for group in unrolling.optimizer.param_groups}
    assert groups[id(head.norm.weight)] == pytest.approx(float((start * best).square().mean().sqrt()), rel=1e-5)


def test_layers_unlike_a_llamas_are_refused() -> None:
    source = source_of(tiny_model("gpt2"))
    with pytest.raises(
        CheckpointError, match=r"are not like a Llama's \(no 'input_layernorm'\); it cannot start as them"
    ):
        check_settings(Settings(version=1), source, ())


# ---- refusals ----


def refuse(message: str, target: Source, taps: Sequence[int] = TAPS, init: Any = None, **changes: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_settings(replace(Settings(), **changes), target, taps, init)


def test_settings_that_cannot_be(target: Source, draft: DraftModel) -> None:
    check_settings(Settings(), target, TAPS)
    check_settings(Settings(version=1, layers=2), target, ())
    refuse("version: 2 is unknown; use 1", target, version=2)
    refuse("start: 'middle' is unknown; use one of first, last", target, start="middle")
    for layers in (0, -1, 3):
        refuse(rf"layers: {layers} asked for; a head takes 1 \.\. 2 of this target's 3", target, layers=layers)
    refuse("unroll: 0 passes asked for; use 1 or more", target, unroll=0)
    refuse("epochs: 0 asked for; use 1 or more", target, epochs=0)
    refuse("noise: -0.1 asked for; use 0", target, noise=-0.1)
    refuse("feature_loss: nan asked for; use 0", target, feature_loss=float("nan"))
    for taps in ([2, 0], [1, 1], [0, 4], [-1, 2]):
        refuse(r"taps: \[.*\]; expected different layers, ascending, out of the target's 0 \.\. 3", target, taps)
    refuse("taps: version 3 reads streams of the target; name at least one layer", target, [])
    check_settings(Settings(version=1), target, (), draft)
    refuse("only a version 1 head can stand on a draft model", target, init=draft)
    refuse("only on one that was cut out", target, (), replace(draft, taken=()), version=1)
    one = make_head(Path("one"), random_head(EagleForm(1), 1), target, torch.arange(40))
    three = make_head(Path("three"), random_head(EagleForm(3, TAPS), 1), target, torch.arange(40), ["embedding"])
    check_settings(Settings(), target, TAPS, three)
    refuse(r"one: a version 1 head on layers \[\] cannot start a version 3 head on \[0, 2, 3\]; give", target, init=one)
    refuse(r"three: a version 3 head on layers \[0, 2, 3\] cannot .* on \[0, 2\]", target, (0, 2), three)
    refuse("three: its lm_head is its own .*set feature_loss to 0", target, init=three, feature_loss=0.1)


def test_unusable_shards(target: Source, shards: Path, features: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no conversations; make training data first"):
        train_eagle(tmp_path, features, target, TAPS, work=tmp_path, settings=SETTINGS)
    with pytest.raises(CheckpointError, match="training conversations are less than one batch of 512; make more data"):
        train_eagle(shards, features, target, TAPS, work=tmp_path, settings=replace(SETTINGS, batch=512))
    with pytest.raises(CheckpointError, match="draft vocabulary: 321 tokens asked for, the target has 320"):
        train_eagle(shards, features, target, TAPS, work=tmp_path, settings=replace(SETTINGS, draft_vocabulary=321))
    narrow = [replace(item, features=item.features[:, :32]) for item in conversations(target, 30, seed=0)]
    write_shard(tmp_path / "shard-00000.safetensors", narrow)
    with pytest.raises(CheckpointError, match="features have width 32, the lm_head has 64"):
        train_eagle(tmp_path, features, target, TAPS, work=tmp_path, settings=SETTINGS)


# ---- running, stopping, going on ----


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_an_interrupted_run_ends_with_the_same_weights(
    target: Source, shards: Path, features: Path, tmp_path: Path, noise: float
) -> None:
    settings = replace(SETTINGS, noise=noise)

    def train(work: str, **options: Any) -> tuple[EagleHead, dict[str, Any]]:
        own = options.pop("settings", settings)
        return train_eagle(shards, features, target, TAPS, work=tmp_path / work, settings=own, **options)

    whole, report = train("whole")
    assert not any(weight.requires_grad for weight in whole.model.parameters()) and not whole.model.training
    steps: list[int] = []

    def stop_at(last: int, step: int) -> None:
        steps.append(step)
        if step == last:
            raise KeyboardInterrupt

    per_epoch = sum(len(read_side(path, features, False)) for path in shard_paths(shards)) // settings.batch
    assert per_epoch > 6
    for last in (5, per_epoch + 3):  # in the first epoch, in the second
        with pytest.raises(KeyboardInterrupt):
            train("cut", checkpoint_seconds=0, report=lambda step, steps, loss, last=last: stop_at(last, step))
    cut, again = train("cut")
    assert steps.count(5) == 2 and max(steps) == per_epoch + 3 and len(steps) == per_epoch + 4  # 5 was not saved yet
    assert cut.fingerprint == whole.fingerprint and again["loss"] == report["loss"]
    done, _ = train("cut", report=lambda *_: pytest.fail("trained on"))
    assert done.fingerprint == whole.fingerprint
    if noise:
        assert train("plain", settings=SETTINGS)[0].fingerprint != whole.fingerprint
        return
    assert train("other", settings=replace(settings, seed=1))[0].fingerprint != whole.fingerprint
    with pytest.raises(CheckpointError, match=r"eagle-training\.pt: made with settings .* give the same again to go"):
        train("cut", settings=replace(settings, lr=1e-5))
    (tmp_path / "cut" / training.CHECKPOINT_FILE).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        train("cut")


def test_a_checkpoint_of_other_data_is_refused(
    target: Source, shards: Path, features: Path, last_features: Path, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, version=1, epochs=1)
    train_eagle(shards, features, target, TAPS, work=tmp_path, settings=settings)
    with pytest.raises(CheckpointError, match=r"made with taps \[0, 2, 3\], this run has \[\]"):
        train_eagle(shards, last_features, target, (), work=tmp_path, settings=settings)
    more = tmp_path / "more"
    more.mkdir()
    for path in [*shard_paths(shards), shard_paths(shards)[0]]:
        name = path.name if not (more / path.name).exists() else "shard-00003.safetensors"
        (more / name).symlink_to(path)
    (tmp_path / "features").mkdir()
    for path in shard_paths(more):
        (tmp_path / "features" / path.name).symlink_to(features / path.resolve().name)
    with pytest.raises(CheckpointError, match=r"made with shards .*, this run has .*shard-00003"):
        train_eagle(more, tmp_path / "features", target, TAPS, work=tmp_path, settings=settings)


def test_bfloat16_where_the_hardware_has_it(
    target: Source, shards: Path, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, feature_loss=0.1)
    _, plain = train_eagle(shards, features, target, TAPS, work=tmp_path / "a", settings=settings)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    head, half = train_eagle(shards, features, target, TAPS, work=tmp_path / "b", settings=settings)
    assert (plain["training_dtype"], half["training_dtype"]) == ("float32", "bfloat16")
    np.testing.assert_allclose(half["loss"], plain["loss"], rtol=0.05)
    assert half["loss"] != plain["loss"]
    assert {tensor.dtype for tensor in own_tensors(head).values()} == {torch.float32}


@pytest.mark.parametrize("version", [1, 3])
def test_training_goes_on_from_a_given_head(
    target: Source, shards: Path, features: Path, tmp_path: Path, version: int
) -> None:
    settings = replace(SETTINGS, version=version)
    first, report = train_eagle(shards, features, target, TAPS, work=tmp_path / "a", settings=settings)
    write_eagle(first, tmp_path / "first")
    init = read_eagle(tmp_path / "first", target)
    known, before = init.fingerprint, {name: tensor.clone() for name, tensor in init.model.state_dict().items()}
    still, _ = train_eagle(
        shards, features, target, TAPS, work=tmp_path / "b", settings=replace(settings, epochs=1, lr=0.0), init=init
    )
    assert still.fingerprint == known and still.token_ids is not None
    assert first.token_ids is not None and torch.equal(still.token_ids, first.token_ids)
    second, again = train_eagle(shards, features, target, TAPS, work=tmp_path / "c", settings=settings, init=init)
    assert again["loss"][0][0] < report["loss"][0][0] and second.fingerprint != known
    assert all(torch.equal(tensor, before[name]) for name, tensor in init.model.state_dict().items())  # not its memory


def test_a_given_heads_own_lm_head_stays_its_own(target: Source, shards: Path, features: Path, tmp_path: Path) -> None:
    token_ids = torch.arange(0, VOCAB, 2)
    model = random_head(EagleForm(3, TAPS), 1, vocabulary=len(token_ids))
    init = make_head(Path("own"), model, target, token_ids, ["embedding"])
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.model.embed_tokens.weight)
    head, _ = train_eagle(shards, features, target, TAPS, work=tmp_path / "work", settings=SETTINGS, init=init)
    write_eagle(head, tmp_path / "head")
    read = read_eagle(tmp_path / "head", target)
    assert read.shares == ("embedding",)
    torch.testing.assert_close(read.model.lm_head.weight, model.lm_head.weight, rtol=1e-3, atol=1e-3)


def test_training_on_a_draft_model_uses_features(
    target: Source, shards: Path, features: Path, draft: DraftModel, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, version=1, epochs=3)
    before = fingerprint_own(draft.model, draft.token_ids)
    head, report = train_eagle(shards, features, target, TAPS, work=tmp_path, settings=settings, init=draft)
    assert head.form.join == 1 and head.token_ids is not None and torch.equal(head.token_ids, draft.token_ids)
    assert report["loss"][-1][0] < report["loss"][0][0] and report["form"]["join"] == 1
    assert float(head.model.fc.weight[:, WIDTH:].abs().max()) > 1e-3
    assert fingerprint_own(draft.model, draft.token_ids) == before
    write_eagle(head, tmp_path / "head")
    read = read_eagle(tmp_path / "head", target)
    assert read.form == head.form
    found, stored = (measure(one, shards, features, depth=2) for one in (head, read))
    assert (found == stored).mean() > 0.9  # fp16


# ---- measuring ----


@pytest.mark.parametrize("name", ["eagle3", "eagle1-norms", "trunk"])
def test_ranks_against_brute_force(
    target: Source,
    shards: Path,
    features: Path,
    last_features: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(training, "CHUNK", 5)
    form, layers, kv_heads = FORMS[name]
    token_ids = torch.arange(0, VOCAB, 2)
    head = make_head(Path("head"), random_head(form, layers, kv_heads, len(token_ids)), target, token_ids)
    folder, depth = features if form.taps else last_features, 4
    found = measure(head, shards, folder, depth=depth, batch=2)
    expected: list[list[int]] = []
    for path in shard_paths(shards):
        for item, own in sorted(read_side(path, folder, held_out=True), key=lambda pair: len(pair[1])):
            text, fused = [*item.prompt.tolist(), *item.answer.tolist()], fuse(head.model, own)
            columns = [[UNKNOWN] * depth for _ in item.answer]
            # Rounds start behind any answer token: the row that reads it is one before it.
            for start in range(len(item.prompt), len(text) - 1):
                steps = min(depth, len(text) - 1 - start)
                for level, logits in enumerate(drafted_by_hand(head.model, text, fused, start - 1, steps)):
                    token = text[start + 1 + level]
                    rank = int((logits > logits[token // 2]).sum()) if token % 2 == 0 else MISSED
                    columns[start + 1 + level - len(item.prompt)][level] = rank
            expected += columns[1:]
    assert len(expected) > 20 and found.shape == (depth, len(expected))
    ours, theirs = found.T, np.array(expected)
    assert ((ours == UNKNOWN) == (theirs == UNKNOWN)).all() and ((ours == MISSED) == (theirs == MISSED)).all()
    counted = (theirs != UNKNOWN) & (theirs != MISSED)
    assert counted.sum() > 40 and np.abs(ours - theirs)[counted].max() <= 1  # of logits equal but for rounding
    assert (ours == theirs).mean() > 0.98


def test_figures_counted_by_hand() -> None:
    ranks = np.array(
        [
            [0, 2, 0, MISSED, 9, 0, 10, 0],
            [UNKNOWN, 0, 0, MISSED, UNKNOWN, 0, 1, 0],
            [UNKNOWN, UNKNOWN, 4, MISSED, UNKNOWN, UNKNOWN, 0, 3],
        ]
    )
    assert figures(ranks) == {
        "positions": 8,
        "agreement": 4 / 8,
        "top3": 5 / 8,
        "top10": 6 / 8,
        "by_depth": [4 / 8, 4 / 6, 1 / 4],
    }


# ---- the command ----


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A work folder with the graph and a few conversations in it."""
    work = tmp_path_factory.mktemp("made") / "work"
    work.mkdir()
    source = read_model(checkpoint)
    assert pipeline._make_data(source, work, TOKENS, 32, 0, None, lambda _: None) >= TOKENS
    return work


@pytest.fixture
def work(made: Path, tmp_path: Path) -> Path:
    """Another work folder with the same data."""
    folder = tmp_path / "work"
    folder.mkdir()
    for part in made.iterdir():
        (folder / part.name).symlink_to(part)
    return folder


QUICK = ("--tokens", TOKENS, "--rows", 32, "--draft-vocabulary", 60, "--epochs", 1, "--device", "cpu")


@pytest.mark.parametrize(
    ("options", "version", "taps"),
    [
        (("--taps", "0,2", "--unroll", 2), 3, (0, 2)),
        (("--dtype", "int8"), 3, (0, 1, 2)),
        (("--version", 1, "--feature-loss", 0.1, "--noise", 0.1, "--layers", 2, "--start", "last"), 1, ()),
    ],
)
def test_a_head_is_published_with_its_card_and_tree(
    speccompile: Cli,
    checkpoint: Path,
    target: Source,
    work: Path,
    tmp_path: Path,
    options: tuple[object, ...],
    version: int,
    taps: tuple[int, ...],
) -> None:
    out = tmp_path / "head"
    status, stdout, stderr = speccompile(
        "train", "eagle", checkpoint, "--out", out, "--work", work, "--json", *QUICK, *options
    )
    assert (status, stderr) == (0, "")
    card = json.loads(stdout)
    assert json.loads((out / "card.json").read_text()) == card
    assert sorted(file.name for file in out.iterdir()) == ["card.json", "config.json", "model.safetensors", "tree.json"]
    assert load_tree(out / "tree.json") == pipeline.EAGLE_TREE
    head = read_eagle(out, target)
    assert (head.version, head.form.taps, head.draft_vocabulary) == (version, taps, 60)
    assert head.shares == ("embedding", "lm_head") and head.target_fingerprint == target.fingerprint
    assert card["method"] == "eagle" and card["target_fingerprint"] == target.fingerprint
    assert card["data"]["answer_tokens"] >= TOKENS and card["data"]["source"] == "self-made"
    given = {
        str(key).removeprefix("--").replace("-", "_"): value
        for key, value in zip(options[::2], options[1::2], strict=True)
    }
    for name in {"unroll", "feature_loss", "noise", "layers", "start", "version"} & set(given):
        assert card["settings"][name] == given[name]
    assert card["dtype"] == given.get("dtype", "fp16")
    assert np.array(card["loss"]).shape == (1, card["settings"]["unroll"])
    # Measured on what was written.
    folder = work / f"features-{'-'.join(map(str, taps)) or 'last'}"
    again = figures(measure(head, work / "conversations", folder))
    assert {name: card[name] for name in again} == again
    assert again["positions"] > 0 and len(again["by_depth"]) == training.MEASURED_DEPTH


def test_heads_start_from_drafts_and_heads(
    speccompile: Cli, checkpoint: Path, target: Source, work: Path, draft: DraftModel, tmp_path: Path
) -> None:
    write_draft(draft, tmp_path / "draft")

    def train(out: str, *options: object) -> tuple[int, str, str]:
        (work / "checkpoint" / training.CHECKPOINT_FILE).unlink(missing_ok=True)
        return speccompile(
            "train", "eagle", checkpoint, "--out", tmp_path / out, "--work", work, *QUICK, "--version", 1, *options
        )

    status, stdout, stderr = train("first", "--init", tmp_path / "draft", "--taps", "0,2,3")
    assert (status, stdout) == (0, "") and "of its first guesses are the target's" in stderr and "first" in stderr
    first = read_eagle(tmp_path / "first", target)
    assert first.form.join == 1 and first.form.taps == TAPS and first.draft_vocabulary == len(draft.token_ids)  # type: ignore[arg-type]
    status, stdout, _ = train("second", "--init", tmp_path / "first", "--json")  # its taps come with it
    assert status == 0
    second = read_eagle(tmp_path / "second", target)
    assert second.form == first.form and second.fingerprint != first.fingerprint
    losses = [json.loads((tmp_path / name / "card.json").read_text())["loss"][0][0] for name in ("first", "second")]
    assert losses[1] < losses[0]


def test_an_interruption_leaves_nothing_half_written(
    speccompile: Cli, checkpoint: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", "eagle", checkpoint, "--out", tmp_path / "head", "--work", work, *QUICK, "--taps", "1")
    seen: list[Path] = []

    def interrupt(written: EagleHead, *_: object) -> None:
        seen.append(written.path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "measure_eagle", interrupt)  # the last step, when weights have been written
        status, stdout, stderr = speccompile(*command)
    assert (status, stdout) == (130, "") and "interrupted" in stderr
    assert len(seen) == 1 and sorted(file.name for file in tmp_path.iterdir()) == ["work"]
    monkeypatch.setattr(Unrolling, "update", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(training, "_run_target", lambda *_: pytest.fail("ran the target again"))
    assert speccompile(*command)[0] == 0 and (tmp_path / "head" / "card.json").is_file()
    status, _, stderr = speccompile(*command)
    assert status == 1 and "already exists" in stderr


def bad_options(draft: Path) -> Iterator[tuple[tuple[object, ...], int, str]]:
    yield ("--taps", "2,x"), 2, "--taps: '2,x' is no list of layers; write it like 2,15,27."
    yield ("--taps", "0,9"), 1, "error: taps: [0, 9]; expected different layers, ascending, out of the target's 0 .. 3."
    yield ("--version", 2), 2, "'2' is not one of '1', '3'"
    yield ("--start", "middle"), 2, "'middle' is not one of 'first', 'last'"
    yield ("--layers", 3), 1, "error: layers: 3 asked for; a head takes 1 .. 2 of this target's 3."
    yield ("--unroll", 0), 1, "error: unroll: 0 passes asked for; use 1 or more."
    yield ("--epochs", 0), 1, "error: epochs: 0 asked for; use 1 or more."
    yield ("--noise", -1), 1, "error: noise: -1.0 asked for; use 0 (none) or more."
    yield ("--feature-loss", "nan"), 1, "error: feature_loss: nan asked for; use 0 (none) or more."
    yield ("--draft-vocabulary", 999), 1, "error: draft vocabulary: 999 tokens asked for, the target has 320"
    yield ("--dtype", "fp8"), 2, "'fp8' is not one of"
    yield ("--init", draft.with_name("nothing")), 1, f"error: {draft.with_name('nothing')}"
    yield ("--init", draft), 1, f"error: {draft}: only a version 1 head can stand on a draft model"


def test_bad_options_are_a_sentence_each(speccompile: Cli, checkpoint: Path, draft: DraftModel, tmp_path: Path) -> None:
    write_draft(draft, tmp_path / "draft")
    for options, expected, sentence in bad_options(tmp_path / "draft"):
        status, stdout, stderr = speccompile(
            "train", "eagle", checkpoint, "--out", tmp_path / "head", "--json", "--draft-vocabulary", 60, *options
        )
        assert (status, stdout) == (expected, "") and sentence in stderr, (options, stderr)
        assert stderr.count("\n") == 1 or expected == 2
        assert sorted(file.name for file in tmp_path.iterdir()) == ["draft"]  # refused before anything was made
