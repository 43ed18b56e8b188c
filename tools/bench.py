"""Speculative against plain against transformers: the same prompts, side by side in one run, and the same words.

    python -m speccompile.tools.bench BUNDLE... [--model MODEL] [--prompts N | --per-task N --file FILE] [--lookup] ...

Every prompt is answered by each contestant in turn, so that a machine that slows down slows all of them, and the order
changes from prompt to prompt. Times are wall time of the whole answer, prefill included; "decoding" leaves out the
target's and the drafter's prefill. Each answer starts from an empty cache. Greedy tokens of all contestants are
compared; where two differ, the gap between the best two logits there decides whether it was a tie that rounding may
break either way.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speccompile.graphs.errors import SpecCompileError
from speccompile.graphs.settings import LOOKUP_TREE, LookaheadSettings, LookupSettings
from speccompile.graphs.tree import DraftTree, DynamicTree, read_tree
from speccompile.runtime import Decoder, load
from speccompile.runtime.backends import ort
from speccompile.runtime.stats import STAGES
from speccompile.tools.prompts import MT_BENCH, Question, read_questions, spread

TIE_GAP = 1e-4
MOST_ORDERS = 720
PLAIN, TRANSFORMERS = "plain", "transformers"

console = Console(stderr=True)


@dataclass
class Contestant:
    """One way of answering: `answer(ids)` gives (new token ids, Stats or None)."""

    name: str
    answer: Callable[[list[int]], tuple[list[int], Any]]
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)

    def run(self, ids: list[int]) -> None:
        before = time.perf_counter()
        tokens, stats = self.answer(ids)
        self.seconds.append(time.perf_counter() - before)
        self.tokens.append(tokens)
        self.stats.append(stats)


@click.command()
@click.argument("bundles", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--model", type=click.Path(path_type=Path), help="Also time transformers' generate on this model.")
@click.option("--prompts", type=int, help="First N questions of the file. Default: all.")
@click.option("--per-task", type=int, help="N questions of each task, evenly spaced.")
@click.option("--file", type=click.Path(path_type=Path), default=MT_BENCH, help="Prompt file. Default: MT-bench.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--tree", "trees", multiple=True, help="Also try this tree with the first bundle; may be repeated.")
@click.option("--lookahead", "windows", multiple=True, help="Also lookahead W,N,G with the first bundle's target.")
@click.option("--lookup", is_flag=True, help="Also prompt lookup with the first bundle's target.")
@click.option("--also", is_flag=True, help="Also every bundle that drafts, its guesses joined by prompt lookup's.")
@click.option("--threads", type=int, help="Default: the cores this process may use.")
@click.option("--json", "as_json", is_flag=True)
def main(
    bundles: tuple[Path, ...],
    model: Path | None,
    prompts: int | None,
    per_task: int | None,
    file: Path,
    max_new_tokens: int,
    trees: tuple[str, ...],
    windows: tuple[str, ...],
    lookup: bool,
    also: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare ways of decoding BUNDLES with plain decoding of the first one, and with transformers."""
    try:
        ort.share_threads(threads)
        questions = read_questions(file)
        questions = questions[:prompts] if per_task is None else spread(questions, per_task)
        if not questions:
            raise SpecCompileError(f"{file}: no questions to ask; give a file with some, and --prompts of 1 or more.")
        decoders = [load(bundle, threads) for bundle in bundles]
        first, methods = decoders[0], [decoder.bundle.manifest.method for decoder in decoders]
        if also and all(decoder.heads is None and decoder.draft is None for decoder in decoders):
            raise SpecCompileError(
                f"--also: {bundles[0]} has nothing that drafts, for prompt lookup to join; give such."
            )
        ways = [
            (method if methods.count(method) == 1 else bundle.stem, decoder)
            for method, bundle, decoder in zip(methods, bundles, decoders, strict=True)
            if method != PLAIN
        ]
        ways += [(tree, variant(first, read_tree(tree))) for tree in trees]
        ways += [(f"lookahead {window}", lookahead_variant(first, window)) for window in windows]
        if lookup:
            ways.append(("prompt-lookup", lookup_variant(first)))
        if also:
            ways += [
                (f"{name} and lookup", variant(decoder, decoder.tree, lookup=LookupSettings()))
                for name, decoder in ways[: len(bundles)]
                if decoder in decoders and (decoder.heads or decoder.draft)
            ]
        contestants = [bundle_contestant(first, PLAIN, False, max_new_tokens)]
        contestants += [bundle_contestant(decoder, name, True, max_new_tokens) for name, decoder in ways]
        if model is not None:
            contestants.insert(0, transformers_contestant(model, max_new_tokens, threads))
        result = compete(first, contestants, questions)
    except SpecCompileError as error:
        sys.exit(f"error: {error}")
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)


