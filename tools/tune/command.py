"""`speccompile tune`: its options and tables. What it runs is imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from speccompile.graphs.costs import Costs
    from speccompile.graphs.manifest import Manifest

notes = Console(stderr=True)
ROWS = {
    "speedup": "gain over plain decoding",
    "mean_accepted_tokens": "tokens a round*",
    "round_ms": "ms a round",
    "draft_ms": "ms of it drafting",
    "host_ms": "ms of it outside**",
}


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path), help="Prompts to tune on, one a line or JSONL. Default: ours.")
@click.option("--prompts", type=click.IntRange(min=1), default=16, show_default=True, help="Prompts to tune on.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Of each answer.")
@click.option("--threads", type=int, help="Default: the cores this process may use.")
@click.option("--dry-run", is_flag=True, help="Write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as one object.")
def tune(
    bundle: Path,
    text: Path | None,
    prompts: int,
    max_new_tokens: int,
    threads: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measure BUNDLE on this machine and choose its draft tree, or plain decoding where guesses do not pay."""
    from speccompile.runtime.backends import ort
    from speccompile.tools.tune.tuning import tune as work

    ort.share_threads(threads)
    with Console(stderr=True, quiet=as_json).status("starting") as status:
        manifest = work(
            bundle,
            text=text,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            threads=threads,
            dry_run=dry_run,
            report=status.update,
        )
    if as_json:
        click.echo(json.dumps(manifest.measured))
        return
    show(manifest, notes)
    notes.print(f"{bundle}: nothing was written" if dry_run else f"wrote [bold]{bundle / 'manifest.json'}[/bold]")


def show(manifest: Manifest, out: Console) -> None:
    """Print the costs, the best settings, and what was predicted and measured."""
    measured = manifest.measured
    if manifest.costs is not None:
        out.print(cost_table(manifest.costs))
    if "candidates" not in measured:
        return
    table = Table(
        "best settings", "gain", "tokens*", "nodes", "ms", "drafting", "outside**", title="predicted, by round"
    )
    for facts in measured["candidates"]:
        numbers = (facts[name] for name in ("mean_accepted_tokens", "nodes", "round_ms", "draft_ms", "host_ms"))
        table.add_row(facts["name"], f"{facts['speedup']:.3f}x", *(f"{number:.2f}" for number in numbers))
    out.print(table)
    table = Table(measured["candidates"][0]["name"], "predicted", "measured")
    for name, text in ROWS.items():
        table.add_row(text, f"{measured['predicted'][name]:.3f}", f"{measured['measured'][name]:.3f}")
    out.print(table)
    out.print("measured on prompts that were not tuned on, prefill left out; * bonus included; ** of ONNX Runtime")
    choice = "do not speculate" if measured["off"] else measured["candidates"][0]["name"]
    out.print(f"choice: [bold]{choice}[/bold]")


def cost_table(costs: Costs) -> Table:
    """Milliseconds of a target call."""
    table = Table("tokens", *(f"ms behind {past}" for past in costs.pasts))
    for count, *row in zip(costs.tokens, *costs.target, strict=True):
        table.add_row(f"{count}", *(f"{value:.2f}" for value in row))
    return table
