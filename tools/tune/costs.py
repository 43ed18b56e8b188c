"""What calls cost: the target's for T tokens, and those of what drafts, as they follow each other in a round.

In a round a drafting graph runs after the target has swept the caches, then the target runs after it. So both are timed
in that order: a drafting graph's first call, which has to fetch its weights again, apart from those that follow at
once. Sizes take turns in random order, so that a machine that slows down slows all of them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from speccompile.graphs.costs import Costs
from speccompile.runtime import Decoder
from speccompile.runtime.backends.ort import OrtCache
from speccompile.runtime.backends.step import Target

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PASTS = (200, 1000)
DRAFT_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
SWEEPS = 9

Report = Callable[[str], None]


@dataclass(frozen=True)
class DraftCosts:
    """Medians in milliseconds of a drafting graph's calls.

    Args:
        rows: numbers of new rows, ascending.
        first: what a round's first call took, which asks for the guesses of its last row only.
        later: what a call right behind another took, which asks for those of all its rows.
    """

    rows: list[int]
    first: list[float]
    later: list[float]

    def round(self, calls: Sequence[int]) -> float:
        """Milliseconds of a round's calls, given the rows of each."""
        if not calls:
            return 0.0
        return _at(self.rows, self.first, calls[0]) + sum(_at(self.rows, self.later, rows) for rows in calls[1:])


def _at(rows: list[int], values: list[float], at: int) -> float:
    return float(np.interp(at, rows, values))


@dataclass(frozen=True)
class CallCosts:
    """What `measure_calls` found; `target` is [pasts][tokens] as in `Costs`, `draft` None where no graph drafts."""

    target: Costs
    draft: DraftCosts | None = None


@dataclass(frozen=True)
class RoundCosts:
    """Milliseconds of whole rounds.

    Args:
        calls: of the graphs.
        plain_host: what a plain step takes outside the backend.
        host, host_per_call: what a speculative round does, and what each call of a drafting graph adds to it.
    """

    calls: CallCosts
    plain_host: float = 0.0
    host: float = 0.0
    host_per_call: float = 0.0
    _known: dict[tuple[int, int], float] = field(default_factory=dict, compare=False, repr=False)
    _drafts: dict[tuple[int, ...], float] = field(default_factory=dict, compare=False, repr=False)

    def call(self, tokens: int, past: int) -> float:
        """The target's."""
        if (tokens, past) not in self._known:
            self._known[tokens, past] = self.calls.target.call(tokens, past)
        return self._known[tokens, past]

    def plain(self, past: int) -> float:
        return self.call(1, past) + self.plain_host

    def drafting(self, calls: tuple[int, ...]) -> float:
        """Inside the backend."""
        if self.calls.draft is None:
            return 0.0
        if calls not in self._drafts:
            self._drafts[calls] = self.calls.draft.round(calls)
        return self._drafts[calls]

    def outside(self, calls: Sequence[int]) -> float:
        return self.host + self.host_per_call * len(calls)

    def round(self, tokens: int, past: int, calls: tuple[int, ...] = ()) -> float:
        """A round whose tree has `tokens` nodes and whose drafting took calls of so many rows."""
        return self.call(tokens, past) + self.drafting(calls) + self.outside(calls)


def measure_target(
    decoder: Decoder, tokens: Sequence[int] = TOKENS, pasts: Sequence[int] = PASTS, sweeps: int = SWEEPS
) -> list[list[float]]:
    """Median milliseconds of the target's calls, [pasts][tokens], with no drafter in between. A past that leaves no
    room for the largest call stands for the longest one that does."""
    return _measure(decoder, tokens, pasts, (), sweeps, lambda _: None)[0]


