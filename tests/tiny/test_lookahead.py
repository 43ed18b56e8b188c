"""Lookahead: the window as a tree, its update and pool against the paper's rows, and lossless decoding.

The target is a table of logits by the last two tokens. Expected tokens come from a loop without drafts, expected
probabilities from enumeration in float64.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from speccompile.graphs.errors import SettingsError
from speccompile.graphs.settings import LookaheadSettings
from speccompile.graphs.tree import ROOT_ALONE, TokenTree
from speccompile.runtime.acceptance import Accepted, accept_sampled, walk
from speccompile.runtime.backends.ort import StepOutput
from speccompile.runtime.drafters.draft import Draft
from speccompile.runtime.drafters.lookahead import LookaheadDrafter, NgramPool
from speccompile.runtime.sampling import Sampling, distribution, draw

Path = tuple[int, ...]
NextToken = Callable[[Sequence[int]], int]
NO_LOGITS = np.empty((1, 0, 0), np.float32)
PLENTY = 10_000

SHAPES = [(5, 3, 5), (7, 5, 7), (15, 5, 15), (3, 2, 3), (1, 2, 1), (1, 5, 1), (2, 7, 4), (9, 3, 1), (4, 4, 20)]


def by_two(table: npt.NDArray[Any]) -> NextToken:
    """A target that knows the last two tokens."""
    return lambda context: int(table[context[-2], context[-1]])


def by_last(table: dict[int, int]) -> NextToken:
    return lambda context: table[context[-1]]


def counting(context: Sequence[int]) -> int:
    return (context[-1] + 1) % 10


def token_paths(draft: Draft) -> list[Path]:
    """The tokens from behind the root to each node, by the parents alone."""
    paths: list[Path] = [()]
    for node in range(1, len(draft.tree)):
        paths.append((*paths[draft.tree.parents[node]], int(draft.tokens[node])))
    return paths


class Calls:
    """The target's outputs for drafts, in one buffer that every call overwrites, as the backend's are."""

    def __init__(self) -> None:
        self._buffer = np.empty((1, 1000), np.int64)

    def output(self, next_ids: Sequence[int]) -> StepOutput:
        self._buffer[:] = 10**9  # no token: whoever reads an old output fails
        self._buffer[0, : len(next_ids)] = next_ids
        return StepOutput(self._buffer[:, : len(next_ids)], NO_LOGITS, None)


@dataclass
class Answer:
    """An answer, and what each round gave: its draft, the emitted tokens, and the context it started from."""

    tokens: list[int]
    drafts: list[Draft] = field(default_factory=list)
    emitted: list[list[int]] = field(default_factory=list)
    contexts: list[list[int]] = field(default_factory=list)
    ended_in_a_branch: bool = False


def plainly(prompt: Sequence[int], limit: int, choose: NextToken, eos_ids: Collection[int] = ()) -> list[int]:
    context = list(prompt)
    while len(context) < len(prompt) + limit and not (len(context) > len(prompt) and context[-1] in eos_ids):
        context.append(choose(context))
    return context[len(prompt) :]


def speculatively(
    prompt: Sequence[int],
    limit: int,
    shape: tuple[int, int, int],
    greedy: NextToken,
    *,
    choose: NextToken | None = None,
    rule: Callable[[Draft, list[int]], Accepted] | None = None,
    eos_ids: Collection[int] = (),
    from_prompt: bool = False,
    seed: int = 0,
    nodes_left: Callable[[int], int] = lambda round_: PLENTY,
) -> Answer:
    """The decoding loop. `greedy` is the graph's argmax, `choose` (by default the same) what follows a context, `rule`
    replaces the whole walk."""
    choose = choose or greedy
    tokens: list[int] = []
    drafter = LookaheadDrafter(tokens, LookaheadSettings(*shape, from_prompt), eos_ids, seed)
    tokens += prompt  # after the drafter was made, as the decoder does
    calls = Calls()
    drafter.observe([0], calls.output([greedy(tokens)]))
    root = choose(tokens)
    answer = Answer([root])
    while len(answer.tokens) < limit and root not in eos_ids:
        max_nodes, max_depth = nodes_left(len(answer.drafts)), limit - len(answer.tokens) - 1
        draft = drafter.propose(root, max_nodes, max_depth)
        before = [*tokens, root]
        paths = token_paths(draft)
        assert len(draft.tree) <= min(max_nodes, LookaheadSettings(*shape).nodes)
        assert draft.tree.max_depth <= max_depth
        assert draft.tokens[0] == root and len(set(paths)) == len(paths)
        output = calls.output([greedy([*before, *path]) for path in paths])
        if rule is None:
            accepted = walk(draft.tree, draft.tokens, lambda node, path: choose([*before, *path]))  # noqa: B023
        else:
            accepted = rule(draft, before)
        new = [*(int(draft.tokens[node]) for node in accepted.nodes[1:]), accepted.bonus]
        kept = next((index for index, token in enumerate(new, 1) if token in eos_ids), len(new))
        answer.ended_in_a_branch |= kept < len(new)
        nodes = accepted.nodes[: kept + 1]
        answer.drafts.append(draft)
        answer.emitted.append(new[:kept])
        answer.contexts.append(list(tokens))
        answer.tokens += new[:kept]
        tokens += [root, *new[: len(nodes) - 1]]
        drafter.observe(nodes, output)
        root = answer.tokens[-1]
    return answer


# ---- the window is a tree ----


def test_the_worked_example_of_the_mask_and_positions() -> None:
    """Reference notes 3.2 and 3.3 for W = 3, N = 4, by hand: all that (r, j) sees, and its place r + j."""
    sees = {
        (0, 0): {(0, 0)},
        (0, 1): {(0, 0), (0, 1)},
        (0, 2): {(0, 0), (0, 1), (0, 2)},
        (1, 0): {(0, 0), (1, 0)},
        (1, 1): {(0, 0), (0, 1), (1, 1)},
        (1, 2): {(0, 0), (0, 1), (0, 2), (1, 2)},
        (2, 0): {(0, 0), (1, 0), (2, 0)},
        (2, 1): {(0, 0), (0, 1), (1, 1), (2, 1)},
        (2, 2): {(0, 0), (0, 1), (0, 2), (1, 2), (2, 2)},
    }
    tokens = list(range(100, 140))  # so many that row 0 holds no token twice with this seed
    drafter = LookaheadDrafter(tokens, LookaheadSettings(3, 4, 2), ())
    calls = Calls()
    drafter.observe([39], calls.output([0]))

    # First filling round: the root and W + N - 3 = 4 random prompt tokens, a chain.
    first = drafter.propose(200, PLENTY, PLENTY)
    assert first.tree == TokenTree.chain(4)
    assert set(first.tokens[1:].tolist()) <= set(tokens)
    drafter.observe([0], calls.output([300, 301, 302, 303, 304]))
    # Second: row 0 lost its first token, and so did the new row 1.
    second = drafter.propose(201, PLENTY, PLENTY)
    row_0 = first.tokens[2:].tolist()
    columns = [[201, 301], [row_0[0], 302], [row_0[1], 303], [row_0[2], 304]]
    ends = [node_of(second, [column[0] for column in columns[1 : j + 1]] + columns[j][1:]) for j in range(4)]
    next_ids = [0] * len(second.tree)
    for j, end in enumerate(ends):
        next_ids[end] = 400 + j
    drafter.observe([0], calls.output(next_ids))

    steady = drafter.propose(202, PLENTY, PLENTY)
    cells = {(0, 0): 202, (0, 1): row_0[1], (0, 2): row_0[2], (1, 0): 302, (1, 1): 303, (1, 2): 304}
    cells |= {(2, j): 401 + j for j in range(3)}
    assert len(steady.tree) == len(cells) == len(set(cells.values()))
    by_token = {int(token): node for node, token in enumerate(steady.tokens)}
    for cell, token in cells.items():
        node = by_token[token]
        assert steady.tree.depths[node] == sum(cell)
        assert {int(steady.tokens[seen]) for seen in np.flatnonzero(steady.tree.mask[node])} == {
            cells[other] for other in sees[cell]
        }


def node_of(draft: Draft, path: Sequence[int]) -> int:
    return token_paths(draft).index(tuple(path))


class Rows:
    """Sections 3.2 and 3.4 of the notes with 2-D lists, row by row; row 0 is kept without the current token."""

    def __init__(self, row_0: list[int], ngram: int, guesses: int) -> None:
        self.rows, self.ngram, self.guesses = [row_0], ngram, guesses
        self.pool: dict[int, list[Path]] = {}

    def cell_path(self, r: int, j: int) -> Path:
        """Tokens that (r, j) sees behind the current one, itself last."""
        return (*self.rows[0][:j], *(self.rows[row][j] for row in range(1, r + 1)))

    def expected(self, root: int) -> set[Path]:
        """Paths of all nodes: every cell and every guess, with what leads there."""
        width = len(self.rows[0]) + 1
        whole = [self.cell_path(r, j) for r in range(len(self.rows)) for j in range(width)]
        whole += self.pool.get(root, [])
        return {path[:length] for path in whole for length in range(len(path) + 1)}

    def step(self, root: int, argmax: Callable[[Path], int]) -> None:
        width, last = len(self.rows[0]) + 1, len(self.rows) - 1
        results = [argmax(self.cell_path(last, j)) for j in range(width)]
        if len(self.rows) < self.ngram - 1:
            self.rows = [row[1:] for row in [*self.rows, results]]
            return
        for j in range(width):
            key = root if j == 0 else self.rows[0][j - 1]
            value = (*(self.rows[r][j] for r in range(1, self.ngram - 1)), results[j])
            known = self.pool.setdefault(key, [])
            if value in known:
                known.remove(value)
            elif len(known) == self.guesses:
                known.pop(0)
            known.append(value)
        self.rows = [*self.rows[1:], results]
        self.rows[0] = self.rows[0][1:]


@pytest.mark.parametrize("shape", SHAPES)
def test_window_and_pool_evolve_as_written_in_rows(shape: tuple[int, int, int]) -> None:
    """Filling and steady rounds, one shift a round however many tokens were accepted."""
    window, ngram, guesses = shape
    jumps = Counter[int]()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        greedy = by_two(rng.integers(0, 9, (9, 9)))
        prompt = rng.integers(0, 9, 12).tolist()
        # A limit far off, so that depth cuts nothing in the rounds looked at.
        answer = speculatively(prompt, 100, shape, greedy, seed=seed)
        assert answer.drafts[0].tree == TokenTree.chain(window + ngram - 3)
        assert set(answer.drafts[0].tokens[1:].tolist()) <= set(prompt)
        rows = Rows(answer.drafts[0].tokens[1:].tolist(), ngram, guesses)
        for draft, before, new in zip(answer.drafts, answer.contexts, answer.emitted, strict=True):
            if len(before) > len(prompt) + 60:
                break
            root = int(draft.tokens[0])
            assert set(token_paths(draft)) == rows.expected(root)
            rows.step(root, lambda path: greedy([*before, root, *path]))  # noqa: B023
            jumps[len(new)] += 1
        assert len(rows.rows) == ngram - 1 and len(rows.rows[0]) == window - 1
    assert len(jumps) > 1


def test_the_root_takes_cell_zero_when_several_tokens_were_accepted() -> None:
    """The key of column 0 is the token that was fed."""
    tokens = [5, 6, 7]
    drafter = LookaheadDrafter(tokens, LookaheadSettings(1, 2, 3), ())
    calls = Calls()
    drafter.observe([2], calls.output([0]))
    assert drafter.propose(40, PLENTY, PLENTY).tree is ROOT_ALONE
    drafter.observe([0], calls.output([41]))
    assert drafter.propose(90, PLENTY, PLENTY).tree is ROOT_ALONE
    drafter.observe([0], calls.output([91]))
    assert token_paths(drafter.propose(40, PLENTY, PLENTY)) == [(), (41,)]
    assert token_paths(drafter.propose(90, PLENTY, PLENTY)) == [(), (91,)]


# ---- the pool ----


def test_pool_keeps_the_newest_and_a_hit_makes_new() -> None:
    pool = NgramPool(3)
    for follower in ((1, 1), (2, 2), (3, 3), (1, 1)):
        pool.learn(9, follower)
    pool.learn(8, (7, 7))
    assert list(pool.newest(9)) == [(1, 1), (3, 3), (2, 2)]
    pool.learn(9, (4, 4))
    assert list(pool.newest(9)) == [(4, 4), (1, 1), (3, 3)]
    assert list(pool.newest(8)) == [(7, 7)]
    assert list(pool.newest(0)) == []


def test_pool_learns_prompt_and_answer_once_each_and_in_order() -> None:
    """The authors' history appends one hit for every position (their PR 69): here the text is what was emitted."""
    #          0  1  2  3  4  5  6
    tokens = [10, 1, 2, 10, 3, 4, 10]
    drafter = LookaheadDrafter(tokens, LookaheadSettings(1, 3, 2, from_prompt=True), ())
    calls = Calls()
    drafter.observe([6], calls.output([0]))
    guesses = [path for path in token_paths(drafter.propose(10, PLENTY, 9)) if len(path) == 2]
    assert [guess for guess in guesses if guess[0] in (1, 3)] == [(3, 4), (1, 2)]
    # Accept both tokens of the older guess: the text is now ... 10 | 10 1 2, so (10, 1) and (1, 2) are the newest.
    draft = drafter.propose(10, PLENTY, 9)
    nodes = [0, node_of(draft, (1,)), node_of(draft, (1, 2))]
    tokens += [10, 1, 2]
    drafter.observe(nodes, calls.output([0] * len(draft.tree)))
    paths = token_paths(drafter.propose(10, PLENTY, 9))
    assert [path for path in paths if len(path) == 2][:2] == [(1, 2), (10, 1)]  # the limit of 2 dropped (3, 4)
    # No new text: the window's own n-gram is now the newest. Were the text read again, (1, 2) would be.
    drafter.observe([0], calls.output([0] * len(paths)))
    draft = drafter.propose(10, PLENTY, 9)
    assert [path for path in token_paths(draft) if len(path) == 2][:2] == [(0, 0), (1, 2)]
    # Both in one round: the text's is newer than the window's.
    tokens += [10, 1, 2]
    drafter.observe([0, node_of(draft, (1,)), node_of(draft, (1, 2))], calls.output([5] * len(draft.tree)))
    paths = token_paths(drafter.propose(10, PLENTY, 9))
    assert [path for path in paths if len(path) == 2][:2] == [(1, 2), (0, 5)]


