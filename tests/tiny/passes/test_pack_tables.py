"""Embedding and lm_head in eight bits: what they give, and that a tied table is there once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes import PackTables, clean
from speccompile.graphs.passes.pack_tables import BLOCK
from tests.tiny.passes import Array, graph, kinds, normal, only, run
from tests.tiny.passes.test_pack_weights import as_loaded

TOKENS, WIDTH = 250, 96  # an odd number of blocks
IDS = np.array([[3, 0, 249, 3]])
X = normal(1, 5, WIDTH, seed=2)
PACKED = {"GatherBlockQuantized": 1, "MatMulNBits": 1}


def model_with(embedding: str = "E", head: str = "E", axis: int = 0, width: int = WIDTH) -> tuple[ir.Model, Array]:
    """An embedding and an lm_head on one table or two; and the head's table."""
    tables = {name: normal(TOKENS, width, seed=seed) for seed, name in enumerate(sorted({embedding, head}))}
    model = graph(
        f"""agraph (int64[B,T] ids, float[B,R,{width}] x) => (float[B,R,{TOKENS}] y, float[B,T,F] e)
            <float[{width},{TOKENS}] t> {{
            e = Gather<axis = {axis}>({embedding}, ids)
            t = Transpose<perm = [1, 0]>({head})
            y = MatMul(x, t)
        }}""",
        **tables,
    )
    return model, tables[head]


def stored(node: ir.Node, place: int) -> Array:
    value = node.inputs[place]
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def nearest(table: Array) -> tuple[Array, Array]:
    """Integers and steps, both float64 [V,F]: of the 255 levels around zero that reach a block's largest weight."""
    blocks = table.astype(np.float64).reshape(len(table), -1, BLOCK)
    steps = np.abs(blocks).max(-1, keepdims=True) / 127
    integers = np.rint(blocks / steps).reshape(table.shape)
    return integers, np.broadcast_to(steps, blocks.shape).reshape(table.shape)


@pytest.mark.parametrize("names", [("E", "E"), ("E", "H")], ids=["tied", "untied"])
def test_what_embedding_and_lm_head_give(names: tuple[str, str], tmp_path: Path) -> None:
    model, head = model_with(*names)
    table = normal(TOKENS, WIDTH)
    assert PackTables()(model).modified
    clean(model)
    assert kinds(model) == PACKED
    logits, embedded = run(model, {"ids": IDS, "x": X})
    integers, steps = nearest(table)
    np.testing.assert_allclose(embedded, (integers * steps)[IDS], rtol=1e-6)
    assert 0 < np.abs(embedded - table[IDS]).max() <= steps.max() * 0.501

    weights = np.multiply(*nearest(head))
    row_steps = np.abs(X[0].reshape(5, -1, BLOCK)).max(-1).repeat(BLOCK, 1) / 127
    wanted, at_most = X[0].astype(np.float64) @ weights.T, row_steps * 0.502 @ np.abs(weights).T + 1e-5
    for found in (logits, *as_loaded(model, tmp_path, {"ids": IDS, "x": X})):
        assert (np.abs(found[0] - wanted) <= at_most).all()
        assert np.linalg.norm(found[0] - wanted) < 0.01 * np.linalg.norm(wanted)


def test_a_tied_table_has_the_same_bytes_in_both() -> None:
    model, _ = model_with()
    PackTables()(model)
    gather, product = only(model, "GatherBlockQuantized"), only(model, "MatMulNBits")
    assert stored(gather, 0).shape == (TOKENS, WIDTH)
    assert stored(product, 1).shape == (TOKENS, WIDTH // BLOCK, BLOCK)
    assert stored(gather, 0).tobytes() == stored(product, 1).tobytes()
    assert gather.inputs[2] is product.inputs[2]  # one tensor of scales
    assert (gather.domain, product.domain) == (MICROSOFT, MICROSOFT)


def test_two_tables_stay_two() -> None:
    model, _ = model_with("E", "H")
    PackTables()(model)
    gather, product = only(model, "GatherBlockQuantized"), only(model, "MatMulNBits")
    assert stored(gather, 0).tobytes() != stored(product, 1).tobytes()
    assert gather.inputs[2] is not product.inputs[2]
    for node, place, scale, table in (
        (gather, 0, 2, normal(TOKENS, WIDTH)),
        (product, 1, 2, normal(TOKENS, WIDTH, seed=1)),
    ):
        integers, steps = nearest(table)
        np.testing.assert_array_equal(stored(node, place).reshape(table.shape) - 128.0, integers)
        np.testing.assert_allclose(stored(node, scale), steps[:, ::BLOCK], rtol=1e-6)


def test_a_row_of_logits_is_the_same_alone_and_beside_others(tmp_path: Path) -> None:
    model, _ = model_with()
    PackTables()(model)
    loud = X * np.float32(1000)
    beside = [np.where(np.arange(5)[:, None] == row, X, loud) for row in range(5)]
    feeds = [*(X[:, row : row + 1] for row in range(5)), X, *beside]
    results = as_loaded(model, tmp_path, *({"ids": IDS, "x": rows} for rows in feeds))
    alone = np.concatenate(results[:5], 1)
    np.testing.assert_array_equal(results[5], alone)
    for row, mixed in enumerate(results[6:]):
        np.testing.assert_array_equal(mixed[:, row], alone[:, row])


def test_an_embedding_without_an_lm_head() -> None:
    """A drafting graph with a small vocabulary of its own: its lm_head is not this pass's business."""
    model = graph(
        f"""agraph (int64[B,T] ids, float[B,R,{WIDTH}] x) => (float[B,R,40] y, float[B,T,F] e) <float[{WIDTH},40] t> {{
            e = Gather(E, ids)
            t = Transpose<perm = [1, 0]>(H)
            y = MatMul(x, t)
        }}""",
        E=normal(TOKENS, WIDTH),
        H=normal(40, WIDTH),
    )
    assert PackTables()(model).modified
    assert kinds(model) == {"GatherBlockQuantized": 1, "Transpose": 1, "MatMul": 1}


@pytest.mark.parametrize("changes", [{"axis": 1}, {"width": 80}], ids=["columns are gathered", "blocks cut short"])
def test_everything_else_stays(changes: dict[str, int]) -> None:
    model, _ = model_with(**changes)  # type: ignore[arg-type]
    before = kinds(model)
    assert not PackTables()(model).modified
    assert kinds(model) == before


def test_a_lone_lm_head_stays() -> None:
    model = graph(
        f"""agraph (float[B,R,{WIDTH}] x) => (float[B,R,{TOKENS}] y) <float[{WIDTH},{TOKENS}] t> {{
            t = Transpose<perm = [1, 0]>(H)
            y = MatMul(x, t)
        }}""",
        H=normal(TOKENS, WIDTH),
    )
    assert not PackTables()(model).modified
    assert kinds(model) == {"Transpose": 1, "MatMul": 1}
