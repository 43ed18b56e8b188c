"""Synthetic acceptance: an oracle that drafts right as often as it is told to, to explore machines and trees before
there is anything that drafts. What is emitted stays exact, so speculation is really done, and really timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.graphs.costs import Costs
from speccompile.graphs.errors import SpecCompileError, TreeError
from speccompile.graphs.tree import ROOT_ALONE, TokenTree, read_tree
from speccompile.runtime import Decoder
from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.decoder import Request, SequenceState
from speccompile.runtime.drafters.draft import Draft, Drafter
from speccompile.runtime.drafters.plain import PlainDrafter
from speccompile.tools.bench.contestants import Asked, Contestant, bundle_contestant, variant


class OracleDrafter:
    """Drafts for one answer that is known.

    Behind a right node the guess of rank r is right with the chance rate (1 - rate)^r: each guess with the same chance
    when the better ones are wrong. Every other node gets a token that is wrong there.

    Args:
        tokens: the live list of committed tokens: a prompt, and as much of `truth` as is said.
        truth: the answer that plain decoding gives.
        uniform: numbers in [0, 1).
        draft_seconds: how long drafting pretends to take. It keeps a core busy, as drafting would.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        prompt_length: int,
        truth: Sequence[int],
        tree: TokenTree,
        rate: float,
        vocabulary: int,
        rng: np.random.Generator,
        draft_seconds: float = 0.0,
    ) -> None:
        self.tokens, self.prompt_length, self.truth = tokens, prompt_length, truth
        self.tree, self.rate, self.vocabulary = tree, rate, vocabulary
        self.draft_seconds, self.seconds = draft_seconds, 0.0
        self._rng = rng

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        del nodes, output
        self.seconds = 0.0

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        before = perf_counter()
        tree = self.tree.prune(max_nodes, max_depth)
        if len(tree) == 1:
            self.seconds = 0.0
            return Draft(ROOT_ALONE, np.array([root], np.int64))
        tokens = self._guesses(root, tree)
        while perf_counter() - before < self.draft_seconds:
            pass
        self.seconds = perf_counter() - before
        return Draft(tree, tokens)

    def _guesses(self, root: int, tree: TokenTree) -> npt.NDArray[np.int64]:
        start = len(self.tokens) - self.prompt_length + 1
        ahead = self.truth[start : start + tree.max_depth]
        tokens = np.zeros(len(tree), np.int64)
        tokens[0] = root
        right = 0  # the deepest right node, -1 behind a wrong guess of all its children
        for depth in range(1, tree.max_depth + 1):
            truth = ahead[depth - 1] if depth <= len(ahead) else 0
            level = np.flatnonzero(tree.depths == depth)
            tokens[level] = (truth + 1 + tree.rank_array[level]) % self.vocabulary
            lucky = int(self._rng.geometric(self.rate)) - 1  # the rank of the guess that is right
            children = tree.children[right] if right >= 0 and depth <= len(ahead) else ()
            right = next((child for child in children if tree.ranks[child] == lucky), -1)
            if right >= 0:
                tokens[right] = truth
        return tokens


class OracleDecoder(Decoder):
    """The target of another decoder, with an `OracleDrafter`."""

    def __init__(self, like: Decoder, tree: TokenTree, rate: float, asked: Asked, draft_seconds: float) -> None:
        plain = variant(like, tree, method="plain", heads=None, draft=None, eagle=None, lookahead=None, lookup=None)
        vars(self).update(vars(plain))
        self.heads = self.draft = None
        self._rate, self._asked, self._draft_seconds = rate, asked, draft_seconds
        self.known: dict[tuple[int, ...], list[int]] = {}  # prompt -> answer
        self._rng = np.random.default_rng(asked.seed)

    def learn(self, ids: list[int]) -> None:
        """Find out what plain decoding says."""
        if tuple(ids) not in self.known:
            asked = self._asked
            done = self.generate(
                ids,
                max_new_tokens=asked.max_new_tokens,
                temperature=asked.temperature,
                seed=asked.seed,
                speculate=False,
                sequence=self.new_sequence(),
            )
            self.known[tuple(ids)] = done.token_ids

    def _drafter(self, request: Request, sequence: SequenceState) -> Drafter:
        if not request.speculate:
            return PlainDrafter()
        assert isinstance(self.tree, TokenTree)
        return OracleDrafter(
            sequence.tokens,
            len(request.ids),
            self.known[tuple(request.ids)],
            self.tree,
            self._rate,
            self.target.vocab_size,
            self._rng,
            self._draft_seconds,
        )


def synthetic_contestant(
    plain: Contestant, rate: float, tree_name: str, draft_ms: float, asked: Asked, costs: Costs | None, past: int
) -> Contestant:
    """An oracle for the target of `plain`.

    Args:
        costs: of a target call, when known; then the speed-up that they promise is reported beside the measured one.
        past: tokens in the cache, about, for which they are looked up.

    Raises:
        SpecCompileError: when the tree is not a fixed one, or the rate is not above 0 and at most 1.
    """
    tree = read_tree(tree_name)
    if not isinstance(tree, TokenTree):
        raise TreeError(f"--synthetic-tree: '{tree_name}' grows by what a drafter believes; give a fixed tree.")
    if not 0 < rate <= 1:
        raise SpecCompileError(f"--synthetic-accept: {rate} is no rate of acceptance; use more than 0, and at most 1.")
    assert plain.decoder is not None
    decoder = OracleDecoder(plain.decoder, tree, rate, asked, draft_ms / 1e3)
    mean = expected_tokens(tree, rate)
    expected = {"mean_accepted_tokens": mean}
    if costs is not None:
        expected["speedup"] = mean * costs.plain(past) / (costs.call(len(tree), past) + draft_ms)
    name = " ".join(["synthetic", f"{rate:g}", tree_name, *plain.name.split()[1:]])
    facts: dict[str, Any] = {"expected": expected}
    return bundle_contestant(name, decoder, asked, plain, prepare=decoder.learn, facts=facts)


def expected_tokens(tree: TokenTree, rate: float) -> float:
    """Tokens per round that theory expects of the oracle, the bonus included: every node is on the accepted path with
    the product of its ranks' chances. For a chain of g guesses that is (1 - rate^(g+1)) / (1 - rate), arXiv 2211.17192.
    """
    return sum(math.prod(rate * (1 - rate) ** rank for rank in path) for path in tree.paths)