def test_without_from_prompt_text_teaches_nothing() -> None:
    drafter = LookaheadDrafter([10, 1, 2, 10], LookaheadSettings(1, 3, 2), (1, 2))
    drafter.observe([3], Calls().output([0]))
    assert token_paths(drafter.propose(10, PLENTY, 9)) == [(), (10,)]  # row 0 of the first round, no guess


# ---- greedy identity ----


@pytest.mark.parametrize("from_prompt", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_plain_decoding(shape: tuple[int, int, int], from_prompt: bool) -> None:
    rounds = length = 0
    for seed in range(12):
        rng = np.random.default_rng(100 + seed)
        vocabulary = int(rng.integers(3, 14))
        greedy = by_two(rng.integers(0, vocabulary, (vocabulary, vocabulary)))
        prompt = rng.integers(0, vocabulary, rng.integers(2, 10)).tolist()
        # Several end tokens (pitfall 8), rare enough that answers have some length.
        eos_ids = set(rng.choice(vocabulary, 2, replace=False).tolist()) if seed % 2 else set[int]()
        expected = plainly(prompt, 50, greedy, eos_ids)
        answer = speculatively(prompt, 50, shape, greedy, eos_ids=eos_ids, from_prompt=from_prompt, seed=seed)
        assert answer.tokens == expected
        rounds, length = rounds + len(answer.drafts) + 1, length + len(expected)
    assert rounds < length  # something was accepted


def test_an_end_token_inside_a_branch_ends_the_answer_and_nothing_is_drafted_behind_it() -> None:
    """Pitfall 6, with several end tokens."""
    eos_ids = {20, 21}
    for last in (20, 21):
        greedy = by_last({0: 1, 1: 2, 2: 3, 3: 4, 4: last, 20: 9, 21: 9, 9: 9})
        prompt = [0, 1, 2, 3, 4, last, 9, 0, 1, 2, 3, 4, last, 9, 0]
        answer = speculatively(prompt, 30, (4, 6, 4), greedy, eos_ids=eos_ids, from_prompt=True)
        assert answer.tokens == [1, 2, 3, 4, last]
        # One round: the prompt's 2 3 4 and the end token are accepted, and the bonus behind it is not emitted.
        assert [len(new) for new in answer.emitted] == [4] and answer.ended_in_a_branch
        assert not any(eos_ids & set(path[:-1]) for path in token_paths(answer.drafts[0]))
    # The pool's n-gram goes on behind the end token, the guess does not.
    tokens = [0, 3, 20, 6, 0, 3, 20, 6, 0]
    drafter = LookaheadDrafter(tokens, LookaheadSettings(1, 4, 4, from_prompt=True), eos_ids)
    drafter.observe([8], Calls().output([0]))
    paths = token_paths(drafter.propose(0, PLENTY, 9))
    assert (3, 20) in paths and not any(path[:2] == (3, 20) and len(path) > 2 for path in paths)


def test_end_tokens_leave_the_window_but_reach_the_pool() -> None:
    """The target answers EOS everywhere: no window cell holds it, and the pool still guesses it."""
    prompt = [3, 4, 5, 20, 3]
    tokens = list(prompt)
    drafter = LookaheadDrafter(tokens, LookaheadSettings(4, 3, 4), {20})
    calls = Calls()
    drafter.observe([4], calls.output([0]))
    seen = Counter[int]()
    for _ in range(8):
        draft = drafter.propose(3, PLENTY, PLENTY)
        for node in range(1, len(draft.tree)):
            seen[int(draft.tokens[node])] += 1
            assert draft.tokens[node] != 20 or (not draft.tree.children[node] and draft.tree.depths[node] == 2)
        drafter.observe([0], calls.output([20] * len(draft.tree)))
        tokens.append(3)
    assert set(seen) == {3, 4, 5, 20}


# ---- more than N - 1 tokens in one step ----


@pytest.mark.parametrize("shape", [(5, 3, 5), (7, 5, 7), (15, 5, 15), (3, 2, 3), (8, 7, 2)])
def test_a_repetitive_text_gives_n_tokens_in_one_step(shape: tuple[int, int, int]) -> None:
    """The authors' loop stops at N - 1 (their issue 32); here the bonus after a full match is kept."""
    answer = speculatively(list(range(10)), 200, shape, counting)
    assert answer.tokens == [value % 10 for value in range(200)]
    assert max(len(new) for new in answer.emitted) >= shape[1]


@pytest.mark.parametrize("ngram", [2, 3, 5, 8])
def test_a_whole_guess_gives_its_bonus(ngram: int) -> None:
    """With one column the window is N - 2 deep, so that only a whole guess and its bonus make N tokens."""
    answer = speculatively(list(range(10)) * 2, 64, (1, ngram, 2), counting, from_prompt=True)
    assert answer.tokens == [value % 10 for value in range(64)]
    assert {len(new) for new in answer.emitted[:3]} == {ngram}


def test_window_cells_are_accepted_too() -> None:
    """In the first round there is no guess yet: what is accepted is row 0."""
    greedy = by_two(np.full((3, 3), 1))
    answer = speculatively([1, 1], 50, (5, 4, 5), greedy)
    assert len(answer.emitted[0]) == 5 + 4 - 3 + 1


# ---- limits ----


def filled(shape: tuple[int, int, int], rounds: int = 12) -> tuple[LookaheadDrafter, Calls, list[int]]:
    """A drafter in its steady state, the root 7 well known to its pool."""
    rng = np.random.default_rng(4)
    tokens = [7, *rng.integers(0, 30, 8).tolist()]
    drafter = LookaheadDrafter(tokens, LookaheadSettings(*shape), ())
    calls = Calls()
    drafter.observe([8], calls.output([0]))
    for _ in range(rounds):
        draft = drafter.propose(7, PLENTY, PLENTY)
        drafter.observe([0], calls.output(rng.integers(0, 30, len(draft.tree)).tolist()))
        tokens.append(7)
    return drafter, calls, tokens


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(1, 9), (9, 0), (1, 0), (9, -1)])
def test_no_room_is_the_root_alone(max_nodes: int, max_depth: int) -> None:
    drafter, _, _ = filled((4, 4, 4))
    draft = drafter.propose(7, max_nodes, max_depth)
    assert draft.tree is ROOT_ALONE
    assert draft.tokens.tolist() == [7] and draft.tokens.dtype == np.int64


