"""What a generation did, and where its time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

STAGES = ("prefill", "draft", "verify", "accept", "commit", "host")


@dataclass
class Stats:
    """Counts and seconds of one generation.

    Args:
        rounds: target calls after the prefill.
        plain_rounds: those that did not draft, because drafts had cost more than they gained (see `runtime.pace`).
        stepped_back: how often that began in this answer; it may also have begun in an earlier one.
        drafted: guesses verified, roots not counted.
        tested: times that the target's own token was looked for among guesses; `accepted` of them were found.
        accepted: guesses kept.
        bonus: tokens that the target added by itself, one per round.
        rounds_by_length: [k] counts the rounds that emitted k tokens; as long as the longest one needs.
        emitted: new tokens of the answer, the first one (from the prefill) included.
        lossless: False when an acceptance rule was asked for that changes the distribution.
        prompt_tokens, reused_tokens: length of the prompt, and how many of it were already in the cache.
        draft_calls, draft_step_seconds: of a draft model or EAGLE head: its calls, and the median time of one for a
            single token.
        seconds: by stage. prefill, draft and verify are time inside the backend; accept and commit are numpy;
            host is everything else that the loop does.
    """

    rounds: int = 0
    plain_rounds: int = 0
    stepped_back: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    bonus: int = 0
    rounds_by_length: list[int] = field(default_factory=list)
    emitted: int = 0
    lossless: bool = True
    prompt_tokens: int = 0
    reused_tokens: int = 0
    draft_calls: int = 0
    draft_step_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens emitted per round of any kind, bonus included; plain decoding is 1. The prefill's token is not
        counted."""
        return (self.emitted - 1) / self.rounds if self.rounds else 0.0

    @property
    def longest_round(self) -> int:
        """Most tokens that one round emitted."""
        return max(len(self.rounds_by_length) - 1, 0)

    @property
    def acceptance_rate(self) -> float:
        """Share of tested guesses that were right: alpha of arXiv 2211.17192."""
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def decode_seconds(self) -> float:
        """Everything after the prefill."""
        return sum(seconds for stage, seconds in self.seconds.items() if stage != "prefill")

    def to_json(self) -> dict[str, Any]:
        derived = ("mean_accepted_tokens", "acceptance_rate", "longest_round")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def count_round(self, tokens: int) -> None:
        """A round emitted so many tokens."""
        self.rounds_by_length += [0] * (tokens + 1 - len(self.rounds_by_length))
        self.rounds_by_length[tokens] += 1


class StageClock:
    """Splits the wall time of a generation into stages; time the caller spends between pieces is not counted."""

    def __init__(self, stats: Stats) -> None:
        self.seconds = stats.seconds
        self._started: float | None = None
        self._named = 0.0

    def start(self) -> None:
        """The loop has the floor."""
        self._started, self._named = perf_counter(), 0.0

    def stop(self) -> None:
        """The caller has it; what no stage claimed since `start` was the host's."""
        if self._started is not None:
            self.seconds["host"] += max(perf_counter() - self._started - self._named, 0.0)
            self._started = None

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] += seconds
        self._named += seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - before)
