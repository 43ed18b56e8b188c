"""The TensorRT backend against stand-ins for the library and for CUDA (see `tensorrt_standin`): whole answers equal
ONNX Runtime's, and what is bound, copied, launched, recorded and refused is counted. Nothing here has run on a GPU."""

from __future__ import annotations

import gc
import inspect
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from transformers import LlamaConfig

from speccompile.compiler import build as building
from speccompile.compiler.build import build
from speccompile.compiler.checkpoint import read_model
from speccompile.compiler.eagle_head import make_head, write_eagle
from speccompile.compiler.engine import build_engines
from speccompile.graphs import contract
from speccompile.graphs.eagle import EagleForm, EagleModel
from speccompile.graphs.engines import REMEDY, read_engines
from speccompile.graphs.errors import BundleError, GenerationError
from speccompile.graphs.manifest import file_info
from speccompile.graphs.tree import DynamicTree, TokenTree
from speccompile.runtime import Decoder, load
from speccompile.runtime.backends import ort as ort_backend
from speccompile.runtime.backends import tensorrt as backend
from speccompile.runtime.backends.cuda import Cuda, DeviceMemory, moves
from speccompile.runtime.backends.ort import OrtCache, OrtGpuCache, OrtHeads, OrtTarget, open_session
from speccompile.runtime.backends.step import Array, StepOutput
from speccompile.runtime.backends.tensorrt import IDLE_RUNS, KEPT_RECORDINGS, TrtCache, TrtHeads, collecting_log
from speccompile.runtime.bundle import Bundle
from tests.tiny.conftest import TREE, write_tokenizer
from tests.tiny.models import VOCAB, tiny_model
from tests.tiny.tensorrt_standin import (
    NAN_BYTE,
    TARGET,
    VERSION,
    Attribute,
    CaptureMode,
    ContextStandin,
    CudaStandin,
    EngineStandin,
    Kind,
    RuntimeConfigStandin,
    RuntimeStandin,
    Status,
    TrtStandin,
    install,
    make_engines,
    write_engines,
)
from tests.tiny.test_cache import random_tree
from tests.tiny.test_eagle_build import copied_target
from tests.tiny.test_methods import answer, changed

CAPACITY, MAX_TOKENS, MAX_MASKED = 96, 16, 48
METHODS = ("medusa", "draft", "eagle", "medusa-fp16")
PROMPTS: tuple[Any, ...] = ("the fox and the crow", [{"role": "user", "content": "Why is the sky blue?"}])


# ---- bundles ----


@pytest.fixture(scope="module")
def noisy_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is right more often than not: the tiny target with noise on its weights."""
    model, generator = tiny_model("llama"), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.008)
    folder = tmp_path_factory.mktemp("checkpoint") / "draft"
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def some_head(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """An EAGLE-1 head that has learnt nothing: what it is fed shows in what it drafts."""
    source, folder = read_model(tiny_checkpoint), tmp_path_factory.mktemp("eagle") / "head"
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = EagleModel(config, EagleForm(1), 64, VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15)
    write_eagle(make_head(folder, model, source, None), folder)
    return folder


@pytest.fixture(scope="module")
def bundles(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Path,
    tuned_heads: Path,
    noisy_target: Path,
    some_head: Path,
) -> Callable[[str], Path]:
    """By method, a scatter bundle with engines of both libraries; made when it is asked for."""
    folder, made = tmp_path_factory.mktemp("bundles"), dict[str, Path]()
    options: dict[str, dict[str, Any]] = {
        "medusa": {"heads": tuned_heads, "tree": TREE},
        "medusa-fp16": {"heads": tuned_heads, "tree": TREE, "precision": "fp16"},
        "draft": {"method": "draft", "draft": noisy_target, "tree": TREE},
        "eagle": {"method": "eagle", "head": some_head, "tree": DynamicTree(10, 0.0, 4, 3)},
    }

    def bundle(name: str) -> Path:
        if name not in made:
            path = folder / f"{name}.bundle"
            with pytest.MonkeyPatch.context() as patch:
                if name in ("draft", "eagle"):  # their target is the one that is there already
                    patch.setattr(building, "write_target", copied_target(bundle("medusa")))
                build(tiny_checkpoint, path, dialect="scatter", **options[name])
            for runtime in ("tensorrt", "tensorrt_rtx"):
                make_engines(path, runtime, capacity=CAPACITY, max_tokens=MAX_TOKENS, max_masked=MAX_MASKED)
            made[name] = path
        return made[name]

    return bundle


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> TrtStandin:
    """`import tensorrt` and `import cuda.bindings.runtime` find stand-ins."""
    module = TrtStandin(CudaStandin())
    install(monkeypatch, module)
    return module


@pytest.fixture
def cache(bundles: Callable[[str], Path], trt: TrtStandin) -> TrtCache:
    """An empty cache of the target; what is counted starts here."""
    decoder = load(bundles("medusa"), backend="tensorrt")
    trt.contexts.clear()
    trt.cuda.reset_counts()
    return open_cache(decoder)


def open_cache(decoder: Decoder, batch: int = 1) -> TrtCache:
    cache = decoder.target.open(decoder.capacity, batch)
    assert isinstance(cache, TrtCache)
    return cache


def step(cache: Any, count: int, seed: int = 0, **more: Any) -> StepOutput:
    """A chain of random tokens behind what is committed."""
    tree = TokenTree.chain(count - 1)
    ids = np.random.default_rng(seed).integers(5, VOCAB, count)
    return cache.run(ids, cache.length + tree.depths, tree.mask, tree.nodes, **more)


def endless(path: Path, **options: Any) -> Decoder:
    """A decoder whose answers end with their limit only."""
    decoder = load(path, **options)
    return changed(decoder, decoder.tree, [])


# ---- whole answers ----


@pytest.mark.parametrize("runtime", ["tensorrt", "tensorrt_rtx"])
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_onnxruntime(
    method: str, runtime: str, bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts longer than one call takes, answers up to the end of the cache, greedy and drawn, plain and not; a second
    turn that reuses the cache."""
    install(monkeypatch, TrtStandin(CudaStandin(), runtime))
    ours = endless(bundles(method), backend=runtime)
    theirs = endless(bundles(method), threads=1, capacity=CAPACITY)
    assert ours.capacity == CAPACITY and not ours.in_order and not theirs.in_order
    assert ours.target.max_tokens == MAX_TOKENS < len(ours.encode(PROMPTS[1])) < CAPACITY
    accepted = 0
    for prompt in PROMPTS:
        for options in ({}, {"speculate": False}, {"temperature": 0.9, "top_k": 20, "seed": 3}):
            first, second = (answer(decoder, prompt, max_new_tokens=200, **options) for decoder in (ours, theirs))
            assert first.token_ids == second.token_ids
            assert first.finish_reason == second.finish_reason
            for figure in ("rounds", "drafted", "accepted", "tested"):
                assert getattr(first.stats, figure) == getattr(second.stats, figure), figure
            accepted += first.stats.accepted
    assert accepted > (0 if method == "eagle" else 30)
    for turn in PROMPTS:
        assert ours.generate(turn, max_new_tokens=20).token_ids == theirs.generate(turn, max_new_tokens=20).token_ids