def test_limits_cut_columns_first_and_guesses_from_the_oldest() -> None:
    """W = 3, N = 4, G = 4 holds 3 * 3 + 4 * 3 nodes; the newest guess is the first branch."""
    drafter, _, _ = filled((3, 4, 4))
    whole = drafter.propose(7, PLENTY, PLENTY)
    paths = token_paths(whole)
    guesses = paths[1:13]
    assert (
        len(paths) == LookaheadSettings(3, 4, 4).nodes == 21 and [len(path) for path in guesses] == [1, 2, 3] * 4
    )  # nothing shared with this seed
    window = paths[13:]
    assert sorted(len(path) for path in window) == [1, 1, 2, 2, 2, 3, 3, 4]  # (0, 1) .. (2, 2)
    assert token_paths(drafter.propose(7, 2, 9)) == [(), guesses[0]]
    assert token_paths(drafter.propose(7, 7, 9)) == [(), *guesses[:6]]
    assert token_paths(drafter.propose(7, 15, 9)) == [(), *guesses, *window[:2]]  # column 0, whole
    assert token_paths(drafter.propose(7, 17, 9)) == [(), *guesses, *window[:2]]  # column 1 needs three nodes
    assert token_paths(drafter.propose(7, 18, 9)) == [(), *guesses, *window[:5]]
    for depth, columns in ((1, 0), (2, 1), (3, 2), (4, 3)):  # column j is j + 2 deep
        expected = {(), *(path for path in guesses if len(path) <= depth)}
        expected |= set(window[: (0, 2, 5, 8)[columns]])
        assert set(token_paths(drafter.propose(7, PLENTY, depth))) == expected


