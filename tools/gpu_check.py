"""What this machine can run, whether it is right, and how fast: `bash tools/gpu_check.sh [OUT.json]`.

For SmolLM2 in float16 with prompt lookup, Medusa heads and an EAGLE head, and for each runtime that is here:

    engines   TensorRT engines of the bundle's graphs are built for this GPU
    answers   the proof's prompts are answered greedily, plainly and speculatively, which gives milliseconds a token;
              every token is held against the logits of ONNX Runtime on the CPU, given all tokens before it
    costs     verifying 1, 4, 8, 16 and 32 tokens is timed, with the step captured in a CUDA graph and without

A token is right when no other has a higher logit there, and a tie when one has by less than rounding explains. Each of
these lines runs in a process of its own with a time limit, so that one that crashes or hangs does not end the rest.
Exit status: 0 all is well, 1 a line failed or a token was wrong, 2 an option was refused, 3 nothing failed, and nothing
was run on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from speccompile.graphs.errors import BundleError, SpecCompileError
from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.ort import OrtTarget
from speccompile.runtime.bundle import Bundle
from speccompile.runtime.decoder import Decoder, load
from speccompile.runtime.text import Text

MODEL = "smollm2-135m-instruct"
METHODS = ("prompt-lookup", "medusa", "eagle")
BUDGET = 450  # seconds for all lines
LIMITS = {"machine": 60, "build": 300, "prompts": 60, "engines": 150, "answers": 90, "costs": 60}  # seconds
LEAST = 5  # seconds: a line that gets less is not begun
MAX_LENGTH = 2048
NEW_TOKENS, ON_CPU = (
    48,
    16,
)  # ONNX Runtime's CPU kernels are slow in sixteen bits: 0.3 s for a token of SmolLM2 on two cores
TOKENS = (1, 4, 8, 16, 32)
PAST = 200
SWEEPS, WARM_UP = 25, 4  # a step is captured when its shape comes for the third time
ELSEWHERE = "sm89"  # what TensorRT-RTX builds for where there is no GPU that it knows
NO_GPU = "no GPU: nothing was run on one"
NOT_RUN = "nothing was run on this GPU"
CUDA_PROVIDER = "CUDAExecutionProvider"
CUDA_PACKAGE = "onnxruntime-gpu"
UNJUDGED = "ONNX Runtime's CPU kernels, which judge every token, do not compute in bf16; use fp16."
# Of the largest logit: a token this far below the best one may be due to rounding. Sums of a few hundred products in
# another order change 24 bits by 1e-6 and 11 bits by some 1e-2 in the end.
TIES = {"fp32": 1e-5}
TIE = 0.01

Array = npt.NDArray[Any]
Facts = dict[str, Any]
Step = Callable[..., Facts]


# ---- what is run, each in a process of its own ----


def machine(packages: str | None) -> Facts:
    """The GPU, if any, and what is installed that could run on it.

    Args:
        packages: folder that may hold an ONNX Runtime for CUDA, with the libraries of CUDA.
    """
    import onnxruntime

    facts: Facts = {"gpu": None, "providers": onnxruntime.get_available_providers(), "cores": os.cpu_count()}
    facts["versions"] = {"onnxruntime": onnxruntime.__version__}
    facts["missing"], facts["targets"], facts["packages"] = {}, {}, None
    for found in importlib.metadata.distributions(name=CUDA_PACKAGE, path=[packages] if packages else []):
        facts["versions"][CUDA_PACKAGE], facts["packages"] = found.version, packages
    for name in ("tensorrt", "tensorrt_rtx"):
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a library that it links is often what is missing
            facts["missing"][name] = _first_line(error)
            continue
        facts["versions"][name] = module.__version__
        if hasattr(module, "ComputeCapability"):
            facts["targets"][name] = [kind.lower() for kind in dir(module.ComputeCapability) if kind.startswith("SM")]
    try:
        facts["gpu"] = _gpu()
    except Exception as error:  # cuda-python's own exceptions share no public base class
        facts["missing"]["gpu"] = _first_line(error)
    return facts


def _gpu() -> Facts:
    runtime = importlib.import_module("cuda.bindings.runtime")
    status, count = runtime.cudaGetDeviceCount()
    if int(status):
        raise RuntimeError(f"cudaGetDeviceCount: {status.name}")
    if not count:
        raise RuntimeError("cudaGetDeviceCount: 0 devices")
    _, properties = runtime.cudaGetDeviceProperties(0)
    _, driver = runtime.cudaDriverGetVersion()
    name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
    target = f"sm{properties.major}{properties.minor}"
    return {"name": name, "target": target, "bytes": int(properties.totalGlobalMem), "driver": int(driver)}


def build_bundle(model: str | None, method: str, out: str, precision: str) -> Facts:
    """Make the bundle at `out`, unless a whole one is there."""
    path = Path(out)
    try:
        Bundle.open(path)
        return {"built": "earlier"}
    except BundleError:
        pass
    from speccompile.compiler.build import build
    from speccompile.tools.zoo import fetch

    source = fetch.fetch(MODEL) if model is None else Path(model)
    parts = {"medusa": {"heads": fetch.heads}, "eagle": {"head": fetch.eagle}}.get(method, {})
    manifest = build(
        source,
        path,
        method=method,
        dialect="scatter",
        precision=precision,
        max_length=MAX_LENGTH if model is None else None,
        force=(path / "manifest.json").exists(),
        report=print,
        **{name: find(MODEL) for name, find in parts.items()},  # type: ignore[arg-type]
    )
    return {"built": "now", "proof": manifest.proof}


def read_prompts(bundle: str) -> Facts:
    """The proof's prompts as token ids, under the chat template where there is one."""
    from speccompile.compiler.prove import PROMPTS

    opened = Bundle.open(bundle, check_hashes=False)
    text = Text.load(opened.path, opened.manifest.tokenizer.special_tokens)
    chat = text.chat_template is not None
    asked = [text.chat([{"role": "user", "content": prompt}]) if chat else text.encode(prompt) for prompt in PROMPTS]
    room = max(1, opened.manifest.target.max_length // 2)
    return {"prompts": [ids[-room:] for ids in asked]}


def engines(bundle: str, module: str, target: str | None) -> Facts:
    """Build the engines of a bundle: for this GPU (None) or for `target`."""
    from speccompile.compiler.engine import build_engines

    before = time.perf_counter()
    (made,) = build_engines(
        importlib.import_module(module),
        Path(bundle),
        targets=None if target is None else [target],
        max_length=None,
        batch=1,
        max_tree=None,
        report=print,
        force=True,
    )
    return {
        "target": made.target,
        "version": made.version,
        "build_seconds": time.perf_counter() - before,
        "bytes": {name: engine.bytes for name, engine in made.engines.items()},
        "measured": made.measured,
    }


def answers(bundle: str, backend: str, provider: str | None, prompts: list[list[int]], seconds: float) -> Facts:
    """Answer each prompt plainly and speculatively, as long as another should fit into `seconds`, and judge each token
    on the CPU."""
    began = time.monotonic()
    decoder = _load(bundle, backend, provider)
    own = backend == "onnxruntime" and provider is None
    judge = decoder.target if own else OrtTarget(decoder.bundle.graph("target")[0])
    share = TIES.get(decoder.bundle.manifest.graphs["target"].precision, TIE)
    spent, tokens, rounds = [0.0, 0.0], [0, 0], 0
    verdicts = dict.fromkeys(("equal", "ties", "different", "unlike_plain"), 0)
    largest = 0.0
    if not own:
        limit = min(NEW_TOKENS, decoder.capacity - len(prompts[0]))
        for speculate in (False, True):  # warms up: kernels are loaded, and steps captured
            decoder.generate(prompts[0], max_new_tokens=limit, speculate=speculate)
    for number, prompt in enumerate(prompts, start=1):
        limit, plain = min(ON_CPU if own else NEW_TOKENS, decoder.capacity - len(prompt)), list[int]()
        for speculate in (False, True):
            found = decoder.generate(prompt, max_new_tokens=limit, speculate=speculate)
            gaps, top = logit_gaps(judge, prompt, found.token_ids)
            verdicts[judged(gaps, share * top)] += 1
            largest = max(largest, float(gaps.max()))
            spent[speculate] += found.stats.decode_seconds
            tokens[speculate] += found.stats.emitted - 1
            if speculate:
                rounds += found.stats.rounds
                verdicts["unlike_plain"] += found.token_ids != plain
            plain = found.token_ids
        if (time.monotonic() - began) * (number + 1) / number > seconds:
            break
    plain_ms, speculative_ms = (1e3 * taken / max(count, 1) for taken, count in zip(spent, tokens, strict=True))
    return {
        "answers": 2 * number,
        **verdicts,
        "largest_gap": largest,
        "plain_ms": plain_ms,
        "speculative_ms": speculative_ms,
        "speedup": plain_ms / speculative_ms if speculative_ms else 0.0,
        "tokens_per_round": tokens[True] / max(rounds, 1),
    }


def logit_gaps(judge: Any, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Array, float]:
    """How far the logit of each token of an answer lies below the best one, given all before it, and the largest logit.
    All of it is 0 exactly when `judge` would have given this answer."""
    ids = [*prompt, *answer[:-1]]
    chain, rows = TokenTree.chain(len(ids) - 1), np.arange(len(prompt) - 1, len(ids))
    logits = judge.open(len(ids)).run(np.array(ids), chain.depths, chain.mask, rows).logits[0]
    return logits.max(-1) - logits[np.arange(len(answer)), answer], float(np.abs(logits).max())


def judged(gaps: Array, tie: float) -> str:
    """One of "equal", "ties" and "different"."""
    if not (gaps <= tie).all():  # so is what is not a number
        return "different"
    return "ties" if gaps.any() else "equal"


def costs(bundle: str, backend: str, provider: str | None, captured: bool) -> Facts:
    """Median milliseconds of a verifying call, for each of `TOKENS`, behind `PAST` tokens or as many as there is room
    for."""
    if backend != "onnxruntime" and not captured:
        _capture_nothing()
    decoder, rng = _load(bundle, backend, provider), np.random.default_rng(0)
    target, past = decoder.target, min(PAST, decoder.capacity - max(TOKENS))
    cache = target.open(past + max(TOKENS))
    spent: dict[int, list[float]] = {count: [] for count in TOKENS}

    def call(count: int) -> float:
        chain = TokenTree.chain(count - 1)
        ids = rng.integers(target.vocab_size, size=count)
        before = time.perf_counter()
        output = cache.run(ids, cache.length + chain.depths, chain.mask, chain.nodes)
        int(output.next_ids[0, -1])  # what waits for the GPU
        return 1e3 * (time.perf_counter() - before)

    while count := min(max(TOKENS), past - cache.length):
        call(count)
        cache.commit(range(count))
    for sweep in range(WARM_UP + SWEEPS):  # a machine that slows down for a while slows all of them
        for count in rng.permutation(TOKENS).tolist():
            taken = call(count)
            if sweep >= WARM_UP:
                spent[count].append(taken)
    return {"tokens": list(TOKENS), "ms": [median(spent[count]) for count in TOKENS]}


def _load(bundle: str, backend: str, provider: str | None) -> Decoder:
    if provider is not None:
        import onnxruntime

        onnxruntime.preload_dlls()  # those that came from pip lie where the system's loader does not look
    return load(bundle, provider=provider, backend=backend)


def _capture_nothing() -> None:
    """For this process, which only times: nobody else would want it."""
    from speccompile.runtime.backends import tensorrt

    tensorrt.RECORD_AFTER = sys.maxsize
    tensorrt.Engine.records_itself = False  # type: ignore[assignment,method-assign]


# ---- lines, their time and their ends ----


@dataclass
class Line:
    """One thing that was tried: `outcome` is "ok", "failed", "crashed", "timed out" or "skipped"."""

    name: str
    runtime: str
    bundle: str
    outcome: str
    seconds: float = 0.0
    why: str = ""
    facts: Facts = field(default_factory=dict)

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.name, self.runtime, self.bundle)))


