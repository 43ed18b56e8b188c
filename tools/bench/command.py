"""`speccompile bench`: speculative against plain against other programs, the same prompts side by side in one run."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from speccompile.graphs.errors import SpecCompileError
from speccompile.tools.prompts import MT_BENCH, Question, read_questions, spread

if TYPE_CHECKING:
    from speccompile.graphs.costs import Costs
    from speccompile.runtime import Decoder
    from speccompile.tools.bench.contestants import Asked, Contestant

PATH = click.Path(path_type=Path)
RANDOM_PROMPTS = 8

notes = Console(stderr=True)


@click.command()
@click.argument("bundles", type=PATH, nargs=-1, required=True)
@click.option(
    "--prompts-file",
    "--file",
    "file",
    type=PATH,
    default=MT_BENCH,
    help="JSONL in Spec-Bench's format, or text, one prompt a line. Default: MT-bench.",
)
@click.option("--prompts", type=click.IntRange(min=1), help="First N questions of the file. Default: all.")
@click.option("--per-task", type=click.IntRange(min=1), help="N questions of each task, evenly spaced.")
@click.option("--random-prompts", type=click.IntRange(min=1), metavar="LENGTH", help="Random tokens instead of a file.")
@click.option("--past", type=click.IntRange(min=0), default=0, help="Put N tokens of other text before each prompt.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="The median time counts.")
@click.option("--warm-up", type=click.IntRange(min=0), default=1, show_default=True, help="Prompts answered before.")
@click.option("--tree", "trees", multiple=True, help="Also try this tree with the first bundle; may be repeated.")
@click.option("--lookahead", "windows", multiple=True, help="Also lookahead W,N,G with the first bundle's target.")
@click.option("--lookup", is_flag=True, help="Also prompt lookup with the first bundle's target.")
@click.option("--also", is_flag=True, help="Also every bundle that drafts, its guesses joined by prompt lookup's.")
@click.option(
    "--synthetic-accept",
    "rates",
    type=float,
    multiple=True,
    metavar="RATE",
    help="Also an oracle that guesses right at this rate, with every target; may be repeated.",
)
@click.option(
    "--synthetic-tree",
    "shapes",
    multiple=True,
    default=("chain-4",),
    show_default=True,
    help="The oracle's tree; may be repeated.",
)
@click.option(
    "--synthetic-draft-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Milliseconds a round that the oracle pretends to draft.",
)
@click.option("--model", type=PATH, help="Also transformers' generate on this model (a folder or .gguf file).")
@click.option("--assistant", type=PATH, help="With --model: also its assisted generation, with this draft model.")
@click.option("--transformers-lookup", is_flag=True, help="With --model: also its prompt lookup.")
@click.option("--openvino", type=PATH, help="Also OpenVINO GenAI on this .gguf file or folder.")
@click.option("--llama-cpp", type=PATH, help="Also llama.cpp on this .gguf file.")
@click.option("--costs", is_flag=True, help="Measure what calls of the targets cost, where tune has not.")
@click.option("--plot", type=PATH, help="Draw the comparison into this picture, such as out.png.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: the cores this process may use.")
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of tables.")
def bench(
    bundles: tuple[Path, ...],
    file: Path,
    prompts: int | None,
    per_task: int | None,
    random_prompts: int | None,
    past: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    repeats: int,
    warm_up: int,
    threads: int | None,
    costs: bool,
    plot: Path | None,
    as_json: bool,
    **ways: Any,
) -> None:
    """Compare ways of decoding: BUNDLES, variants of them, other programs.

    Every prompt is answered by each contestant in turn, in an order that changes from prompt to prompt, from an empty
    cache. Greedy answers of a bundle must be those of plain decoding with the same graph; otherwise the exit status
    is 1. Answers of other programs are compared too, but not judged: other kernels round otherwise.
    """
    for option, value in (("--assistant", ways["assistant"]), ("--transformers-lookup", ways["transformers_lookup"])):
        if value and ways["model"] is None:
            raise SpecCompileError(f"{option}: transformers needs its model for that; give --model, too.")
    if plot is not None:
        _require_plot(plot)

    from speccompile.runtime.backends import ort
    from speccompile.tools.bench import asking, compete, contestants, report

    ort.share_threads(threads)
    asked = contestants.Asked(max_new_tokens, temperature, seed)
    decoders = contestants.load_all(bundles, threads)
    first = decoders[0]
    if random_prompts is None:
        questions = _questions(file, prompts, per_task)
        ids = asking.question_prompts(first.text, questions, past)
    else:
        questions = [Question("")] * (prompts or RANDOM_PROMPTS)
        eos_ids = first.bundle.manifest.eos_ids
        ids = asking.random_prompts(len(questions), random_prompts + past, first.target.vocab_size, eos_ids)
    plains = contestants.plain_contestants(decoders, asked)
    field = [*plains, *_speculative(decoders, plains, asked, **ways)]
    needed = asking.check_room(ids, max_new_tokens, decoders)
    known = {plain.name: _costs(plain, decoders, costs) for plain in plains}
    halfway = round(fmean(map(len, ids)) + max_new_tokens / 2)
    field += _synthetic(plains, known, halfway, asked, **ways)
    field += _baselines(first, needed, threads, asked, **ways)
    tasks = [question.task for question in questions]
    result = compete.compete(
        field, ids, tasks, repeats=repeats, warm_up=warm_up, greedy=temperature == 0, console=notes
    )
    result["costs"] = {name: asdict(table) for name, table in known.items() if table is not None}
    result["settings"] = {
        "bundles": [str(bundle) for bundle in bundles],
        "file": str(file) if random_prompts is None else None,
        "past": past,
        **asdict(asked),
        "repeats": repeats,
        "warm_up": warm_up,
        "threads": threads or ort.available_cores(),
        "onnxruntime": version("onnxruntime"),
    }
    if plot is not None:
        from speccompile.tools.bench.plot import save

        save(result, plot)
    if as_json:
        click.echo(json.dumps(result))
    else:
        report.show(result)
    compete.require_identity(result)


def _questions(file: Path, prompts: int | None, per_task: int | None) -> list[Question]:
    questions = read_questions(file)
    questions = questions[:prompts] if per_task is None else spread(questions, per_task)
    if not questions:
        raise SpecCompileError(f"{file}: it has no questions to ask; give a file with some.")
    return questions


def _require_plot(path: Path) -> None:
    """Better before hours of measuring than after."""
    from speccompile.tools.bench.baselines import module

    formats = module("matplotlib.backend_bases", "--plot").FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise SpecCompileError(f"--plot: {path} ends like no picture; use .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise SpecCompileError(f"--plot: the folder of {path} does not exist; make it, or write elsewhere.")


def _costs(plain: Contestant, decoders: list[Decoder], measure: bool) -> Costs | None:
    """What `tune` wrote into a bundle of this target, or else, when asked for, what is measured now."""
    from speccompile.graphs.costs import Costs
    from speccompile.tools.bench.contestants import target_of

    assert plain.decoder is not None
    same = [decoder for decoder in decoders if target_of(decoder) == target_of(plain.decoder)]
    written = next((d.bundle.manifest.costs for d in same if d.bundle.manifest.costs is not None), None)
    if written is not None or not measure:
        return written
    from speccompile.tools.tune.costs import PASTS, TOKENS, measure_target

    capacity = plain.decoder.capacity
    tokens = [count for count in TOKENS if count <= max(capacity // 2, 1)]
    pasts = sorted({min(past, capacity - tokens[-1]) for past in PASTS})
    notes.print(f"measuring what calls of {plain.name} cost")
    return Costs(tokens, pasts, measure_target(plain.decoder, tokens, pasts))


def _speculative(
    decoders: list[Decoder],
    plains: list[Contestant],
    asked: Asked,
    *,
    trees: tuple[str, ...],
    windows: tuple[str, ...],
    lookup: bool,
    also: bool,
    **_: Any,
) -> list[Contestant]:
    from speccompile.graphs.tree import read_tree
    from speccompile.tools.bench import contestants as ways

    first = decoders[0]
    own = ways.speculative_contestants(decoders, plains, asked)
    variants = [(tree, ways.variant(first, read_tree(tree))) for tree in dict.fromkeys(trees)]
    variants += [(f"lookahead {window}", ways.lookahead_variant(first, window)) for window in dict.fromkeys(windows)]
    if lookup:
        taken = any(contestant.name == "prompt-lookup" for contestant in own)
        name = f"prompt-lookup on {first.bundle.path.stem}" if taken else "prompt-lookup"
        variants.append((name, ways.lookup_variant(first)))
    others = [ways.bundle_contestant(name, decoder, asked, plains[0]) for name, decoder in variants]
    return [*own, *others, *(ways.joined_variants(own, asked) if also else ())]


def _synthetic(
    plains: list[Contestant],
    costs: dict[str, Costs | None],
    past: int,
    asked: Asked,
    *,
    rates: tuple[float, ...],
    shapes: tuple[str, ...],
    synthetic_draft_ms: float,
    **_: Any,
) -> list[Contestant]:
    from speccompile.tools.bench.synthetic import synthetic_contestant

    return [
        synthetic_contestant(plain, rate, tree, synthetic_draft_ms, asked, costs[plain.name], past)
        for plain, rate, tree in product(plains, rates, shapes)
    ]


def _baselines(
    first: Decoder,
    needed: int,
    threads: int | None,
    asked: Asked,
    *,
    model: Path | None,
    assistant: Path | None,
    transformers_lookup: bool,
    openvino: Path | None,
    llama_cpp: Path | None,
    **_: Any,
) -> list[Contestant]:
    from speccompile.tools.bench import baselines

    eos_ids, found = first.bundle.manifest.eos_ids, list[Any]()
    if model is not None:
        found += baselines.transformers_contestants(model, asked, threads, assistant, transformers_lookup)
    if openvino is not None:
        modules = [baselines.module(name, "--openvino") for name in ("openvino_genai", "openvino")]
        found.append(baselines.openvino_contestant(openvino, asked, eos_ids, threads, *modules))
    if llama_cpp is not None:
        package = baselines.module("xllamacpp", "--llama-cpp")
        found.append(baselines.llama_cpp_contestant(llama_cpp, asked, eos_ids, threads, first.text, needed, package))
    return found
