"""Speculative against plain against transformers: the same prompts, side by side in one run, and the same words.

    python -m speccompile.tools.bench BUNDLE [--model MODEL] [--prompts N] [--max-new-tokens N] [--tree FILE ...]

Every prompt is answered by each contestant in turn, so that a machine that slows down slows all of them, and the order
changes from prompt to prompt. Times are wall time of the whole answer, prefill included. Each answer starts from an
empty cache. Greedy tokens of all contestants are compared; where two differ, the gap between the best two logits there
decides whether it was a tie that rounding may break either way.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speccompile.graphs.errors import SpecCompileError
from speccompile.graphs.tree import DraftTree, read_tree
from speccompile.runtime import Decoder, load
from speccompile.runtime.backends.ort import available_cores
from speccompile.tools.prompts import MT_BENCH, first_turns

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

    @property
    def ms_per_token(self) -> float:
        return 1e3 * sum(self.seconds) / sum(map(len, self.tokens))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Also time transformers' generate on this model.")
@click.option("--prompts", type=int, default=80, show_default=True)
@click.option("--file", type=click.Path(path_type=Path), default=MT_BENCH, help="Prompt file. Default: MT-bench.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--tree", "trees", multiple=True, help="Also try this tree (JSON file or name); may be repeated.")
@click.option("--threads", type=int, help="Default: the cores this process may use.")
@click.option("--json", "as_json", is_flag=True)
def main(
    bundle: Path,
    model: Path | None,
    prompts: int,
    file: Path,
    max_new_tokens: int,
    trees: tuple[str, ...],
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare speculative decoding with plain decoding of the same bundle, and with transformers."""
    try:
        texts = first_turns(file, prompts)
        decoder = load(bundle, threads)
        contestants = [bundle_contestant(decoder, PLAIN, False, max_new_tokens)]
        if decoder.heads is not None:
            contestants.append(bundle_contestant(decoder, decoder.bundle.manifest.method, True, max_new_tokens))
        for name in trees:
            tree = read_tree(name)
            contestants.append(bundle_contestant(decoder, Path(name).stem, True, max_new_tokens, tree))
        if model is not None:
            contestants.insert(0, transformers_contestant(model, max_new_tokens, threads))
        result = compete(decoder, contestants, texts)
    except SpecCompileError as error:
        sys.exit(f"error: {error}")
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)


def bundle_contestant(
    decoder: Decoder, name: str, speculate: bool, max_new_tokens: int, tree: DraftTree | None = None
) -> Contestant:
    def answer(ids: list[int]) -> tuple[list[int], Any]:
        decoder.tree = tree or decoder.bundle.tree
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

    torch.set_num_threads(threads or available_cores())
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


def compete(decoder: Decoder, contestants: list[Contestant], texts: list[str]) -> dict[str, Any]:
    """Let every contestant answer every prompt, compare words and times."""
    chat = decoder.text.chat_template is not None
    prompts = [decoder.text.chat([{"role": "user", "content": t}]) if chat else decoder.text.encode(t) for t in texts]
    for contestant in contestants:  # warm up: caches, thread pools, first-touch pages
        contestant.answer(prompts[0])
    # Who runs after whom matters (another program's weights have filled the caches), so all orders take turns.
    orders = itertools.cycle(itertools.islice(itertools.permutations(contestants), MOST_ORDERS))
    for ids, order in zip(track(prompts, "answering", console=console), orders, strict=False):
        for contestant in order:
            contestant.run(ids)
    plain = next(c for c in contestants if c.name == PLAIN)
    return {
        "prompts": len(prompts),
        "contestants": [_summary(c, plain) for c in contestants],
        "identity": [_identity(decoder, prompts, plain, c) for c in contestants if c is not plain],
    }


def _summary(contestant: Contestant, plain: Contestant) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(plain.seconds, contestant.seconds, strict=True)]
    facts: dict[str, Any] = {
        "name": contestant.name,
        "ms_per_token": contestant.ms_per_token,
        "tokens": sum(map(len, contestant.tokens)),
        "speedup_over_plain": plain.ms_per_token / contestant.ms_per_token,
        "speedup_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3,
    }
    if all(contestant.stats):
        stats = contestant.stats
        seconds = {stage: sum(s.seconds[stage] for s in stats) for stage in stats[0].seconds}
        rounds = sum(s.rounds for s in stats)
        steps = {stage: value for stage, value in seconds.items() if stage != "prefill"}
        facts |= {
            "mean_accepted_tokens": sum(s.emitted - 1 for s in stats) / max(rounds, 1),
            "rounds": rounds,
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
    table = Table("", "ms/token", "against plain", "mean accepted tokens*", "outside ONNX Runtime")
    for facts in result["contestants"]:
        accepted = f"{facts['mean_accepted_tokens']:.2f}" if "rounds" in facts else ""
        outside = f"{100 * facts['outside_backend']:.1f} %" if "rounds" in facts else ""
        low, _, high = facts["speedup_quartiles"]
        speed = f"{facts['speedup_over_plain']:.2f}x ({low:.2f} .. {high:.2f})"
        table.add_row(facts["name"], f"{facts['ms_per_token']:.1f}", speed, accepted, outside)
    out.print(table)
    out.print(f"{result['prompts']} prompts; in brackets the quartiles over prompts; * per round, bonus included")
    for row in result["identity"]:
        out.print(
            f"{row['names'][1]} = {row['names'][0]}: {row['equal']} answers equal, {row['ties']} part at a tie "
            f"(gap < {TIE_GAP:g}), {len(row['different'])} differ {row['different'] or ''}"
        )


if __name__ == "__main__":
    main()
