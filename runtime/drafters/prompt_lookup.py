"""Prompt lookup: what followed the last tokens earlier in the text may follow them again.

The idea is apoorvumang/prompt-lookup-decoding's: find the longest n-gram that ends the text and has occurred before,
and draft what came after it (reference notes 3.6). Here several earlier places may speak, and how far each is believed
is learned while decoding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

import numpy as np

from speccompile.graphs.settings import LookupSettings
from speccompile.graphs.tree import ROOT_ALONE, DynamicTree
from speccompile.runtime.backends.step import StepOutput
from speccompile.runtime.drafters.candidates import Trie
from speccompile.runtime.drafters.draft import Draft

LONGEST = 8
"""Longer matches are not told apart."""

PRIOR = (0.0, 0.2, 0.5, 0.6, 0.7, 0.75, 0.8, 0.8, 0.9)
"""By match length: how often the copy's next token is right, before this answer has shown it. Counted over greedy
answers of SmolLM2-135M-Instruct to questions it made up itself (70,000 tokens, none of a benchmark), and rounded."""

PRIOR_WEIGHT, MEMORY = 8, 32
"""Outcomes that the prior stands for, and the number of latest ones that an estimate is the mean of, roughly."""

PLACES = 16
"""Earlier places looked at in a round, unless more guesses are wanted: a frequent word has hundreds, which mostly say
the same."""


class PromptLookupDrafter:
    """Drafts for one answer by copying from its own text: the prompt and the answer so far. No model is run.

    With `newest` and several guesses this is also the simple n-gram form of lookahead decoding: a cache of the n-grams
    seen so far, the latest ones first, verified together, without the window that would make new ones.

    *Which places.* An index holds every n-gram of up to `settings.ngram` tokens whose next token is known, so the end
    of the text never finds itself. It is made once for the prompt (about 2 us a token on a slow core) and grows with
    the answer. Longest n-gram first, then newest (or oldest) first, until `settings.guesses` places have added
    something to the tree. A copy that reaches the end of the text goes on with itself, as in LZ77, so a text that
    repeats with a short period is drafted as far as the budget goes. Nothing is drafted behind an EOS id.

    *How far.* A row of the target call costs time, so a guess must be probable enough. `accuracy[k]` estimates how
    often the copy's next token is right when the k last tokens agree (k up to LONGEST). A path's probability is the
    product along it, with k growing by one per token, for if the path is right the match is that much longer; a further
    guess at the same place gets its share of what the earlier ones leave. The tree keeps paths above `tree.floor`.

    *Learning.* For every token that the answer gains, drafted or not, the index is asked what it would have guessed
    first. So an estimate also recovers while nothing is drafted, and no target call is spent on learning. The prompt
    does not train it: prompts repeat themselves in other ways, and to ask about each of their tokens would make the
    index several times dearer.

    Args:
        tokens: committed tokens of the sequence, the live list that the decoding loop extends.
        tree: node budget and floor.
        eos_ids: tokens that end an answer.
    """

    seconds = 0.0

    def __init__(
        self, tokens: Sequence[int], settings: LookupSettings, tree: DynamicTree, eos_ids: Collection[int]
    ) -> None:
        self.tokens, self.settings, self.tree, self.eos_ids = tokens, settings, tree, frozenset(eos_ids)
        self.accuracy = list(PRIOR)
        self._outcomes = [PRIOR_WEIGHT] * len(PRIOR)
        self._text: list[int] = []  # `tokens` and the root, as far as indexed
        self._starts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # by n-gram: where its next token is
        self._tail: list[tuple[int, ...]] = []  # the n-grams that end the text, longest first

    def observe(self, nodes: Sequence[int], output: StepOutput) -> None:
        del nodes, output  # `tokens` says it all

    def propose(self, root: int, max_nodes: int, max_depth: int) -> Draft:
        nodes = min(max_nodes, self.tree.nodes)
        depth = min(max_depth, nodes - 1)
        if depth < 1:
            return Draft(ROOT_ALONE, np.array([root], np.int64), np.ones(1))
        self._read(root)
        trie, guesses = Trie(root), 0
        for start, length in islice(self._places(), max(PLACES, self.settings.guesses)):
            size = len(trie)
            self._copy(trie, start, length, depth)
            guesses += len(trie) > size
            if guesses == self.settings.guesses:
                break
        return trie.draft(nodes, self.tree.floor)

    # ---- places ----

    def _places(self) -> Iterator[tuple[int, int]]:
        """Where a copy may start, best first, and how many tokens before it agree with the end of the text."""
        seen = set[int]()
        for key in self._tail:
            starts = self._starts.get(key, ())
            for start in reversed(starts) if self.settings.newest else starts:
                if start not in seen:
                    seen.add(start)
                    yield start, self._match_length(start, len(key))

    def _match_length(self, start: int, known: int) -> int:
        """Tokens before `start` that agree with the end of the text, up to LONGEST; `known` of them do."""
        if known < self.settings.ngram:
            return min(known, LONGEST)  # a longer one would have been found
        text, end, length = self._text, len(self._text), min(known, LONGEST)
        while length < min(LONGEST, start) and text[start - 1 - length] == text[end - 1 - length]:
            length += 1
        return length

    def _copy(self, trie: Trie, start: int, length: int, depth: int) -> None:
        """Add what follows `start` to the tree, while it is probable enough."""
        source = self._text[start : start + depth]
        if len(source) < depth:
            source = (source * (depth // len(source) + 1))[:depth]
        node, floor = 0, self.tree.floor
        for matched, token in enumerate(source, length):
            siblings = trie.children[node]
            child = siblings.get(token)
            if child is None:
                left = trie.probabilities[node] - sum(trie.probabilities[sibling] for sibling in siblings.values())
                probability = left * self.accuracy[min(matched, LONGEST)]
                if probability < floor:
                    return
                child = trie.add(node, token, probability)
            if token in self.eos_ids:
                return
            node = child

    # ---- reading ----

    def _read(self, root: int) -> None:
        """Index what is new in the text, and learn from it unless it is the prompt."""
        if not self._text:
            self._index(self.tokens)
        for token in [*self.tokens[len(self._text) :], root]:
            self._learn(token)
            for key in self._tail:
                self._starts[key].append(len(self._text))
            self._append((token,))

    def _index(self, prompt: Sequence[int]) -> None:
        """The same as reading token by token without learning, several times faster."""
        body = prompt[:-1]
        for size in range(1, self.settings.ngram + 1):
            for start, key in enumerate(zip(*(body[first:] for first in range(size)), strict=False), size):
                self._starts[key].append(start)
        self._append(prompt)

    def _append(self, tokens: Sequence[int]) -> None:
        self._text += tokens
        longest = min(self.settings.ngram, len(self._text))
        self._tail = [tuple(self._text[-size:]) for size in range(longest, 0, -1)]

    def _learn(self, token: int) -> None:
        """Compare `token`, which comes next, with the first guess."""
        place = next(self._places(), None)
        if place is not None:
            start, length = place
            right = self._text[start] == token
            self._outcomes[length] = min(self._outcomes[length] + 1, MEMORY)
            self.accuracy[length] += (right - self.accuracy[length]) / self._outcomes[length]