def measure_calls(decoder: Decoder, sweeps: int = SWEEPS, report: Report = lambda _: None) -> CallCosts:
    """Time the calls of every graph, for the usual numbers of tokens and pasts as far as they fit the cache."""
    tokens = [count for count in TOKENS if count <= max(decoder.capacity // 2, 1)]
    pasts = sorted({min(past, decoder.capacity - tokens[-1]) for past in PASTS})
    rows: Sequence[int] = ()
    if decoder.heads is not None:
        rows = DRAFT_ROWS[:1]  # they run on one row, and once
    elif (info := decoder.bundle.manifest.drafting) is not None:
        rows = [count for count in DRAFT_ROWS if 4 * count <= min(info.max_length, decoder.capacity)]
    table, first, later = _measure(decoder, tokens, pasts, rows, sweeps, report)
    target = Costs(tokens, pasts, table)
    return CallCosts(target, DraftCosts(list(rows), first, later) if rows else None)


def _measure(
    decoder: Decoder, tokens: Sequence[int], pasts: Sequence[int], rows: Sequence[int], sweeps: int, report: Report
) -> tuple[list[list[float]], list[float], list[float]]:
    """Medians: the target's [pasts][tokens], and a drafting graph's first and later calls, [rows] each."""
    rng = np.random.default_rng(0)
    places = []
    for past in pasts:
        least = _least_capacity(decoder)
        target = _filled(decoder.target, min(past, decoder.capacity - max(tokens)), max(tokens), rng, least)
        places.append((target, _drafting(decoder, target.length, max(rows), rng) if rows else None))
    taken = defaultdict[tuple[int, int], list[float]](list)
    first, later = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for sweep in range(sweeps + 1):  # a machine that slows down for a while slows all of them
        report(f"timing calls, sweep {sweep + 1} of {sweeps + 1}")
        for place, (target, drafting) in enumerate(places):
            for count, width in _in_turns(tokens, rows, rng):
                beginning, *following = drafting(width) if drafting is not None else (0.0,)
                spent = _call(target, count, count, count, rng)
                if sweep:  # the first call of a shape makes its plans and buffers
                    taken[place, count].append(spent)
                    first[width].append(beginning)
                    later[width] += following
    table = [[median(taken[place, count]) for count in tokens] for place in range(len(places))]
    return table, [median(first[width]) for width in rows], [median(later[width] or first[width]) for width in rows]


def _in_turns(tokens: Sequence[int], rows: Sequence[int], rng: np.random.Generator) -> Iterable[tuple[int, int]]:
    """Pairs, in random order, that name everything at least once."""
    turns = max(len(tokens), len(rows))
    shuffled = (np.resize(rng.permutation(values or [0]), turns).tolist() for values in (list(tokens), list(rows)))
    return zip(*shuffled, strict=True)


def _drafting(decoder: Decoder, past: int, widest: int, rng: np.random.Generator) -> Callable[[int], list[float]]:
    """Rows -> milliseconds of a drafting graph's calls for so many, one right behind the other."""
    if (heads := decoder.heads) is not None:
        hidden = rng.standard_normal(heads.width, np.float32)

        def run_heads(_: int) -> list[float]:
            heads.run(hidden)
            return [1e3 * heads.seconds]

        return run_heads
    draft, info = decoder.draft, decoder.bundle.manifest.drafting
    assert draft is not None and info is not None
    least = min(_least_capacity(decoder), info.max_length)
    cache = _filled(draft, min(past, info.max_length - 2 * widest), 2 * widest, rng, least)
    return lambda rows: [
        _call(cache, rows, seen, wanted, rng) for seen, wanted in ((rows, 1), (rows, rows), (2 * rows, rows))
    ]


def _least_capacity(decoder: Decoder) -> int:
    """Of caches to measure with. Attention of dialect scatter reads whole caches: they must be as large as in use."""
    return decoder.capacity if decoder.bundle.manifest.graphs["target"].dialect == "scatter" else 0


def _filled(model: Target, past: int, room: int, rng: np.random.Generator, least: int = 0) -> OrtCache:
    """A cache that holds `past` tokens of noise: pages never written would all be the same one, which costs nothing to
    read.

    Args:
        least: capacity that it has at least.
    """
    cache = model.open(max(past + room, least))
    assert isinstance(cache, OrtCache)
    kv_heads, head_dim = cache.buffer.shape[2], cache.buffer.shape[4]
    cache.buffer[...] = rng.standard_normal((1, 1, kv_heads, cache.buffer.shape[3], head_dim), np.float32)
    cache.length = past
    return cache


def _call(cache: OrtCache, rows: int, seen: int, wanted: int, rng: np.random.Generator) -> float:
    """Milliseconds of a call for `rows` new tokens that asks for the logits of the last `wanted`, where the mask speaks
    about `seen` rows behind the past."""
    model, features = cache.target, None
    if model.features:
        features = rng.standard_normal((rows, model.features), np.float32)
    positions = cache.length + seen - rows + np.arange(rows)
    mask = np.tri(rows, seen, seen - rows, dtype=np.bool_)
    cache.run(
        rng.integers(model.vocab_size, size=rows), positions, mask, np.arange(rows - wanted, rows), features=features
    )
    return 1e3 * cache.seconds
