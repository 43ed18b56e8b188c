"""Settings of the methods that draft without a graph, as the manifest keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.graphs.errors import SettingsError
from speccompile.graphs.tree import DynamicTree

LOOKUP_TREE = DynamicTree(12, 0.12)
"""For prompt lookup: on two cores, a row of the target call costs about 0.07 of a plain step, and wrong guesses nothing
but that; above the floor a guess pays with some margin, for its probability is an estimate."""

LONGEST_NGRAM = 32  # longer ones find nothing that these do not


@dataclass(frozen=True)
class LookupSettings:
    """Prompt lookup: continue the text as it went on after an earlier place that ended like it does now.

    Args:
        ngram: tokens of the longest ending that is looked up; shorter ones follow, down to one token.
        guesses: most continuations in one draft.
        newest: of several earlier places, whether the last one comes first (else the first one).

    Raises:
        SettingsError: when a number is out of range.
    """

    ngram: int = 3
    guesses: int = 3
    newest: bool = True

    def __post_init__(self) -> None:
        _check("prompt lookup", "ngram", self.ngram, 1, LONGEST_NGRAM)
        _check("prompt lookup", "guesses", self.guesses, 1)


@dataclass(frozen=True)
class LookaheadSettings:
    """Lookahead decoding (arXiv 2402.02057): W, N and G of the paper.

    Args:
        window: W, columns of the window; 0 has none and draws its n-grams from the text alone.
        ngram: N, tokens of an n-gram; the window has N - 1 rows.
        guesses: G, most n-grams in one draft, and most kept for one first token.
        from_prompt: whether the n-grams of the prompt are in the pool from the start.

    Raises:
        SettingsError: when a number is out of range.
    """

    window: int = 5
    ngram: int = 3
    guesses: int = 5
    from_prompt: bool = False

    def __post_init__(self) -> None:
        _check("lookahead", "window", self.window, 0)
        _check("lookahead", "ngram", self.ngram, 2, LONGEST_NGRAM)
        _check("lookahead", "guesses", self.guesses, 1)
        if self.from_prompt and not self.window:
            raise SettingsError("lookahead: a window of 0 always knows the prompt; leave out pool-from-prompt.")

    @property
    def nodes(self) -> int:
        """Most nodes of a round's tree, the root included: (N - 1)(W + G)."""
        return (self.ngram - 1) * (self.window + self.guesses) + (self.window == 0)


def _check(method: str, name: str, value: int, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"{least} or more" if most is None else f"{least} .. {most}"
        raise SettingsError(f"{method}: {name} is {value}; use {allowed}.")