@dataclass
class Lines:
    """Runs steps in processes of their own until the time is used up.

    Args:
        budget: seconds for all of them.
    """

    budget: float
    report: Callable[[str], None] = lambda _: None
    done: list[Line] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.started + self.budget - time.monotonic()

    def run(
        self,
        name: str,
        runtime: str,
        bundle: str,
        step: Step,
        given: Facts,
        *,
        limit: float | None = None,
        first: str | None = None,
    ) -> Facts | None:
        """What `step` returns for the arguments `given`, or None when it did not get that far.

        Args:
            limit: seconds; default: what `LIMITS` has for `name`.
            first: folder of packages that hide those of the same names, for this line.
        """
        wanted = limit or LIMITS[name]
        limit = min(wanted, self.left)
        line = Line(name, runtime, bundle, "skipped", why="no time was left for it")
        self.done.append(line)
        if limit < LEAST:
            return None
        self.report(line.title)
        before = time.monotonic()
        line.outcome, line.why, line.facts = _in_a_process(step, given, limit, first)
        line.seconds = time.monotonic() - before
        if line.outcome == "timed out" and limit < wanted:  # it may well have been about to end
            line.outcome, line.why = "skipped", f"no more time was left: {line.why}"
        return line.facts if line.outcome == "ok" else None

    def skip(self, name: str, runtime: str, bundle: str, why: str) -> None:
        self.done.append(Line(name, runtime, bundle, "skipped", why=why))


