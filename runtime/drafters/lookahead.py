"""Lookahead decoding: a window of Jacobi iterations makes n-grams; those that follow the root are verified.

arXiv 2402.02057; reference notes 3.1 to 3.5. A window cell (r, j), row r and column j, holds a guess for the token r +
j places after the root, which is cell (0, 0). It sees (0, 0) to (0, j), then (1, j) to (r, j). That is a tree: row 0
is a chain below the root, and from each of its cells the rest of the column hangs as another chain. The pool's n-grams
are chains below the root as well. So one `TokenTree` with its ordinary mask, positions and acceptance is the whole
method, and two things come free: window cells may be accepted too, and the bonus after a full match is kept (the
authors' code drops it, hao-ai-lab/LookaheadDecoding issue 32).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from speccompile.graphs.settings import LookaheadSettings
from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.drafters.candidates import Trie
from speccompile.runtime.drafters.draft import Draft


class NgramPool:
    """For each token, the n-grams last seen to follow it, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._followers: dict[int, dict[tuple[int, ...], None]] = {}  # dicts as ordered sets, the newest last

    def learn(self, token: int, follower: tuple[int, ...]) -> None:
        """`follower` came after `token`: it is now the newest; the oldest goes when there are too many."""
        known = self._followers.setdefault(token, {})
        known.pop(follower, None)
        known[follower] = None
        if len(known) > self._limit:
            del known[next(iter(known))]

    def newest(self, token: int) -> Iterable[tuple[int, ...]]:
        """The n-grams after `token`, the newest first."""
        return reversed(self._followers.get(token, {}))


class LookaheadDrafter:
    """Drafts for one answer, with the target alone.

    Columns are kept, not rows: a column is one Jacobi trajectory. Each round appends the argmax at its last cell; once
    it has N - 1 cells, they and the argmax go to the pool and its first cell is dropped. That is the paper's shift,
    one per round however many tokens were accepted.

    The first N - 2 rounds fill the window. Row 0 starts as the root and W + N - 3 random tokens of the prompt; a
    filling round drops the first column instead of first cells, which leaves W columns of N - 1 cells (the paper's
    schedule; its first filling step is part of the prefill, here all are ordinary rounds, which may accept window
    cells).

    Limits: a draft has at most `settings.nodes` nodes. Guesses are placed first, cut to the limits. Then come the
    columns from the left, each whole or not at all, until one does not fit; so the window narrows near the end of an
    answer, where cells behind the end are of no use. A column left out waits unchanged.

    EOS: the pool learns it like any token, and a guess ends with it. In the window a random token of the prompt takes
    its place: what follows EOS is never emitted, so its column would make n-grams that nothing can use (the authors do
    so when sampling only, because of numerical errors with many EOS in the window).

    With `from_prompt` the pool learns every n-gram of the committed text once, after the window's n-grams of the same
    round, so that real text is tried first.

    Args:
        tokens: the committed tokens, the list that the decoding loop extends. At the first `propose` it must hold the
            prompt, all of it and nothing else.
        settings: with a window of at least one column.
        eos_ids: end-of-text tokens.
        seed: of the random tokens, which decide what is drafted, never what is emitted. They come from a generator of
            the drafter's own, so that sampling draws the same numbers with and without drafts.
    """

    seconds = 0.0  # no backend but the target

    def __init__(
        self, tokens: Sequence[int], settings: LookaheadSettings, eos_ids: Collection[int], seed: int = 0
    ) -> None:
        assert settings.window, "without a window there is nothing to look ahead in; prompt lookup reads the text alone"
        self._tokens, self._settings, self._eos_ids = tokens, settings, frozenset(eos_ids)
        self._rng = np.random.default_rng(seed)
        self._fillers: Sequence[int] = ()  # what random tokens are picked from
        self._columns: list[list[int]] = []
        self._ends: list[int] = []  # node of the last cell of each column that was in the draft
        self._pool = NgramPool(settings.guesses)
        self._learned = 0  # n-grams of the text that the pool has

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        del nodes
        if self._columns:  # else it is the prompt that was run
            self._advance(output.next_ids[0, self._ends].tolist())
        if self._settings.from_prompt:
            self._learn_text()

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        if not self._columns:
            self._fillers = [token for token in self._tokens if token not in self._eos_ids] or list(self._tokens)
            width = self._settings.window + self._settings.ngram - 2
            self._columns = [[token] for token in self._random(width)]  # the first is the root's place
        max_nodes = min(max_nodes, self._settings.nodes)
        trie = Trie(root)
        for guess in self._pool.newest(root):
            node = 0
            for token in guess[: max(max_depth, 0)]:
                node = trie.add(node, token)
                if token in self._eos_ids:
                    break
        self._columns[0][0] = root
        self._ends = []
        head = 0  # the column's cell in row 0
        for index, column in enumerate(self._columns):
            # As if no cell shared a node with a guess: a column is now and then left out though it would just fit.
            cells = len(column) - (index == 0)
            if index + len(column) - 1 > max_depth or len(trie) + cells > max_nodes:
                break
            if index:
                head = trie.add(head, column[0])
            node = head
            for token in column[1:]:
                node = trie.add(node, token)
            self._ends.append(node)
        draft = trie.draft(max_nodes)  # the first nodes, numbered as here: all are equally probable to the trie
        return Draft(draft.tree, draft.tokens)

    def _advance(self, results: Sequence[int]) -> None:
        """Shift or fill by one round: `results` are the argmaxes at the last cells of the columns that were drafted."""
        rows, filling = self._settings.ngram - 1, len(self._columns) > self._settings.window
        for column, token in zip(self._columns, results, strict=False):
            if len(column) == rows:
                self._pool.learn(column[0], (*column[1:], token))
                del column[0]
            column.append(self._random(1)[0] if token in self._eos_ids else token)
        if filling:
            del self._columns[0]

    def _learn_text(self) -> None:
        length = self._settings.ngram
        for start in range(self._learned, len(self._tokens) - length + 1):
            token, *follower = self._tokens[start : start + length]
            self._pool.learn(token, tuple(follower))
            self._learned = start + 1

    def _random(self, count: int) -> list[int]:
        """`count` tokens of the prompt."""
        return [self._fillers[index] for index in self._rng.integers(len(self._fillers), size=count)]
