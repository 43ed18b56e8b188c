"""`TokenTree` against published vectors (reference notes, 1.4, 1.5, 2.3) and against brute force."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from speccompile.graphs.errors import TreeError
from speccompile.graphs.tree import (
    NAMED_TREES_FILE,
    AdaptiveChain,
    DynamicTree,
    NodePath,
    TokenTree,
    grow,
    load_tree,
    read_tree,
    tree_from_json,
    tree_names,
)

PUBLISHED = {  # name: (nodes per depth, leaves), from the table of section 1.4 and from 2.3
    "mc_sim_7b_63": ([10, 28, 23, 2], 42),
    "vicuna_7b_stage1": ([10, 32, 20, 1], 44),
    "vicuna_7b_stage1_ablation": ([10, 21, 25, 7], 42),
    "vicuna_7b_stage2": ([10, 23, 23, 7], 42),
    "vicuna_13b_stage1": ([10, 29, 23, 1], 44),
    "vicuna_13b_stage2": ([10, 19, 25, 9], 42),
    "vicuna_33b_stage1": ([10, 34, 19], 46),
    "vicuna_33b_stage2": ([10, 24, 24, 5], 43),
    "zephyr_stage2": ([10, 27, 23, 3], 44),
    "eagle_mc_sim_25": ([4, 8, 8, 3, 2], 15),
}
MC_SIM_7B_63 = (
    "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90 "
    "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 0000 0001"
)
EAGLE_25 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"


def paths_of(digits: str) -> list[NodePath]:
    return [tuple(int(rank) for rank in path) for path in digits.split()]


def tree_indices(tree: TokenTree) -> list[int]:
    """Medusa's index into [root token, 10 of head 0, 10 of head 1, ...]."""
    return [0] + [tree.ranks[node] + 10 * (int(tree.depths[node]) - 1) + 1 for node in range(1, len(tree))]


def random_paths(rng: np.random.Generator) -> list[NodePath]:
    """A random prefix-closed set of rank paths, in random order."""
    paths: set[NodePath] = set()
    for _ in range(int(rng.integers(1, 40))):
        parent = () if not paths or rng.random() < 0.3 else list(paths)[rng.integers(len(paths))]
        paths.add((*parent, int(rng.integers(0, 6))))
    ordered = list(paths)
    rng.shuffle(ordered)
    return [tuple(int(rank) for rank in path) for path in ordered]


RANDOM_PATHS = [random_paths(np.random.default_rng(seed)) for seed in range(40)]


# ---- published vectors ----


def test_named_trees_are_the_published_ones() -> None:
    assert tree_names() == sorted(PUBLISHED)
    for name, (per_depth, leaves) in PUBLISHED.items():
        tree = TokenTree.named(name)
        counts = Counter(tree.depths.tolist())
        assert [counts[depth] for depth in range(1, tree.max_depth + 1)] == per_depth, name
        assert len(tree) == 1 + sum(per_depth) == (26 if name == "eagle_mc_sim_25" else 64), name
        assert len(tree.retrieve_rows) == sum(not children for children in tree.children) == leaves, name
    assert set(TokenTree.named("mc_sim_7b_63").paths[1:]) == set(paths_of(MC_SIM_7B_63))
    assert set(TokenTree.named("eagle_mc_sim_25").paths[1:]) == set(paths_of(EAGLE_25))
    assert max(max(TokenTree.named(name).ranks) for name in PUBLISHED if name.startswith("vicuna")) == 9


def test_named_trees_file_carries_its_notice() -> None:
    notice = json.loads(NAMED_TREES_FILE.read_text("utf-8"))["notice"]
    for part in (
        "FasterDecoding/Medusa",
        "SafeAILab/EAGLE",
        "Apache License, Version 2.0",
        "medusa_choices.py",
    ):
        assert part in notice


def test_small_vector_of_section_1_5() -> None:
    tree = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    rows = ["".join(str(int(bit)) for bit in row) for row in tree.mask]
    assert rows == ["100000", "110000", "101000", "110100", "110010", "101001"]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2]
    assert tree.retrieve_rows.tolist() == [[0, 2, 5], [0, 1, 4], [0, 1, 3]]
    assert tree_indices(tree) == [0, 1, 2, 11, 12, 11]
    assert tree.parents == (-1, 0, 0, 1, 1, 2)
    assert tree.children == ((1, 2), (3, 4), (5,), (), (), ())


