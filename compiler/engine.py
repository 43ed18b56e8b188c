"""A bundle's graphs -> TensorRT engines beside them. Needs no torch, and with tensorrt_rtx no GPU.

    graph -> FixCapacity, ForTensorrt, constants folded -> parsed, checked -> one engine a target -> engines.json

The module, `tensorrt` or `tensorrt_rtx`, is a parameter: what is used of them here is the same in both, but for naming
targets. tensorrt_rtx builds for the GPUs it is told, tensorrt for the one that is there.
"""

from __future__ import annotations

import itertools
import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import onnx_ir as ir
from onnxscript.optimizer import fold_constants

from speccompile.compiler.engine_checks import (
    check_attention,
    check_cache,
    check_contract,
    check_inputs_used,
    check_log,
    check_nodes,
    dtype_name,
)
from speccompile.compiler.publish import staged
from speccompile.graphs import contract
from speccompile.graphs.engines import (
    ENGINES_FOLDER,
    ENGINES_SCHEMA,
    SIDECAR_FILE,
    EngineInfo,
    EngineSet,
    TensorInfo,
    folder_name,
)
from speccompile.graphs.errors import EngineError, SpecCompileError
from speccompile.graphs.manifest import file_info
from speccompile.graphs.passes import FixCapacity, ForTensorrt, clean
from speccompile.graphs.passes.for_tensorrt import ATTENTION
from speccompile.runtime.backends.cuda import open_cuda
from speccompile.runtime.backends.tensorrt import collecting_log
from speccompile.runtime.bundle import Bundle

DEFAULT_MAX_LENGTH = 4096
ROWS = 64
"""Caches have a multiple of so many rows. Keys and values of all layers lie in one block, B * Hkv * C * D numbers
apart, and TensorRT wants addresses that are multiples of 256: with 64 rows of an even D and 16 bits, they are."""
LEAST_MAX_TOKENS = 64
USUAL_TOKENS = 8  # kernels are chosen for it; SmolLM2 in fp16: 281 MB, against 500 MB with a profile for T = 1 besides
REPORT_SECONDS = 0.2
DRAFTING = ("draft", "eagle")
LEAST_ARCHITECTURE = {"fp8": 89, "bf16": 80, "int4": 80}  # precision -> sm
AXES = {
    contract.INPUT_IDS: "BT",
    contract.POSITION_IDS: "BT",
    contract.TREE_MASK: "BTM",
    contract.PAST_LENGTH: "B",
    contract.LOGIT_ROWS: "R",
    contract.FEATURES: "BTF",
    contract.HIDDEN: "BRF",
}
CACHE_AXES = "BHCD"

Report = Callable[[str], None]
Range = tuple[int, int, int]
"""Smallest, usual and largest size."""


def build_engines(
    trt: ModuleType,
    bundle: Path,
    *,
    targets: Sequence[str] | None = None,
    max_length: int | None = None,
    batch: int = 1,
    max_tree: int | None = None,
    report: Report = lambda _: None,
    force: bool = False,
    lean: bool = False,
) -> list[EngineSet]:
    """Make the engines of all graphs of a bundle, for each target or for none.

    Args:
        trt: tensorrt or tensorrt_rtx.
        targets: such as "sm89"; default: the GPU that is there.
        max_length: rows of the caches, of which there are up to 63 more; default: the bundle's own limit, at most 4096.
        batch: most texts in one call.
        max_tree: most tokens in one call; default: 64, or as many as the bundle's tree has.
        report: called with what is being done.
        force: whether to replace engines of the same library version and target.
        lean: whether tensorrt_lean shall be able to run them, too; of tensorrt only.

    Raises:
        EngineError: when the bundle is of another dialect, a target or `lean` is not to be had, TensorRT refuses a
            graph, or what it made of one is not what the graph says.
        BundleError: when the bundle is damaged.
    """
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    for name, graph in manifest.graphs.items():
        if graph.dialect == "gqa":
            raise EngineError(
                f"{bundle}: its graph '{name}' is in the dialect 'gqa', which TensorRT cannot read; build the bundle "
                "with --dialect scatter."
            )
    if lean and hasattr(trt, "ComputeCapability"):
        raise EngineError(
            f"--lean: {trt.__name__} has no lean runtime; leave the option out, or use --runtime tensorrt."
        )
    chosen = choose_targets(trt, targets)
    for graph in manifest.graphs.values():
        _check_precision(graph.precision, chosen)
    nodes = max(len(opened.tree), manifest.lookahead.nodes if manifest.lookahead else 0)
    limits = choose_limits(manifest.target.max_length, nodes, max_length, batch, max_tree)
    version = str(trt.__version__)
    folders = {target: bundle / ENGINES_FOLDER / folder_name(trt.__name__, version, target) for target in chosen}
    for folder in folders.values():
        if folder.exists() and not (force and (folder / SIDECAR_FILE).is_file()):
            remedy = "remove it first" if force else "give --force to replace it"
            raise EngineError(f"{folder}: already exists; {remedy}.")
    log = collecting_log(trt)
    log.take_errors(), log.take_warnings()  # of earlier builds that failed, or of what runs engines in this process
    with ExitStack() as stack:
        staging = {t: stack.enter_context(staged(folder, force, SIDECAR_FILE)) for t, folder in folders.items()}
        made = {name: _build_graph(trt, log, opened, name, limits, lean, staging, report) for name in manifest.graphs}
        sets = [
            EngineSet(
                schema=ENGINES_SCHEMA,
                runtime=trt.__name__,
                version=version,
                target=target,
                capacity=limits.capacity,
                batch=limits.batch,
                max_tokens=limits.tokens,
                lean=lean,
                engines={name: built[target].info for name, built in made.items()},
                measured={
                    "seconds": {name: built[target].seconds for name, built in made.items()},
                    "warnings": {name: built[target].warnings for name, built in made.items()},
                    "peak_bytes": peak_bytes(),
                },
            )
            for target in chosen
        ]
        for whole in sets:
            text = json.dumps(whole.to_json(), indent=1) + "\n"
            (staging[whole.target] / SIDECAR_FILE).write_text(text, "utf-8")
        report("publishing")
    return sets


