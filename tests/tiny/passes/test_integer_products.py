"""Products of integers: exact where eight bits hold everything, half a step off elsewhere, each row on its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speccompile.graphs.passes import IntegerProducts
from tests.tiny.passes import Array, graph, kinds, normal, run
from tests.tiny.passes.test_pack_weights import as_loaded

INNER, OUTER = 200, 97
BODY = f"agraph (float[B,T,{INNER}] x) => (float[B,T,{OUTER}] y) {{ y = MatMul(x, W) }}"
NODES = {"Abs": 1, "ReduceMax": 1, "Div": 1, "QuantizeLinear": 1, "MatMulIntegerToFloat": 1, "Mul": 1}


def eighths(seed: int, *shape: int) -> Array:
    """Integers of -127 .. 127, the first of each row and column the largest."""
    whole = np.random.default_rng([seed, *shape]).integers(-127, 128, shape).astype(np.float32)
    whole[..., 0] = whole[..., 0, :] = 127
    return whole


def test_what_eight_bits_hold_is_exact(tmp_path: Path) -> None:
    """Rows and channels of very different sizes, all of them whole steps."""
    weights = eighths(0, INNER, OUTER) * np.geomspace(1e-4, 10, OUTER, dtype=np.float32)
    x = eighths(1, 1, 6, INNER) * np.geomspace(1e-5, 1e4, 6, dtype=np.float32)[:, None]
    model = graph(BODY, W=weights)
    assert IntegerProducts()(model).modified
    assert kinds(model) == NODES
    wanted = x.astype(np.float64) @ weights
    sizes = np.abs(x).astype(np.float64) @ np.abs(weights)
    for found in (run(model, {"x": x})[0], *as_loaded(model, tmp_path, {"x": x}, {"x": x[:, :1]})):
        assert (np.abs(found - wanted[:, : found.shape[1]]) <= 1e-6 * sizes[:, : found.shape[1]]).all()


def test_sums_of_the_largest_bytes_do_not_saturate(tmp_path: Path) -> None:
    """Neighbouring products of 255 and 127 exceed 16 bits, in which some instructions add them."""
    model = graph(BODY, W=np.full((INNER, OUTER), 0.5, np.float32))
    IntegerProducts()(model)
    (found,) = as_loaded(model, tmp_path, {"x": np.full((1, 3, INNER), 2, np.float32)})
    np.testing.assert_allclose(found, np.full((1, 3, OUTER), INNER), rtol=1e-6)


def test_everything_else_is_half_a_step_off() -> None:
    weights, x = normal(INNER, OUTER), normal(1, 50, INNER)
    model = graph(BODY, W=weights)
    IntegerProducts()(model)
    found = run(model, {"x": x})[0][0]
    wide, table = x[0].astype(np.float64), weights.astype(np.float64)
    row_steps, channel_steps = np.abs(wide).max(-1) / 127, np.abs(table).max(0) / 127
    at_most = row_steps[:, None] / 2 * np.abs(table).sum(0) + channel_steps / 2 * (
        np.abs(wide).sum(-1)[:, None] + INNER * row_steps[:, None] / 2
    )
    errors = found - wide @ table
    assert (np.abs(errors) <= at_most).all()
    # Evenly spread halves of a step add up like random ones. Seven bits, or one scale for all, would show.
    variance = row_steps[:, None] ** 2 / 12 * (table**2).sum(0) + channel_steps**2 / 12 * (wide**2).sum(-1)[:, None]
    assert 0.9 < np.sqrt((errors**2 / variance).mean()) < 1.1


def test_each_row_and_each_channel_has_its_own_scale() -> None:
    """A loud row or channel costs the others nothing."""
    weights, x = normal(INNER, OUTER), normal(1, 4, INNER)
    weights[:, 5] *= 1e4
    x[:, 2] *= 1e4
    model = graph(BODY, W=weights)
    IntegerProducts()(model)
    errors = (run(model, {"x": x})[0] - x.astype(np.float64) @ weights)[0]
    share = np.abs(errors) / np.linalg.norm(x[0], axis=-1)[:, None] / np.linalg.norm(weights, axis=0)
    assert share.max() < 0.005


@pytest.mark.parametrize(("inner", "outer"), [(INNER, OUTER), (128, 384), (577, 130)])
def test_a_row_is_the_same_alone_and_beside_others(inner: int, outer: int, tmp_path: Path) -> None:
    """Bit by bit, beside rows of any size, of zeros and of what is no number."""
    model = graph(
        f"agraph (float[B,T,{inner}] x) => (float[B,T,{outer}] y) {{ y = MatMul(x, W) }}", W=normal(inner, outer)
    )
    IntegerProducts()(model)
    x, odd = normal(1, 9, inner), normal(1, 9, inner, seed=1) * np.geomspace(1e-30, 1e30, 9, dtype=np.float32)[:, None]
    odd[:, ::3] = 0
    odd[:, 4, 7] = np.nan
    beside = [np.where(np.arange(9)[:, None] == row, x, odd) for row in range(9)]
    feeds = [*(x[:, row : row + 1] for row in range(9)), *(x[:, :count] for count in range(2, 10)), *beside]
    results = as_loaded(model, tmp_path, *({"x": rows} for rows in feeds))
    alone = np.concatenate(results[:9], 1)
    for together in results[9:17]:
        np.testing.assert_array_equal(together, alone[:, : together.shape[1]])
    for row, mixed in enumerate(results[17:]):
        np.testing.assert_array_equal(mixed[:, row], alone[:, row])


def test_rows_and_channels_of_zeros(tmp_path: Path) -> None:
    weights, x = normal(INNER, OUTER), normal(1, 3, INNER)
    weights[:, 3], x[:, 1] = 0, 0
    model = graph(BODY, W=weights)
    IntegerProducts()(model)
    for found in (run(model, {"x": x})[0], *as_loaded(model, tmp_path, {"x": x})):
        assert np.isfinite(found).all()
        assert not found[:, 1].any() and not found[..., 3].any()
        assert np.abs(found[:, 0, :3]).min() > 0
    (alone,) = as_loaded(model, tmp_path, {"x": x[:, 1:2]})
    assert not alone.any()


def test_products_of_one_activation_round_it_once() -> None:
    weights = {name: normal(INNER, OUTER, seed=seed) for seed, name in enumerate("VW")}
    model = graph(
        f"""agraph (float[B,T,{INNER}] x, float[B,T,{INNER}] other)
            => (float[B,T,{OUTER}] a, float[B,T,{OUTER}] b, float[B,T,{OUTER}] c) {{
            a = MatMul(x, V)
            b = MatMul(x, W)
            c = MatMul(other, W)
        }}""",
        **weights,
    )
    assert IntegerProducts()(model).modified
    assert kinds(model) == {name: 3 if "Mul" in name else 2 for name in NODES}
    x, other = normal(1, 2, INNER), normal(1, 2, INNER, seed=1)
    found = run(model, {"x": x, "other": other})
    for got, (given, name) in zip(found, [(x, "V"), (x, "W"), (other, "W")], strict=True):
        wanted = given.astype(np.float64) @ weights[name]
        assert np.linalg.norm(got - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("y = MatMul(x, W)", (INNER, 8)),  # too small to be worth it
        ("y = MatMul(x, W)", (2, INNER, OUTER)),  # a stack, as of experts
        ("y = MatMul(W, x)", (INNER, INNER)),  # weights on the left
        ("y = Add(x, W)", (INNER, INNER)),
    ],
)
def test_everything_else_stays(body: str, shape: tuple[int, ...]) -> None:
    model = graph(f"agraph (float[B,T,{INNER}] x) => (float[U,V,W] y) {{ {body} }}", W=normal(*shape))
    before = kinds(model)
    assert not IntegerProducts()(model).modified
    assert kinds(model) == before
