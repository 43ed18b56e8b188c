"""The competition: everybody answers every prompt, in changing order; then times, tokens and words are compared.

Times are wall time of the whole answer, prefill included; "decode" leaves out the target's and the drafter's prefill.
Of a prompt's repeats the median one counts (the faster of two in the middle). A speed-up is a ratio of times per token;
its quartiles are over all pairs of runs, which had the same prompt and the same repeat.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from speccompile.graphs.errors import ProofError
from speccompile.tools.bench.contestants import Contestant, Run

MOST_ORDERS = 720


def compete(
    contestants: Sequence[Contestant],
    prompts: Sequence[list[int]],
    tasks: Sequence[str],
    *,
    repeats: int = 1,
    warm_up: int = 1,
    greedy: bool = True,
    console: Console | None = None,
) -> dict[str, Any]:
    """Let every contestant answer every prompt, and report.

    Args:
        contestants: the first one decodes plainly.
        tasks: what each prompt belongs to.
        warm_up: so many prompts are answered once before, untimed: caches, thread pools, first-touch pages.
        greedy: whether answers are to be the same, which is then checked.
    """
    for contestant, ids in itertools.product(contestants, prompts[:warm_up]):
        contestant.prepare(ids)
        contestant.answer(ids)
    # Who runs after whom matters (another program's weights have filled the caches), so all orders take turns. A
    # machine that slows down slows all alike.
    turns = list(itertools.product(range(repeats), enumerate(prompts)))
    console = console or Console(stderr=True)
    for (_, (number, ids)), order in zip(track(turns, "answering", console=console), orders(contestants), strict=False):
        for contestant in order:
            contestant.run(number, ids)
    of_task = {task: [i for i, t in enumerate(tasks) if t == task] for task in dict.fromkeys(tasks)}
    first = contestants[0]

    def summaries(chosen: Sequence[int]) -> list[dict[str, Any]]:
        return [{"name": c.name, **c.facts, **summary(c, c.plain or first, first, chosen)} for c in contestants]

    return {
        "prompts": len(prompts),
        "contestants": summaries(range(len(prompts))),
        "tasks": {task: summaries(chosen) for task, chosen in of_task.items() if len(of_task) > 1},
        "identity": [judged(c, prompts) for c in contestants if c.decoder and (c.plain or repeats > 1) and greedy],
        "compared": [compared(c, first) for c in contestants if c.plain is None and c is not first and greedy],
    }


def orders(contestants: Sequence[Contestant]) -> Iterator[tuple[Contestant, ...]]:
    """All orders in turn, for ever, when they are few; else random ones, always the same."""
    if math.factorial(len(contestants)) <= MOST_ORDERS:
        return itertools.cycle(itertools.permutations(contestants))
    rng = random.Random(0)
    return (tuple(rng.sample(contestants, len(contestants))) for _ in itertools.count())


# ---- times ----


def median_run(runs: Sequence[Run]) -> Run:
    """The run whose time is the median, the lower of two."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def summary(contestant: Contestant, plain: Contestant, first: Contestant, chosen: Sequence[int]) -> dict[str, Any]:
    """Figures over the prompts `chosen`: beside `plain`, who decodes the same graph, and beside the `first` plain."""
    runs = [median_run(contestant.runs[number]) for number in chosen]
    pace = _ms_per_token(contestant, chosen)
    facts: dict[str, Any] = {
        "plain": plain.name,
        "tokens": sum(len(run.reply) for run in runs),
        "ms_per_token": pace,
        "tokens_per_second": 1e3 / pace,
        "speedup_over_plain": _ms_per_token(plain, chosen) / pace,
        "speedup_quartiles": _quartiles(contestant, plain, chosen),
        "speedup_over_first_plain": _ms_per_token(first, chosen) / pace,
        "first_plain_quartiles": _quartiles(contestant, first, chosen),
    }
    stats = [run.reply.stats for run in runs if run.reply.stats is not None]
    if len(stats) < len(runs):
        return facts
    rounds = sum(s.rounds for s in stats)
    seconds = {stage: sum(s.seconds[stage] for s in stats) for stage in stats[0].seconds}
    steps = {stage: value for stage, value in seconds.items() if stage != "prefill"}
    lengths = [sum(counts) for counts in itertools.zip_longest(*(s.rounds_by_length for s in stats), fillvalue=0)]
    decode, plain_decode = _decode_ms_per_token(contestant, chosen), _decode_ms_per_token(plain, chosen)
    return facts | {
        "decode_ms_per_token": decode,
        "decode_speedup_over_plain": plain_decode / decode if plain_decode and decode else None,
        "mean_accepted_tokens": sum(s.emitted - 1 for s in stats) / max(rounds, 1),
        "most_tokens_in_a_round": max(s.longest_round for s in stats),
        "rounds_by_length": lengths,
        # [d - 1]: how often a guess at depth d was kept
        "acceptance_by_depth": [sum(lengths[depth + 1 :]) / rounds for depth in range(1, len(lengths) - 1)],
        "rounds": rounds,
        "plain_rounds": sum(s.plain_rounds for s in stats),
        "stepped_back": sum(s.stepped_back for s in stats),
        "drafted_per_round": sum(s.drafted for s in stats) / max(rounds, 1),
        "ms_per_round": {stage: 1e3 * value / max(rounds, 1) for stage, value in steps.items()},
        # accept, commit and host are the time outside the backend
        "outside_backend": (steps["host"] + steps["accept"] + steps["commit"]) / max(sum(steps.values()), 1e-9),
        "prefill_seconds": seconds["prefill"],
    }