def _in_a_process(step: Step, given: Facts, limit: float, first: str | None) -> tuple[str, str, Facts]:
    """(outcome, why, facts) of a step."""
    context = multiprocessing.get_context("spawn")  # a fork would share what CUDA and ONNX Runtime hold
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = context.Process(target=_child, args=(step, given, theirs, str(log)))
        with _path(first):
            process.start()
        theirs.close()
        ended = False
        try:
            if not (ended := ours.poll(limit)):
                return "timed out", f"it took longer than {limit:.0f} s{_last_words(log)}", {}
            outcome, found = ours.recv()
            return (outcome, "", found) if outcome == "ok" else (outcome, found, {})
        except EOFError:
            process.join()
            return "crashed", f"its process ended with status {process.exitcode}{_last_words(log)}", {}
        finally:
            _end(process, patience=5 if ended else 0)
            ours.close()


@contextlib.contextmanager
def _path(first: str | None) -> Iterator[None]:
    """What is begun in here looks for modules in `first` first: a process gets its parent's `sys.path`, and it imports
    this file, with all that it imports, before anything else."""
    before = list(sys.path)
    if first is not None:
        sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.path[:] = before


def _child(step: Step, given: Facts, results: Any, log: str) -> None:
    """Run a step; what it and its libraries print goes to `log`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a build cleans up behind itself
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            results.send(("ok", step(**given)))
        except SpecCompileError as error:
            results.send(("failed", str(error)))
        except Exception as error:
            traceback.print_exc()
            results.send(("failed", f"{type(error).__name__}: {_first_line(error)}"))


def _end(process: Any, patience: float) -> None:
    """Wait for it so many seconds, then ask it to stop, then make it."""
    process.join(patience)
    for stop in (process.terminate, process.kill):
        if process.exitcode is None:
            stop()
            process.join(5)


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        if lines:
            return f"; its last words: {lines[-1][:200]}"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---- the whole check ----


@dataclass(frozen=True)
class Runtime:
    """Something that decodes.

    Args:
        backend, provider: as `runtime.decoder.load` takes them.
        target: what engines are built for; None: whatever GPU there is, or there are no engines.
        runs: whether it can run here; else its engines are only built.
        on_gpu: whether a GPU does the work.
        packages: folder of the packages that only it uses.
    """

    name: str
    backend: str
    provider: str | None = None
    target: str | None = None
    runs: bool = True
    on_gpu: bool = True
    packages: str | None = None


def runtimes(facts: Facts) -> list[Runtime]:
    """What can be tried on this machine: what runs on the GPU, what only builds for one, ONNX Runtime's CPU kernels."""
    gpu, found = facts["gpu"], []
    if gpu and "tensorrt" in facts["versions"]:
        found.append(Runtime("TensorRT", "tensorrt"))
    if "tensorrt_rtx" in facts["versions"]:
        knows = bool(gpu) and gpu["target"] in facts["targets"].get("tensorrt_rtx", ())
        target = gpu["target"] if knows else ELSEWHERE
        found.append(Runtime("TensorRT-RTX", "tensorrt_rtx", target=target, runs=knows))
    if gpu and (facts["packages"] or CUDA_PROVIDER in facts["providers"]):
        found.append(Runtime("ONNX Runtime, CUDA", "onnxruntime", CUDA_PROVIDER, packages=facts["packages"]))
    found.sort(key=lambda runtime: not runtime.runs)
    return [*found, Runtime("ONNX Runtime, CPU", "onnxruntime", on_gpu=False)]