def test_mc_sim_7b_63_vector_of_section_1_5() -> None:
    tree = TokenTree.named("mc_sim_7b_63")
    assert tree.retrieve_rows.shape == (42, 5)
    assert tree.retrieve_rows[0].tolist() == [0, 1, 11, 39, 63]
    assert tree.retrieve_rows[-1].tolist() == [0, 1, 19, -1, -1]
    assert tree.mask.sum() == 207
    assert max(tree_indices(tree)) == 32


# ---- against brute force ----


@pytest.mark.parametrize("paths", RANDOM_PATHS, ids=range(len(RANDOM_PATHS)))
def test_random_trees(paths: list[NodePath]) -> None:
    tree = TokenTree.from_paths(paths)
    nodes: list[NodePath] = [(), *sorted(paths, key=lambda path: (len(path), path))]
    assert list(tree.paths) == nodes
    assert tree.depths.tolist() == [len(path) for path in nodes]
    assert tree.depths.dtype == np.int64
    # An ancestor's path is a prefix.
    assert tree.mask.tolist() == [[path[: len(other)] == other for other in nodes] for path in nodes]
    assert tree.mask.dtype == np.bool_
    assert all(nodes[tree.parents[node]] == nodes[node][:-1] for node in range(1, len(tree)))
    for node, path in enumerate(nodes):
        assert tree.ancestry(node) == [nodes.index(path[:depth]) for depth in range(len(path) + 1)]
        assert [nodes[child] for child in tree.children[node]] == [p for p in nodes[1:] if p[:-1] == path]
    # Medusa's own order of rows: from the last path on, skipping what an earlier row went through.
    rows, passed = [], set()
    for path in reversed(nodes):
        if path not in passed:
            prefixes = [path[:depth] for depth in range(len(path) + 1)]
            passed |= set(prefixes)
            row = [nodes.index(prefix) for prefix in prefixes]
            rows.append(row + [-1] * (tree.max_depth + 1 - len(row)))
    assert tree.retrieve_rows.tolist() == rows


@pytest.mark.parametrize("paths", RANDOM_PATHS[:10], ids=range(10))
def test_round_trips_and_equality(paths: list[NodePath], tmp_path: Path) -> None:
    tree = TokenTree.from_paths(paths)
    assert TokenTree.from_paths(tree.paths[1:]) == tree
    assert hash(TokenTree.from_paths(paths[::-1])) == hash(tree)
    assert TokenTree.from_paths([*paths, (6,)]) != tree
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(tree.to_json()))
    assert load_tree(file) == tree
    file.write_text(json.dumps(paths))
    assert load_tree(file) == tree


@pytest.mark.parametrize("paths", RANDOM_PATHS, ids=range(len(RANDOM_PATHS)))
def test_keep_and_prune(paths: list[NodePath]) -> None:
    tree = TokenTree.from_paths(paths)
    for max_nodes in range(-1, len(tree) + 2):
        for max_depth in (-1, 0, 1, 2, 9, None):
            pruned = tree.prune(max_nodes, max_depth)
            allowed = [p for p in tree.paths if max_depth is None or len(p) <= max(max_depth, 0)]
            assert list(pruned.paths) == allowed[: max(max_nodes, 1)]
    assert tree.prune() is tree
    assert tree.prune(len(tree), tree.max_depth) is tree

    leaf = int(np.argmax(tree.depths))
    branch = tree.keep(tree.ancestry(leaf))
    assert list(branch.paths) == [tree.paths[leaf][:depth] for depth in range(len(tree.paths[leaf]) + 1)]
    nodes = [node for node in range(len(tree)) if 0 not in tree.paths[node]]
    kept = tree.keep(nodes)
    assert list(kept.paths) == [tree.paths[node] for node in nodes]
    assert kept.mask.tolist() == tree.mask[np.ix_(nodes, nodes)].tolist()


# ---- chains, drawings ----


def test_chain() -> None:
    chain = TokenTree.chain(3)
    assert chain == TokenTree.from_paths([[0], [0, 0], [0, 0, 0]]) == TokenTree.named("chain-3")
    assert chain.mask.tolist() == np.tri(4, dtype=bool).tolist()
    assert chain.retrieve_rows.tolist() == [[0, 1, 2, 3]]
    plain = TokenTree.chain(0)
    assert (len(plain), plain.max_depth, plain.retrieve_rows.tolist()) == (1, 0, [[0]])
    assert plain == TokenTree.from_paths([])