def _ms_per_token(contestant: Contestant, chosen: Sequence[int]) -> float:
    runs = [median_run(contestant.runs[number]) for number in chosen]
    return 1e3 * sum(run.seconds for run in runs) / max(sum(len(run.reply) for run in runs), 1)


def _decode_ms_per_token(contestant: Contestant, chosen: Sequence[int]) -> float | None:
    """None when no answer went on after its first token."""
    stats = [median_run(contestant.runs[number]).reply.stats for number in chosen]
    tokens = sum(s.emitted - 1 for s in stats if s)
    return 1e3 * sum(s.decode_seconds for s in stats if s) / tokens if tokens else None


def _quartiles(contestant: Contestant, plain: Contestant, chosen: Sequence[int]) -> list[float]:
    """Of the speed-up over `plain`."""
    ratios = [
        (theirs.seconds / max(len(theirs.reply), 1)) / (ours.seconds / max(len(ours.reply), 1))
        for number in chosen
        for ours, theirs in zip(contestant.runs[number], plain.runs[number], strict=True)
    ]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


# ---- words ----


def judged(contestant: Contestant, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Whether all its answers are those of plain decoding of the same graph.

    Where two differ, the gap between the best two logits there tells whether it was a tie, which rounding may break
    either way.
    """
    from speccompile.compiler.prove import first_difference, tie_gap, top_two_gap

    plain = contestant.plain or contestant
    assert plain.decoder is not None
    equal = ties = 0
    least = tie_gap(plain.decoder)
    wrong: list[dict[str, Any]] = []
    for number, ids in enumerate(prompts):
        expected = plain.runs[number][0].reply.tokens
        places = [first_difference(expected, run.reply.tokens) for run in contestant.runs[number]]
        place = next((place for place in places if place is not None), None)
        if place is None:
            equal += 1
        elif (gap := top_two_gap(plain.decoder, [*ids, *expected[:place]])) < least:
            ties += 1
        else:
            wrong.append({"prompt": number, "token": place, "gap": gap})
    names = [plain.name, contestant.name]
    return {"names": names, "equal": equal, "ties": ties, "tie_gap": least, "different": wrong}


def compared(contestant: Contestant, first: Contestant) -> dict[str, Any]:
    """How far the answers of another graph or program go along with those of the first plain contestant."""
    from speccompile.compiler.prove import first_difference

    pairs = zip(first.runs, contestant.runs, strict=True)
    places = [first_difference(ours[0].reply.tokens, theirs[0].reply.tokens) for ours, theirs in pairs]
    parted = [place for place in places if place is not None]
    return {
        "names": [first.name, contestant.name],
        "equal": places.count(None),
        "parted": len(parted),
        "mean_token_of_parting": statistics.fmean(parted) if parted else None,
    }


def require_identity(result: dict[str, Any]) -> None:
    """Raises:
    ProofError: when a contestant's greedy tokens are not those of plain decoding with the same graph.
    """
    for row in result["identity"]:
        if row["different"]:
            plain, name = row["names"]
            worst = row["different"][0]
            raise ProofError(
                f"identity: '{name}' and '{plain}' differ in {len(row['different'])} answers, first at token "
                f"{worst['token']} of prompt {worst['prompt']}, where the best two logits are {worst['gap']:.2g} apart "
                f"(a tie is below {row['tie_gap']:g}); check the bundle with 'speccompile verify'."
            )
