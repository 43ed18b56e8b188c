"""Training heads and choosing their tree, on data small enough to know the answer."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from speccompile.compiler.medusa_heads import MedusaHeads, head_offset, read_heads, write_heads
from speccompile.graphs.errors import CheckpointError, TreeError
from speccompile.graphs.medusa import MedusaModule
from speccompile.graphs.tree import NodePath
from speccompile.tools.training import medusa
from speccompile.tools.training.conversations import Conversation, shard_paths, write_shard
from speccompile.tools.training.medusa import NO_LABEL, ScaledBlocks, Settings, train_medusa
from speccompile.tools.training.tree_search import best_tree, best_tree_measured, mean_accepted_tokens

WIDTH, VOCABULARY, HEADS = 16, 24, 3
CYCLE = np.array([3, 5, 8, 11, 14, 17, 20], np.int32)
SETTINGS = Settings(heads=HEADS, draft_vocabulary=12, epochs=12, lr=2e-2, batch=64)
CHANNEL_SIZES = np.geomspace(0.05, 20, WIDTH)
LM_HEAD = torch.from_numpy(np.random.default_rng(0).normal(size=(VOCABULARY, WIDTH)) / CHANNEL_SIZES).float()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def states_of(tokens: npt.NDArray[np.int32], rng: np.random.Generator) -> npt.NDArray[np.float16]:
    """Hidden states whose lm_head argmax is `tokens`, with channels of very different sizes."""
    directions = LM_HEAD.numpy() * CHANNEL_SIZES
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    states = (12 * directions[tokens] + rng.normal(size=(len(tokens), WIDTH)) * 0.1) * CHANNEL_SIZES
    assert (np.argmax(states @ LM_HEAD.numpy().T, axis=1) == tokens).all()
    return states.astype(np.float16)


def periodic(count: int, seed: int) -> list[Conversation]:
    """Conversations whose answers run round CYCLE from a random start."""
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        answer = CYCLE[(rng.integers(len(CYCLE)) + np.arange(rng.integers(8, 30))) % len(CYCLE)]
        prompt = rng.integers(VOCABULARY, size=5, dtype=np.int32)
        items.append(Conversation(prompt, answer, states_of(answer, rng)))
    return items


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(3):
        write_shard(folder / f"shard-{number:05d}.safetensors", periodic(40, seed=number))
    return folder


# ---- the whole way ----


def test_periodic_answers_are_learned_by_every_head(shards: Path, tmp_path: Path) -> None:
    heads, report = train_medusa(shards, LM_HEAD, work=tmp_path, settings=SETTINGS, target_fingerprint="f")
    assert [row[0] for row in report["accuracy"]] == [1.0] * HEADS
    assert report["chain"] == [1.0] * HEADS and report["chain_mean_accepted_tokens"] == HEADS + 1
    assert report["coverage"] == 1.0 and report["loss"][-1] < report["loss"][0] / 10
    assert heads.target_fingerprint == "f" and heads.draft_vocabulary == 12
    assert json.loads(json.dumps(report)) == report
    # Said once more without any of the trainer's own counting: after CYCLE[0], head h gives CYCLE[1 + h].
    module = MedusaModule(heads.blocks, None, 1, token_map=heads.token_map, target_lm_head=LM_HEAD)
    state = torch.from_numpy(states_of(CYCLE[:1], np.random.default_rng(9))).float()
    assert module(state[None])[0].flatten().tolist() == CYCLE[1 : HEADS + 1].tolist()


@pytest.mark.parametrize("wrong", [-1, 1])
def test_an_offset_off_by_one_shows(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(medusa, "head_offset", lambda head: head_offset(head) + wrong)
        heads, report = train_medusa(shards, LM_HEAD, work=tmp_path, settings=SETTINGS)
        assert report["accuracy"][0][0] == 1.0  # it agrees with itself
    ranks = medusa.held_out_ranks(heads, shard_paths(shards), LM_HEAD)
    assert [row[0] for row in medusa.accuracy(ranks)["accuracy"]] == [0.0] * HEADS


def test_an_interrupted_run_ends_with_the_same_weights(shards: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, epochs=2)
    whole, report = train_medusa(shards, LM_HEAD, work=tmp_path / "whole", settings=settings)
    steps: list[int] = []

    def stop_at(last: int, step: int) -> None:
        steps.append(step)
        if step == last:
            raise KeyboardInterrupt

    for last in (5, 30):  # in the first epoch, in the second
        with pytest.raises(KeyboardInterrupt):
            train_medusa(
                shards,
                LM_HEAD,
                work=tmp_path / "cut",
                settings=settings,
                checkpoint_seconds=0,
                report=lambda step, steps, loss, last=last: stop_at(last, step),
            )
    cut, again = train_medusa(shards, LM_HEAD, work=tmp_path / "cut", settings=settings)
    assert steps.count(5) == 2 and max(steps) == 30 and len(steps) == 31  # step 5 was not yet saved
    assert cut.fingerprint == whole.fingerprint
    assert again["loss"] == report["loss"]
    # A finished run trains no more.
    done, _ = train_medusa(
        shards, LM_HEAD, work=tmp_path / "cut", settings=settings, report=lambda *_: pytest.fail("trained on")
    )
    assert done.fingerprint == whole.fingerprint


def test_the_seed_decides(shards: Path, tmp_path: Path) -> None:
    runs = [
        train_medusa(shards, LM_HEAD, work=tmp_path / str(run), settings=replace(SETTINGS, epochs=1, seed=seed))[0]
        for run, seed in enumerate((0, 0, 1))
    ]
    assert runs[0].fingerprint == runs[1].fingerprint != runs[2].fingerprint


def test_labels_outside_the_draft_vocabulary_are_misses(shards: Path, tmp_path: Path) -> None:
    heads, report = train_medusa(shards, LM_HEAD, work=tmp_path, settings=replace(SETTINGS, draft_vocabulary=5))
    ranks = medusa.held_out_ranks(heads, shard_paths(shards), LM_HEAD)
    assert heads.token_map is not None and set(heads.token_map.tolist()) < set(CYCLE.tolist())
    assert 0.6 < report["coverage"] < 0.8  # 5 of 7 tokens, all about equally frequent
    known = ranks[:, 0] != medusa.UNKNOWN
    assert set(np.unique(ranks[known, 0])) == {0, medusa.MISSED}
    assert report["accuracy"][0][0] == pytest.approx(np.mean(ranks[known, 0] == 0))
    assert report["accuracy"][0][0] == pytest.approx(report["coverage"], abs=0.05)


# ---- its parts ----


def test_labels_end_with_the_answer() -> None:
    labels = medusa.labels_of(np.array([7, 8, 9, 6], np.int32), heads=3)
    none = NO_LABEL
    assert labels.tolist() == [[8, 9, 6], [9, 6, none], [6, none, none], [none, none, none]]
    assert medusa.labels_of(np.array([7], np.int32), heads=3).tolist() == [[none] * 3]


def test_loss_and_gradient_against_float64() -> None:
    rng = np.random.default_rng(3)
    states, matrix, bias = rng.normal(size=(2, 5, 4)), rng.normal(size=(6, 4)), rng.normal(size=6)
    labels = np.array([[1, 2], [0, NO_LABEL], [NO_LABEL, NO_LABEL], [5, 3], [4, NO_LABEL]])
    expected, gradient = 0.0, np.zeros_like(states)
    for head in range(2):
        counted = [row for row in range(5) if labels[row, head] != NO_LABEL]
        for row in counted:
            logits = matrix @ states[head, row] + bias
            probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            weight = 0.8**head / len(counted)
            expected -= weight * math.log(probabilities[labels[row, head]])
            probabilities[labels[row, head]] -= 1
            gradient[head, row] = weight * matrix.T @ probabilities
    leaf = torch.from_numpy(states).float().requires_grad_()
    loss = medusa.heads_loss(
        leaf, torch.from_numpy(labels), torch.from_numpy(matrix).float(), torch.from_numpy(bias).float()
    )
    assert loss == pytest.approx(expected, abs=1e-5)
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), gradient, atol=1e-6)
    nothing = torch.full((5, 2), NO_LABEL)
    leaf.grad = None
    assert medusa.heads_loss(leaf, nothing, torch.from_numpy(matrix).float(), None) == 0.0
    assert leaf.grad is not None and not leaf.grad.any()


@pytest.mark.parametrize("layers", [1, 2])
def test_folded_blocks_are_the_trained_ones(tmp_path: Path, layers: int) -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = ScaledBlocks(HEADS, layers, torch.from_numpy(CHANNEL_SIZES).float(), generator)
    with torch.no_grad():
        blocks.weight += torch.randn(blocks.weight.shape, generator=generator) / math.sqrt(WIDTH)
        blocks.bias += torch.randn(blocks.bias.shape, generator=generator)
    token_map = torch.arange(0, VOCABULARY, 2)
    write_heads(MedusaHeads(WIDTH, blocks.fold(), token_map=token_map), tmp_path, dtype=torch.float32)
    read = read_heads(tmp_path)
    assert read.layout == "B" and (read.num_heads, read.num_layers) == (HEADS, layers)
    module = MedusaModule(read.blocks, None, len(token_map), token_map=read.token_map, target_lm_head=LM_HEAD)
    features = torch.from_numpy(states_of(np.repeat(CYCLE, 3), np.random.default_rng(5))).float()
    ids, logprobs = module(features[None])
    with torch.no_grad():
        trained = (blocks(features).transpose(0, 1) @ LM_HEAD[token_map].T).log_softmax(-1)
    found = torch.zeros_like(trained).scatter(-1, ids[0] // 2, logprobs[0])
    np.testing.assert_allclose(found.numpy(), trained.numpy(), rtol=1e-5, atol=1e-5)


def test_unfolding_undoes_folding() -> None:
    scale = torch.from_numpy(CHANNEL_SIZES).float()
    trained, other = (ScaledBlocks(HEADS, 2, scale, torch.Generator().manual_seed(seed)) for seed in (6, 7))
    with torch.no_grad():
        trained.bias += torch.randn(trained.bias.shape, generator=torch.Generator().manual_seed(8))
    other.unfold(MedusaHeads(WIDTH, trained.fold()))
    for name, tensor in trained.state_dict().items():
        np.testing.assert_allclose(other.state_dict()[name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)


def test_training_goes_on_from_given_heads(shards: Path, tmp_path: Path) -> None:
    first, _ = train_medusa(shards, LM_HEAD, work=tmp_path / "a", settings=SETTINGS)
    still = replace(SETTINGS, epochs=1, lr=0.0)
    second, report = train_medusa(shards, LM_HEAD, work=tmp_path / "b", settings=still, init=first)
    assert first.token_map is not None and torch.equal(first.token_map, second.token_map)
    for old, new in zip(first.blocks, second.blocks, strict=True):
        torch.testing.assert_close(new[0][0], old[0][0], rtol=1e-4, atol=1e-5)
    assert [row[0] for row in report["accuracy"]] == [1.0] * HEADS
    with pytest.raises(CheckpointError, match=r"3 heads of 1 blocks cannot start a training of 2 heads"):
        train_medusa(shards, LM_HEAD, work=tmp_path / "c", settings=replace(SETTINGS, heads=2), init=first)


def test_every_training_position_comes_once_an_epoch(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medusa, "SHUFFLE_SHARDS", 2)  # the three shards take two windows

    def epoch(seed: int, number: int) -> list[tuple[bytes, ...]]:
        batches = list(medusa.shuffled_batches(shard_paths(shards), HEADS, 50, seed, number))
        assert all(features.shape == (50, WIDTH) and labels.shape == (50, HEADS) for features, labels in batches)
        return [tuple(f.tobytes() + t.tobytes() for f, t in zip(*batch, strict=True)) for batch in batches]

    stored = [medusa.read_positions(path, HEADS, held_out=False) for path in shard_paths(shards)]
    every = {f.tobytes() + t.tobytes() for shard in stored for f, t in zip(*shard, strict=True)}
    first = epoch(0, 0)
    seen = list(itertools.chain(*first))
    assert len(seen) == len(set(seen)) == len(every) // 50 * 50 and set(seen) <= every
    assert epoch(0, 0) == first
    assert epoch(0, 1) != first != epoch(1, 0)


def test_a_question_asked_twice_is_on_one_side() -> None:
    items = periodic(400, seed=7)
    again = [replace(item, answer=item.answer[:4], features=item.features[:4]) for item in items]
    sides = [medusa.is_held_out(item) for item in items]
    assert sides == [medusa.is_held_out(item) for item in again]
    assert 0.02 < np.mean(sides) < 0.09


def test_draft_vocabulary_takes_frequent_answers_then_prompts_then_low_ids(tmp_path: Path) -> None:
    items = [
        Conversation(
            np.array([21, 22, 22, number % 20], np.int32), answer, np.ones((len(answer), WIDTH), np.float16) * 3
        )
        for number in range(200)
        for answer in [np.repeat(np.array([9, 15, 4], np.int32), [3, 2, 1])]
    ]
    write_shard(tmp_path / "shard-00000.safetensors", items)
    paths = shard_paths(tmp_path)
    assert medusa.survey(paths, VOCABULARY, 2).token_ids.tolist() == [9, 15]
    assert medusa.survey(paths, VOCABULARY, 2).coverage == pytest.approx(5 / 6)
    assert medusa.survey(paths, VOCABULARY, 5).token_ids.tolist() == [4, 9, 15, 21, 22]
    assert medusa.survey(paths, VOCABULARY, VOCABULARY).token_ids.tolist() == list(range(VOCABULARY))
    np.testing.assert_allclose(medusa.survey(paths, VOCABULARY, 2).scale.numpy(), 3.0, rtol=1e-3)


def test_schedule_warms_up_and_ends_at_nothing() -> None:
    rates = [medusa.schedule(step, 200) for step in range(200)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3]) and max(rates) == rates[10] == 1.0
    assert rates[105] == pytest.approx(0.5, abs=0.01) and 0 < rates[-1] < 1e-3
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))


# ---- refusals ----


def test_unusable_input_is_refused(shards: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    with pytest.raises(CheckpointError, match="no feature shards"):
        train_medusa(tmp_path, LM_HEAD, work=work)
    with pytest.raises(CheckpointError, match="width 16, the lm_head has 8"):
        train_medusa(shards, LM_HEAD[:, :8], work=work, settings=SETTINGS)
    with pytest.raises(CheckpointError, match=r"not among the target's 15"):
        train_medusa(shards, LM_HEAD[:15], work=work, settings=SETTINGS)
    with pytest.raises(CheckpointError, match="30 tokens asked for, the target has 24"):
        train_medusa(shards, LM_HEAD, work=work, settings=replace(SETTINGS, draft_vocabulary=30))
    with pytest.raises(CheckpointError, match="less than one batch of 100000"):
        train_medusa(shards, LM_HEAD, work=work, settings=replace(SETTINGS, batch=100_000))
    write_shard(tmp_path / "shard-00000.safetensors", periodic(1, seed=11))
    with pytest.raises(CheckpointError, match="0 held-out positions"):
        train_medusa(tmp_path, LM_HEAD, work=work, settings=SETTINGS)


def test_a_checkpoint_of_another_run_is_refused(shards: Path, tmp_path: Path) -> None:
    short = replace(SETTINGS, epochs=1)
    train_medusa(shards, LM_HEAD, work=tmp_path, settings=short, target_fingerprint="a")
    with pytest.raises(CheckpointError, match=r"made with settings .*'lr': 0.02.*this run has .*'lr': 0.01"):
        train_medusa(shards, LM_HEAD, work=tmp_path, settings=replace(short, lr=0.01), target_fingerprint="a")
    with pytest.raises(CheckpointError, match="made with target_fingerprint a, this run has b"):
        train_medusa(shards, LM_HEAD, work=tmp_path, settings=short, target_fingerprint="b")
    (tmp_path / medusa.CHECKPOINT_FILE).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        train_medusa(shards, LM_HEAD, work=tmp_path, settings=short, target_fingerprint="a")


# ---- trees ----


def closed_trees(heads: int, ranks: int, nodes: int) -> list[tuple[NodePath, ...]]:
    """Every prefix-closed set of `nodes` paths."""
    paths = [path for depth in range(1, heads + 1) for path in itertools.product(range(ranks), repeat=depth)]
    return [
        tree
        for tree in itertools.combinations(paths, nodes)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    ]


def product_of(accuracy: Sequence[Sequence[float]], path: NodePath) -> float:
    return math.prod(accuracy[depth][rank] for depth, rank in enumerate(path))


@pytest.mark.parametrize("seed", range(4))
def test_best_tree_against_every_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Ranks out of order happen on small samples: the third guess right more often than the second.
    accuracy = rng.dirichlet([1.0] * 4, size=3)[:, :3].tolist()
    for nodes in (1, 2, 4):
        best = max(sum(product_of(accuracy, path) for path in tree) for tree in closed_trees(3, 3, nodes))
        tree = best_tree(accuracy, nodes)
        assert len(tree) == nodes + 1
        assert sum(product_of(accuracy, path) for path in tree.paths[1:]) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
def test_best_measured_tree_against_every_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.geometric(0.4, size=(60, 3)) - 1, 12).astype(np.int8)
    ranks[rng.random(60) < 0.4] = [0, 1, 2]  # heads that are right together
    ranks[rng.random((60, 3)) < 0.1] = medusa.MISSED
    ranks[rng.random((60, 3)) < 0.1] = medusa.UNKNOWN

    def accepted(tree: Sequence[NodePath], row: Sequence[int]) -> int:
        """Walk down as the runtime does."""
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in tree:
            depth += 1
        return depth

    for nodes in (1, 2, 4):
        best = max(np.mean([1 + accepted(tree, row) for row in ranks.tolist()]) for tree in closed_trees(3, 3, nodes))
        tree = best_tree_measured(ranks, nodes)
        assert len(tree) == nodes + 1
        assert mean_accepted_tokens(tree, ranks) >= best - 1e-12  # it may use ranks above 2 too
        assert mean_accepted_tokens(tree, ranks) == pytest.approx(
            np.mean([1 + accepted(tree.paths[1:], row) for row in ranks.tolist()])
        )


def test_no_tree_of_guesses_that_are_never_right() -> None:
    with pytest.raises(TreeError, match="3 nodes asked for, but only 2 paths"):
        best_tree_measured(np.array([[0, 1], [0, 99]], np.int8), 3)
    with pytest.raises(TreeError, match="4 nodes asked for, but only 3 paths"):
        best_tree([[0.5, 0.0], [0.25, 0.1]], 4)
