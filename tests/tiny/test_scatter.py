"""The `scatter` dialect: batches of texts with lengths and trees of their own, sixteen bits, its mask."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
from torch import nn

from speccompile.graphs import contract
from speccompile.graphs.passes import finish_scatter
from speccompile.graphs.scatter import cast_model, mask_of_capacity, trace_scatter
from speccompile.graphs.target import TargetTail, survey
from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.ort import OrtCache, OrtTarget
from tests.tiny.models import ARCHITECTURES, VOCAB, WINDOW, tiny_model

HALVED = ("llama", "qwen3", "gemma2", "gpt2")
CAPACITY = 48
TOLERANCE = 1e-5
TREES = (
    TokenTree((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0)),
    TokenTree.chain(3),
    TokenTree((-1, 0, 0, 0, 2), (0, 0, 1, 2, 0)),
)
LENGTHS = (11, 4, 14)  # one longer than the window, one shorter

Array = npt.NDArray[np.float32]


def target_of(model: nn.Module, folder: Path) -> OrtTarget:
    graph = trace_scatter(model, survey(model, 128), TargetTail(True))
    finish_scatter(graph)
    ir.save(graph, folder / "target.onnx")
    return OrtTarget(folder / "target.onnx", threads=1)


def eager(model: nn.Module, ids: list[int]) -> Array:
    with torch.no_grad():
        logits: Array = model(input_ids=torch.tensor([ids])).logits[0, -1].float().numpy()
    return logits


def prefill(cache: OrtCache, prompts: list[list[int]]) -> None:
    """All prompts in one call; short ones are filled up with rows that later calls overwrite."""
    width = max(map(len, prompts))
    ids = np.array([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    order = np.arange(width)
    nothing = np.zeros(len(prompts), np.int64)
    mask = np.broadcast_to(np.tri(width, dtype=np.bool_), (len(prompts), width, width))
    cache.run(ids, np.broadcast_to(order, ids.shape), mask, order[-1:], past_length=nothing)


def run_trees(cache: OrtCache, lengths: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Array:
    """Logits [B,N,V] of a tree of its own for every text; where a tree is smaller than N, rows that see themselves."""
    batch, nodes = tokens.shape
    mask = np.broadcast_to(np.eye(nodes, dtype=np.bool_), (batch, nodes, nodes)).copy()
    depths = np.zeros((batch, nodes), np.int64)
    for row, tree in enumerate(TREES):
        mask[row, : len(tree), : len(tree)] = tree.mask
        depths[row, : len(tree)] = tree.depths
    out = cache.run(tokens, lengths[:, None] + depths, mask, np.arange(nodes), past_length=lengths)
    return out.logits.copy()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_texts_of_a_batch_have_lengths_and_trees_of_their_own(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tiny_model(name)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    tokens = rng.integers(3, VOCAB, (len(TREES), max(map(len, TREES))))
    cache = target_of(model, tmp_path).open(CAPACITY, batch=len(TREES))
    lengths = np.array(LENGTHS)
    prefill(cache, prompts)
    logits = run_trees(cache, lengths, tokens)
    for row, tree in enumerate(TREES):
        for node in range(len(tree)):
            want = eager(model, prompts[row] + tokens[row, tree.ancestry(node)].tolist())
            np.testing.assert_allclose(
                logits[row, node], want, atol=TOLERANCE, rtol=0, err_msg=f"text {row}, node {node}"
            )

    tree, batch = TREES[0], len(TREES)  # level by level, each node once, behind the levels before it
    depths = np.broadcast_to(tree.depths, (batch, len(tree)))
    whole = cache.run(
        tokens, lengths[:, None] + depths, np.stack([tree.mask] * batch), tree.nodes, past_length=lengths
    ).logits.copy()
    for depth in range(tree.max_depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        mask = np.stack([tree.mask[level, : level[-1] + 1]] * batch)
        before = lengths + level[0]
        out = cache.run(tokens[:, level], lengths[:, None] + depths[:, level], mask, np.arange(len(level)), before)
        np.testing.assert_allclose(out.logits, whole[:, level], atol=TOLERANCE, rtol=0, err_msg=f"level {depth}")
    run_trees(cache, lengths, tokens)

    # Each text keeps a path of its own, of its own length; the next tree stands behind it.
    paths = [tree.ancestry(len(tree) - 1) for tree in TREES]
    for row, path in enumerate(paths):
        rows = cache.buffer[:, row]
        rows[:, :, lengths[row] : lengths[row] + len(path)] = rows[:, :, [lengths[row] + node for node in path]]
        prompts[row] += tokens[row, path].tolist()
    lengths += [len(path) for path in paths]
    logits = run_trees(cache, lengths, tokens)
    for row, tree in enumerate(TREES):
        node = len(tree) - 1
        want = eager(model, prompts[row] + tokens[row, tree.ancestry(node)].tolist())
        np.testing.assert_allclose(
            logits[row, node], want, atol=TOLERANCE, rtol=0, err_msg=f"text {row} after its commit"
        )


@pytest.mark.parametrize("name", HALVED)
def test_sixteen_bits_stay_close_and_keep_norms_in_float32(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tiny_model(name)
    half = cast_model(model, torch.float16)
    target = target_of(half, tmp_path)
    assert target.kv_dtype == np.float16
    rng = np.random.default_rng(0)
    prompt, tree = rng.integers(3, VOCAB, 11).tolist(), TREES[0]
    tokens = rng.integers(3, VOCAB, len(tree))
    cache = target.open(CAPACITY)
    chain = TokenTree.chain(10)
    cache.run(np.array(prompt), chain.depths, chain.mask, chain.nodes)
    cache.commit(chain.nodes.tolist())
    out = cache.run(tokens, cache.length + tree.depths, tree.mask, tree.nodes)
    assert out.logits.dtype == np.float32 and out.hidden is not None and out.hidden.dtype == np.float32
    exact = [eager(model, prompt + tokens[tree.ancestry(node)].tolist()) for node in range(len(tree))]
    largest = float(np.abs(exact).max())
    np.testing.assert_allclose(out.logits[0], exact, atol=4e-3 * largest, rtol=0)
    assert np.abs(out.logits[0] - exact).max() > 1e-6 * largest, "it was computed in float32"

    graph = ir.load(tmp_path / "target.onnx").graph
    norms = [node for node in graph if node.op_type == "RMSNormalization"]
    assert name == "gpt2" or len(norms) >= 7
    assert all(value is not None and value.dtype == ir.DataType.FLOAT for node in norms for value in node.inputs)
    scattered = [node for node in graph if node.op_type == "TensorScatter"]
    assert len(scattered) == 6 and all(node.outputs[0].is_graph_output() for node in scattered)


def test_a_cast_model_is_a_copy_that_keeps_ties_and_tables() -> None:
    model = tiny_model("llama-tied")
    before = copy.deepcopy(model.state_dict())
    half = cast_model(model, torch.float16)
    assert half.lm_head.weight is half.model.embed_tokens.weight and half.lm_head.weight.dtype == torch.float16
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert cast_model(model, torch.float32) is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bfloat16_is_traced_with_the_same_nodes() -> None:
    model = tiny_model("llama")
    found, kinds = survey(model, 128), []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        graph = trace_scatter(cast_model(model, dtype), found, TargetTail(True))
        finish_scatter(graph)
        kinds.append([node.op_type for node in graph.graph if node.op_type != "Cast"])
    assert kinds[0] == kinds[1] == kinds[2]
    cache = next(value for value in graph.graph.inputs if value.name == contract.past_names(1)[0])
    assert cache.dtype == ir.DataType.BFLOAT16


def test_next_ids_say_when_logits_are_no_numbers(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    cache = target_of(model, tmp_path).open(CAPACITY)
    alone = TokenTree.chain(0)
    good = cache.run(np.array([7]), alone.depths, alone.mask, alone.nodes)
    assert good.next_ids[0, 0] == good.logits[0, 0].argmax()
    bad = cache.run(np.array([5]), alone.depths, alone.mask, alone.nodes)
    assert np.isnan(bad.logits).all() and bad.next_ids.tolist() == [[-1]]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_mask_of_capacity_row_by_row(window: int | None) -> None:
    """Against the contract's words, one slot at a time: older rows, the newest M, what is not written yet."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        older, tokens, before = int(rng.integers(0, 14)), int(rng.integers(1, 6)), int(rng.integers(0, 5))
        masked = before + tokens
        parents = [int(rng.integers(-1, node)) if node else -1 for node in range(masked)]
        ancestors = [[node] for node in range(masked)]
        for node, parent in enumerate(parents):
            ancestors[node] += ancestors[parent] if parent >= 0 else []
        depths = [len(line) - 1 for line in ancestors]
        tree_mask = np.zeros((masked, masked), np.bool_)
        for node, line in enumerate(ancestors):
            tree_mask[node, line] = True
        rows = slice(before, masked)
        positions = older + np.array(depths)[rows]
        bias = mask_of_capacity(
            torch.from_numpy(tree_mask[None, rows]),
            torch.from_numpy(positions[None]),
            torch.tensor([older + before]),
            CAPACITY,
            window,
            torch.float32,
        )[0, 0].numpy()
        for row in range(tokens):
            for slot in range(CAPACITY):
                if slot < older:
                    seen = window is None or positions[row] - slot < window
                elif slot < older + masked:
                    node = slot - older
                    distance = depths[before + row] - depths[node]
                    seen = bool(tree_mask[before + row, node]) and (window is None or distance < window)
                else:
                    seen = False
                assert (bias[row, slot] == 0) == seen, (older, before, row, slot)
                assert seen or bias[row, slot] == np.finfo(np.float32).min
