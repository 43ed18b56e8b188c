"""The key/value cache: committing rows, forgetting them, bindings per shape, rows of different length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from speccompile.graphs.errors import GenerationError
from speccompile.graphs.tree import TokenTree
from speccompile.runtime import Decoder
from speccompile.runtime.backends import ort as backend
from speccompile.runtime.backends.ort import OrtCache

Array = npt.NDArray[Any]
LAYERS, KV_HEADS, HEAD_DIM = 2, 3, 4


def cache_alone(capacity: int, batch: int = 1) -> OrtCache:
    """A cache without a graph: rows are written by the test."""
    shape = SimpleNamespace(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, kv_dtype=np.float32)
    return OrtCache(shape, capacity, batch)  # type: ignore[arg-type]


def random_tree(rng: np.random.Generator, size: int) -> TokenTree:
    parents = (-1, *(int(rng.integers(0, node)) for node in range(1, size)))
    return TokenTree(parents, tuple(range(size)))


@pytest.mark.parametrize("batch", [1, 3])
def test_commit_keeps_what_a_list_would(batch: int) -> None:
    """Random trees, random paths in them and now and then a truncation, against a list of rows."""
    rng = np.random.default_rng(batch)
    cache, rows = cache_alone(300, batch), list[Array]()
    moved = straight = 0
    for _ in range(150):
        tree = random_tree(rng, int(rng.integers(1, 12)))
        new = rng.standard_normal((2 * LAYERS, batch, KV_HEADS, len(tree), HEAD_DIM)).astype(np.float32)
        cache.buffer[:, :, :, cache.length : cache.length + len(tree)] = new
        path = tree.ancestry(int(rng.integers(len(tree))))
        path = path[: rng.integers(1, len(path) + 1)]
        cache.commit(path)
        rows += [new[:, :, :, node] for node in path]
        first_rows = path == list(range(len(path)))
        moved, straight = moved + (not first_rows), straight + first_rows
        if rng.random() < 0.2 or len(rows) > 250:
            rows = rows[: int(rng.integers(0, len(rows) + 1))]
            cache.truncate(len(rows))
        assert cache.length == len(rows)
        if rows:
            np.testing.assert_array_equal(cache.buffer[:, :, :, : len(rows)], np.stack(rows, axis=3))
    assert moved > 20
    assert straight > 20


def test_truncate_cannot_bring_back_rows() -> None:
    cache = cache_alone(8)
    cache.commit(range(5))
    cache.truncate(5)
    cache.truncate(2)
    for length in (3, -1):
        with pytest.raises(AssertionError):
            cache.truncate(length)


# ---- with a graph ----


def step(cache: OrtCache, ids: Array, tree: TokenTree, rows: Array | None = None) -> Array:
    """Logits [R,V] of a tree behind the committed tokens."""
    wanted = tree.nodes if rows is None else rows
    return cache.run(ids, cache.length + tree.depths, tree.mask, wanted).logits[0].copy()


def ids_of(tiny_decoder: Decoder, count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(5, tiny_decoder.target.vocab_size, count)


def test_tokens_beyond_the_capacity_are_refused(tiny_decoder: Decoder) -> None:
    cache = tiny_decoder.target.open(12)
    ids = ids_of(tiny_decoder, 13)
    with pytest.raises(GenerationError, match="13 new tokens behind 0 do not fit its capacity of 12"):
        step(cache, ids, TokenTree.chain(12))
    step(cache, ids[:12], TokenTree.chain(11))  # exactly full
    cache.commit(range(10))
    kept = cache.buffer[:, :, :, :10].copy()
    with pytest.raises(GenerationError, match="3 new tokens behind 10 do not fit its capacity of 12"):
        step(cache, ids[:3], TokenTree.chain(2))
    assert cache.length == 10
    fitting = step(cache, ids[10:12], TokenTree.chain(1))
    np.testing.assert_array_equal(cache.buffer[:, :, :, :10], kept)
    whole = step(tiny_decoder.target.open(12), ids[:12], TokenTree.chain(11))
    np.testing.assert_allclose(fitting, whole[10:], atol=1e-5)


def test_rows_are_written_in_place_behind_the_committed_ones(tiny_decoder: Decoder) -> None:
    cache = tiny_decoder.target.open(20)
    ids = ids_of(tiny_decoder, 9)
    step(cache, ids[:5], TokenTree.chain(4))
    cache.commit(range(5))
    before = cache.buffer.copy()
    step(cache, ids[5:], TokenTree.chain(3))
    np.testing.assert_array_equal(cache.buffer[:, :, :, :5], before[:, :, :, :5])
    assert (np.abs(cache.buffer[:, :, :, 5:9] - before[:, :, :, 5:9]).max((0, 1, 2, 4)) > 0).all()
    np.testing.assert_array_equal(cache.buffer[:, :, :, 9:], 0)


def test_the_rows_asked_for_are_the_rows_given(tiny_decoder: Decoder) -> None:
    tree = TokenTree.from_paths([[0], [1], [0, 0], [1, 0]])
    ids = ids_of(tiny_decoder, len(tree))
    every = step(tiny_decoder.target.open(20), ids, tree)
    for rows in ([4], [0, 3], [3, 0], [2, 2]):
        np.testing.assert_allclose(
            step(tiny_decoder.target.open(20), ids, tree, np.array(rows)), every[rows], atol=1e-5
        )


def test_shapes_in_any_order_give_what_a_fresh_cache_gives(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More shapes than are kept, and buffers that grow under the shapes that were there before."""
    monkeypatch.setattr(backend, "KEPT_SHAPES", 7)
    monkeypatch.setattr(backend, "ROOM", 4)
    cache = tiny_decoder.target.open(64)
    ids = ids_of(tiny_decoder, 40)
    step(cache, ids[:8], TokenTree.chain(7))
    cache.commit(range(8))
    wanted = {}
    for tokens in range(1, 20):
        fresh = tiny_decoder.target.open(64)
        step(fresh, ids[:8], TokenTree.chain(7))
        fresh.commit(range(8))
        wanted[tokens] = step(fresh, ids[8 : 8 + tokens], TokenTree.chain(tokens - 1))
    rng = np.random.default_rng(0)
    for tokens in [*wanted, *rng.permutation(list(wanted)), *wanted, 1, 1, 2, 1]:
        got = step(cache, ids[8 : 8 + int(tokens)], TokenTree.chain(int(tokens) - 1))
        np.testing.assert_array_equal(got, wanted[int(tokens)])
        assert len(cache._calls._calls) <= 7