def variant(decoder: Decoder, tree: DraftTree, **changes: Any) -> Decoder:
    """The same loaded graphs with another tree and other fields in the manifest."""
    other = copy.copy(decoder)
    other.bundle = replace(decoder.bundle, manifest=replace(decoder.bundle.manifest, **changes), tree=tree)
    other.tree = tree
    return other


def lookup_variant(decoder: Decoder) -> Decoder:
    """Prompt lookup, whatever the bundle was built for."""
    other = variant(decoder, LOOKUP_TREE, method="prompt-lookup", lookup=LookupSettings(), lookahead=None)
    other.heads = other.draft = None
    return other


def lookahead_variant(decoder: Decoder, numbers: str) -> Decoder:
    """Lookahead with W,N,G, whatever the bundle was built for."""
    try:
        window, ngram, guesses = map(int, numbers.split(","))
    except ValueError as error:
        raise SpecCompileError(f"--lookahead: '{numbers}' is not W,N,G; give three whole numbers.") from error
    settings = LookaheadSettings(window, ngram, guesses)
    other = variant(decoder, DynamicTree(settings.nodes), method="lookahead", lookahead=settings, lookup=None)
    other.heads = other.draft = None
    return other


def bundle_contestant(decoder: Decoder, name: str, speculate: bool, max_new_tokens: int) -> Contestant:
    def answer(ids: list[int]) -> tuple[list[int], Any]:
        done = decoder.generate(
            ids, max_new_tokens=max_new_tokens, speculate=speculate, sequence=decoder.new_sequence()
        )
        return done.token_ids, done.stats

    return Contestant(name, answer)


def transformers_contestant(model: Path, max_new_tokens: int, threads: int | None) -> Contestant:
    """transformers' own greedy `generate` in float32, with its default attention."""
    import torch
    from transformers import GenerationConfig

    from speccompile.compiler.checkpoint import read_model

    torch.set_num_threads(threads or ort.available_cores())
    source = read_model(model)
    source.model.set_attn_implementation("sdpa")
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(source.eos_ids),
        pad_token_id=source.eos_ids[0],
    )

    def answer(ids: list[int]) -> tuple[list[int], Any]:
        prompt = torch.tensor([ids])
        out = source.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        return out[0, len(ids) :].tolist(), None

    return Contestant(TRANSFORMERS, answer)


def compete(decoder: Decoder, contestants: list[Contestant], questions: list[Question]) -> dict[str, Any]:
    """Let every contestant answer every question, compare words and times."""
    chat = decoder.text.chat_template is not None
    texts = [question.text for question in questions]
    prompts = [decoder.text.chat([{"role": "user", "content": t}]) if chat else decoder.text.encode(t) for t in texts]
    for contestant in contestants:  # warm up: caches, thread pools, first-touch pages
        contestant.answer(prompts[0])
    # Who runs after whom matters (another program's weights have filled the caches), so all orders take turns.
    orders = itertools.cycle(itertools.islice(_orders(contestants), MOST_ORDERS))
    for ids, order in zip(track(prompts, "answering", console=console), orders, strict=False):
        for contestant in order:
            contestant.run(ids)
    plain = next(c for c in contestants if c.name == PLAIN)
    tasks = [question.task for question in questions]
    of_task = {task: [i for i, t in enumerate(tasks) if t == task] for task in dict.fromkeys(tasks)}
    everything = list(range(len(prompts)))
    return {
        "prompts": len(prompts),
        "contestants": [{"name": c.name, **_summary(c, plain, everything)} for c in contestants],
        "tasks": {
            task: [{"name": c.name, **_summary(c, plain, chosen)} for c in contestants]
            for task, chosen in of_task.items()
            if len(of_task) > 1
        },
        "identity": [_identity(decoder, prompts, plain, c) for c in contestants if c is not plain],
    }


def _orders(contestants: list[Contestant]) -> Iterator[tuple[Contestant, ...]]:
    """All orders when they are few; else random ones, always the same."""
    if math.factorial(len(contestants)) <= MOST_ORDERS:
        return itertools.permutations(contestants)
    rng = random.Random(0)
    return (tuple(rng.sample(contestants, len(contestants))) for _ in itertools.count())