def test_trees_wider_than_a_call_are_cut_and_answers_stay(
    bundles: Callable[[str], Path], trt: TrtStandin, tmp_path: Path
) -> None:
    """Engines for four tokens: drafters ask for no more, level by level, and prompts go in by fours."""
    for method in ("medusa", "draft", "eagle"):
        path = tmp_path / method
        shutil.copytree(bundles(method), path, ignore=shutil.ignore_patterns("engines"))
        make_engines(path, capacity=CAPACITY, max_tokens=4, max_masked=6)
        decoder = endless(path, backend="tensorrt")
        decoder.tree = DynamicTree(12, 0.0)
        plain = answer(decoder, PROMPTS[0], max_new_tokens=30, speculate=False)
        drafted = answer(decoder, PROMPTS[0], max_new_tokens=30)
        assert drafted.token_ids == plain.token_ids
        assert 0 < drafted.stats.drafted <= 3 * drafted.stats.rounds


def test_batch_rows_of_different_length_equal_single_rows(
    bundles: Callable[[str], Path], trt: TrtStandin, tmp_path: Path
) -> None:
    path = tmp_path / "b"
    shutil.copytree(bundles("medusa"), path, ignore=shutil.ignore_patterns("engines"))
    make_engines(path, capacity=CAPACITY, max_tokens=MAX_TOKENS, batch=3)
    decoder = load(path, backend="tensorrt")
    tree, lengths = TokenTree.from_paths([[0], [1], [0, 0]]), np.array([4, 9, 2])
    rng = np.random.default_rng(1)
    prompts, ids = rng.integers(5, VOCAB, (3, 9)), rng.integers(5, VOCAB, (3, len(tree)))
    batch = open_cache(decoder, 3)
    prefill = np.tri(9, dtype=np.bool_)
    batch.run(prompts, np.arange(9)[None].repeat(3, 0), prefill[None].repeat(3, 0), np.array([8]))
    together = batch.run(
        ids, lengths[:, None] + tree.depths, np.broadcast_to(tree.mask, (3, 4, 4)), tree.nodes, past_length=lengths
    )
    for row, length in enumerate(lengths.tolist()):
        single = open_cache(decoder)
        single.run(prompts[row, :length], np.arange(length), prefill[:length, :length], np.array([length - 1]))
        single.commit(range(length))
        alone = single.run(ids[row], length + tree.depths, tree.mask, tree.nodes)
        np.testing.assert_array_equal(together.next_ids[row], alone.next_ids[0])
        np.testing.assert_allclose(together.logits[row], alone.logits[0], atol=1e-5)


# ---- what is bound, copied and launched ----


def test_past_and_present_of_a_layer_are_one_place_in_one_block(cache: TrtCache, trt: TrtStandin) -> None:
    step(cache, 3)
    (context,) = trt.contexts
    target = cache.target
    size = target.kv_heads * CAPACITY * target.head_dim * 4
    past, present = contract.past_names(target.layers), contract.present_names(target.layers)
    first = context.addresses[past[0]]
    assert len(past) == 6
    assert [context.addresses[name] - first for name in past] == [part * size for part in range(6)]
    assert [context.addresses[name] for name in present] == [context.addresses[name] for name in past]
    assert context.shapes[past[0]] == (1, target.kv_heads, CAPACITY, target.head_dim)
    block = trt.cuda.bytes_at(first, 6 * size).view(np.float32).reshape(6, target.kv_heads, CAPACITY, -1)
    assert (np.abs(block[:, :, :3]).max((1, 3)) > 0).all()  # written in place
    np.testing.assert_array_equal(block[:, :, 3:], 0)  # a GPU's memory is anything at first, here NaN
    assert trt.cuda.bytes_at(context.addresses[contract.LOGITS], 4)[0] != NAN_BYTE


