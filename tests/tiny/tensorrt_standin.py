"""Stand-ins for TensorRT's Python module and for `cuda.bindings.runtime`, which record what is asked of them.

No GPU is needed, and none of this shows that a GPU would do the same. What they do is what the documentation of the
real ones says (`help(...)` in tensorrt_rtx 1.7.1 and cuda-python 13; named where it is used), and where that leaves
something open, the stricter reading:

* work on a stream runs when somebody waits for it, not before: who does not wait reads old bytes;
* memory on the device has addresses that mean nothing to the host, is full of NaN when it is new, and knows its bounds;
* a context refuses to run before all shapes and addresses are told, and in a recording also right after a change of
  shapes;
* what was recorded from a context is void once its shapes or addresses change, also where a context records itself;
* the library logs to the first logger it was given, and does not keep it alive;
* an engine says a size where its profile allows only one (`changes`), and the lean runtime opens only what is made for
  it.

An engine is a JSON file that names an ONNX graph; running it runs the graph in ONNX Runtime on the bytes at the bound
addresses.
"""

# ruff: noqa: N802, N815
from __future__ import annotations

import enum
import json
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort

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
from speccompile.graphs.manifest import file_info
from speccompile.runtime.bundle import Bundle

VERSION = "11.4.0.106"
TARGET = "sm89"
NAN_BYTE = 0xFF
SCRATCH = 4096

_NUMPY = {"float32": np.float32, "float16": np.float16, "int64": np.int64, "int32": np.int32, "bool": np.bool_}
_FROM_ORT = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}


class Status(enum.IntEnum):
    """Some of `cudaError_t`."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidPitchValue = 12
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


class Kind(enum.IntEnum):
    """`cudaMemcpyKind`."""

    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class Attribute(enum.IntEnum):
    """Some of `cudaDeviceAttr`."""

    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


class CaptureMode(enum.IntEnum):
    """`cudaStreamCaptureMode`."""

    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


Work = Callable[[], None]


class Stream:
    """A handle, as cuda-python's are: an object that can be made an int."""

    def __int__(self) -> int:
        return 0x5EED