def test_draw() -> None:
    tree = TokenTree.from_paths([[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1]])
    assert tree.draw() == "\n".join(
        [
            "root",
            "├─ 0",
            "│  ├─ 0",
            "│  │  └─ 1",
            "│  └─ 2",
            "└─ 1",
            "   └─ 0",
        ]
    )
    assert tree.draw(lambda node: f"<{node}>").splitlines()[2] == "│  ├─ <3>"
    assert TokenTree.chain(0).draw() == "root"


# ---- what is refused ----


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((), (), "node 0 must be the root"),
        ((0,), (0,), "node 0 must be the root"),
        ((-1, 0), (0,), "2 parents but 1 ranks"),
        ((-1, 1), (0, 0), "node 1 has parent 1; a parent must come before its child"),
        ((-1, 2, 0), (0, 0, 0), "node 1 has parent 2"),
        ((-1, 0, -1), (0, 0, 0), "node 2 has parent -1"),
        ((-1, 0), (0, -1), "node 1 has rank -1"),
        ((-1, 0, 0), (0, 4, 4), "node 2 repeats rank 4 under parent 0"),
    ],
)
def test_bad_trees(parents: tuple[int, ...], ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        TokenTree(parents, ranks)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"path \[1, 0\] needs its prefix \[1\], which is missing"),
        ([[0], [0]], r"path \[0\] is repeated"),
        ([[0], []], r"path \[\] is empty"),
    ],
)
def test_bad_paths(paths: list[list[int]], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        TokenTree.from_paths(paths)


def test_keep_needs_the_parents() -> None:
    with pytest.raises(TreeError, match="node 1 is the parent of a kept node"):
        TokenTree.from_paths([[0], [0, 0], [1]]).keep([0, 3])


def test_unknown_name() -> None:
    with pytest.raises(TreeError, match=r"tree 'mc_sim' is unknown; use one of eagle_mc_sim_25, mc_sim_7b_63"):
        TokenTree.named("mc_sim")
    with pytest.raises(TreeError, match="tree 'chain-x' is unknown"):
        TokenTree.named("chain-x")


@pytest.mark.parametrize("text", ["", "{", "3", "null", '{"nodes": []}', "[0, 1]", '[["a"]]', "[[[0]]]", '"00 01"'])
def test_bad_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(TreeError):
        load_tree(file)
    with pytest.raises(TreeError, match=r"absent\.json"):
        load_tree(tmp_path / "absent.json")


# ---- dynamic trees ----


def test_grow_takes_the_most_probable_paths() -> None:
    """Against all paths, enumerated: the same total probability, prefix-closed, and no path left out is better."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        depth, ranks, nodes = rng.integers(1, 4), rng.integers(1, 5), int(rng.integers(2, 20))
        logprobs = -np.sort(rng.exponential(1.0, (depth, ranks)), axis=1)
        every = {
            path: sum(logprobs[level, rank] for level, rank in enumerate(path))
            for length in range(1, depth + 1)
            for path in itertools.product(range(ranks), repeat=length)
        }
        tree = grow(logprobs, nodes)
        taken = tree.paths[1:]
        assert len(taken) == min(nodes - 1, len(every))
        best = sorted(every.values(), reverse=True)[: len(taken)]
        np.testing.assert_allclose(sorted((every[path] for path in taken), reverse=True), best)


def test_grow_keeps_parents_when_a_guess_is_certain() -> None:
    """Pitfall 27: with log p = 0 a child scores as much as its parent and must not come without it."""
    tree = grow(np.array([[0.0, -9.0], [0.0, -9.0], [0.0, -9.0]]), 4)
    assert tree == TokenTree.chain(3)


def test_adaptive_chain_is_read_written_and_refused() -> None:
    assert read_tree("adaptive-8") == tree_from_json({"adaptive": {"longest": 8}}) == AdaptiveChain(8)
    chain = AdaptiveChain(8, 0.4)
    assert read_tree("adaptive-8-0.4") == tree_from_json(chain.to_json()) == chain
    assert len(chain) == 9  # the root and eight guesses
    for bad in (
        {"adaptive": {"longest": 0}},
        {"adaptive": {"nodes": 4}},
        {"adaptive": 4},
        {"adaptive": {"longest": True}},
        {"adaptive": {"longest": 3, "confidence": 1}},
        {"adaptive": {"longest": 3, "confidence": "high"}},
    ):
        with pytest.raises(TreeError):
            tree_from_json(bad)


def test_dynamic_tree_is_read_written_and_refused() -> None:
    assert read_tree("dynamic-12") == tree_from_json({"dynamic": {"nodes": 12}}) == DynamicTree(12)
    assert read_tree("dynamic-12-0.08") == tree_from_json(DynamicTree(12, 0.08).to_json()) == DynamicTree(12, 0.08)
    assert tree_from_json(DynamicTree(5).to_json()) == DynamicTree(5)
    assert DynamicTree(5).to_json() == {"dynamic": {"nodes": 5, "floor": 0.0}}  # limits only where they are set
    assert read_tree("chain-2") == TokenTree.chain(2)
    refused: list[object] = [
        {"dynamic": {"nodes": 1}},
        {"dynamic": {}},
        {"dynamic": 4},
        {"dynamic": {"nodes": True}},
        {"dynamic": {"nodes": 3, "floor": 1}},
        {"dynamic": {"nodes": 3, "depth": 0}},
        {"dynamic": {"nodes": 3, "top_k": 0}},
        {"dynamic": {"nodes": 3, "depth": 1.5}},
        {"dynamic": {"nodes": 3, "top_k": True}},
        {"dynamic": {"nodes": 3, "depth": None}},
    ]
    for data in refused:
        with pytest.raises(TreeError):
            tree_from_json(data)


def test_limits_of_a_dynamic_tree_are_read_and_written() -> None:
    cases: list[tuple[str, DynamicTree, dict[str, float]]] = [
        ("dynamic-60-d6-k10", DynamicTree(60, depth=6, top_k=10), {"nodes": 60, "floor": 0.0, "depth": 6, "top_k": 10}),
        ("dynamic-8-0.06-d6", DynamicTree(8, 0.06, 6), {"nodes": 8, "floor": 0.06, "depth": 6}),
        ("dynamic-8-.1-k4", DynamicTree(8, 0.1, None, 4), {"nodes": 8, "floor": 0.1, "top_k": 4}),
    ]
    for text, tree, data in cases:
        assert read_tree(text) == tree_from_json({"dynamic": data}) == tree
        assert tree.to_json() == {"dynamic": data}
    for text in ("dynamic-8-k4-d6", "dynamic-8-d", "dynamic-8-d6-0.1", "adaptive-8-d6", "dynamic-8-d-6", "dynamic-8d6"):
        with pytest.raises(TreeError, match=r"use one of .* dynamic-N\[-FLOOR\]\[-dDEPTH\]\[-kTOPK\]"):
            read_tree(text)
    for text, message in (("dynamic-8-d0", "a depth of 0 leaves no room"), ("dynamic-8-k0", "a top_k of 0 leaves no")):
        with pytest.raises(TreeError, match=message):
            read_tree(text)


def test_grow_expands_no_more_than_the_best_of_a_level() -> None:
    """Against EAGLE-2's own order of things: expand level by level, then take the best of all."""
    rng = np.random.default_rng(6)
    limited = 0
    for _ in range(60):
        depth, ranks, top_k, nodes = (int(rng.integers(*bounds)) for bounds in ((1, 5), (1, 6), (1, 5), (2, 30)))
        logprobs = -np.sort(rng.exponential(1.0, (depth, ranks)), axis=1)
        scores: dict[NodePath, float] = {}
        level: dict[NodePath, float] = {(): 0.0}
        for table in logprobs:
            frontier = sorted(level, key=level.__getitem__, reverse=True)[:top_k]
            level = {(*path, rank): level[path] + table[rank] for path in frontier for rank in range(min(top_k, ranks))}
            scores |= level
        best = sorted(scores, key=scores.__getitem__, reverse=True)[: nodes - 1]
        assert set(grow(logprobs, nodes, top_k=top_k).paths[1:]) == set(best)
        limited += grow(logprobs, nodes, top_k=top_k) != grow(logprobs[:, :top_k], nodes)
    assert limited > 3  # times that the frontier, not the children alone, was what set the limit


def test_grow_leaves_out_what_is_not_worth_a_row() -> None:
    logprobs = np.log([[0.6, 0.3, 0.04], [0.5, 0.1, 0.05]])
    # Worth at least 0.1: [0] .6, [1] .3, [0,0] .3, [1,0] .15; not [0,1] .06, [2] .04, ...
    assert set(grow(logprobs, 99, 0.1).paths[1:]) == {(0,), (1,), (0, 0), (1, 0)}
    assert grow(logprobs, 99, 0.7) == TokenTree.chain(0)
