"""`TokenTree`: the shape of a draft. A chain is a tree with one branch; plain decoding is a tree with one node.

Node 0 is the root: the token already chosen by the target but not yet in its cache. Every other node is a
guess that follows its parent. Parents come before children, so a causal kernel never hides an ancestor.

A node carries the *rank* of the guess it stands for: rank r at depth d is the r-th best token of whatever
drafts depth d (for Medusa, head d-1). A path is the tuple of ranks from the root to a node, as in
FasterDecoding/Medusa `medusa/model/medusa_choices.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.graphs.errors import TreeError

NodePath = tuple[int, ...]

NAMED_TREES_FILE = Path(__file__).with_name("named_trees.json")


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A draft tree of N nodes.

    Args:
        parents: length N; -1 for the root, else the index of an earlier node.
        ranks: length N; 0 for the root, else the rank of the guess at this node. Siblings differ in rank.

    Raises:
        TreeError: when there is no root at node 0, a parent does not come before its child, or two siblings
            have the same rank.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise TreeError("tree: node 0 must be the root, with parent -1.")
        if len(self.ranks) != len(self.parents):
            raise TreeError(f"tree: {len(self.parents)} parents but {len(self.ranks)} ranks; give one rank per node.")
        seen: set[tuple[int, int]] = set()
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if node and not 0 <= parent < node:
                raise TreeError(f"tree: node {node} has parent {parent}; a parent must come before its child.")
            if rank < 0:
                raise TreeError(f"tree: node {node} has rank {rank}; ranks start at 0.")
            if (parent, rank) in seen:
                raise TreeError(f"tree: node {node} repeats rank {rank} under parent {parent}.")
            seen.add((parent, rank))

    # ---- making trees ----

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Build from rank paths (the root is implied), in the order (length, then value) of Medusa's buffers.

        Raises:
            TreeError: when a path's prefix is missing, or a path is empty or repeated.
        """
        ordered = sorted((tuple(int(rank) for rank in path) for path in paths), key=lambda p: (len(p), p))
        index: dict[NodePath, int] = {(): 0}
        parents, ranks = [-1], [0]
        for path in ordered:
            if path in index:
                raise TreeError(f"tree: path {list(path)} is {'repeated' if path else 'empty'}.")
            if path[:-1] not in index:
                raise TreeError(f"tree: path {list(path)} needs its prefix {list(path[:-1])}, which is missing.")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def chain(cls, length: int) -> TokenTree:
        """The root followed by `length` best guesses, one below the other."""
        return cls(tuple(range(-1, length)), (0,) * (length + 1))

    @classmethod
    def named(cls, name: str) -> TokenTree:
        """A public tree by name (see `tree_names`), or `chain-N`.

        Raises:
            TreeError: for an unknown name.
        """
        if name.startswith("chain-") and name[6:].isdecimal():
            return cls.chain(int(name[6:]))
        trees = _named_trees()
        if name not in trees:
            raise TreeError(
                f"tree '{name}' is unknown; use one of {', '.join(sorted(trees))}, chain-N, "
                "dynamic-N[-FLOOR][-dDEPTH][-kTOPK], adaptive-N[-CONFIDENCE], or a JSON file."
            )
        return cls.from_paths(trees[name])

    @classmethod
    def from_json(cls, data: object) -> TokenTree:
        """The inverse of `to_json`; also takes a bare list of paths."""
        paths = data.get("paths") if isinstance(data, dict) else data
        if not isinstance(paths, list) or not all(
            isinstance(path, list) and all(type(rank) is int for rank in path) for path in paths
        ):
            raise TreeError("tree: expected a JSON list of rank paths, such as [[0], [1], [0, 0]].")
        return cls.from_paths(paths)

    def to_json(self) -> dict[str, list[list[int]]]:
        """JSON form: the rank path of every node but the root."""
        return {"paths": [list(path) for path in self.paths[1:]]}

    # ---- reading trees ----

    def __len__(self) -> int:
        return len(self.parents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTree) and (self.parents, self.ranks) == (other.parents, other.ranks)

    def __hash__(self) -> int:
        return hash((self.parents, self.ranks))

    @cached_property
    def depths(self) -> npt.NDArray[np.int64]:
        """int64 [N]: 0 for the root, else one more than the parent's."""
        depths = np.zeros(len(self), np.int64)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @cached_property
    def nodes(self) -> npt.NDArray[np.int64]:
        """int64 [N]: every node, in order."""
        return np.arange(len(self))

    @cached_property
    def rank_array(self) -> npt.NDArray[np.int64]:
        """int64 [N]: `ranks`, for indexing."""
        return np.array(self.ranks, np.int64)

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool [N,N]: `[i,j]` when node j is node i or one of its ancestors."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in node order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self)):
            children[self.parents[node]].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def paths(self) -> tuple[NodePath, ...]:
        """Rank path of each node; the root's is empty."""
        paths: list[NodePath] = [()]
        for node in range(1, len(self)):
            paths.append((*paths[self.parents[node]], self.ranks[node]))
        return tuple(paths)

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())

    def ancestry(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    @cached_property
    def retrieve_rows(self) -> npt.NDArray[np.int64]:
        """int64 [leaves, max_depth + 1]: the nodes of each root-to-leaf path, padded with -1.

        Rows in Medusa's order: last node first (`generate_medusa_buffers`). The pad is -1, which no node can
        match; Medusa's own pad is token 0, which a model may really predict.
        """
        leaves = [node for node in reversed(range(len(self))) if not self.children[node]]
        rows = np.full((len(leaves), self.max_depth + 1), -1, np.int64)
        for row, leaf in zip(rows, leaves, strict=True):
            nodes = self.ancestry(leaf)
            row[: len(nodes)] = nodes
        return rows

    @cached_property
    def trunk(self) -> TokenTree:
        """The chain that the first nodes form: each the child of the one before. Its rows lie in the cache as if they
        had been decoded one by one."""
        nodes = next((node for node in range(1, len(self)) if self.parents[node] != node - 1), len(self))
        return self.prune(nodes)

    # ---- changing trees ----

    def keep(self, nodes: Sequence[int]) -> TokenTree:
        """The sub-tree of `nodes` (ascending, root included, prefix-closed), renumbered."""
        if not len(nodes) or nodes[0] != 0:
            raise TreeError(f"tree: kept nodes {list(nodes)} must start with the root, node 0.")
        new = {old: index for index, old in enumerate(nodes)}
        try:
            parents = (-1, *(new[self.parents[node]] for node in nodes[1:]))
        except KeyError as error:
            raise TreeError(f"tree: node {error} is the parent of a kept node and must be kept too.") from None
        return TokenTree(parents, tuple(self.ranks[node] for node in nodes))

    def prune(self, max_nodes: int | None = None, max_depth: int | None = None) -> TokenTree:
        """At most `max_nodes` nodes (the first ones), none deeper than `max_depth`; the root always stays.

        Used near the end of the cache and of the answer. Returns `self` when nothing has to go.
        """
        nodes = [node for node in range(len(self)) if max_depth is None or self.depths[node] <= max(max_depth, 0)]
        if max_nodes is not None:
            nodes = nodes[: max(max_nodes, 1)]
        return self if len(nodes) == len(self) else self.keep(nodes)

    # ---- showing trees ----

    def draw(self, label: Callable[[int], str] | None = None) -> str:
        """A text drawing, one node a line; `label(node)` defaults to the node's rank."""
        label = label or (lambda node: str(self.ranks[node]) if node else "root")
        lines = [label(0)]
        waiting = [(child, "") for child in reversed(self.children[0])]
        while waiting:  # depth first, with a stack of our own: chains may be long
            node, indent = waiting.pop()
            last = node == self.children[self.parents[node]][-1]
            lines.append(f"{indent}{'└─' if last else '├─'} {label(node)}")
            waiting += [(child, indent + ("   " if last else "│  ")) for child in reversed(self.children[node])]
        return "\n".join(lines)


ROOT_ALONE = TokenTree.chain(0)
"""Plain decoding."""


@dataclass(frozen=True)
class DynamicTree:
    """A draft tree grown anew in every round from what the drafter believes then (see `grow`): the most probable paths.

    With `depth` and `top_k` it is EAGLE-2's tree (arXiv 2406.16858; SafeAILab/EAGLE `eagle/model/cnets.py`,
    `topK_genrate`): level by level the `top_k` best nodes of a level get `top_k` children each, and of all these the
    best are kept. EAGLE's own `total_token` is `nodes`, and its `depth` is one less than the one here.

    Args:
        nodes: largest size of a round's tree, the root included.
        floor: paths less probable than this are not worth a row of the target call. A row costs a share of a plain
            step, so a guess pays for itself when its probability is about that share or more.
        depth: no node that a model drafts is deeper (copies of prompt lookup, which cost nothing, may be); None sets no
            limit.
        top_k: most children of a node, and most nodes of a level that get any; None: as many as the graph names.
    """

    nodes: int
    floor: float = 0.0
    depth: int | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise TreeError(f"tree: dynamic-{self.nodes} leaves no room for a guess; use at least 2 nodes.")
        if not 0 <= self.floor < 1:
            raise TreeError(f"tree: a floor of {self.floor} is no probability; use 0 up to 1.")
        for name, value in (("depth", self.depth), ("top_k", self.top_k)):
            if value is not None and value < 1:
                raise TreeError(f"tree: a {name} of {value} leaves no room for a guess; use at least 1.")

    def __len__(self) -> int:
        return self.nodes

    def to_json(self) -> dict[str, dict[str, float]]:
        """JSON form; `depth` and `top_k` only where they are set."""
        limits = {"depth": self.depth, "top_k": self.top_k}
        set_limits = {name: value for name, value in limits.items() if value is not None}
        return {"dynamic": {"nodes": self.nodes, "floor": self.floor, **set_limits}}


@dataclass(frozen=True)
class AdaptiveChain:
    """A chain whose length follows what was accepted lately, for a drafter that pays for every token it drafts.

    Args:
        longest: most guesses in a round.
        confidence: drafting stops behind a guess that the drafter itself finds less probable than this.
    """

    longest: int
    confidence: float = 0.0

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise TreeError(f"tree: adaptive-{self.longest} leaves no room for a guess; use at least 1.")
        if not 0 <= self.confidence < 1:
            raise TreeError(f"tree: a confidence of {self.confidence} is no probability; use 0 up to 1.")

    def __len__(self) -> int:
        return self.longest + 1

    def to_json(self) -> dict[str, dict[str, float]]:
        """JSON form."""
        return {"adaptive": {"longest": self.longest, "confidence": self.confidence}}


DraftTree = TokenTree | DynamicTree | AdaptiveChain


def grow(
    logprobs: npt.NDArray[np.floating[Any]], nodes: int, floor: float = 0.0, top_k: int | None = None
) -> TokenTree:
    """The tree of the `nodes` - 1 most probable paths, when depths are guessed independently (as Medusa's heads do).

    A path's log-probability is the sum over its depths, so a parent never scores below its child and the tree is
    found best first: from each node taken, its next sibling and its first child become candidates (the search of
    Medusa's `gen_results.py`, run on this round's probabilities instead of calibration averages).

    Args:
        logprobs: float [D,K], non-increasing along K: depth d+1's guesses, best first.
        nodes: size of the tree, the root included; fewer when D and K allow no more.
        floor: least probability of a path; with none above it the root stands alone.
        top_k: as in `DynamicTree`.
    """
    table = logprobs[:, :top_k].tolist()
    depth_count, rank_count = len(table), len(table[0]) if table else 0
    parents_left = [math.inf if top_k is None else top_k] * depth_count  # by depth, as nodes come best first
    parents, ranks = [-1], [0]
    # (minus the path's score, order of creation, parent node, parent's score, depth, rank)
    candidates = [(-table[0][0], 0, 0, 0.0, 1, 0)] if depth_count else []
    created, dearest = 0, -math.log(floor) if floor else math.inf
    while candidates and len(parents) < nodes and candidates[0][0] <= dearest:
        cost, _, parent, above, depth, rank = heappop(candidates)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        if rank + 1 < rank_count:
            created += 1
            heappush(candidates, (-above - table[depth - 1][rank + 1], created, parent, above, depth, rank + 1))
        if depth < depth_count and parents_left[depth]:
            created += 1
            parents_left[depth] -= 1
            heappush(candidates, (cost - table[depth][0], created, node, -cost, depth + 1, 0))
    return TokenTree(tuple(parents), tuple(ranks))


def read_tree(text: str) -> DraftTree:
    """A tree as the command line writes it: a public name, chain-N, dynamic-N[-FLOOR][-dDEPTH][-kTOPK] (such as
    dynamic-60-d6-k10), adaptive-N[-CONFIDENCE], or a JSON file.

    Raises:
        TreeError: for anything else.
    """
    if text.endswith(".json"):
        return load_tree(Path(text))
    size = r"-(\d+)(?:-(0?\.\d+))?"
    if match := re.fullmatch(rf"dynamic{size}(?:-d(\d+))?(?:-k(\d+))?", text, re.ASCII):
        depth, top_k = (None if limit is None else int(limit) for limit in match.group(3, 4))
        return DynamicTree(int(match[1]), float(match[2] or 0), depth, top_k)
    if match := re.fullmatch(f"adaptive{size}", text, re.ASCII):
        return AdaptiveChain(int(match[1]), float(match[2] or 0))
    return TokenTree.named(text)


def load_tree(path: Path) -> DraftTree:
    """Read a JSON file: a list of rank paths, {"paths": [...]}, {"dynamic": {"nodes": N, "floor": P, "depth": N,
    "top_k": N}} or {"adaptive": {"longest": N, "confidence": P}}; only the sizes must be there.

    Raises:
        TreeError: when the file is not such JSON or not a tree.
    """
    try:
        return tree_from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise TreeError(f"{path}: not a tree file ({error}); expected a JSON list of rank paths.") from error
    except TreeError as error:
        raise TreeError(f"{path}: {error}") from error


def tree_from_json(data: object) -> DraftTree:
    """The inverse of `to_json` of any kind of tree; also takes a bare list of paths."""
    for name, size, share, kind in (
        ("dynamic", "nodes", "floor", DynamicTree),
        ("adaptive", "longest", "confidence", AdaptiveChain),
    ):
        if not isinstance(data, dict) or (fields := data.get(name)) is None:
            continue
        if not isinstance(fields, dict) or type(fields.get(size)) is not int:
            raise TreeError(f"tree: '{name}' is {fields!r}; expected an object with a whole number '{size}'.")
        value = fields.get(share, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TreeError(f"tree: '{share}' is {value!r}; expected a probability.")
        limits = {limit: fields[limit] for limit in ("depth", "top_k") if kind is DynamicTree and limit in fields}
        for limit, number in limits.items():
            if type(number) is not int:
                raise TreeError(f"tree: '{limit}' is {number!r}; expected a whole number, or leave it out.")
        return kind(fields[size], float(value), **limits)
    return TokenTree.from_json(data)


def _named_trees() -> dict[str, list[list[int]]]:
    """Named trees as rank paths. The file writes a path as a string of one digit per rank."""
    data = json.loads(NAMED_TREES_FILE.read_text("utf-8"))
    return {name: [[int(digit) for digit in path] for path in paths.split()] for name, paths in data["trees"].items()}


def tree_names() -> list[str]:
    """Names `TokenTree.named` knows, apart from `chain-N`."""
    return sorted(_named_trees())
