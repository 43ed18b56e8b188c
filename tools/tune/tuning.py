"""`tune`: measure, search, predict, measure the prediction, write the manifest."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnxruntime

from speccompile.graphs.errors import BundleError, SpecCompileError
from speccompile.graphs.manifest import MANIFEST_FILE, Manifest
from speccompile.graphs.tree import ROOT_ALONE, DynamicTree
from speccompile.runtime import Decoder, Stats
from speccompile.runtime.backends import ort
from speccompile.runtime.bundle import Bundle
from speccompile.runtime.stats import STAGES
from speccompile.tools.tune.costs import CallCosts, Report, RoundCosts, measure_calls
from speccompile.tools.tune.recording import DEEPEST, Recorded, record
from speccompile.tools.tune.replay import count_ranks, look_ahead, replay
from speccompile.tools.tune.search import (
    NODES,
    Prediction,
    best_fixed_tree,
    climb,
    families,
    predict,
    true_ranks,
    windows,
    worthwhile_nodes,
)
from speccompile.tools.tune.setting import Setting
from speccompile.tools.tune.texts import Sample, answer, read_prompts

LEAST_GAIN = 1.02
"""A smaller predicted gain is none: it is about what the medians of two equal calls differ by, and sampled requests
accept fewer guesses than the greedy ones that were counted."""

DEAREST = 3.0
"""Plain steps that a round's target call may cost: with a gain of 1.5, a dearer one would have to emit more than 4.5
tokens, and larger trees take long to record."""

OUTSIDE = ("host", "accept", "commit")  # stages of a round that are not the backend's
TRIALS = 2  # answers that the loop's own time is taken from
LIVE_SAMPLES = 4  # answers that every lookahead window is tried on
BEST_SHOWN = 5

Noted = Sequence[tuple[Sample, Recorded]]


def tune(
    bundle: Path,
    *,
    text: Path | None = None,
    prompts: int = 16,
    max_new_tokens: int = 64,
    threads: int | None = None,
    provider: str | None = None,
    dry_run: bool = False,
    report: Report = lambda _: None,
) -> Manifest:
    """Choose how to draft with a bundle on this machine, or not to; write `tree`, `costs` and `measured`.

    Args:
        text: file of prompts, instead of ours; every other one is kept for measuring.
        prompts: most prompts to tune on; as many are measured on.
        max_new_tokens: longest answer.
        threads, provider: as in `runtime.load`.
        dry_run: writes nothing.
        report: called with what is being done.

    Returns:
        the manifest as it is written.

    Raises:
        BundleError: when the bundle cannot be read, or its manifest not be written.
        SpecCompileError: when there is no text to tune on.
    """
    found = Bundle.open(bundle)
    manifest = found.manifest
    if not dry_run and not os.access(found.path, os.W_OK):
        raise BundleError(f"{found.path}: cannot be written, so nothing would come of tuning; use --dry-run or a copy.")
    start = _start(manifest)
    # With its own tree it might not draft at all, and with its own costs not in every round.
    fresh = replace(found, manifest=replace(manifest, costs=None), tree=start.tree)
    decoder = start.of(Decoder(fresh, threads, provider))
    calls = measure_calls(decoder, report=report)
    machine = _machine(threads)
    if manifest.method == "plain":
        measured: dict[str, Any] = {"machine": machine, "choice": None, "off": True}
        return _written(found, replace(manifest, costs=calls.target, measured=measured), dry_run)
    tuned_on, held_out = read_prompts(decoder, text, prompts)
    samples = answer(decoder, tuned_on, max_new_tokens, report)
    report("timing the loop")
    costs = _round_costs(calls, decoder, samples)
    largest = worthwhile_nodes(costs, DEAREST, min(NODES[-1], decoder.capacity // 2))
    noted = _record(decoder, samples, largest, report)
    candidates = _search(decoder, noted, costs, largest, report)
    # How much a text lets a drafter guess differs from text to text. What is predicted is the gain on other texts than
    # the setting was chosen by, from their plain answers.
    others = _record(decoder, answer(decoder, held_out, max_new_tokens, report), largest, report)
    best = _predicted(decoder, candidates[0].setting, others, costs)
    report(f"measuring {best.setting}")
    gained = measure(decoder, best.setting, held_out, max_new_tokens)
    off = candidates[0].speedup < LEAST_GAIN or gained["speedup"] < 1
    chosen = replace(best.setting, tree=ROOT_ALONE) if off else best.setting
    measured = {
        "machine": machine,
        "acceptance": _acceptance(decoder, noted, largest),
        "candidates": [_facts(candidate) for candidate in candidates],
        "choice": chosen.to_json(),
        "predicted": {name: value for name, value in _facts(best).items() if isinstance(value, float)},
        "measured": gained,
        "off": off,
    }
    target = replace(calls.target, draft=best.draft_ms, host=best.host_ms)
    tuned = replace(
        manifest,
        tree=chosen.tree.to_json(),
        lookup=chosen.lookup,
        lookahead=chosen.lookahead,
        costs=target,
        measured=measured,
    )
    return _written(found, tuned, dry_run)


def measure(decoder: Decoder, setting: Setting, prompts: Sequence[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Decode prompts plainly and with a setting, one after the other and in turns first; compare the time per token,
    prefills left out.

    Raises:
        SpecCompileError: when no answer has more than one token.
    """
    speculating = setting.of(decoder)
    taken: dict[bool, list[Stats]] = {False: [], True: []}
    for number, ids in enumerate([prompts[0], *prompts]):
        for speculate in (number % 2 == 0, number % 2 == 1):
            sequence = speculating.new_sequence()
            done = speculating.generate(ids, max_new_tokens=max_new_tokens, speculate=speculate, sequence=sequence)
            if number:  # the first one is to warm up
                taken[speculate].append(done.stats)
    tokens = {speculate: sum(stats.emitted - 1 for stats in answers) for speculate, answers in taken.items()}
    if not all(tokens.values()):
        raise SpecCompileError(
            f"{decoder.bundle.path}: none of the {len(prompts)} prompts kept for measuring has an answer of two tokens "
            "or more; give other ones (--text)."
        )
    plain, ours = (1e3 * sum(s.decode_seconds for s in taken[on]) / tokens[on] for on in (False, True))
    rounds = sum(stats.rounds for stats in taken[True])
    decoding = [stage for stage in STAGES if stage != "prefill"]
    in_round = {stage: 1e3 * sum(s.seconds[stage] for s in taken[True]) / rounds for stage in decoding}
    return {
        "speedup": plain / ours,
        "mean_accepted_tokens": tokens[True] / rounds,
        "tokens": tokens[True],
        "plain_ms": plain,
        "round_ms": sum(in_round.values()),
        "draft_ms": in_round["draft"],
        "host_ms": sum(in_round[stage] for stage in OUTSIDE),
    }