def check(
    lines: Lines, bundles: dict[str, Path], model: Path | None, work: Path, precision: str, packages: str | None
) -> Facts | None:
    """Run every line. What is in `bundles` is not built; `packages` is as in `machine`. Returns what the machine is, if
    that much is known."""
    facts = lines.run("machine", "", "", machine, {"packages": packages})
    if facts is None:
        return None
    found, prompts = runtimes(facts), None
    # The GPU's own lines come before anything that could be had elsewhere, for all bundles.
    soon = [runtime for runtime in found if runtime.runs and runtime.on_gpu] or found
    later = [runtime for runtime in found if runtime not in soon]
    methods = METHODS if model is None else METHODS[:1]  # for other models there are no heads at hand
    ready: dict[str, Path] = {}
    for name in bundles or methods:
        path = bundles.get(name, work / f"{name}-{precision}.bundle")
        if name not in bundles:
            source = model and str(model.absolute())
            given = {"model": source, "method": name, "out": str(path), "precision": precision}
            if lines.run("build", "", name, build_bundle, given) is None:
                continue
        prompts = prompts or lines.run("prompts", "", name, read_prompts, {"bundle": str(path)})
        if prompts is None:
            continue
        ready[name] = path
        for runtime in soon:
            try_out(lines, runtime, name, path, prompts["prompts"], with_costs=runtime.on_gpu and len(ready) == 1)
    for name, path in ready.items():
        assert prompts is not None
        for runtime in later:
            try_out(lines, runtime, name, path, prompts["prompts"], with_costs=False)
    return facts