def test_known_shapes_allocate_and_bind_nothing(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiny_decoder.target.open(64)
    ids, binds = ids_of(tiny_decoder, 9), backend.ort.IOBinding.bind_ortvalue_input
    for tokens in (3, 9, 1):
        step(cache, ids[:tokens], TokenTree.chain(tokens - 1))
    made: list[str] = []
    monkeypatch.setattr(backend.ort.IOBinding, "bind_ortvalue_input", lambda io, name, value: made.append(name))
    bind, value = tiny_decoder.target.session.io_binding, backend.ort.OrtValue.ortvalue_from_numpy
    monkeypatch.setattr(tiny_decoder.target.session, "io_binding", lambda: (made.append("binding"), bind())[1])
    monkeypatch.setattr(
        backend.ort.OrtValue, "ortvalue_from_numpy", lambda array: (made.append(str(array.shape)), value(array))[1]
    )
    for tokens in (1, 9, 3, 3):
        step(cache, ids[:tokens], TokenTree.chain(tokens - 1))
    assert made == []
    monkeypatch.setattr(backend.ort.IOBinding, "bind_ortvalue_input", binds)
    cache.run(ids, TokenTree.chain(8).depths, TokenTree.chain(8).mask, np.array([7, 8]))
    assert made == ["binding", "(2,)", "(1, 2)", "(1, 2, 320)"]  # rows, next_ids and logits; the rest is known


def test_outputs_of_all_shapes_share_one_buffer(tiny_decoder: Decoder) -> None:
    """A vocabulary's width for each row of each shape would be most of what a sequence takes."""
    cache = tiny_decoder.target.open(64)
    ids = ids_of(tiny_decoder, 16)
    outputs = [
        cache.run(ids[:tokens], TokenTree.chain(tokens - 1).depths, TokenTree.chain(tokens - 1).mask, np.arange(tokens))
        for tokens in (3, 16, 1)
    ]
    addresses = {output.logits.ctypes.data for output in outputs}
    assert len(addresses) == 1
    assert [output.logits.shape[1] for output in outputs] == [3, 16, 1]


def test_caches_of_one_target_do_not_touch_each_other(tiny_decoder: Decoder) -> None:
    texts = [ids_of(tiny_decoder, 12, seed) for seed in range(3)]
    alone = [step(tiny_decoder.target.open(12), text, TokenTree.chain(11)) for text in texts]
    caches = [tiny_decoder.target.open(12) for _ in texts]
    for place in range(12):
        for text, cache, wanted in zip(texts, caches, alone, strict=True):
            got = step(cache, text[place : place + 1], TokenTree.chain(0))
            np.testing.assert_allclose(got[0], wanted[place], atol=1e-5)
            cache.commit([0])


def test_batch_rows_of_different_length_equal_single_rows(tiny_decoder: Decoder) -> None:
    lengths, target = [7, 3, 11], tiny_decoder.target
    singles, batch = [target.open(24) for _ in lengths], target.open(24, batch=3)
    for row, (length, single) in enumerate(zip(lengths, singles, strict=True)):
        step(single, ids_of(tiny_decoder, length, row), TokenTree.chain(length - 1))
        single.commit(range(length))
        batch.buffer[:, row, :, :length] = single.buffer[:, 0, :, :length]
        batch.buffer[:, row, :, length:] = 1e3  # what lies behind a row's own length must not be read
    for turn in range(6):
        ids = ids_of(tiny_decoder, 3, 100 + turn)[:, None]
        past = np.array(lengths) + turn
        out = batch.run(ids, past[:, None], np.ones((3, 1, 1), np.bool_), np.array([0]), past)
        for row, single in enumerate(singles):
            wanted = step(single, ids[row], TokenTree.chain(0))
            np.testing.assert_allclose(out.logits[row], wanted, atol=1e-5)
            assert out.next_ids[row, 0] == wanted[0].argmax()
            single.commit([0])
            np.testing.assert_allclose(
                batch.buffer[:, row, :, : single.length], single.buffer[:, 0, :, : single.length], atol=1e-5
            )