@dataclass(frozen=True)
class Built:
    """One engine, what it took, and what TensorRT warned of."""

    info: EngineInfo
    seconds: float
    warnings: list[str]


def _build_graph(
    trt: ModuleType,
    log: Any,
    bundle: Bundle,
    name: str,
    limits: Limits,
    lean: bool,
    staging: Mapping[str, Path],
    report: Report,
) -> dict[str, Built]:
    """Parse a graph once and build it for every target, into the target's folder."""
    report(f"parsing the {name}")
    path, _ = bundle.graph(name)
    model = prepare(path, limits.capacity)
    parsed = Parsed.of(trt, log, name, model, path.parent)
    parsed.check(model.graph)
    warnings = log.take_warnings()
    built = {}
    for target, folder in staging.items():
        began = time.perf_counter()
        file = folder / f"{name}.engine"
        inputs = parsed.build(limits, target, file, report, lean)
        written = file_info(file)
        info = EngineInfo(
            file=file.name,
            bytes=written.bytes,
            sha256=written.sha256,
            graph_sha256=bundle.manifest.graph_sha256(name),
            inputs=inputs,
            outputs=parsed.outputs(),
            aliases=parsed.aliases,
        )
        built[target] = Built(info, round(time.perf_counter() - began, 2), warnings + log.take_warnings())
    return built


def check_request(trt: ModuleType, dialect: str, precision: str, targets: Sequence[str] | None) -> None:
    """Refuse what `build_engines` would of a bundle that is not built yet.

    Raises:
        EngineError: see there.
    """
    if dialect == "gqa":
        raise EngineError("--dialect: TensorRT cannot read gqa; leave the option out, or give scatter.")
    _check_precision(precision, choose_targets(trt, targets))


def _check_precision(precision: str, targets: Sequence[str]) -> None:
    least = LEAST_ARCHITECTURE.get(precision, 0)
    for target in targets:
        if _number(target) < least:
            raise EngineError(
                f"--target: {target} cannot multiply in {precision}, as a graph of the bundle does; it takes sm{least} "
                "or newer, or a bundle of another --precision."
            )


# ---- what to build for ----


@dataclass(frozen=True)
class Limits:
    """C, and the largest B, T and tree."""

    capacity: int
    batch: int
    tokens: int
    nodes: int

    def ranges(self, name: str) -> dict[str, Range]:
        """By letter of `AXES`, for the graph of this name."""
        usual = min(USUAL_TOKENS, self.tokens)
        masked = self.tokens + self.nodes * (name in DRAFTING)  # a tree that grows level by level, see the contract
        rows = (1, 1 if name == "medusa" else usual, self.tokens)
        return {"B": (1, 1, self.batch), "T": (1, usual, self.tokens), "M": (1, usual, masked), "R": rows}