class CudaStandin:
    """`cuda.bindings.runtime`: every function returns a tuple whose first item is a status.

    `counts` has how often each function was called, `copied` the bytes of each kind of copy, `fails` statuses that a
    function shall return. With `on_host`, addresses on the device are real ones of this process.
    """

    cudaMemcpyKind = Kind
    cudaDeviceAttr = Attribute
    cudaStreamCaptureMode = CaptureMode
    cudaStreamNonBlocking = 1
    cudaHostAllocDefault = 0

    def __init__(
        self,
        devices: int = 1,
        capability: tuple[int, int] = (8, 9),
        driver: bool = True,
        on_host: bool = False,
    ) -> None:
        self.devices, self.capability, self.driver, self.on_host = devices, capability, driver, on_host
        self.counts: Counter[str] = Counter()
        self.copied: Counter[Kind] = Counter()
        self.fails: dict[str, Status] = {}
        self.device: dict[int, np.ndarray[Any, Any]] = {}
        self.host: dict[int, np.ndarray[Any, Any]] = {}
        self.waiting: list[Work] = []
        self.recording: list[Work] | None = None
        self.void = False  # what is being recorded
        self.last_error = Status.cudaSuccess
        self._next = 0x7F00_0000_0000

    def reset_counts(self) -> None:
        self.counts.clear()
        self.copied.clear()

    # ---- devices ----

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        if not self.driver:
            return Status.cudaErrorInsufficientDriver, 0
        return (Status.cudaSuccess, self.devices) if self.devices else (Status.cudaErrorNoDevice, 0)

    def cudaDeviceGetAttribute(self, attribute: Attribute, device: int) -> tuple[Any, ...]:
        assert device == 0
        return Status.cudaSuccess, self.capability[attribute is Attribute.cudaDevAttrComputeCapabilityMinor]

    def cudaGetLastError(self) -> tuple[Any, ...]:
        self.last_error, error = Status.cudaSuccess, self.last_error
        return (error,)

    # ---- memory ----

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        if status := self._begin("cudaMalloc", recordable=False):
            return status, 0
        self._next += 1 << 32  # no block reaches into another
        block = np.full(size, NAN_BYTE, np.uint8)
        address = block.ctypes.data if self.on_host else self._next
        self.device[address] = block
        return Status.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        if status := self._begin("cudaFree", recordable=False):
            return (status,)
        self._run()  # it waits for the device
        return (Status.cudaSuccess if self.device.pop(address, None) is not None else Status.cudaErrorInvalidValue,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        if status := self._begin("cudaHostAlloc", recordable=False):
            return status, 0
        assert flags == self.cudaHostAllocDefault
        pages = np.full(size, NAN_BYTE, np.uint8)
        self.host[pages.ctypes.data] = pages
        return Status.cudaSuccess, pages.ctypes.data

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        if status := self._begin("cudaFreeHost", recordable=False):
            return (status,)
        return (Status.cudaSuccess if self.host.pop(address, None) is not None else Status.cudaErrorInvalidValue,)

    # ---- work ----

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaStreamNonBlocking
        self.stream = Stream()
        return Status.cudaSuccess, self.stream

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: Stream) -> tuple[Any, ...]:
        return self._put("cudaMemsetAsync", stream, lambda: self.bytes_at(address, size).fill(value))

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: Kind, stream: Stream) -> tuple[Any, ...]:
        ends = {
            Kind.cudaMemcpyHostToDevice: (self.bytes_at, self.host_at),
            Kind.cudaMemcpyDeviceToHost: (self.host_at, self.bytes_at),
        }[kind]

        def copy() -> None:
            self.copied[kind] += size
            ends[0](target, size)[:] = ends[1](source, size)

        return self._put("cudaMemcpyAsync", stream, copy)

    def cudaMemcpy2DAsync(
        self, target: int, tpitch: int, source: int, spitch: int, width: int, height: int, kind: Kind, stream: Stream
    ) -> tuple[Any, ...]:
        assert kind is Kind.cudaMemcpyDeviceToDevice
        if width > min(tpitch, spitch):
            return (Status.cudaErrorInvalidPitchValue,)

        def copy() -> None:
            self.copied[kind] += width * height
            for row in range(height):
                to, of = target + row * tpitch, source + row * spitch
                assert abs(to - of) >= width, "a copy within the device must not overlap itself"
                self.bytes_at(to, width)[:] = self.bytes_at(of, width)

        return self._put("cudaMemcpy2DAsync", stream, copy)

    def cudaStreamSynchronize(self, stream: Stream) -> tuple[Any, ...]:
        if status := self._begin("cudaStreamSynchronize", recordable=False):
            return (status,)
        assert stream is self.stream
        try:
            self._run()
        except _IllegalAddressError:
            return (Status.cudaErrorIllegalAddress,)
        return (Status.cudaSuccess,)

    # ---- recording ----

    def cudaStreamBeginCapture(self, stream: Stream, mode: CaptureMode) -> tuple[Any, ...]:
        assert stream is self.stream and mode is CaptureMode.cudaStreamCaptureModeThreadLocal
        assert self.recording is None, "it is being recorded already"
        self.counts["cudaStreamBeginCapture"] += 1
        self.recording, self.void = [], False
        return (Status.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: Stream) -> tuple[Any, ...]:
        assert stream is self.stream and self.recording is not None
        recorded, self.recording = self.recording, None
        if self.void:
            self.last_error = Status.cudaErrorStreamCaptureInvalidated
            return self.last_error, None
        return Status.cudaSuccess, recorded

    def cudaGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[Any, ...]:
        assert flags == 0
        if status := self._begin("cudaGraphInstantiate"):
            return status, None
        return Status.cudaSuccess, list(graph)

    def cudaGraphDestroy(self, graph: list[Work]) -> tuple[Any, ...]:
        graph.clear()
        return (Status.cudaSuccess,)

    def cudaGraphExecDestroy(self, executable: list[Work]) -> tuple[Any, ...]:
        self._begin("cudaGraphExecDestroy")
        executable.clear()
        return (Status.cudaSuccess,)

    def cudaGraphLaunch(self, executable: list[Work], stream: Stream) -> tuple[Any, ...]:
        assert executable, "it was destroyed, or nothing was recorded"

        def replay() -> None:
            for work in executable:
                work()

        return self._put("cudaGraphLaunch", stream, replay)

    # ---- for the other stand-in and for tests ----

    def bytes_at(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """A view of memory on the device."""
        return _part(self.device, address, size)

    def host_at(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """A view of pinned memory; anything else would make a copy wait."""
        return _part(self.host, address, size)

    def put(self, work: Work) -> None:
        (self.waiting if self.recording is None else self.recording).append(work)

    def _put(self, name: str, stream: Stream, work: Work) -> tuple[Any, ...]:
        assert stream is self.stream, "work on another stream waits for nothing"
        status = self._begin(name)
        if not status:
            self.put(work)
        return (status,)

    def _begin(self, name: str, recordable: bool = True) -> Status:
        self.counts[name] += 1
        if self.recording is not None and not recordable:
            self.void = True
            return Status.cudaErrorStreamCaptureUnsupported
        return self.fails.get(name, Status.cudaSuccess)

    def _run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            work()


class _IllegalAddressError(Exception):
    pass


def _part(blocks: dict[int, np.ndarray[Any, Any]], address: int, size: int) -> np.ndarray[Any, Any]:
    for start, block in blocks.items():
        if start <= address and address + size <= start + len(block):
            return block[address - start : address - start + size]
    raise _IllegalAddressError(hex(address))


# ---- TensorRT ----


class _Logged:
    """Base of loggers: `ILogger`, with its severities."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None:
        self.ready = True  # a logger that does not call this crashes the real module


def _enum(name: str, *members: str) -> Any:
    return enum.Enum(name, members)


class TrtStandin(ModuleType):
    """`tensorrt`, or `tensorrt_rtx` with what only that has. `runtimes` and `contexts` are those that were made; making
    a context takes `context_seconds`."""

    ILogger = _Logged
    DataType = _enum("DataType", "FLOAT", "HALF", "BF16", "INT32", "INT64", "BOOL")
    TensorIOMode = _enum("TensorIOMode", "NONE", "INPUT", "OUTPUT")
    TensorLocation = _enum("TensorLocation", "DEVICE", "HOST")
    ExecutionContextAllocationStrategy = _enum(
        "ExecutionContextAllocationStrategy", "STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"
    )

    def __init__(self, cuda: CudaStandin, name: str = "tensorrt", version: str = VERSION) -> None:
        super().__init__(name)
        self.__version__ = version
        self.cuda = cuda
        self.runtimes: list[RuntimeStandin] = []
        self.contexts: list[ContextStandin] = []
        self.changes: dict[str, Any] = {}  # tensor -> what an engine says of it instead of the truth
        self.recordable = True
        self.context_seconds = 0.0
        self._logger: Callable[[], _Logged | None] | None = None
        if name == "tensorrt_rtx":
            self.CudaGraphStrategy = _enum("CudaGraphStrategy", "DISABLED", "WHOLE_GRAPH_CAPTURE")

    def Runtime(self, logger: _Logged) -> RuntimeStandin:
        assert self.cuda.driver and self.cuda.devices, "without a driver the real one would crash the process"
        assert logger.ready
        self._logger = self._logger or weakref.ref(logger)
        self.runtimes.append(RuntimeStandin(self))
        return self.runtimes[-1]

    def log_error(self, line: str) -> None:
        logger = self._logger and self._logger()
        assert logger is not None, "the first logger is gone; the real library would crash the process"
        logger.log(_Logged.ERROR, line)  # type: ignore[attr-defined]


class RuntimeStandin:
    def __init__(self, module: TrtStandin) -> None:
        self.module = module

    def deserialize_cuda_engine(self, serialized: Any) -> EngineStandin | None:
        """None when it cannot be read."""
        try:
            described = json.loads(bytes(serialized))
        except ValueError:
            self.module.log_error("Serialization assertion failed: magic tag does not match. Nothing helps.")
            return None
        if self.module.__name__ == "tensorrt_lean" and not described["lean"]:
            self.module.log_error("Serialization assertion failed: the plan is not version compatible. Nothing helps.")
            return None
        return EngineStandin(self.module, described)


class EngineStandin:
    def __init__(self, module: TrtStandin, described: dict[str, Any]) -> None:
        self.module = module
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(described["onnx"], options, providers=["CPUExecutionProvider"])
        self.profile: dict[str, tuple[list[int], list[int]]] = described["profile"]
        self.aliases: dict[str, str] = described["aliases"]
        self.inputs = {value.name: _tensor(value, described["capacity"]) for value in self.session.get_inputs()}
        self.outputs = {value.name: _tensor(value, described["capacity"]) for value in self.session.get_outputs()}
        self.tensors = {**self.inputs, **self.outputs}
        self.num_io_tensors = len(self.tensors)
        self.device_memory_size_v2 = SCRATCH

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.module.TensorIOMode["INPUT" if name in self.inputs else "OUTPUT"]

    def get_tensor_dtype(self, name: str) -> Any:
        names = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64", "bool": "BOOL"}
        return self.module.DataType[self.module.changes.get(name, {}).get("dtype", names[self.tensors[name][0]])]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """-1 where a size is chosen at run time."""
        return tuple(self.module.changes.get(name, {}).get("shape", self.tensors[name][1]))

    def get_tensor_location(self, name: str) -> Any:
        return self.module.TensorLocation[self.module.changes.get(name, {}).get("location", "DEVICE")]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        """The input that shares memory with an output."""
        sharing = {present: past for past, present in self.aliases.items()}
        return self.module.changes.get(name, {}).get("alias", sharing.get(name))

    def create_runtime_config(self) -> Any:
        return RuntimeConfigStandin()

    def create_execution_context(self, how: Any) -> ContextStandin:
        """Of an allocation strategy or of a runtime config."""
        time.sleep(self.module.context_seconds)
        self.module.contexts.append(ContextStandin(self, how))
        return self.module.contexts[-1]


class RuntimeConfigStandin:
    cuda_graph_strategy: Any = None
    allocation: Any = None
    kernels: Any = None

    def create_runtime_cache(self) -> Any:
        return object()

    def set_runtime_cache(self, cache: Any) -> bool:
        self.kernels = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy


class ContextStandin:
    def __init__(self, engine: EngineStandin, how: Any) -> None:
        self.engine, self.how = engine, how
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch: tuple[int, int] | None = None
        self.runs = 0
        self.version = 0  # of its shapes and addresses
        self.settled = -1  # the version whose deferred work is done
        self.captures = 0  # that it has made itself

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0 and size >= self.engine.device_memory_size_v2
        self.scratch = memory, size

    def set_input_shape(self, name: str, shape: Any) -> bool:
        """False when the shape does not fit the profile."""
        known = self.engine.inputs.get(name)
        low, high = self.engine.profile.get(name, ([], []))
        fits = known is not None and len(shape) == len(low)
        if not fits or any(not a <= size <= b for a, size, b in zip(low, shape, high, strict=True)):
            return self._failed(f"Parameter check failed: {name} cannot have shape {list(shape)}. Look at the profile.")
        if self.shapes.get(name) != tuple(shape):
            self.shapes[name] = tuple(shape)
            self.version += 1
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.engine.tensors or memory % 256:
            return self._failed(f"Parameter check failed: {name} cannot be bound to {memory:#x}. Look at its name.")
        if self.addresses.get(name) != memory:
            self.addresses[name] = memory
            self.version += 1
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        """False, and a line in the log, when something is not as it must be."""
        engine, cuda = self.engine, self.engine.module.cuda
        assert type(stream_handle) is int and stream_handle == int(cuda.stream)
        missing = [n for n, (_, s) in engine.inputs.items() if -1 in s and n not in self.shapes]
        missing += [name for name in engine.tensors if name not in self.addresses]
        if missing or self.scratch is None:
            return self._failed(f"Not all shapes and addresses are set: {missing}. Set them.")
        if any(self.addresses[past] != self.addresses[present] for past, present in engine.aliases.items()):
            return self._failed("An aliased output is not bound to the memory of its input. Bind it.")
        if cuda.recording is not None and (self.settled != self.version or not engine.module.recordable):
            cuda.void = True
            return self._failed("The stream is being captured, but there is work left to do. Run it once before.")
        strategy = getattr(self.how, "cuda_graph_strategy", None)
        self.captures += (
            strategy is not None and strategy.name == "WHOLE_GRAPH_CAPTURE" and self.settled != self.version
        )
        self.settled = self.version
        self.runs += 1
        version, shapes, addresses = self.version, dict(self.shapes), dict(self.addresses)

        def run() -> None:
            assert version == self.version, "shapes or addresses have changed since this was recorded"
            feeds = {
                name: self._array(name, addresses[name], shapes.get(name, shape)).copy()
                for name, (_, shape) in engine.inputs.items()
            }
            for name, result in zip(engine.outputs, engine.session.run(list(engine.outputs), feeds), strict=True):
                self._array(name, addresses[name], result.shape)[...] = result

        cuda.put(run)
        return True

    def _array(self, name: str, address: int, shape: Any) -> np.ndarray[Any, Any]:
        kind = _NUMPY[self.engine.tensors[name][0]]
        size = math.prod(shape) * np.dtype(kind).itemsize
        return self.engine.module.cuda.bytes_at(address, size).view(kind).reshape(shape)

    def _failed(self, line: str) -> bool:
        self.engine.module.log_error(line)
        return False


def _tensor(value: Any, capacity: int) -> tuple[str, list[int]]:
    shape = [-1 if isinstance(size, str) else size for size in value.shape]
    if value.name.startswith(("past_key_values.", "present.")):
        shape[2] = capacity
    return _FROM_ORT[value.type], shape


# ---- engines of a bundle ----


def make_engines(
    bundle_path: Path,
    runtime: str = "tensorrt",
    version: str = VERSION,
    target: str = TARGET,
    *,
    capacity: int = 96,
    batch: int = 1,
    max_tokens: int = 16,
    max_masked: int = 48,
    lean: bool = False,
) -> Path:
    """Engines of a bundle for the stand-in, with a sidecar as `speccompile engine` writes one; the folder."""
    bundle = Bundle.open(bundle_path)
    folder = bundle_path / ENGINES_FOLDER / folder_name(runtime, version, target)
    folder.mkdir(parents=True)
    engines = {}
    for name, graph in bundle.manifest.graphs.items():
        session = ort.InferenceSession(str(bundle_path / graph.file), providers=["CPUExecutionProvider"])
        most = {
            contract.TREE_MASK: [batch, max_tokens, max_masked if name != "target" else max_tokens],
            contract.LOGIT_ROWS: [max_tokens],
        }
        inputs = []
        for value in session.get_inputs():
            dtype, shape = _tensor(value, capacity)
            usual = most.get(value.name) or [batch, max_tokens][: shape.count(-1)]
            sizes = iter(usual)
            largest = [next(sizes) if size < 0 else size for size in shape]
            smallest = [1 if size < 0 else size for size in shape]
            inputs.append(TensorInfo(value.name, dtype, shape, smallest, smallest, largest))
        outputs = [TensorInfo(value.name, *_tensor(value, capacity)) for value in session.get_outputs()]
        pasts = [tensor.name for tensor in inputs if tensor.name.startswith("past_key_values.")]
        aliases = {past: past.replace("past_key_values", "present") for past in pasts}
        made_from = bundle.manifest.graph_sha256(name)
        engines[name] = EngineInfo(f"{name}.engine", 0, "", made_from, inputs, outputs, aliases)
    described = EngineSet(ENGINES_SCHEMA, runtime, version, target, capacity, batch, max_tokens, lean, engines)
    return write_engines(bundle, folder, described)


def write_engines(bundle: Bundle, folder: Path, described: EngineSet) -> Path:
    """Engines for the stand-in as a sidecar describes them, and the sidecar, which gets their hashes."""
    engines = {}
    for name, engine in described.engines.items():
        file = folder / engine.file
        content = {
            "onnx": str(bundle.path / bundle.manifest.graphs[name].file),
            "capacity": described.capacity,
            "profile": {tensor.name: (tensor.smallest, tensor.largest) for tensor in engine.inputs},
            "aliases": engine.aliases,
            "lean": described.lean,
        }
        file.write_text(json.dumps(content))
        info = file_info(file)
        engines[name] = replace(engine, bytes=info.bytes, sha256=info.sha256)
    (folder / SIDECAR_FILE).write_text(json.dumps(replace(described, engines=engines).to_json()))
    return folder


def install(monkeypatch: Any, module: TrtStandin) -> None:
    """Let `import` find the stand-ins."""
    monkeypatch.setitem(sys.modules, module.__name__, module)
    parent = ModuleType("cuda.bindings")
    parent.runtime = module.cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", parent)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", module.cuda)
