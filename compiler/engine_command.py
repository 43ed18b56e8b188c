"""`speccompile engine`: TensorRT engines of a published bundle."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import click
from rich.table import Table

from speccompile.graphs.engines import EngineSet
from speccompile.graphs.errors import EngineError

PACKAGES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # package -> module


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--runtime",
    type=click.Choice(list(PACKAGES)),
    default="tensorrt-rtx",
    show_default=True,
    help="tensorrt builds for the GPU that is there; tensorrt-rtx for any it knows, without one.",
)
@click.option("--target", "targets", multiple=True, help="GPU, such as sm89; may be repeated. Default: the one here.")
@click.option(
    "--max-length",
    type=int,
    help="Most tokens of prompt and answer, rounded up to 64s. Default: the bundle's, at most 4096.",
)
@click.option("--batch", type=int, default=1, show_default=True, help="Most texts in one call.")
@click.option("--max-tree", type=int, help="Most tokens in one call. Default: 64, or the nodes of the bundle's tree.")
@click.option("--lean", is_flag=True, help="tensorrt: for the package tensorrt-lean, too, which runs but cannot build.")
@click.option("--force", is_flag=True, help="Replace engines of the same version and target.")
@click.option("--verbose", is_flag=True, help="Show what TensorRT warned of.")
@click.option("--json", "as_json", is_flag=True, help="Print what engines.json says, one object per target.")
def engine(
    bundle: Path,
    runtime: str,
    targets: tuple[str, ...],
    max_length: int | None,
    batch: int,
    max_tree: int | None,
    lean: bool,
    force: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Build TensorRT engines of BUNDLE's graphs, into its folder engines."""
    from speccompile.compiler.cli import notes, progress
    from speccompile.compiler.engine import build_engines

    module = load_module(runtime)
    with progress(as_json) as report:
        sets = build_engines(
            module,
            bundle,
            targets=targets,
            max_length=max_length,
            batch=batch,
            max_tree=max_tree,
            report=report,
            force=force,
            lean=lean,
        )
    if verbose:
        for made in sets:
            for name, warnings in made.measured["warnings"].items():
                for line in warnings:
                    notes.print(f"{made.target} {name}: {line}", style="yellow", markup=False)
    if as_json:
        click.echo(json.dumps([made.to_json() for made in sets]))
        return
    notes.print(engines_table(sets))
    notes.print(f"built for {sets[0].runtime} {sets[0].version} in [bold]{bundle}[/bold]")


def load_module(package: str) -> ModuleType:
    """The TensorRT module of a package.

    Raises:
        EngineError: when it cannot be imported.
    """
    try:
        return importlib.import_module(PACKAGES[package])
    except ImportError as error:
        raise EngineError(
            f"--runtime: {PACKAGES[package]} cannot be imported ({error}); install it with pip install {package}."
        ) from error


def engines_table(sets: list[EngineSet]) -> Table:
    """Sizes, seconds and memory."""
    table = Table("target", "engine", "MB", "seconds", "peak memory MB")
    for made in sets:
        peak = made.measured["peak_bytes"]
        for name, info in made.engines.items():
            seconds = f"{made.measured['seconds'][name]:.1f}"
            table.add_row(made.target, name, f"{info.bytes / 1e6:.1f}", seconds, f"{peak / 1e6:.0f}" if peak else "?")
    return table