def try_out(
    lines: Lines, runtime: Runtime, name: str, bundle: Path, prompts: list[list[int]], with_costs: bool
) -> None:
    """The lines of one runtime on one bundle."""
    has_engines = runtime.backend != "onnxruntime"
    if has_engines:
        given = {"bundle": str(bundle), "module": runtime.backend, "target": runtime.target}
        if lines.run("engines", runtime.name, name, engines, given) is None:
            return
    if not runtime.runs:
        lines.skip("answers", runtime.name, name, "there is no GPU that it knows")
        return
    given = {"bundle": str(bundle), "backend": runtime.backend, "provider": runtime.provider}
    seconds = 0.8 * min(LIMITS["answers"], lines.left)  # the rest is for starting
    answered = lines.run(
        "answers",
        runtime.name,
        name,
        answers,
        {**given, "prompts": prompts, "seconds": seconds},
        first=runtime.packages,
    )
    if answered is None or not with_costs:
        return
    for captured in (True, False) if has_engines else (False,):
        title = f"{runtime.name}{' (captured)' * captured}"
        lines.run("costs", title, name, costs, {**given, "captured": captured}, first=runtime.packages)


def status_of(lines: Lines, facts: Facts | None) -> int:
    """The exit status."""
    wrong = any(
        line.outcome in ("failed", "crashed", "timed out") or line.facts.get("different") for line in lines.done
    )
    if wrong or facts is None:
        return 1
    return 0 if ran_on_gpu(lines, facts) else 3


def ran_on_gpu(lines: Lines, facts: Facts) -> bool:
    """Whether anything was answered on a GPU."""
    on_gpu = {runtime.name for runtime in runtimes(facts) if runtime.on_gpu}
    return any(line.name == "answers" and line.outcome == "ok" and line.runtime in on_gpu for line in lines.done)


# ---- what is said about it ----