# ---- the search ----


def _search(decoder: Decoder, noted: Noted, costs: RoundCosts, largest: int, report: Report) -> list[Prediction]:
    """The best settings, best first."""
    manifest, predictions = decoder.bundle.manifest, dict[Setting, Prediction]()

    def score(setting: Setting) -> float:
        if setting not in predictions:
            predictions[setting] = _predicted(decoder, setting, noted, costs)
            report(f"searching, {len(predictions)} settings tried")
        return predictions[setting].speedup

    if manifest.heads is not None:
        past = _mean_past(noted)
        fixed, _ = best_fixed_tree(
            true_ranks(noted), lambda n: costs.round(n, past, (1,)) if n > 1 else costs.plain(past), largest
        )
        if len(fixed) > 1:
            score(Setting(fixed, manifest.lookup))
    for family in families(manifest, largest):
        climb(family.axes, lambda *numbers: score(family.make(*numbers)))  # noqa: B023
    if manifest.lookahead is not None:
        few = noted[:: max(len(noted) // LIVE_SAMPLES, 1)]
        tried = windows(manifest.lookahead, worthwhile_nodes(costs, DEAREST, NODES[-1]))

        def look(setting: Setting, text: Noted) -> Prediction:
            report(f"trying {setting}")
            return _predicted(decoder, setting, text, costs)

        looked = [look(setting, few) for setting in tried]
        best = max(looked, key=lambda prediction: prediction.speedup)
        predictions |= {prediction.setting: prediction for prediction in looked}
        predictions[best.setting] = look(best.setting, noted)
    return _distinct(predictions.values())


def _record(decoder: Decoder, samples: Sequence[Sample], largest: int, report: Report) -> Noted:
    noted = []
    for number, sample in enumerate(samples, 1):
        report(f"recording what is drafted, answer {number} of {len(samples)}")
        noted.append((sample, record(decoder, sample, largest)))
    return noted


def _predicted(decoder: Decoder, setting: Setting, noted: Noted, costs: RoundCosts) -> Prediction:
    """What the rounds of known answers come to; those of a lookahead window are really run."""
    eos_ids = frozenset(decoder.bundle.manifest.eos_ids)
    if setting.lookahead is not None and setting.lookahead.window:
        return predict(setting, [r for sample, _ in noted for r in look_ahead(decoder, sample, setting)], costs)
    rounds = [
        r
        for sample, notes in noted
        for r in replay(sample, setting, notes, decoder.capacity, eos_ids, decoder.in_order)
    ]
    return predict(setting, rounds, costs)


def _distinct(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The best few; of those that come to the same, the one that was tried first."""
    ranked: dict[tuple[float, float], Prediction] = {}
    for prediction in sorted(predictions, key=lambda prediction: -prediction.speedup):
        ranked.setdefault((prediction.speedup, prediction.mean_accepted_tokens), prediction)
    return list(ranked.values())[:BEST_SHOWN]


def _mean_past(noted: Noted) -> int:
    return sum(len(sample.prompt) + len(sample.answer) // 2 for sample, _ in noted) // len(noted)


def _acceptance(decoder: Decoder, noted: Noted, largest: int) -> dict[str, Any]:
    """How often guesses of each depth and rank are right, with the largest tree of the first drafter alone."""
    manifest = decoder.bundle.manifest
    setting = Setting(DynamicTree(largest))
    if manifest.heads is None and manifest.drafting is None:
        if (looked := Setting(ROOT_ALONE, manifest.lookup, manifest.lookahead).looks_up) is None:
            return {}
        setting = Setting(DynamicTree(NODES[-1]), looked)
    elif manifest.drafting is not None:
        setting = Setting(DynamicTree(largest, depth=DEEPEST))
    counts = count_ranks(noted, setting, decoder.capacity, frozenset(manifest.eos_ids))
    shares = [[round(share, 4) for share in row] for row in counts.shares()[:DEEPEST]]
    return {"shares": shares, "places": counts.places[:DEEPEST]}


def _start(manifest: Manifest) -> Setting:
    """A middling setting, to load the bundle with and to time the loop."""
    ahead = manifest.lookahead
    if ahead is not None and ahead.window:
        return Setting(DynamicTree(ahead.nodes), lookahead=ahead)
    return Setting(DynamicTree(8, 0.05), manifest.lookup, ahead)


def _round_costs(calls: CallCosts, decoder: Decoder, samples: Sequence[Sample]) -> RoundCosts:
    """Add what the loop takes outside the backend: of plain steps, and of rounds with a middling setting."""

    def outside(stats: Sequence[Stats]) -> float:
        spent = sum(s.seconds[stage] for s in stats for stage in OUTSIDE)
        return 1e3 * spent / max(sum(s.rounds for s in stats), 1)

    plain = outside([sample.stats for sample in samples])
    trials = [
        decoder.generate(sample.prompt, max_new_tokens=sample.limit, sequence=decoder.new_sequence()).stats
        for sample in samples[:TRIALS]
    ]
    ours, called = outside(trials), sum(s.draft_calls for s in trials) / max(sum(s.rounds for s in trials), 1)
    if not called:
        return RoundCosts(calls, plain, ours)
    return RoundCosts(calls, plain, plain, max(ours - plain, 0.0) / called)


# ---- the manifest ----


def _facts(prediction: Prediction) -> dict[str, Any]:
    numbers = {name: value for name, value in asdict(prediction).items() if name != "setting"}
    return {"name": str(prediction.setting), **prediction.setting.to_json(), **numbers}


def _machine(threads: int | None) -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": ort.available_cores(),
        "threads": threads or ort.available_cores(),
        "onnxruntime": onnxruntime.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _written(bundle: Bundle, manifest: Manifest, dry_run: bool) -> Manifest:
    """Replace the bundle's manifest in one step; no other file of it changes."""
    if dry_run:
        return manifest
    file = bundle.path / MANIFEST_FILE
    partial = file.with_name(f".{MANIFEST_FILE}.partial-{os.getpid()}")
    data = json.dumps(manifest.to_json(), indent=1) + "\n"
    Manifest.from_json(json.loads(data), str(partial))  # what cannot be read must not be written
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError as error:
        raise BundleError(f"{file}: cannot be written ({error.strerror}); it is as it was.") from error
    finally:
        partial.unlink(missing_ok=True)
    return manifest