def _summary(contestant: Contestant, plain: Contestant, chosen: list[int]) -> dict[str, Any]:
    """Figures over the questions `chosen`."""

    def ms_per_token(c: Contestant) -> float:
        return 1e3 * sum(c.seconds[i] for i in chosen) / sum(len(c.tokens[i]) for i in chosen)

    def decode_ms_per_token(c: Contestant) -> float:
        return 1e3 * sum(c.stats[i].decode_seconds for i in chosen) / sum(len(c.tokens[i]) - 1 for i in chosen)

    ratios = [plain.seconds[i] / contestant.seconds[i] for i in chosen]
    facts: dict[str, Any] = {
        "ms_per_token": ms_per_token(contestant),
        "tokens": sum(len(contestant.tokens[i]) for i in chosen),
        "speedup_over_plain": ms_per_token(plain) / ms_per_token(contestant),
        "speedup_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3,
    }
    if all(contestant.stats):
        stats = [contestant.stats[i] for i in chosen]
        seconds = {stage: sum(s.seconds[stage] for s in stats) for stage in stats[0].seconds}
        rounds = sum(s.rounds for s in stats)
        steps = {stage: value for stage, value in seconds.items() if stage != "prefill"}
        facts |= {
            "decode_speedup_over_plain": decode_ms_per_token(plain) / decode_ms_per_token(contestant),
            "mean_accepted_tokens": sum(s.emitted - 1 for s in stats) / max(rounds, 1),
            "most_tokens_in_a_round": max(s.longest_round for s in stats),
            "rounds": rounds,
            "drafted_per_round": sum(s.drafted for s in stats) / max(rounds, 1),
            "ms_per_round": {stage: 1e3 * value / max(rounds, 1) for stage, value in steps.items()},
            # accept, commit and host are the time outside the backend
            "outside_backend": (steps["host"] + steps["accept"] + steps["commit"]) / max(sum(steps.values()), 1e-9),
            "prefill_seconds": seconds["prefill"],
        }
    return facts


def _identity(decoder: Decoder, prompts: list[list[int]], plain: Contestant, other: Contestant) -> dict[str, Any]:
    from speccompile.compiler.prove import first_difference, top_two_gap

    equal = ties = 0
    wrong: list[dict[str, Any]] = []
    for number, (ids, ours, theirs) in enumerate(zip(prompts, plain.tokens, other.tokens, strict=True)):
        place = first_difference(ours, theirs)
        if place is None:
            equal += 1
        elif (gap := top_two_gap(decoder, [*ids, *ours[:place]])) < TIE_GAP:
            ties += 1
        else:
            wrong.append({"prompt": number, "token": place, "gap": gap})
    return {"names": [PLAIN, other.name], "equal": equal, "ties": ties, "different": wrong}


def show(result: dict[str, Any]) -> None:
    """Print the comparison for a person."""
    out = Console()
    table = Table("", "ms/token", "against plain", "decoding", "mean accepted tokens*", "outside ONNX Runtime")
    for facts in result["contestants"]:
        decoding, accepted, outside = "", "", ""
        if "rounds" in facts:
            decoding = f"{facts['decode_speedup_over_plain']:.2f}x"
            accepted = f"{facts['mean_accepted_tokens']:.2f}"
            outside = f"{100 * facts['outside_backend']:.1f} %"
        low, _, high = facts["speedup_quartiles"]
        speed = f"{facts['speedup_over_plain']:.2f}x ({low:.2f} .. {high:.2f})"
        table.add_row(facts["name"], f"{facts['ms_per_token']:.1f}", speed, decoding, accepted, outside)
    out.print(table)
    out.print(
        f"{result['prompts']} prompts; in brackets the quartiles over prompts; decoding: without prefill; "
        "* per round, bonus included"
    )
    table = Table("milliseconds a round", *(stage for stage in STAGES if stage != "prefill"))
    for facts in result["contestants"]:
        if "rounds" in facts:
            table.add_row(facts["name"], *(f"{value:.2f}" for value in facts["ms_per_round"].values()))
    out.print(table)
    if result["tasks"]:
        names = [facts["name"] for facts in result["contestants"] if "rounds" in facts and facts["name"] != PLAIN]
        table = Table("decoding against plain (mean accepted tokens)", *names)
        for task, row in result["tasks"].items():
            cells = {
                f["name"]: f"{f['decode_speedup_over_plain']:.2f}x ({f['mean_accepted_tokens']:.2f})"
                for f in row
                if "rounds" in f
            }
            table.add_row(task, *(cells[name] for name in names))
        out.print(table)
    for row in result["identity"]:
        out.print(
            f"{row['names'][1]} = {row['names'][0]}: {row['equal']} answers equal, {row['ties']} part at a tie "
            f"(gap < {TIE_GAP:g}), {len(row['different'])} differ {row['different'] or ''}"
        )


if __name__ == "__main__":
    main()
