"""Lengths and masks computed inside the graph, against a numpy reference that looks at one pair of tokens at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.graphs import contract
from speccompile.graphs.passes import DeriveGqaInputs
from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.ort import open_session
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


# ---- a lone token that passes through attention twice ----

HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 4, 2, 32, 80
FORMS = {
    # how queries, keys and values reach the operator, and whether it rotates them
    "packed, rotated inside": ("qkv, , ", "cos, sin, position_ids"),
    "apart, rotated inside": ("q, k, v", "cos, sin, position_ids"),
    "apart, rotated before": ("q, k, v", ", , "),
}


def attending(form: str, window: int | None = None, one_as_two: bool = True) -> ir.Model:
    """Attention behind a cache, with what the pass derives for it."""
    given, rotary = FORMS[form]
    bias = "attention_bias" if window is None else f"attention_bias_window_{window}"
    angles = np.random.default_rng(0).uniform(0, 6.28, (CAPACITY, HEAD_DIM // 2)).astype(np.float32)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)} if "cos" in rotary else {}
    cached = ", ".join(f"float[B,{KV_HEADS},{CAPACITY},{HEAD_DIM}] {{}}{part}" for part in ("key", "value"))
    parts = "float[B,T,256] qkv" if "qkv" in given else "float[B,T,128] q, float[B,T,64] k, float[B,T,64] v"
    rotates = int("cos" in rotary)
    model = graph(
        f"""agraph (int64[B,T] input_ids, int64[B,T] position_ids, int64[R] logit_rows, int32[B] seqlens_k,
            int32 total_sequence_length, float[B,1,T,S] {bias}, {parts}, {cached.format("past_", "past_")})
            => (float[B,T,128] y, {cached.format("new_", "new_")}, int64[B,T] ids, int64[R] rows)
            <float[B,T,128] a> {{
            a, new_key, new_value = com.microsoft.GroupQueryAttention<
                num_heads = {HEADS}, kv_num_heads = {KV_HEADS}, do_rotary = {rotates}, scale = 0.2>(
                {given}, past_key, past_value, seqlens_k, total_sequence_length, {rotary}, {bias})
            y = Neg(a)
            ids = Identity(input_ids)
            rows = Identity(logit_rows)
        }}""",
        **tables,
    )
    assert DeriveGqaInputs(one_as_two)(model).modified
    return model


def rows_for(model: ir.Model, count: int, batch: int = 1, seed: int = 0) -> Feed:
    """Queries, keys and values of `count` tokens, loud enough that attention matters."""
    widths = {
        str(value.name): int(value.shape[2]) for value in model.graph.inputs if value.name in ("qkv", "q", "k", "v")
    }  # type: ignore[index,arg-type]
    return {name: 2 * normal(batch, count, width, seed=seed) for name, width in widths.items()}


def with_cache(given: Feed, rows: Feed, seed: int = 7) -> Feed:
    """A cache full of numbers: whatever lies behind the committed rows must not matter."""
    batch = len(given[contract.PAST_LENGTH])
    past = {
        name: normal(batch, KV_HEADS, CAPACITY, HEAD_DIM, seed=seed + place)
        for place, name in enumerate(("past_key", "past_value"))
    }
    return {name: array for name, array in given.items() if name != "cache"} | dict(rows) | past


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 1, 4])
def test_passing_twice_changes_nothing(form: str, window: int | None) -> None:
    plain, twice = (attending(form, window, one_as_two) for one_as_two in (False, True))
    assert kinds(twice)["GroupQueryAttention"] == 1
    one = np.zeros(1, np.int64)
    cases = [(TREES["one node"].mask[None], [past], one) for past in (0, 1, 2, 11, 50)]
    cases += [(np.ones((3, 1, 1), np.bool_), past, one) for past in ([5, 0, 9], [2, 2, 2], [12, 3, 40])]
    cases += [
        (tree.mask[None], [past], tree.depths) for tree in (TREES["chain"], TREES["two branches"]) for past in (0, 9)
    ]
    cases += [(TokenTree.chain(1).mask[None], [3], np.arange(2))]
    for masks, past, depths in cases:
        batch, tokens, _ = masks.shape
        given = with_cache(feed(masks, past, depths), rows_for(plain, tokens, batch))
        wanted, found = run(plain, given), run(twice, given)
        np.testing.assert_allclose(found[0], wanted[0], atol=4e-6, rtol=0)
        assert found[0].shape == (batch, tokens, HEADS * HEAD_DIM)
        for got, want in zip(found[1:3], wanted[1:3], strict=True):
            for row, length in enumerate(past):
                np.testing.assert_array_equal(got[row, :, : length + tokens], want[row, :, : length + tokens])


@pytest.mark.parametrize("window", [None, 3])
def test_passing_twice_inside_a_level_of_a_tree(window: int | None) -> None:
    """One node behind uncommitted ones: the mask speaks about more rows than are run."""
    form, tree, past = "packed, rotated inside", TokenTree.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 0]]), 6
    plain, twice = (attending(form, window, one_as_two) for one_as_two in (False, True))
    node = len(tree) - 1
    assert tree.depths[node] == 3
    given = feed(tree.mask[None, node:, :], [past], tree.depths[node:])
    given[contract.PAST_LENGTH] += node
    given = with_cache(given, rows_for(plain, 1))
    np.testing.assert_allclose(run(twice, given)[0], run(plain, given)[0], atol=4e-6, rtol=0)
    unmasked = dict(given) | {contract.TREE_MASK: np.ones((1, 1, node + 1), np.bool_)}
    assert np.abs(run(twice, unmasked)[0] - run(twice, given)[0]).max() > 0.01  # the mask is read


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 4])
def test_a_token_alone_is_bit_by_bit_the_token_in_a_chain(form: str, window: int | None, tmp_path: Path) -> None:
    """Whatever comes behind it, and however long the text is."""
    model = attending(form, window)
    ir.save(model, tmp_path / "graph.onnx")
    session = open_session(tmp_path / "graph.onnx", threads=2)
    for past in (0, 1, 15, 16, 47, 63):
        rows, others = rows_for(model, 9), rows_for(model, 9, seed=1)
        given = with_cache(feed(np.tri(9, dtype=np.bool_)[None], [past], np.arange(9)), rows)
        whole, *cache = session.run(None, given)[:3]
        alone = []
        for place in range(9):
            one = with_cache(feed(np.ones((1, 1, 1), np.bool_), [past], np.zeros(1, np.int64)), {})
            one = one | {name: array[:, place : place + 1] for name, array in rows.items()}
            one |= {contract.PAST_LENGTH: np.array([past + place]), contract.POSITION_IDS: np.array([[past + place]])}
            behind = np.arange(CAPACITY)[:, None] >= past + place
            for name, array in zip(("past_key", "past_value"), cache, strict=True):
                one[name] = np.where(behind, one[name], array)
            y, *kept = session.run(None, one)[:3]
            alone.append(y)
            for got, want in zip(kept, cache, strict=True):
                np.testing.assert_array_equal(got[:, :, : past + place + 1], want[:, :, : past + place + 1])
        lone = np.concatenate(alone, 1)
        np.testing.assert_array_equal(whole, lone)
        for count in range(2, 9):
            mixed = {name: np.concatenate([rows[name][:, : count - 1], others[name][:, -1:]], 1) for name in rows}
            given = with_cache(feed(np.tri(count, dtype=np.bool_)[None], [past], np.arange(count)), mixed)
            found = session.run(None, given)[0]
            np.testing.assert_array_equal(found[:, : count - 1], lone[:, : count - 1])
            assert np.abs(found[:, -1] - lone[:, count - 1]).max() > 0.01