def test_a_greedy_round_moves_no_logits(cache: TrtCache, trt: TrtStandin) -> None:
    """Five inputs go in with one copy, one copy brings `next_ids` back, and nothing else is moved."""
    cuda = trt.cuda
    step(cache, 3)  # makes the blocks that all calls share
    for count in (7, 7, 7, 7, 5):
        cuda.reset_counts()
        runs = sum(context.runs for context in trt.contexts)
        output = step(cache, count)
        assert output.finite(range(count))
        recorded = cuda.counts["cudaGraphLaunch"] == 1
        places = (count * 8, count * 8, count * count, 8, count * 8)
        padded = sum(-(-size // 256) * 256 for size in places[:-1]) + places[-1]
        assert cuda.copied == {Kind.cudaMemcpyHostToDevice: padded, Kind.cudaMemcpyDeviceToHost: count * 8}
        assert cuda.counts["cudaStreamSynchronize"] == 1
        if not recorded and not cuda.counts["cudaStreamBeginCapture"]:
            assert cuda.counts == {"cudaMemcpyAsync": 2, "cudaStreamSynchronize": 1}
            assert sum(context.runs for context in trt.contexts) == runs + 1
        elif recorded:
            assert cuda.counts == {"cudaGraphLaunch": 1, "cudaStreamSynchronize": 1}
            assert sum(context.runs for context in trt.contexts) == runs
    asked = step(cache, 5)
    cuda.reset_counts()
    logits, again = asked.logits, asked.logits
    assert cuda.copied == {Kind.cudaMemcpyDeviceToHost: 5 * VOCAB * 4}
    assert logits is again
    np.testing.assert_array_equal(logits[0].argmax(-1), asked.next_ids[0])
    assert asked.hidden is not None and asked.hidden.shape == (1, 5, 64)


@pytest.mark.parametrize(
    ("method", "options", "wanted"),
    [
        ("draft", {}, set()),
        ("medusa", {}, {"hidden"}),  # the heads' input
        ("eagle", {}, {"hidden"}),
        ("draft", {"temperature": 1.0, "seed": 0}, {"logits"}),
        ("medusa", {"temperature": 1.0, "seed": 0}, {"logits", "hidden"}),
    ],
)
def test_what_whole_answers_ask_for(
    method: str,
    options: dict[str, Any],
    wanted: set[str],
    bundles: Callable[[str], Path],
    trt: TrtStandin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, fetch = set[str](), backend._Calls._fetch

    def spy(self: Any, call: Any, name: str, number: int) -> Array:
        asked.add(name)
        return fetch(self, call, name, number)

    monkeypatch.setattr(backend._Calls, "_fetch", spy)
    result = answer(endless(bundles(method), backend="tensorrt"), PROMPTS[0], max_new_tokens=40, **options)
    assert result.stats.drafted > 20
    assert asked == wanted


def test_what_lies_on_the_gpu_must_be_asked_for_in_time(cache: TrtCache) -> None:
    first = step(cache, 4)
    step(cache, 4)
    with pytest.raises(AssertionError, match="'logits' was asked for after the next call had overwritten it"):
        _ = first.logits


def test_a_row_that_is_no_number_is_found_without_its_logits(bundles: Callable[[str], Path], trt: TrtStandin) -> None:
    """A cache with NaN in it: the graph says -1 and the answer ends with an error."""
    decoder = endless(bundles("medusa"), backend="tensorrt")
    sequence = decoder.new_sequence()
    stream = decoder.stream(PROMPTS[0], max_new_tokens=20, sequence=sequence)
    next(stream)
    assert isinstance(sequence.cache, TrtCache)
    size = 2 * 96 * 16 * 4
    trt.cuda.bytes_at(sequence.cache.keys_values.addresses[0], size).view(np.float32)[:16] = np.nan
    trt.cuda.reset_counts()
    with pytest.raises(GenerationError, match="logits: they are not finite"):
        list(stream)
    assert trt.cuda.copied[Kind.cudaMemcpyDeviceToHost] < VOCAB * 4


# ---- committing ----


@pytest.mark.parametrize("batch", [1, 3])
def test_commit_keeps_what_a_list_would(batch: int) -> None:
    """Random trees, random paths in them and now and then a truncation, against a list of rows."""
    rng, standin = np.random.default_rng(batch), CudaStandin()
    engine = SimpleNamespace(cuda=Cuda(standin))
    shape = SimpleNamespace(layers=2, kv_heads=3, head_dim=4, rows=300, kv_bytes=4, engine=engine)
    cache, rows = TrtCache(shape, 300, batch), list[Array]()  # type: ignore[arg-type]
    engine.cuda.synchronize()
    size = 4 * batch * 3 * 300 * 4
    buffer = standin.bytes_at(cache.keys_values.addresses[0], size * 4).view(np.float32).reshape(4, batch, 3, 300, 4)
    launches = expected = 0
    for _ in range(150):
        tree = random_tree(rng, int(rng.integers(1, 12)))
        new = rng.standard_normal((4, batch, 3, len(tree), 4)).astype(np.float32)
        buffer[:, :, :, cache.length : cache.length + len(tree)] = new
        path = tree.ancestry(int(rng.integers(len(tree))))
        path = path[: rng.integers(1, len(path) + 1)]
        standin.reset_counts()
        cache.commit(path)
        expected += sum(1 for index, node in enumerate(path) if index != node)  # row by row
        launches += standin.counts["cudaMemcpy2DAsync"]
        engine.cuda.synchronize()
        rows += [new[:, :, :, node] for node in path]
        if rng.random() < 0.2 or len(rows) > 250:
            rows = rows[: int(rng.integers(0, len(rows) + 1))]
            cache.truncate(len(rows))
        assert cache.length == len(rows)
        if rows:
            np.testing.assert_array_equal(buffer[:, :, :, : len(rows)], np.stack(rows, axis=3))
    assert 20 < launches < expected


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ([0, 1, 2], []),
        ([0, 2, 5], [(11, 12, 1), (12, 15, 1)]),
        ([0, 4, 5, 6], [(11, 14, 3)]),  # apart from where they go: at once
        ([0, 3, 4, 5, 6], [(11, 13, 2), (13, 15, 2)]),  # two at a time, else they would overwrite one another
        ([0, 2, 3, 4], [(11, 12, 1), (12, 13, 1), (13, 14, 1)]),
        ([3, 4, 9], [(10, 13, 2), (12, 19, 1)]),
        ([], []),
    ],
)
def test_rows_move_in_as_few_pieces_as_do_not_overlap(nodes: list[int], wanted: list[tuple[int, int, int]]) -> None:
    assert list(moves(10, nodes)) == wanted


def test_a_commit_is_one_launch_for_all_layers(cache: TrtCache, trt: TrtStandin) -> None:
    step(cache, 8)
    trt.cuda.reset_counts()
    cache.commit([0, 5, 6])
    assert trt.cuda.counts == {"cudaMemcpy2DAsync": 1}
    trt.cuda.cudaStreamSynchronize(trt.cuda.stream)
    assert trt.cuda.copied == {Kind.cudaMemcpyDeviceToDevice: 2 * 3 * 2 * 2 * 16 * 4}  # parts, heads, rows, D, float32
    assert cache.length == 3


# ---- recording ----


def test_a_shape_is_recorded_when_it_has_come_three_times(cache: TrtCache, trt: TrtStandin) -> None:
    cuda, seen = trt.cuda, []
    for turn in range(6):
        cuda.reset_counts()
        output = step(cache, 4, seed=turn)
        seen.append((cuda.counts["cudaStreamBeginCapture"], cuda.counts["cudaGraphLaunch"], len(trt.contexts)))
        fresh = open_cache_like(cache)
        np.testing.assert_array_equal(output.next_ids, step(fresh, 4, seed=turn).next_ids)
        trt.contexts.pop()
        if turn == 1:
            step(cache, 5)  # another shape in between takes nothing back
    assert seen == [(0, 0, 1), (0, 0, 1), (1, 0, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]
    shared, own = trt.contexts
    assert shared.runs == 3 and own.runs == 2  # once for real, once to record it
    assert (shared.scratch, shared.how) == (own.scratch, own.how)
    assert shared.how is trt.ExecutionContextAllocationStrategy.USER_MANAGED
    step(cache, 5)
    step(cache, 5)
    assert len(trt.contexts) == 3


def open_cache_like(cache: TrtCache) -> TrtCache:
    return cache.target.open(cache.capacity)


def test_a_recorded_round_sees_what_was_committed_in_between(cache: TrtCache, trt: TrtStandin) -> None:
    """Addresses and sizes are recorded, lengths and masks are not."""
    twin = OrtTarget(cache.target.engine.path.parents[2] / "target.onnx", threads=1).open(CAPACITY)
    rng = np.random.default_rng(0)
    for turn in range(12):
        tree = random_tree(rng, 5)
        ids = rng.integers(5, VOCAB, 5)
        outputs = [c.run(ids, c.length + tree.depths, tree.mask, tree.nodes) for c in (cache, twin)]
        np.testing.assert_array_equal(outputs[0].next_ids, outputs[1].next_ids)
        np.testing.assert_array_equal(outputs[0].logits, outputs[1].logits)
        path = tree.ancestry(int(rng.integers(5)))
        for each in (cache, twin):
            each.commit(path)
            if turn == 7:
                each.truncate(3)
    assert trt.cuda.counts["cudaGraphLaunch"] == 9


def test_only_so_many_recordings_are_kept(cache: TrtCache, trt: TrtStandin) -> None:
    """Shapes that take turns must not push one another out, over and over; only what is not used any more goes."""
    cuda, shapes = trt.cuda, range(1, KEPT_RECORDINGS + 3)
    for _ in range(5):
        for count in shapes:
            step(cache, count)
    assert cuda.counts["cudaStreamBeginCapture"] == KEPT_RECORDINGS
    assert cuda.counts["cudaGraphLaunch"] == 2 * KEPT_RECORDINGS, "the first ones, in both turns that were left"
    assert len(trt.contexts) == 1 + KEPT_RECORDINGS
    late = KEPT_RECORDINGS + 1
    cuda.reset_counts()
    for turn in range(IDLE_RUNS):  # all but the first two of those that are recorded
        step(cache, 3 + turn % (KEPT_RECORDINGS - 2))
    assert cuda.counts["cudaGraphLaunch"] == IDLE_RUNS
    for _ in range(3):
        step(cache, late)
    gc.collect()
    assert cuda.counts["cudaStreamBeginCapture"] == cuda.counts["cudaGraphExecDestroy"] == 1
    cuda.reset_counts()
    step(cache, late)
    assert cuda.counts["cudaGraphLaunch"] == 1
    step(cache, 2)  # the other one that was idle is there until its place is wanted
    assert cuda.counts["cudaGraphLaunch"] == 2
    for _ in range(6):  # the one that went; it would have to wait for a place again
        step(cache, 1)
    assert cuda.counts["cudaGraphLaunch"] == 2 and not cuda.counts["cudaStreamBeginCapture"]


def test_making_a_context_is_not_timed(cache: TrtCache, trt: TrtStandin) -> None:
    """It happens once, and whoever sizes trees by what calls cost would believe that it always does."""
    trt.context_seconds = 0.5
    for _ in range(5):
        step(cache, 4)
        assert 0 < cache.seconds < 0.4
    assert len(trt.contexts) == 2


def test_more_shapes_than_are_kept(cache: TrtCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "KEPT_SHAPES", 4)
    wanted = {count: step(open_cache_like(cache), count).logits.copy() for count in range(1, 12)}
    for count in [*wanted, 3, 3, 3, *wanted, *reversed(wanted)]:
        np.testing.assert_array_equal(step(cache, count).logits, wanted[count])
        assert cache._calls is not None and len(cache._calls._calls) <= 4


def test_an_engine_that_cannot_be_recorded_runs_on(cache: TrtCache, trt: TrtStandin) -> None:
    trt.recordable = False
    outputs = [step(cache, 4).next_ids.tolist() for _ in range(8)]
    assert all(ids == outputs[0] for ids in outputs)
    assert trt.cuda.counts["cudaStreamBeginCapture"] == 1, "tried once"
    assert trt.cuda.counts["cudaGraphLaunch"] == 0
    assert trt.cuda.last_error is Status.cudaSuccess, "an error that stays would fail whoever asks next"
    trt.recordable, trt.cuda.fails = True, {"cudaGraphInstantiate": Status.cudaErrorMemoryAllocation}
    outputs = [step(cache, 5).next_ids.tolist() for _ in range(5)]
    assert all(ids == outputs[0] for ids in outputs)


def test_rtx_records_on_its_own(bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of shape voids what a context has recorded, so shapes that come often have one of their own."""
    module = TrtStandin(CudaStandin(), "tensorrt_rtx")
    install(monkeypatch, module)
    cache = open_cache(load(bundles("medusa"), backend="tensorrt_rtx"))
    shapes = range(1, KEPT_RECORDINGS + 2)
    wanted = [step(open_cache_like(cache), count).logits.copy() for count in shapes]
    module.contexts.clear()
    for _ in range(6):
        for count, logits in zip(shapes, wanted, strict=True):
            np.testing.assert_array_equal(step(cache, count).logits, logits)
    assert module.cuda.counts["cudaStreamBeginCapture"] == 0
    shared, *own = module.contexts
    assert len(own) == KEPT_RECORDINGS
    assert [(context.runs, context.captures) for context in own] == [(4, 1)] * KEPT_RECORDINGS
    assert (shared.runs, shared.captures) == (2 * KEPT_RECORDINGS + 6, 0)
    for context in module.contexts:
        assert context.how.allocation is module.ExecutionContextAllocationStrategy.USER_MANAGED
        assert context.how.kernels is shared.how.kernels is not None, "each would compile kernels of its own"


def test_memory_is_given_back(bundles: Callable[[str], Path], trt: TrtStandin) -> None:
    decoder = load(bundles("medusa"), backend="tensorrt")
    device, host = len(trt.cuda.device), len(trt.cuda.host)
    for _ in range(3):
        cache = open_cache(decoder)
        for _ in range(4):
            assert step(cache, 4).logits.any()
        del cache
        trt.contexts.clear()
    gc.collect()
    assert (len(trt.cuda.device), len(trt.cuda.host)) == (device, host)
    assert trt.cuda.counts["cudaGraphExecDestroy"] == 3


def test_what_goes_while_work_is_recorded_is_freed_afterwards() -> None:
    """Python may collect between any two calls, and cudaFree ends what is being recorded."""
    standin = CudaStandin()
    cuda = Cuda(standin)
    kept, gone = cuda.device_memory(4), [cuda.device_memory(512), cuda.host_memory(512)]
    cuda.synchronize()
    assert (len(standin.device), len(standin.host)) == (2, 1)

    def work() -> None:
        standin.cudaMemsetAsync(kept.address, 7, 4, cuda.stream)
        gone.clear()
        gc.collect()

    recording = cuda.record(work)
    assert (len(standin.device), len(standin.host)) == (1, 0)
    cuda.replay(recording)
    cuda.synchronize()
    assert standin.bytes_at(kept.address, 4).tolist() == [7] * 4


def test_what_goes_while_another_thread_works_is_freed_afterwards() -> None:
    standin = CudaStandin()
    cuda = Cuda(standin)
    gone = [cuda.device_memory(512)]
    collector = threading.Thread(target=gone.clear)
    with cuda.lock:
        collector.start()
        collector.join(20)
        assert not collector.is_alive(), "it waits for the lock; what a finalizer waits for may never come"
        assert len(standin.device) == 1 and standin.counts["cudaFree"] == 0
    cuda.synchronize()
    assert not standin.device
    other = [DeviceMemory(cuda.device_memory(8).address)]
    assert not standin.device and other, "nothing is left to wait for: it is freed at once"


# ---- threads ----


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
def test_heads_are_shared_by_threads(runtime: str, bundles: Callable[[str], Path], trt: TrtStandin) -> None:
    """A thread that comes while another one is between filling and running must not change what that one asks."""
    heads = load(bundles("medusa"), backend=runtime, **({} if runtime == "tensorrt" else {"threads": 1})).heads
    assert isinstance(heads, TrtHeads | OrtHeads)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, heads.width)).astype(np.float32)
    wanted = [tuple(part.copy() for part in heads.run(row)) for row in rows]
    assert any((one != two).any() for one, two in zip(*wanted, strict=True))
    first = heads.run(rows[0])
    second = heads.run(rows[1])
    for found, right in zip((first, second), wanted, strict=True):
        for one, two in zip(found, right, strict=True):
            np.testing.assert_array_equal(one, two)
    arrived, going_on = threading.Event(), threading.Event()
    run_filled = heads._calls.run if isinstance(heads, TrtHeads) else heads.session.run_with_iobinding

    def wait_and_run(*given: Any) -> Any:
        if not arrived.is_set():
            arrived.set()
            going_on.wait(20)
        return run_filled(*given)

    if isinstance(heads, TrtHeads):
        heads._calls.run = wait_and_run  # type: ignore[method-assign]
    else:
        heads.session = SimpleNamespace(run_with_iobinding=wait_and_run)
    answers: list[Any] = [None, None]

    def ask(place: int) -> None:
        answers[place] = heads.run(rows[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in (0, 1)]
    threads[0].start()
    assert arrived.wait(20)
    threads[1].start()
    time.sleep(0.2)  # time enough to fill
    going_on.set()
    for thread in threads:
        thread.join(20)
    for found, right in zip(answers, wanted, strict=True):
        for one, two in zip(found, right, strict=True):
            np.testing.assert_array_equal(one, two)


# ---- failures while it runs ----


def test_a_failing_engine_says_what_the_library_said(cache: TrtCache, trt: TrtStandin) -> None:
    step(cache, 3)
    trt.contexts[0].scratch = None
    file = cache.target.engine.path
    with pytest.raises(GenerationError) as caught:
        step(cache, 3)
    assert str(caught.value) == f"{file}: the engine failed (Not all shapes and addresses are set: []); {REMEDY}"


def test_all_of_a_process_log_to_one_logger(bundles: Callable[[str], Path], trt: TrtStandin) -> None:
    """The library keeps the first that it is given: what a second decoder does is logged there, and also when whoever
    gave it has gone. What one has not asked about must not be told to another."""
    load(bundles("medusa"), backend="tensorrt")
    gc.collect()
    log = collecting_log(trt)
    assert collecting_log(trt) is log
    trt.log_error("Nobody asked about this.")
    cache = open_cache(load(bundles("draft"), backend="tensorrt"))
    step(cache, 3)
    trt.contexts[-1].scratch = None
    with pytest.raises(GenerationError, match=r"the engine failed \(Not all shapes and addresses are set: \[\]\);"):
        step(cache, 3)
    assert log.errors == []
    for number in range(1000):
        log.log(trt.ILogger.WARNING, f"{number}")
    assert 10 < len(log.take_warnings()) < 1000, "a process that runs for long would be full of them"


def test_an_error_of_the_device_is_one_sentence(cache: TrtCache, trt: TrtStandin) -> None:
    trt.cuda.fails["cudaStreamSynchronize"] = Status.cudaErrorIllegalAddress
    with pytest.raises(GenerationError) as caught:
        step(cache, 3)
    assert str(caught.value) == (
        "CUDA: cudaStreamSynchronize failed (cudaErrorIllegalAddress, error 700); start the program again."
    )
    trt.cuda.fails = {"cudaMalloc": Status.cudaErrorMemoryAllocation}
    with pytest.raises(GenerationError) as caught:
        open_cache_like(cache)
    assert str(caught.value) == (
        "CUDA: cudaMalloc failed (cudaErrorMemoryAllocation, error 2); free memory or build engines with a smaller "
        "--max-length."
    )


def test_calls_beyond_what_was_built_are_refused_by_name(cache: TrtCache, trt: TrtStandin) -> None:
    with pytest.raises(GenerationError) as caught:
        step(cache, MAX_TOKENS + 1)
    assert str(caught.value) == (
        f"{cache.target.engine.path}: 'input_ids' of shape [1, 17] does not fit this engine, which takes [1, 1] up to "
        "[1, 16]; build the engines with a larger --max-tree."
    )
    step(cache, MAX_TOKENS)
    cache.commit(range(MAX_TOKENS))
    cache.length = CAPACITY - 2
    with pytest.raises(GenerationError, match="cache: 3 new tokens behind 94 do not fit its capacity of 96"):
        step(cache, 3)
    with pytest.raises(GenerationError) as caught:
        cache.target.open(CAPACITY, batch=2)
    assert str(caught.value) == (
        f"{cache.target.engine.path}: a batch of 2 is more than the 1 that this engine was built for; build the "
        "engines with a larger --batch."
    )
    assert [context.runs for context in trt.contexts] == [1]


# ---- refusals before anything is created ----


Change = Callable[[Any], object]


def refused(path: Path, module: TrtStandin | None = None, backend_name: str = "tensorrt") -> str:
    """What `load` says; no `Runtime` may have been made."""
    with pytest.raises(BundleError) as caught:
        load(path, backend=backend_name)
    assert module is None or not module.runtimes, "its methods crash the process where there is no driver"
    return str(caught.value)


@pytest.fixture
def copied(bundles: Callable[[str], Path], tmp_path: Path) -> Path:
    shutil.copytree(bundles("medusa"), tmp_path / "b")
    return tmp_path / "b"


def folder_of(path: Path) -> Path:
    return path / "engines" / f"tensorrt-{VERSION}-{TARGET}"


def edit_sidecar(path: Path, change: Change) -> str:
    file = folder_of(path) / "engines.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    return str(file)


def test_packages_that_are_missing(
    bundles: Callable[[str], Path], trt: TrtStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundles("medusa")
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert refused(path, trt) == (
        "CUDA: the package cuda-python is missing (import of cuda.bindings.runtime halted; None in sys.modules); "
        "install it with pip install 'cuda-python>=13'."
    )
    for name, package in (
        ("tensorrt", "speccompile[gpu]"),
        ("tensorrt_rtx", "speccompile[rtx]"),
        ("tensorrt_lean", "tensorrt-lean"),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        assert refused(path, backend_name=name) == (
            f"backend '{name}': the package cannot be imported (import of {name} halted; None in sys.modules); install "
            f"it with pip install '{package}'."
        )


@pytest.mark.parametrize(
    ("standin", "found"),
    [
        (CudaStandin(driver=False), "cudaErrorInsufficientDriver, error 35"),
        (CudaStandin(devices=0), "cudaErrorNoDevice, error 100"),
    ],
)
def test_no_device(
    standin: CudaStandin, found: str, bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = TrtStandin(standin)
    install(monkeypatch, module)
    assert refused(bundles("medusa"), module) == (
        f"CUDA: no GPU can be used here (cudaGetDeviceCount: {found}); install NVIDIA's driver, or run this bundle "
        "with the backend onnxruntime."
    )


def test_engines_for_another_version_or_gpu(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"tensorrt-{VERSION}-sm89, tensorrt_rtx-{VERSION}-sm89"
    for version, capability, wanted in (("11.5.0", (8, 9), "11.5.0 on sm89"), (VERSION, (9, 0), f"{VERSION} on sm90")):
        module = TrtStandin(CudaStandin(capability=capability), version=version)
        install(monkeypatch, module)
        assert refused(copied, module) == (
            f"{copied}: it has no engines for tensorrt {wanted} (there are: {there}); make them with "
            f"'speccompile engine {copied} --runtime tensorrt', with --lean for tensorrt_lean."
        )
    shutil.rmtree(copied / "engines")
    assert refused(copied, module) == (
        f"{copied}: it has no engines for tensorrt {VERSION} on sm90 (there are: none); make them with "
        f"'speccompile engine {copied} --runtime tensorrt', with --lean for tensorrt_lean."
    )


def test_lean_runs_the_engines_that_were_made_for_it(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = TrtStandin(CudaStandin(), "tensorrt_lean")
    install(monkeypatch, module)
    assert refused(copied, module, "tensorrt_lean") == (
        f"{folder_of(copied) / 'engines.json'}: these engines need the whole of tensorrt, and tensorrt_lean opens only "
        f"those made for it; build them again with 'speccompile engine {copied} --runtime tensorrt --lean --force'."
    )
    shutil.rmtree(folder_of(copied))
    make_engines(copied, capacity=CAPACITY, max_tokens=MAX_TOKENS, lean=True)
    decoder = endless(copied, backend="tensorrt_lean")
    assert len(answer(decoder, PROMPTS[0], max_new_tokens=5).token_ids) == 5
    install(monkeypatch, TrtStandin(CudaStandin()))
    assert len(answer(endless(copied, backend="tensorrt"), PROMPTS[0], max_new_tokens=5).token_ids) == 5


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [("runtime", "tensorrt_rtx", "tensorrt"), ("version", "10.0", VERSION), ("target", "sm86", TARGET)],
)
def test_a_sidecar_that_does_not_match_its_folder(
    field: str, value: str, wanted: str, copied: Path, trt: TrtStandin
) -> None:
    source = edit_sidecar(copied, lambda data: data.update({field: value}))
    assert refused(copied, trt) == f"{source}: {field} is '{value}' but here it is '{wanted}'; {REMEDY}"


def test_engines_of_another_build(copied: Path, trt: TrtStandin) -> None:
    made_from = Bundle.open(copied).manifest.graph_sha256("target")
    source = edit_sidecar(copied, lambda data: data["engines"]["target"].update(graph_sha256="a" * 64))
    assert refused(copied, trt) == (
        f"{source}: target was made from a graph and weights of sha256 aaaaaaaaaaaa... but target.onnx and its weights "
        f"have {made_from[:12]}...; {REMEDY}"
    )
    edit_sidecar(copied, lambda data: data["engines"]["target"].update(graph_sha256=made_from))
    edit_sidecar(copied, lambda data: data["engines"].pop("medusa"))
    assert refused(copied, trt) == (
        f"{source}: field 'engines' has no entry 'medusa', which this bundle needs; {REMEDY}"
    )


def test_engines_that_were_altered(copied: Path, trt: TrtStandin) -> None:
    file = folder_of(copied) / "target.engine"
    whole = file.read_text()
    file.write_text(whole + " ")
    size, listed = len(whole) + 1, len(whole)
    assert refused(copied, trt) == (
        f"{file}: {size} bytes but engines.json says {listed}; the file is truncated or altered, {REMEDY}"
    )
    file.write_text(whole.replace("{", "[", 1))
    found = file_info(file).sha256
    wanted = json.loads((file.parent / "engines.json").read_text())["engines"]["target"]["sha256"]
    assert refused(copied, trt) == (
        f"{file}: sha256 is {found[:12]}... but engines.json says {wanted[:12]}...; the file was altered, {REMEDY}"
    )
    file.unlink()
    assert refused(copied, trt) == f"{file}: listed in engines.json but missing; {REMEDY}"


def test_bundles_of_the_other_dialect(tiny_bundle: Path, trt: TrtStandin) -> None:
    assert refused(tiny_bundle, trt) == (
        f"{tiny_bundle}: its graphs are of the dialect 'gqa', which TensorRT does not run; build the bundle again with "
        "--dialect scatter, and then its engines."
    )


def test_unknown_backends_and_providers(bundles: Callable[[str], Path], trt: TrtStandin) -> None:
    path = bundles("medusa")
    assert refused(path, trt, "openvino") == (
        "backend: 'openvino' is unknown; use one of onnxruntime, tensorrt, tensorrt_rtx, tensorrt_lean."
    )
    with pytest.raises(BundleError) as caught:
        load(path, provider="CPUExecutionProvider", backend="tensorrt")
    assert str(caught.value) == (
        "provider: 'CPUExecutionProvider' is ONNX Runtime's, and the backend 'tensorrt' has none; leave it out."
    )


# ---- refusals of what an engine turns out to be ----


def test_an_engine_that_cannot_be_opened(copied: Path, trt: TrtStandin) -> None:
    file = folder_of(copied) / "medusa.engine"
    file.write_text("x" * file.stat().st_size)
    with pytest.raises(BundleError) as caught:
        load(copied, backend="tensorrt", check_hashes=False)
    assert str(caught.value) == (
        f"{file}: tensorrt cannot open this engine (Serialization assertion failed: magic tag does not match); {REMEDY}"
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"dtype": "HALF"}, "output float16 [-1, -1, 320] on the device"),
        ({"shape": [-1, -1, 321]}, "output float32 [-1, -1, 321] on the device"),
        ({"shape": [-1, 320]}, "output float32 [-1, 320] on the device"),
        ({"location": "HOST"}, "output float32 [-1, -1, 320] on the host"),
    ],
)
def test_an_engine_that_is_not_what_its_sidecar_says(
    change: dict[str, Any], found: str, bundles: Callable[[str], Path], trt: TrtStandin
) -> None:
    trt.changes["logits"] = change
    with pytest.raises(BundleError) as caught:
        load(bundles("draft"), backend="tensorrt")
    file = folder_of(bundles("draft")) / "draft.engine"
    assert str(caught.value) == (
        f"{file}: tensor 'logits' is {found} but engines.json says output float32 [-1, -1, 320] on the device; {REMEDY}"
    )


def test_an_engine_may_know_sizes_that_its_profile_fixes(bundles: Callable[[str], Path], trt: TrtStandin) -> None:
    trt.changes = {"input_ids": {"shape": [1, -1]}, "past_length": {"shape": [1]}, "logits": {"shape": [1, -1, VOCAB]}}
    assert answer(endless(bundles("medusa"), backend="tensorrt"), PROMPTS[0], max_new_tokens=5).token_ids


def test_an_engine_that_does_not_speak_the_contract(copied: Path, trt: TrtStandin) -> None:
    def rename(data: Any) -> None:
        target = data["engines"]["target"]
        next(tensor for tensor in target["inputs"] if tensor["name"] == "tree_mask")["name"] = "mask"

    edit_sidecar(copied, rename)
    with pytest.raises(BundleError) as caught:
        load(copied, backend="tensorrt")
    assert str(caught.value) == (
        f"{folder_of(copied) / 'target.engine'}: inputs or aliases ['mask', 'tree_mask'] differ from the graph "
        f"contract; {REMEDY}"
    )


# ---- ONNX Runtime's providers ----


def test_a_provider_that_is_not_taken_is_refused(bundles: Callable[[str], Path], monkeypatch: Any) -> None:
    """ONNX Runtime itself goes on without a provider whose libraries are missing; here one that is not compiled in."""
    path, asked = bundles("medusa"), list[Any]()
    monkeypatch.setattr(
        ort_backend.ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(ort_backend.ort, "InferenceSession", without_cuda(ort_backend.ort.InferenceSession, asked))
    with pytest.raises(BundleError) as caught:
        load(path, threads=1, provider="CUDAExecutionProvider")
    assert str(caught.value) == (
        "provider 'CUDAExecutionProvider': onnxruntime took 'CPUExecutionProvider' instead, as its libraries or its "
        "driver are missing; install them, or leave the provider out."
    )
    assert asked == [("CUDAExecutionProvider", {"use_tf32": "0"})], "float32 would be rounded to 10 bits"
    decoder = endless(path, threads=1, provider="CUDAExecutionProvider", fall_back=True)
    assert len(answer(decoder, PROMPTS[0], max_new_tokens=3).token_ids) == 3
    assert asked[1:3] == [("CUDAExecutionProvider", {"use_tf32": "0"}), ("CPUExecutionProvider", {})]


def without_cuda(make: Any, asked: list[Any]) -> Any:
    def session(
        path: str, options: Any, providers: list[str], provider_options: list[dict[str, str]], **more: Any
    ) -> Any:
        assert more == {"enable_fallback": 0}, "else onnxruntime prints to stdout and falls back"
        asked.extend(zip(providers, provider_options, strict=True))
        return make(path, options, providers=[name for name in providers if name != "CUDAExecutionProvider"])

    return session


def test_the_rtx_provider_without_its_package(bundles: Callable[[str], Path]) -> None:
    path = bundles("medusa") / "medusa.onnx"
    with pytest.raises(BundleError) as caught:
        open_session(path, 1, "NvTensorRTRTXExecutionProvider")
    assert str(caught.value) == (
        "provider 'NvTensorRTRTXExecutionProvider': its package is missing; install it with pip install "
        "onnxruntime-ep-nv-tensorrt-rtx."
    )
    assert open_session(path, 1, "NvTensorRTRTXExecutionProvider", fall_back=True).get_providers() == [
        "CPUExecutionProvider"
    ]


class CopiesWhenBound(ort.IOBinding):  # type: ignore[misc]
    """As with a provider on the GPU: what lies in the host's memory is copied, once, when it is bound."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.copies: dict[str, Array] = {}

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        self.copies[name] = ortvalue.numpy().copy()
        super().bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(self.copies[name]))


@pytest.mark.parametrize("placed", [True, False], ids=["cache-on-gpu", "cache-on-host"])
@pytest.mark.parametrize("method", ["medusa", "draft", "eagle"])
def test_providers_on_the_gpu(
    method: str, placed: bool, bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU plays the GPU: the stand-in's addresses are then real ones, which ONNX Runtime reads and writes. Where
    the session reads keys and values on the host, they have to stay there."""
    standin = CudaStandin(on_host=True)
    cuda, plain = Cuda(standin), endless(bundles(method), threads=1)
    wanted = [answer(plain, prompt, max_new_tokens=40) for prompt in PROMPTS]
    standin.reset_counts()
    monkeypatch.setattr(ort_backend, "GPU_PROVIDERS", ("CPUExecutionProvider",))
    monkeypatch.setattr(ort_backend, "open_cuda", lambda: cuda)
    monkeypatch.setattr(ort.InferenceSession, "io_binding", lambda session: CopiesWhenBound(session))
    if placed:
        monkeypatch.setattr(ort_backend, "DEVICE", "cpu")
        monkeypatch.setattr(ort_backend, "VENDOR", 0)
    decoder = endless(bundles(method), threads=1)
    assert type(decoder.target.open(8)) is (OrtGpuCache if placed else OrtCache)
    for prompt, theirs in zip(PROMPTS, wanted, strict=True):
        ours = answer(decoder, prompt, max_new_tokens=40)
        assert ours.token_ids == theirs.token_ids
        assert (ours.stats.drafted, ours.stats.accepted) == (theirs.stats.drafted, theirs.stats.accepted)
        assert ours.stats.accepted > 10 or method == "eagle"
    assert (standin.counts["cudaMemcpy2DAsync"] > 5) == (placed and method != "eagle")
    assert placed or not standin.counts
    assert not placed or standin.copied.keys() <= {Kind.cudaMemcpyDeviceToDevice}


def test_keys_and_values_are_on_the_gpu_only_where_all_layers_read_them_there(
    bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = OrtTarget(bundles("medusa") / "target.onnx", threads=1)
    names = [value.name for value in target.session.get_inputs()]
    kinds, nvidia = ort.OrtDeviceMemoryType, ort.OrtDeviceVendorId.NVIDIA
    assert nvidia == 0x10DE, "NVIDIA's number on the PCI bus"

    def reads(**places: tuple[int, Any]) -> bool:
        infos = []
        for name in names:
            vendor, kind = places.get(name.replace(".", "_"), (nvidia, kinds.DEFAULT))
            infos.append(SimpleNamespace(device_vendor_id=vendor, device_mem_type=kind))
        session = SimpleNamespace(get_inputs=target.session.get_inputs, get_input_memory_infos=lambda: infos)
        return ort_backend._reads_cache_on_gpu(session)

    assert reads() and reads(input_ids=(0, kinds.DEFAULT), past_length=(nvidia, kinds.HOST_ACCESSIBLE))
    assert not reads(past_key_values_2_value=(0, kinds.DEFAULT))
    assert not reads(past_key_values_0_key=(nvidia, kinds.HOST_ACCESSIBLE))
    assert not ort_backend._reads_cache_on_gpu(target.session)


# ---- what is imported ----


def test_the_runtime_needs_no_onnxruntime_for_engines() -> None:
    program = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "import speccompile.runtime, speccompile.runtime.backends.tensorrt\n"
        "print(sorted({'tensorrt', 'cuda', 'ctypes'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "['ctypes']"


# ---- the stand-ins, held against the real modules ----


def test_cuda_python_has_what_the_stand_in_has() -> None:
    """Names, values of enums, and the order of arguments, as far as cuda-python's docstrings give it."""
    real = pytest.importorskip("cuda.bindings.runtime")
    for enum, name in (
        (Status, "cudaError_t"),
        (Kind, "cudaMemcpyKind"),
        (Attribute, "cudaDeviceAttr"),
        (CaptureMode, "cudaStreamCaptureMode"),
    ):
        assert {member.name: int(getattr(getattr(real, name), member.name)) for member in enum} == {
            member.name: member.value for member in enum
        }
    assert real.cudaError_t.cudaErrorNoDevice.name == "cudaErrorNoDevice"  # what errors show
    assert (real.cudaStreamNonBlocking, real.cudaHostAllocDefault) == (1, 0)
    functions = [name for name, value in vars(CudaStandin).items() if name.startswith("cuda") and callable(value)]
    functions = [name for name in functions if not isinstance(getattr(CudaStandin, name), type)]
    assert len(functions) == 18
    for name in functions:
        given = re.match(rf"{name}\((.*?)\)", getattr(real, name).__doc__)
        assert given is not None, name
        theirs = [part for part in given[1].split(", ") if part]
        ours = list(inspect.signature(getattr(CudaStandin, name)).parameters)[1:]
        assert len(ours) == len(theirs), (name, theirs)
    status, *_ = real.cudaGetDeviceCount()  # with a driver or without one
    assert int(status) in (0, 35, 100)


def test_tensorrt_rtx_has_what_the_stand_in_has() -> None:
    real = pytest.importorskip("tensorrt_rtx")
    standin = TrtStandin(CudaStandin(), "tensorrt_rtx")
    for name in ("TensorIOMode", "TensorLocation", "ExecutionContextAllocationStrategy", "CudaGraphStrategy"):
        assert set(getattr(standin, name).__members__) == set(getattr(real, name).__members__)
    assert set(standin.DataType.__members__) <= set(real.DataType.__members__)
    for ours, theirs in (
        (RuntimeStandin, real.Runtime),
        (EngineStandin, real.ICudaEngine),
        (ContextStandin, real.IExecutionContext),
        (RuntimeConfigStandin, real.IRuntimeConfig),
    ):
        methods = [name for name in vars(ours) if not name.startswith("_") and callable(getattr(ours, name))]
        assert methods
        for name in methods:
            documented = getattr(theirs, name).__doc__
            for parameter in list(inspect.signature(getattr(ours, name)).parameters)[1:]:
                assert parameter in documented or parameter == "how", (name, parameter, documented)
    for name in ("num_io_tensors", "device_memory_size_v2"):
        assert hasattr(real.ICudaEngine, name)
    assert hasattr(real.IRuntimeConfig, "cuda_graph_strategy")
    assert "256-byte aligned" in real.IExecutionContext.set_device_memory.__doc__
    assert "None if it could not be deserialized" in real.Runtime.deserialize_cuda_engine.__doc__
    assert "non-default stream" in real.IExecutionContext.execute_async_v3.__doc__


@pytest.mark.parametrize("method", ["draft", "eagle", "medusa-fp16"])
def test_what_the_real_builder_describes_is_what_the_backend_takes(
    method: str, bundles: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines built by TensorRT-RTX, their sidecar as it was written, and the stand-in in place of what needs a GPU."""
    real = pytest.importorskip("tensorrt_rtx")
    path = tmp_path / "b"
    shutil.copytree(bundles(method), path, ignore=shutil.ignore_patterns("engines"))
    # 97 rows of keys, and what lies behind them would be where the stand-in takes no address
    (built,) = build_engines(real, path, targets=[TARGET], max_length=97, max_tree=MAX_TOKENS)
    folder = path / "engines" / f"tensorrt_rtx-{real.__version__}-{TARGET}"
    write_engines(Bundle.open(path), folder, built)
    install(monkeypatch, TrtStandin(CudaStandin(), "tensorrt_rtx", real.__version__))
    ours, theirs = endless(path, backend="tensorrt_rtx"), endless(path, threads=1)
    assert ours.capacity == built.capacity == theirs.capacity == 128
    assert (ours.target.max_tokens, ours.target.max_masked) == (MAX_TOKENS, MAX_TOKENS)
    for prompt in PROMPTS:
        first, second = (answer(decoder, prompt, max_new_tokens=30) for decoder in (ours, theirs))
        assert first.token_ids == second.token_ids
        assert first.stats.drafted == second.stats.drafted > 20


def test_the_real_library_refuses_with_its_own_words(bundles: Callable[[str], Path], tmp_path: Path) -> None:
    """TensorRT-RTX can be asked to open an engine where there is no GPU: its logger, and a file that is mapped."""
    real = pytest.importorskip("tensorrt_rtx")
    bundle = bundles("medusa")
    folder = bundle / "engines" / f"tensorrt_rtx-{VERSION}-{TARGET}"
    info = read_engines(folder).engines["medusa"]
    file = tmp_path / "medusa.engine"
    file.write_bytes(b"no engine at all" * 100)
    with pytest.raises(BundleError) as caught:
        backend.Engine(real, Cuda(CudaStandin()), file, info)
    said = str(caught.value)
    assert said.startswith(f"{file}: tensorrt_rtx cannot open this engine (")
    assert said.endswith(f"); {REMEDY}")
    assert "it says nothing of why" not in said and "\n" not in said