def test_a_column_left_out_waits_unchanged() -> None:
    drafter, calls, _ = filled((3, 4, 4))
    before = token_paths(drafter.propose(7, PLENTY, PLENTY))
    for _ in range(3):
        assert drafter.propose(7, PLENTY, 0).tree is ROOT_ALONE
        drafter.observe([0], calls.output([29]))
    assert token_paths(drafter.propose(7, PLENTY, PLENTY)) == before
    # Column 0 alone advances when the depth leaves it alone.
    draft = drafter.propose(7, PLENTY, 2)
    drafter.observe([0], calls.output([40 + node for node in range(len(draft.tree))]))
    after = token_paths(drafter.propose(7, PLENTY, PLENTY))
    column_0_end = node_of(draft, before[14])
    assert (*before[14], 40 + column_0_end) in after  # its n-gram, root first, is now a guess
    assert {path for path in before[13:] if path[0] == before[15][0]} <= set(after)


@pytest.mark.parametrize("shape", [(5, 3, 5), (4, 5, 6), (3, 2, 3)])
def test_greedy_equals_plain_decoding_under_any_limits(shape: tuple[int, int, int]) -> None:
    """Pitfall 22. `speculatively` checks that no draft exceeds them."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        greedy = by_two(rng.integers(0, 8, (8, 8)))
        prompt = rng.integers(0, 8, 6).tolist()
        limits = rng.integers(1, 20, 64).tolist()
        answer = speculatively(prompt, 40, shape, greedy, from_prompt=bool(seed % 2), nodes_left=limits.__getitem__)
        assert answer.tokens == plainly(prompt, 40, greedy)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_shortest_answers(limit: int) -> None:
    answer = speculatively([1, 2], limit, (5, 3, 5), counting)
    assert answer.tokens == [3, 4, 5][:limit]


def test_a_prompt_shorter_than_the_window_and_one_of_end_tokens_only() -> None:
    answer = speculatively([4], 30, (15, 5, 15), counting)
    assert answer.tokens == plainly([4], 30, counting)
    answer = speculatively([9], 30, (15, 5, 15), counting, eos_ids={9}, from_prompt=True)
    assert answer.tokens == list(range(10))


# ---- state ----


def test_answers_do_not_know_of_each_other() -> None:
    """Pitfall 25: the same draft in every round, whether or not another answer came before."""
    rng = np.random.default_rng(3)
    greedy = by_two(rng.integers(0, 9, (9, 9)))
    prompts = [rng.integers(0, 9, 8).tolist() for _ in range(2)]

    def proposed(prompt: list[int]) -> list[list[Path]]:
        return [token_paths(draft) for draft in speculatively(prompt, 40, (5, 4, 5), greedy, from_prompt=True).drafts]

    alone = proposed(prompts[1])
    other = proposed(prompts[0])
    assert proposed(prompts[1]) == alone != other
    assert proposed(prompts[0]) == other


def test_the_seed_decides_the_first_window_only_through_the_prompt() -> None:
    def first(seed: int) -> list[int]:
        return speculatively([1, 2, 3], 50, (9, 3, 2), counting, seed=seed).drafts[0].tokens.tolist()

    assert first(0) == first(0)
    assert len({tuple(first(seed)) for seed in range(5)}) == 5


# ---- settings ----


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1, 3, 5), r"lookahead: window is -1; use 0 or more\."),
        ((5, 1, 5), r"lookahead: ngram is 1; use 2 \.\. 32\."),
        ((5, 33, 5), "ngram is 33;"),
        ((5, 3, 0), r"lookahead: guesses is 0; use 1 or more\."),
        ((5, 3, 2.0), "guesses is 2.0;"),
        ((True, 3, 2), "window is True;"),
    ],
)
def test_settings_out_of_range_are_refused(values: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        LookaheadSettings(*values)


# ---- sampling ----

VOCABULARY, LENGTH = 4, 4
TABLE = np.random.default_rng(11).normal(0, 1.2, (VOCABULARY, VOCABULARY, VOCABULARY))
PROMPT = [0, 1, 2, 3, 1, 0, 2, 2, 3, 0, 1, 2]
SAMPLINGS = [Sampling(temperature=temperature, top_p=0.9) for temperature in (0.7, 1.3)]
SAMPLED_SHAPES = [(2, 2, 2), (3, 3, 3)]


def argmax(context: Sequence[int]) -> int:
    return int(TABLE[context[-2], context[-1]].argmax())


@cache
def processed(sampling: Sampling, before: int, last: int) -> npt.NDArray[np.float64]:
    return distribution(TABLE[before, last], (), sampling)


def probabilities(logits: npt.NDArray[np.float64], temperature: float, top_p: float) -> npt.NDArray[np.float64]:
    """Softmax at a temperature, then the fewest best tokens that make up `top_p`; written anew."""
    weights = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    kept, total = [], 0.0
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if total < top_p:
            kept.append(token)
            total += weights[token]
    return np.where(np.isin(np.arange(len(weights)), kept), weights, 0) / total


@cache
def enumerated(sampling: Sampling) -> dict[Path, float]:
    """The probability of each of the 256 answers."""
    table = np.apply_along_axis(probabilities, -1, TABLE, sampling.temperature, sampling.top_p)
    outcomes = {}
    for answer in itertools.product(range(VOCABULARY), repeat=LENGTH):
        context = [*PROMPT, *answer]
        outcomes[answer] = float(
            np.prod([table[context[i - 2], context[i - 1], context[i]] for i in range(len(PROMPT), len(context))])
        )
    assert sum(outcomes.values()) == pytest.approx(1, abs=1e-12)
    return outcomes


Rule = Callable[
    [TokenTree, npt.NDArray[np.int64], Callable[..., npt.NDArray[np.float64]], Callable[[], float]], Accepted
]


def sampled(
    sampling: Sampling,
    shape: tuple[int, int, int],
    uniform: Callable[[], float],
    seed: int = 0,
    rule: Rule = accept_sampled,
) -> Answer:
    def verify(draft: Draft, before: list[int]) -> Accepted:
        return rule(
            draft.tree,
            draft.tokens,
            lambda node, path: processed(sampling, *[*before, *path][-2:]),
            uniform,
        )

    def choose(context: Sequence[int]) -> int:
        return draw(processed(sampling, *context[-2:]), uniform())

    return speculatively(PROMPT, LENGTH, shape, argmax, choose=choose, rule=verify, from_prompt=True, seed=seed)


def p_value(answers: Counter[Path], sampling: Sampling) -> float:
    """Chi-square over all answers; those expected less than 5 times are one class."""
    expected = {answer: p * answers.total() for answer, p in enumerated(sampling).items()}
    if any(expected[answer] == 0 for answer in answers):
        return 0.0
    common = [answer for answer in expected if expected[answer] >= 5]
    rest = answers.total() - sum(expected[answer] for answer in common)
    counts = [answers[answer] for answer in common] + [answers.total() - sum(answers[answer] for answer in common)]
    return float(chisquare(counts, [*(expected[answer] for answer in common), rest]).pvalue)


@pytest.mark.parametrize("shape", SAMPLED_SHAPES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["0.7", "1.3"])
def test_sampled_answers_have_the_probabilities_of_the_target(sampling: Sampling, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(17)
    runs = [sampled(sampling, shape, rng.random, seed) for seed in range(4000)]
    assert np.mean([len(run.drafts) for run in runs]) < 2.4  # of 3 rounds: drafts do get accepted
    assert p_value(Counter(tuple(run.tokens) for run in runs), sampling) > 1e-3


def accept_with_p_and_draw_from_p(
    tree: TokenTree,
    tokens: npt.NDArray[np.int64],
    distribution_at: Callable[..., npt.NDArray[np.float64]],
    uniform: Callable[[], float],
) -> Accepted:
    """Wrong on purpose: refused drafts are not taken out of p before the bonus is drawn."""
    node, nodes, path = 0, [0], list[int]()
    while True:
        p = distribution_at(node, path)
        child = next((child for child in tree.children[node] if uniform() < p[tokens[child]]), None)
        if child is None:
            return Accepted(tuple(nodes), draw(p, uniform()))
        node, path = child, [*path, int(tokens[child])]
        nodes.append(node)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["0.7", "1.3"])
def test_the_chi_square_test_finds_a_wrong_rule(sampling: Sampling) -> None:
    rng = np.random.default_rng(17)
    runs = [sampled(sampling, (2, 2, 2), rng.random, seed, accept_with_p_and_draw_from_p) for seed in range(4000)]
    assert p_value(Counter(tuple(run.tokens) for run in runs), sampling) < 1e-9


@pytest.mark.parametrize("shape", SAMPLED_SHAPES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["0.7", "1.3"])
def test_sampled_answers_are_exact_without_chance(sampling: Sampling, shape: tuple[int, int, int]) -> None:
    """Each answer owns a box of uniform numbers whose volume is its probability; its middle emits it."""
    for answer, expected in enumerated(sampling).items():
        if expected == 0:
            continue
        middles, volume = [], 1.0
        for i, token in enumerate(answer):
            row = processed(sampling, *[*PROMPT, *answer[:i]][-2:])
            middles.append(float(np.cumsum(row)[token] - row[token] / 2))
            volume *= float(row[token])
        assert tuple(sampled(sampling, shape, iter(middles).__next__).tokens) == answer
        assert volume == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", [(2, 2, 2), (5, 3, 5), (15, 5, 15)])
def test_the_same_seed_gives_the_same_tokens_with_and_without_lookahead(shape: tuple[int, int, int]) -> None:
    sampling = Sampling(temperature=1.3, top_p=0.9)
    rounds = 0
    for seed in range(40):
        plain_rng, rng = np.random.default_rng(seed), np.random.default_rng(seed)

        def choose(context: Sequence[int], rng: np.random.Generator) -> int:
            return draw(processed(sampling, *context[-2:]), rng.random())

        plain = plainly(PROMPT, 25, lambda context: choose(context, plain_rng))  # noqa: B023
        answer = speculatively(
            PROMPT,
            25,
            shape,
            argmax,
            choose=lambda context: choose(context, rng),  # noqa: B023
            seed=seed,
        )
        assert answer.tokens == plain
        assert rng.random() == plain_rng.random()
        rounds += len(answer.drafts)
    assert rounds < 40 * 20