def tables_of(lines: Lines) -> Iterator[tuple[Table, str]]:
    """Each with what it means: engines, answers and the cost of verifying, of the lines that came to an end."""
    whole = [line for line in lines.done if line.outcome == "ok"]
    yield (
        _table(
            ("runtime", "bundle", "engine", "for", "size", "built in", "peak memory"),
            [row for line in whole if line.name == "engines" for row in _engine_rows(line)],
        ),
        "Peak memory: of the process that built the engines of a bundle.",
    )
    yield (
        _table(
            ("runtime", "bundle", "plain", "speculative", "gain", "a round", "answers"),
            [_answers_row(line) for line in whole if line.name == "answers"],
        ),
        "Milliseconds are for a token, without the prompt; a round: tokens that a verifying call emitted. Equal: "
        "answers of which every token is the best on the CPU, given those before; tied: those where one is as "
        "good, within rounding.",
    )
    yield (
        _table(
            ("runtime", "bundle", "1 verified", *(f"{count}" for count in TOKENS[1:])),
            [_costs_row(line) for line in whole if line.name == "costs"],
        ),
        "Time of a call for so many tokens, against that for one; captured: in a CUDA graph.",
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    first, *others, last = columns
    wide = Column(first, min_width=len("TensorRT-RTX")), *(Column(name, no_wrap=True) for name in others)
    table = Table(*wide, last, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # 80 columns will do
    for row in rows:
        table.add_row(*row)
    return table


def _engine_rows(line: Line) -> Iterator[list[str]]:
    facts, measured = line.facts, line.facts["measured"]
    peak = measured["peak_bytes"]
    memory = "" if peak is None else f"{peak / 1e9:.1f} GB"
    for name, size in facts["bytes"].items():
        seconds = f"{measured['seconds'][name]:.0f} s"
        yield [line.runtime, line.bundle, name, facts["target"], f"{size / 1e6:.0f} MB", seconds, memory]
        memory = '"'


def _answers_row(line: Line) -> list[str]:
    facts = line.facts
    right = f"{facts['equal']} equal" + f", {facts['ties']} tied" * (facts["ties"] > 0)
    return [
        line.runtime,
        line.bundle,
        f"{facts['plain_ms']:.2f} ms",
        f"{facts['speculative_ms']:.2f} ms",
        f"{facts['speedup']:.2f}x",
        f"{facts['tokens_per_round']:.2f}",
        right + f", {facts['different']} DIFFERENT" * (facts["different"] > 0),
    ]


def _costs_row(line: Line) -> list[str]:
    one, *more = line.facts["ms"]
    return [line.runtime, line.bundle, f"{one:.2f} ms", *(f"{ms / one:.1f}x" for ms in more)]


def show(lines: Lines, facts: Facts | None, out: Console) -> None:
    """Print the tables, and what did not come to an end."""
    if facts is not None:
        gpu = facts["gpu"]
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        if gpu:
            about = f"{gpu['name']} ({gpu['target']}), {gpu['bytes'] / 2**30:.0f} GiB, driver for CUDA {gpu['driver']}"
            out.print(f"{about}; {versions}")
            if not ran_on_gpu(lines, facts):
                out.print(NOT_RUN, style="bold")
        else:
            out.print(f"{NO_GPU} ({facts['missing'].get('gpu')}); {versions}", style="bold")
        for name, why in facts["missing"].items():
            if name != "gpu":
                out.print(f"{name}: not here ({why})", style="dim")
    for table, meaning in tables_of(lines):
        if table.row_count:
            out.print(table)
            out.print(meaning, style="dim")
    out.print()
    for line in lines.done:
        if line.outcome != "ok":
            style = "yellow" if line.outcome == "skipped" else "red"
            out.print(f"{line.outcome}: {line.title}: {line.why}", style=style, markup=False)


def refuse_bf16(bundles: Sequence[Path], precision: str) -> None:
    """Tokens are judged by the bundle's own graph on a CPU.

    Raises:
        click.UsageError: when that could not compute.
    """
    for path in bundles:
        with contextlib.suppress(BundleError):  # a line will say so
            if Bundle.open(path, check_hashes=False).graph("target")[1].precision == "bf16":
                raise click.UsageError(f"--bundle {path}: {UNJUDGED}")
    if precision == "bf16" and not bundles:
        raise click.UsageError(f"--precision bf16: {UNJUDGED}")


@click.command()
@click.argument("out", type=click.Path(path_type=Path), default=Path("build/gpu_check/gpu_check.json"))
@click.option("--model", type=click.Path(path_type=Path), help=f"Check with prompt lookup on this model, not {MODEL}.")
@click.option(
    "--bundle", "bundles", multiple=True, type=click.Path(path_type=Path), help="Check these scatter bundles."
)
@click.option("--precision", default="fp16", show_default=True, help="Of bundles that are built; not bf16.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/gpu_check"), show_default=True)
@click.option("--onnxruntime-gpu", "packages", help="Folder into which pip has installed it, with CUDA's libraries.")
@click.option("--budget", type=float, default=BUDGET, show_default=True, help="Seconds for everything.")
def main(
    out: Path,
    model: Path | None,
    bundles: tuple[Path, ...],
    precision: str,
    work: Path,
    packages: str | None,
    budget: float,
) -> None:
    """Check what this machine can run; the figures go to OUT as JSON."""
    refuse_bf16(bundles, precision)
    console = Console()
    work.mkdir(parents=True, exist_ok=True)
    with console.status("starting") as status:
        lines = Lines(budget, status.update if console.is_terminal else console.print)
        named = {path.name.removesuffix(".bundle"): path for path in bundles}
        facts = check(lines, named, model, work, precision, packages)
    show(lines, facts, console)
    code = status_of(lines, facts)
    found = {"machine": facts, "status": code, "seconds": time.monotonic() - lines.started}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**found, "lines": [vars(line) for line in lines.done]}, indent=1) + "\n")
    console.print(f"written to {out}", style="dim")
    sys.exit(code)


if __name__ == "__main__":
    main()
