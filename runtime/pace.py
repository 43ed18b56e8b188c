"""Stepping back to plain decoding where speculation loses, and trying again later.

`speccompile tune` has measured what a call costs on this machine; what a text lets a drafter guess shows only while it
is decoded. So over a window of rounds, the tokens that they emitted, worth a plain step each, are held against what
rounds with their trees cost by that table. No clock is read: decisions follow from the tokens decoded so far, so they
can be reproduced, and a busy machine does not change them.

Nor do they change what is emitted. A decision rests on rounds that are over and is made before anything is drawn for
the next one. Whatever happened before, a round emits a piece of text as the target would continue it, with a tree or
with the root alone, and so does the next one; a rule that looks back only may choose between them.
"""

from __future__ import annotations

from threading import Lock

from speccompile.graphs.costs import Costs

WINDOW = 64
"""Rounds of a judgement. The tokens of a round scatter by about 0.55 of their mean (chains and trees of a few guesses),
so their mean over 64 rounds is known to 7 %: drafts that gain a fifth are taken for a loss once in a hundred windows.
Windows do not overlap, as a sliding one would be judged 64 times as often."""

PROBE = 16
"""Rounds of a judgement after a pause. It knows less (14 %), and costs a quarter where drafts still lose."""

FIRST_PAUSE, LONGEST_PAUSE = 64, 1024
"""Plain rounds before the next probe; each probe that loses doubles them. Where drafts halve the speed, probes waste a
quarter of the time at first and 2 % in the end, and a text that has changed is noticed within a few pages."""


class Pace:
    """Whether the next round drafts. One for all answers of a decoder, for an answer may end before a window is full;
    streams in several threads may share it.

    Args:
        costs: of the bundle, measured with its tree.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs, self._lock = costs, Lock()
        self._window, self._pause = WINDOW, FIRST_PAUSE
        self._plain_left = 0  # rounds of this pause
        self._rounds, self._gained, self._spent = 0, 0.0, 0.0  # of this window

    def drafts(self) -> bool:
        """Whether a round that begins now drafts; asked once a round, as pauses are counted by it."""
        with self._lock:
            if not self._plain_left:
                return True
            self._plain_left -= 1
            return False

    def note(self, nodes: int, past: int, emitted: int) -> bool:
        """Count a round that was to draft; True when it was the last one before a pause.

        A round without guesses that paid for none (prompt lookup found nothing) tells nothing and is left out.

        Args:
            nodes: size of its tree, the root included.
            past: tokens in the target's cache before it.
            emitted: tokens of the answer that came of it.
        """
        if nodes == 1 and not self._costs.draft:
            return False
        gained, spent = emitted * self._costs.plain(past), self._costs.round(nodes, past)
        with self._lock:
            if self._plain_left:
                return False  # another stream has begun a pause meanwhile
            self._rounds, self._gained, self._spent = self._rounds + 1, self._gained + gained, self._spent + spent
            if self._rounds < self._window:
                return False
            losing = self._gained < self._spent
            self._rounds, self._gained, self._spent = 0, 0.0, 0.0
            if losing:
                self._plain_left, self._window = self._pause, PROBE
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            else:
                self._window, self._pause = WINDOW, FIRST_PAUSE
            return losing