def choose_limits(longest: int, nodes: int, max_length: int | None, batch: int, max_tree: int | None) -> Limits:
    """Of a bundle for `longest` tokens whose tree has `nodes`.

    Raises:
        EngineError: for a number out of range.
    """
    length = min(longest, DEFAULT_MAX_LENGTH) if max_length is None else max_length
    tokens = min(max(LEAST_MAX_TOKENS, nodes), length) if max_tree is None else max_tree
    for option, value, most in (
        ("--max-length", length, longest),
        ("--batch", batch, None),
        ("--max-tree", tokens, length),
    ):
        if value < 1 or (most is not None and value > most):
            allowed = "1 or more" if most is None else f"1 to {most}"
            raise EngineError(f"{option}: {value} is out of range; use {allowed}.")
    return Limits(-(-length // ROWS) * ROWS, batch, tokens, min(nodes, length))


def supported_targets(trt: ModuleType) -> list[str]:
    """What this tensorrt_rtx builds for."""
    names = [name.lower() for name in trt.ComputeCapability.__members__]
    return sorted((name for name in names if name.startswith("sm")), key=_number)


def choose_targets(trt: ModuleType, asked: Sequence[str] | None) -> list[str]:
    """Those asked for, else the GPU that is there.

    Raises:
        EngineError: when the module cannot build for one of them, or there is no GPU and nothing else was asked for.
    """
    if not hasattr(trt, "ComputeCapability"):
        there = gpu_architecture()
        if there is None:
            raise EngineError(
                "TensorRT builds for the GPU that is there, and there is none (or no driver, or no cuda-python); build "
                "where the engines shall run, or use --runtime tensorrt-rtx, which needs no GPU."
            )
        if asked and set(asked) != {there}:
            raise EngineError(
                f"--target: TensorRT builds for the GPU that is there, which is {there}, not for {', '.join(asked)}; "
                "leave --target out, or use --runtime tensorrt-rtx."
            )
        return [there]
    known = supported_targets(trt)
    if not asked:
        there = gpu_architecture()
        if there is None:
            raise EngineError(f"--target: there is no GPU to build for; name one or more of {', '.join(known)}.")
        asked = [there]
    for target in asked:
        if target not in known:
            raise EngineError(
                f"--target: '{target}' is not supported by {trt.__name__} {trt.__version__}; it builds for "
                f"{', '.join(known)}."
            )
    return list(dict.fromkeys(asked))


def gpu_architecture() -> str | None:
    """Of the first GPU, such as "sm89"; None without a GPU, driver or cuda-python."""
    try:
        return open_cuda().target
    except SpecCompileError:
        return None


def _number(target: str) -> int:
    return int(target.removeprefix("sm"))


# ---- one graph ----


def prepare(path: Path, capacity: int) -> ir.Model:
    """The graph as TensorRT's parser will take it. Weights stay in their file."""
    graph = ir.load(path)
    FixCapacity(capacity)(graph)
    ForTensorrt()(graph)
    fold_constants(graph)  # up to 8192 numbers; weights stay where they are
    clean(graph)
    return graph


def write_beside(graph: ir.Model, weights: Path, folder: Path, name: str) -> Path:
    """Write a graph to `folder`, with links to the files in `weights` that hold its tensors.

    Nothing is copied; and no protobuf may hold 2 GB.
    """
    for value in graph.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            link = folder / tensor.location
            if not link.is_symlink():
                link.symlink_to((weights / tensor.location).resolve())
    path = folder / f"{name}.onnx"
    ir.save(graph, path)
    return path


@dataclass
class Parsed:
    """A network. The parser owns memory that the network reads, so it lives as long."""

    trt: ModuleType
    name: str
    log: Any
    builder: Any
    network: Any
    parser: Any
    aliases: dict[str, str]

    @classmethod
    def of(cls, trt: ModuleType, log: Any, name: str, graph: ir.Model, weights: Path) -> Parsed:
        """Parse a graph from `prepare`, whose tensors are in files of the folder `weights`.

        Raises:
            EngineError: when the parser refuses it.
        """
        builder = trt.Builder(log)
        network = builder.create_network(0)
        parsed = cls(trt, name, log, builder, network, trt.OnnxParser(network, log), _aliases(graph.graph))
        with tempfile.TemporaryDirectory() as scratch, interrupts_held():
            good = parsed.parser.parse_from_file(str(write_beside(graph, weights, Path(scratch), name)))
        errors = [parsed.parser.get_error(index).desc() for index in range(parsed.parser.num_errors)]
        check_log(name, "parsing it", errors + log.take_errors())
        if not good:
            raise EngineError(f"{name}: TensorRT could not parse it and does not say why.")
        return parsed

    def check(self, graph: ir.Graph) -> None:
        """See `engine_checks`."""
        count = sum(node.op_type == ATTENTION for node in graph)
        check_nodes(self.name, graph)
        check_contract(self.name, self.network, graph)
        check_inputs_used(self.name, self.network)
        check_attention(self.trt, self.name, self.network, count)
        check_cache(self.trt, self.name, self.network, self.aliases)

    def build(self, limits: Limits, target: str, file: Path, report: Report, lean: bool = False) -> list[TensorInfo]:
        """Write an engine to `file`.

        Returns:
            its inputs with their profile.
        """
        doing = f"building the {self.name} for {target}"
        report(doing)
        inputs = self.inputs(limits)
        config = self.config(inputs, target, lean)
        with interrupts_held() as interrupted, file.open("wb") as stream:
            monitor, writer = _monitor(self.trt, doing, report, interrupted), _writer(self.trt, stream)
            config.progress_monitor = monitor
            good = self.builder.build_serialized_network_to_stream(self.network, config, writer)
        if writer.failure is not None:
            raise writer.failure
        check_log(self.name, f"building it for {target}", self.log.take_errors())
        if not good:
            raise EngineError(f"{self.name}: TensorRT built no engine for {target} and does not say why.")
        return inputs

    def config(self, inputs: Sequence[TensorInfo], target: str, lean: bool) -> Any:
        """How an engine with these inputs is to be built."""
        flags = self.trt.BuilderFlag
        profile = self.builder.create_optimization_profile()
        for tensor in inputs:
            profile.set_shape(tensor.name, tensor.smallest, tensor.usual, tensor.largest)
        config = self.builder.create_builder_config()
        config.add_optimization_profile(profile)
        config.clear_flag(flags.TF32)  # on by itself; it rounds what float32 products are made of to 10 bits
        if lean:
            config.set_flag(flags.VERSION_COMPATIBLE)
            config.set_flag(flags.EXCLUDE_LEAN_RUNTIME)  # it is a package of its own
        if hasattr(self.trt, "ComputeCapability"):
            config.num_compute_capabilities = 1
            config.set_compute_capability(self.trt.ComputeCapability.__members__[target.upper()], 0)
        return config

    def inputs(self, limits: Limits) -> list[TensorInfo]:
        """Inputs of the network, with the sizes they may have."""
        ranges = limits.ranges(self.name)
        found = []
        for index in range(self.network.num_inputs):
            tensor = self.network.get_input(index)
            letters = CACHE_AXES if tensor.name in self.aliases else AXES.get(tensor.name, "")
            sizes = list(itertools.zip_longest(tensor.shape, letters))
            odd = [letter for size, letter in sizes if size is None or (size < 0 and letter not in ranges)]
            if odd:
                raise EngineError(
                    f"{self.name}: input '{tensor.name}' is {list(tensor.shape)} in the network; the contract "
                    "has no such input, build the bundle again."
                )
            bounds = [[ranges[letter][bound] if size < 0 else size for size, letter in sizes] for bound in range(3)]
            found.append(TensorInfo(tensor.name, dtype_name(tensor.dtype), list(tensor.shape), *bounds))
        return found

    def outputs(self) -> list[TensorInfo]:
        """Outputs of the network."""
        tensors = [self.network.get_output(index) for index in range(self.network.num_outputs)]
        return [TensorInfo(tensor.name, dtype_name(tensor.dtype), list(tensor.shape)) for tensor in tensors]


def _aliases(graph: ir.Graph) -> dict[str, str]:
    """Cache input -> output that must be the same buffer."""
    inputs = {value.name for value in graph.inputs}
    count = len(inputs)
    pairs = zip(contract.past_names(count), contract.present_names(count), strict=True)
    return {past: present for past, present in pairs if past in inputs}


# ---- TensorRT's callbacks ----


def _monitor(trt: ModuleType, doing: str, report: Report, interrupted: Callable[[], bool]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        """Says how far the build is, and ends it when it is interrupted."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.said = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self.say(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.say(f"{phase_name}, {step + 1} of {self.steps.get(phase_name, step + 1)}")
            return not interrupted()

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

        def say(self, what: str) -> None:
            if time.monotonic() - self.said > REPORT_SECONDS:
                self.said = time.monotonic()
                report(f"{doing}: {what}")

    return Monitor()


def _writer(trt: ModuleType, stream: BinaryIO) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[name-defined]
        """Writes an engine as it comes; whole in memory, it would be there twice."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failure: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return stream.write(data)
            except OSError as error:
                self.failure = error
                return 0

    return Writer()


@contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM become a KeyboardInterrupt when the block ends: in the midst of C++ code that calls back, an
    exception would end the process. What it gives tells whether there was one."""
    seen: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda caught, _: seen.append(caught))
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if seen:
            raise KeyboardInterrupt


def peak_bytes() -> int | None:
    """Most memory that this process has held at once; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text("utf-8")
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else None
