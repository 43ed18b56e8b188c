"""Lengths and masks computed inside the graph, against a numpy reference that looks at one pair of tokens at a time."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.graphs import contract
from speccompile.graphs.passes import DeriveGqaInputs
from speccompile.graphs.tree import TokenTree
from tests.tiny.passes import Array, Feed, graph, kinds, normal, run

TREES = {
    "one node": TokenTree.chain(0),
    "chain": TokenTree.chain(5),
    "two branches": TokenTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 0, 0]]),
    "public": TokenTree.named("mc_sim_7b_63"),
}


def model_with(*biases: str) -> ir.Model:
    """A graph that gives out what it derived, and reads the other inputs of the contract."""
    shapes = "".join(f", float[B,1,T,S] {name}" for name in biases)
    outputs = "".join(f", float[B,1,T,S] out_{name}" for name in biases)
    return graph(
        f"""agraph (int64[B,T] input_ids, int64[B,T] position_ids, int64[R] logit_rows, int32[B] seqlens_k,
            int32 total_sequence_length{shapes}, float[B,2,C,4] cache)
            => (int32[B] seqlens, int32 total, int64[B,T] ids, int64[B,T] positions, int64[R] rows,
                float[B,2,C,4] kept{outputs}) {{
            seqlens = Identity(seqlens_k)
            total = Identity(total_sequence_length)
            ids = Identity(input_ids)
            positions = Identity(position_ids)
            rows = Identity(logit_rows)
            kept = Identity(cache)
            {"".join(f"out_{name} = Identity({name})" + chr(10) for name in biases)}
        }}"""
    )


def feed(masks: Array, past: list[int], depths: Array) -> Feed:
    batch, tokens, _ = masks.shape
    return {
        contract.INPUT_IDS: np.ones((batch, tokens), np.int64),
        contract.POSITION_IDS: np.array(past)[:, None] + depths,
        contract.TREE_MASK: masks,
        contract.PAST_LENGTH: np.array(past, np.int64),
        contract.LOGIT_ROWS: np.arange(tokens),
        "cache": normal(batch, 2, 80, 4),
    }


def reference(given: Feed, window: int | None) -> Array:
    """bool [B,T,total]: whether new token i of row b sees slot j, for the slots that row b has."""
    mask, past, positions = given[contract.TREE_MASK], given[contract.PAST_LENGTH], given[contract.POSITION_IDS]
    batch, tokens, _ = mask.shape
    seen = np.zeros((batch, tokens, int(past.max()) + tokens), np.bool_)
    for b, i, j in np.ndindex(*seen.shape):
        committed = j < past[b]
        if not committed and j >= past[b] + tokens:
            continue  # no slot of this row
        position = j if committed else positions[b, j - past[b]]
        seen[b, i, j] = committed or mask[b, i, j - past[b]]
        if window is not None and positions[b, i] - position >= window:
            seen[b, i, j] = False
    return seen


def check(model: ir.Model, given: Feed, windows: dict[str, int | None]) -> None:
    results = dict(zip([value.name for value in model.graph.outputs], run(model, given), strict=True))
    past, tokens = given[contract.PAST_LENGTH], given[contract.INPUT_IDS].shape[1]
    assert results["seqlens"].tolist() == (past + tokens - 1).tolist()
    assert results["total"] == past.max() + tokens
    for name, window in windows.items():
        bias, wanted = results[f"out_{name}"], reference(given, window)
        assert bias.shape == (len(past), 1, *wanted.shape[1:])
        assert set(np.unique(bias)) <= {0, np.finfo(np.float32).min}
        for row, length in enumerate(past):  # slots behind a row's own length are hidden through seqlens
            np.testing.assert_array_equal(bias[row, 0, :, : length + tokens] == 0, wanted[row, :, : length + tokens])


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("past", [0, 1, 3, 11])
def test_trees_with_and_without_a_window(tree: TokenTree, past: int) -> None:
    windows = {"attention_bias": None, **{f"attention_bias_window_{window}": window for window in (1, 2, 4)}}
    model = model_with(*windows)
    assert DeriveGqaInputs()(model).modified
    check(model, feed(tree.mask[None], [past], tree.depths), windows)


@pytest.mark.parametrize("window", [2, 3, 8])
def test_a_window_counts_positions_and_not_slots(window: int) -> None:
    """The last node of the public tree is 63 slots but only 4 positions behind the root."""
    tree, past = TokenTree.named("mc_sim_7b_63"), 20
    leaf, depth = len(tree) - 1, int(tree.depths[-1])
    assert (leaf, depth) == (63, 4)
    model = model_with(f"attention_bias_window_{window}")
    DeriveGqaInputs()(model)
    bias = run(model, feed(tree.mask[None], [past], tree.depths))[-1][0, 0, leaf]
    committed = range(past + depth - window + 1, past)
    drafted = [past + node for node in tree.ancestry(leaf) if tree.depths[node] > depth - window]
    assert np.flatnonzero(bias == 0).tolist() == [*committed, *drafted]


@pytest.mark.parametrize("window", [None, 2, 3, 8])
def test_a_level_of_a_tree_sees_what_it_sees_in_one_call(window: int | None) -> None:
    """A draft model runs a tree level by level; the levels before are rows that the mask still speaks about."""
    tree, past = TREES["public"], 6
    name = "attention_bias" if window is None else f"attention_bias_window_{window}"
    model = model_with(name)
    DeriveGqaInputs()(model)
    whole = reference(feed(tree.mask[None], [past], tree.depths), window)[0]
    for depth in range(tree.max_depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        seen = int(level[-1]) + 1
        given = feed(tree.mask[None, level, :seen], [past], tree.depths[level])
        given[contract.PAST_LENGTH] += seen - len(level)
        out = run(model, given)
        assert out[0].tolist() == [past + seen - 1]
        np.testing.assert_array_equal(out[-1][0, 0] == 0, whole[level, : past + seen])


def test_rows_of_different_length_with_one_token_each() -> None:
    model = model_with("attention_bias", "attention_bias_window_4", "attention_bias_window_7")
    assert DeriveGqaInputs()(model).modified
    for past in ([5, 0, 9], [2, 2, 2], [0, 0, 0], [12, 3, 12]):
        given = feed(np.ones((3, 1, 1), np.bool_), past, np.zeros(1, np.int64))
        check(
            model,
            given,
            {"attention_bias": None, "attention_bias_window_4": 4, "attention_bias_window_7": 7},
        )


def test_the_inputs_become_those_of_the_contract() -> None:
    model = model_with("attention_bias")
    assert DeriveGqaInputs()(model).modified
    assert [value.name for value in model.graph.inputs] == [*contract.TARGET_INPUTS, "cache"]
    known = {value.name: value for value in model.graph.inputs}
    mask, past = known[contract.TREE_MASK], known[contract.PAST_LENGTH]
    assert (mask.dtype, [str(size) for size in mask.shape or ()]) == (ir.DataType.BOOL, ["B", "T", "M"])
    assert (past.dtype, [str(size) for size in past.shape or ()]) == (ir.DataType.INT64, ["B"])


def test_windows_share_what_they_can() -> None:
    """Each further window costs its own comparison and mask, not new lengths."""
    counts = []
    for biases in (("attention_bias",), ("attention_bias", "attention_bias_window_4")):
        model = model_with(*biases)
        DeriveGqaInputs()(model)
        counts.append(kinds(model))
    assert counts[0]["Where"] == 1
    assert counts[1]["Where"] == 2
    for op_type in ("Shape", "Expand"):
        assert counts[0][op_type] == counts[1][op_type]


def test_half_precision_hides_with_its_own_lowest_number() -> None:
    model = model_with("attention_bias")
    bias = next(value for value in (*model.graph.inputs, *model.graph.outputs) if value.name == "attention_bias")
    bias.dtype = model.graph.outputs[-1].dtype = ir.DataType.FLOAT16
    DeriveGqaInputs()(model)
    tree = TREES["two branches"]
    out = run(model, feed(tree.mask[None], [3], tree.depths))[-1]
    assert out.dtype == np.float16
    assert set(np.unique(out)) == {0, np.finfo(np.float16).min}
    np.testing.assert_array_equal(out[0, 0, :, 3:] == 0, tree.mask)


def test_a_graph_without_the_derived_inputs_stays() -> None:
    model = graph("agraph (int64[B,T] input_ids, int64[B] past_length) => (int64[B,T] y) { y = Neg(input_ids) }")
    assert not DeriveGqaInputs()(model).modified
    assert kinds(model) == {"Neg": 1}
