"""TensorRT: the engines of a bundle, and the key/value cache of one sequence on the GPU, bound to them in place.

Past and present of every layer are one address, so that a step writes its rows where they stay. What goes in is packed
into one pinned block and copied at once, and so is what every step needs back: `next_ids`, and the best tokens of what
drafts. Logits and features stay on the GPU until somebody asks for them, so greedy decoding moves neither.

The library is a parameter: `tensorrt`, `tensorrt_rtx` and `tensorrt_lean` are one API as far as it is used here. Its
runtime crashes the process where there is no driver, so nothing of it is called before `cuda.Cuda` has found a device.
"""

from __future__ import annotations

import importlib
import math
import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.graphs import contract
from speccompile.graphs.engines import REMEDY, SIDECAR_FILE, EngineInfo, EngineSet, TensorInfo
from speccompile.graphs.errors import BundleError, GenerationError
from speccompile.runtime.backends.cuda import ALIGNMENT, Cuda, DeviceKeysValues, Recording, open_cuda
from speccompile.runtime.backends.step import Array, Shapes, StepOutput, call_shapes, check_room
from speccompile.runtime.bundle import Bundle

MODULES = {
    "tensorrt": ("tensorrt", "speccompile[gpu]"),
    "tensorrt_rtx": ("tensorrt_rtx", "speccompile[rtx]"),
    "tensorrt_lean": ("tensorrt", "tensorrt-lean"),
}
"""Module -> whose engines it runs, and what pip installs it from."""

KEPT_SHAPES = 128
"""Of the calls of one cache; trees that are grown anew in every round come in dozens."""

RECORD_AFTER = 3
"""A shape that has come so often is recorded as one CUDA graph. Its first call never is: TensorRT leaves work for the
first call behind a change of shape, which must not be repeated."""

KEPT_RECORDINGS = 8
"""Of one cache; each has an execution context of its own."""

IDLE_RUNS = 256
"""A recording gives way to a new one when so many other calls have come since it was last used. One that gave way to
any other shape would be gone when its own comes again, and recording costs more than it saves in a few calls."""

KEPT_WARNINGS = 256

_DTYPES = {
    "INT64": "int64",
    "INT32": "int32",
    "BOOL": "bool",
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class TrtGraphs:
    """The engines of a bundle for this GPU.

    Args:
        backend: a module of `MODULES`.
        check_hashes: whether to read every engine once to compare its sha256.

    Raises:
        BundleError: when the module, cuda-python or a device is missing, or the bundle has no engines for them.
    """

    def __init__(self, bundle: Bundle, backend: str, check_hashes: bool = True) -> None:
        built_by, package = MODULES[backend]
        try:
            self._module = importlib.import_module(backend)
        except ImportError as error:
            raise BundleError(
                f"backend '{backend}': the package cannot be imported ({error}); install it with "
                f"pip install '{package}'."
            ) from error
        self._cuda = open_cuda()
        self._folder, self._set = bundle.engines(
            built_by, self._module.__version__, self._cuda.target, check_hashes=check_hashes
        )
        if backend == "tensorrt_lean" and not self._set.lean:
            raise BundleError(
                f"{self._folder / SIDECAR_FILE}: these engines need the whole of tensorrt, and tensorrt_lean "
                f"opens only those made for it; build them again with 'speccompile engine {bundle.path} "
                "--runtime tensorrt --lean --force'."
            )
        self.capacity = self._set.capacity

    def target(self, name: str = "target") -> TrtTarget:
        """The target, or the draft model or EAGLE head of that name."""
        info = self._set.engines[name]
        return TrtTarget(self._module, self._cuda, self._folder / info.file, info, self._set)

    def heads(self) -> TrtHeads:
        """The Medusa heads."""
        info = self._set.engines["medusa"]
        return TrtHeads(self._module, self._cuda, self._folder / info.file, info)


class Engine:
    """An engine, ready to run on the stream of `cuda`. Its contexts share one scratch memory.

    Raises:
        BundleError: when it cannot be opened, or is not what its sidecar says.
    """

    def __init__(self, module: Any, cuda: Cuda, path: Path, info: EngineInfo) -> None:
        self.module, self.cuda, self.path, self.info = module, cuda, path, info
        self.inputs = {tensor.name: tensor for tensor in info.inputs}
        self.log = collecting_log(module)
        with cuda.lock:
            self.log.take_errors()  # not about this engine
            self._runtime = module.Runtime(self.log)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._engine = self._runtime.deserialize_cuda_engine(data)
            if self._engine is None:
                said = _first_sentence(self.log.take_errors())
                raise BundleError(f"{path}: {module.__name__} cannot open this engine ({said}); {REMEDY}")
            self._check_tensors()
        self._scratch_bytes = int(self._engine.device_memory_size_v2)
        self._scratch = cuda.device_memory(self._scratch_bytes)
        self._kernels: Any = None  # that TensorRT-RTX has made for shapes, for all contexts

    def _check_tensors(self) -> None:
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        found = {name: self._described(name) for name in names}
        listed = {
            tensor.name: _Described(kind, tensor.dtype, tuple(tensor.shape), "device")
            for kind, tensors in (("input", self.info.inputs), ("output", self.info.outputs))
            for tensor in tensors
        }
        for name in sorted(found.keys() | listed.keys()):
            if name not in found or name not in listed or not found[name].agrees(listed[name]):
                raise BundleError(
                    f"{self.path}: tensor '{name}' is {found.get(name, 'missing')} but {SIDECAR_FILE} says "
                    f"{listed.get(name, 'nothing of it')}; {REMEDY}"
                )
        for past, present in self.info.aliases.items():
            if (aliased := self._engine.get_aliased_input_tensor(present)) not in (past, None, ""):
                raise BundleError(
                    f"{self.path}: tensor '{present}' is the memory of '{aliased}' but {SIDECAR_FILE} says '{past}'; "
                    f"{REMEDY}"
                )

    def _described(self, name: str) -> _Described:
        engine, module = self._engine, self.module
        kind = "input" if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT else "output"
        dtype, shape = engine.get_tensor_dtype(name).name, tuple(engine.get_tensor_shape(name))
        on_device = engine.get_tensor_location(name) == module.TensorLocation.DEVICE
        return _Described(kind, _DTYPES.get(dtype, dtype), shape, "device" if on_device else "host")

    @property
    def records_itself(self) -> bool:
        """Whether the library records calls of one shape on its own, as TensorRT-RTX does: it knows best when the
        kernels that it makes for a shape are ready."""
        return hasattr(self.module, "CudaGraphStrategy")

    def context(self, one_shape: bool = False) -> Any:
        """A new execution context. All contexts use the same scratch memory, so only one may run at a time.

        Args:
            one_shape: whether its shapes and addresses will stay. Where the library records by itself, any other
                context would throw away what it has recorded with every change.

        Raises:
            GenerationError: when the library cannot make one.
        """
        managed = self.module.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.records_itself:
            strategies = self.module.CudaGraphStrategy
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(managed)
            config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE if one_shape else strategies.DISABLED
            if self._kernels is None:
                self._kernels = config.create_runtime_cache()
            config.set_runtime_cache(self._kernels)  # else each context would compile its own
            context = self._engine.create_execution_context(config)
        else:
            context = self._engine.create_execution_context(managed)
        self.require(context is not None, "no execution context can be made")
        context.set_device_memory(self._scratch.address, self._scratch_bytes)
        return context

    def require(self, worked: bool, otherwise: str) -> None:
        """Turn a failure of the library into an error that says what it logged. To be called under the lock that what
        is being judged was done under.

        Raises:
            GenerationError: when `worked` is False or the library has logged an error.
        """
        if not worked or self.log.errors:
            raise GenerationError(f"{self.path}: {otherwise} ({_first_sentence(self.log.take_errors())}); {REMEDY}")


@dataclass(frozen=True)
class _Described:
    """What an engine or its sidecar says of a tensor."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    place: str

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype} {list(self.shape)} on the {self.place}"

    def agrees(self, other: _Described) -> bool:
        """Where the network has -1, an engine may have a size: the only one that its profile allows."""
        exact = ((each.kind, each.dtype, len(each.shape), each.place) for each in (self, other))
        sizes = zip(self.shape, other.shape, strict=False)
        return len(set(exact)) == 1 and all(one == two or -1 in (one, two) for one, two in sizes)


class TrtTarget:
    """A target, draft model or EAGLE head as an engine; see `step.Target`. Its caches all have the engine's capacity.

    Raises:
        BundleError: when the engine cannot be opened, or does not speak the graph contract.
    """

    max_tokens: int | None
    max_masked: int | None

    def __init__(self, module: Any, cuda: Cuda, path: Path, info: EngineInfo, engines: EngineSet) -> None:
        inputs = {tensor.name: tensor for tensor in info.inputs}
        outputs = {tensor.name: tensor for tensor in info.outputs}
        self.layers = sum(name.startswith("past_key_values.") for name in inputs) // 2
        names = list(zip(contract.past_names(self.layers), contract.present_names(self.layers), strict=True))
        expected = {*contract.TARGET_INPUTS, *(past for past, _ in names)}
        if not self.layers or set(inputs) - {contract.FEATURES} != expected or info.aliases != dict(names):
            odd = sorted((set(inputs) - {contract.FEATURES}) ^ expected) or sorted(info.aliases)
            raise BundleError(f"{path}: inputs or aliases {odd} differ from the graph contract; {REMEDY}")
        first = inputs[names[0][0]]
        self.kv_heads, self.rows, self.head_dim = first.shape[1:]
        if self.rows != engines.capacity:
            raise BundleError(
                f"{path}: '{first.name}' has {self.rows} rows but {SIDECAR_FILE} says capacity {engines.capacity}; "
                f"{REMEDY}"
            )
        self.kv_bytes = _BYTES[first.dtype]
        self.vocab_size = outputs[contract.LOGITS].shape[-1]
        self.width = outputs[contract.HIDDEN].shape[-1] if contract.HIDDEN in outputs else None
        self.features = inputs[contract.FEATURES].shape[-1] if contract.FEATURES in inputs else None
        self.top_k = outputs[contract.TOPK_IDS].shape[-1] if contract.TOPK_IDS in outputs else 0
        largest = inputs[contract.TREE_MASK].largest
        self.max_batch, self.max_tokens, self.max_masked = largest
        self.largest = (largest[1], largest[2], inputs[contract.LOGIT_ROWS].largest[0])
        self.engine = Engine(module, cuda, path, info)

    def open(self, capacity: int, batch: int = 1) -> TrtCache:
        """A fresh, empty cache for `batch` rows, which holds `capacity` tokens or as many as the engine allows.

        Raises:
            GenerationError: when the engine was built for fewer rows.
        """
        if batch > self.max_batch:
            raise GenerationError(
                f"{self.engine.path}: a batch of {batch} is more than the {self.max_batch} that this engine was built "
                "for; build the engines with a larger --batch."
            )
        return TrtCache(self, min(capacity, self.rows), batch)


class TrtCache:
    """Keys and values of one sequence (or of one batch of rows) on the GPU; see `step.Cache`. `seconds` includes what
    every call copies."""

    def __init__(self, target: TrtTarget, capacity: int, batch: int) -> None:
        self.target, self.capacity, self.batch = target, capacity, batch
        self.length = 0
        self.seconds = 0.0
        self._shape = (batch, target.kv_heads, target.rows, target.head_dim)
        self.keys_values = DeviceKeysValues(target.engine.cuda, (2 * target.layers, *self._shape), target.kv_bytes)
        self._calls: _Calls | None = None  # made by the first one

    def run(
        self,
        input_ids: Array,
        position_ids: Array,
        tree_mask: Array,
        logit_rows: Array,
        past_length: Array | None = None,
        features: Array | None = None,
    ) -> StepOutput:
        """See `step.Cache`.

        Raises:
            GenerationError: when the new rows would not fit the cache, are more than the engine takes in one call, or
                the engine fails.
        """
        tokens, masked = input_ids.shape[-1], tree_mask.shape[-1]
        past = self.length + masked - tokens if past_length is None else past_length
        check_room(past, tokens, self.capacity)
        calls = self._calls = self._calls or self._open_calls()
        key = tokens, masked, len(logit_rows)
        call = calls.get(key) or calls.make(key, call_shapes(self.target, self.batch, *key))
        given = (input_ids, position_ids, tree_mask, past, logit_rows, features)
        for array, value in zip(call.inputs, given, strict=False):  # only heads have an array for `features`
            array[...] = value
        self.seconds = calls.run(call)
        return StepOutput(**call.outputs, **calls.left_behind(call))

    def commit(self, nodes: Sequence[int]) -> None:
        """See `step.Cache`; nothing waits for the moves but the next call."""
        self.keys_values.keep(self.length, nodes)
        self.length += len(nodes)

    def truncate(self, length: int) -> None:
        """See `step.Cache`."""
        assert 0 <= length <= self.length
        self.length = length

    def _open_calls(self) -> _Calls:
        target, addresses = self.target, self.keys_values.addresses
        past, present = contract.past_names(target.layers), contract.present_names(target.layers)
        largest = call_shapes(target, self.batch, *target.largest)
        bound = dict(zip([*past, *present], [*addresses, *addresses], strict=True))
        return _Calls(target.engine, largest, bound, dict.fromkeys(past, self._shape))


class TrtHeads:
    """Medusa heads as an engine; see `step.Heads`.

    Raises:
        BundleError: when the engine cannot be opened.
    """

    def __init__(self, module: Any, cuda: Cuda, path: Path, info: EngineInfo) -> None:
        (hidden,) = info.inputs
        ids = next(tensor for tensor in info.outputs if tensor.name == contract.TOPK_IDS)
        self.width, (self.heads, self.top_k) = hidden.shape[-1], ids.shape[2:]
        self.seconds = 0.0
        shapes: Shapes = {
            contract.HIDDEN: (np.float32, (1, 1, self.width)),
            contract.TOPK_IDS: (np.int64, (1, 1, self.heads, self.top_k)),
            contract.TOPK_LOGPROBS: (np.float32, (1, 1, self.heads, self.top_k)),
        }
        self._lock = cuda.lock
        self._calls = _Calls(Engine(module, cuda, path, info), shapes)
        self._call = self._calls.make((1, 1, 1), shapes)

    def run(self, hidden: Array) -> tuple[Array, Array]:
        """See `step.Heads`."""
        with self._lock:
            self._call.inputs[0][0, 0] = hidden
            self.seconds = self._calls.run(self._call)
            ids, logprobs = (self._call.outputs[name][0, 0] for name in (contract.TOPK_IDS, contract.TOPK_LOGPROBS))
            return ids.copy(), logprobs.copy()


@dataclass(eq=False)
class _Call:
    """What calls of one shape read and write. `inputs` are in the order of `TrtCache.run`'s arguments.

    `shapes` and `addresses` are what a context must be told, of all tensors but keys and values. `left` names what
    stays on the device: (place in its block, dtype, shape).
    """

    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    inputs: tuple[Array, ...]
    outputs: dict[str, Array]
    left: dict[str, tuple[int, type[np.generic], tuple[int, ...]]]
    bytes_in: int
    bytes_out: int
    runs: int = 0
    last: int = 0  # the number of its last run
    context: Any = None  # of its own, once it has come often enough
    recording: Recording | None = None
    recordable: bool = True


class _Calls:
    """The calls of one cache, or of heads, by shape: (new tokens, rows that the mask speaks about, rows of logits).

    They share three blocks: what goes in, what comes back with every call, and what is left on the device.

    Args:
        largest: of the largest call, all that is neither bound nor a cache.
        bound: addresses of keys and values, which are the same for all calls.
        bound_shapes: shapes of those that are inputs.
    """

    _LEFT = (contract.LOGITS, contract.HIDDEN)

    def __init__(
        self,
        engine: Engine,
        largest: Shapes,
        bound: dict[str, int] | None = None,
        bound_shapes: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._engine, self._cuda = engine, engine.cuda
        self._bound, self._bound_shapes = bound or {}, bound_shapes or {}
        (_, bytes_in), (_, bytes_out), (_, bytes_left) = (_pack(shapes) for shapes in self._grouped(largest))
        self._device_in, self._host_in = self._cuda.device_memory(bytes_in), self._cuda.host_memory(bytes_in)
        self._device_out, self._host_out = self._cuda.device_memory(bytes_out), self._cuda.host_memory(bytes_out)
        self._device_left, self._bytes_left = self._cuda.device_memory(bytes_left), bytes_left
        self._host_left: npt.NDArray[np.uint8] | None = None  # made when somebody asks for it
        self._calls: dict[tuple[int, int, int], _Call] = {}
        self._settled: list[_Call] = []  # those with a context of their own
        with self._cuda.lock:
            self._context = self._context_of_all()
        self._told: _Call | None = None  # whose shapes and addresses `_context` has
        self._number = 0  # of the last run
        self._fetched: dict[str, Array] = {}  # of the last run

    def get(self, key: tuple[int, int, int]) -> _Call | None:
        return self._calls.get(key)

    def make(self, key: tuple[int, int, int], shapes: Shapes) -> _Call:
        """The call of a new shape.

        Raises:
            GenerationError: when the engine was not built for it.
        """
        engine = self._engine
        for name, (_, shape) in shapes.items():
            if name in engine.inputs:
                self._check_shape(engine.inputs[name], shape)
        if len(self._calls) == KEPT_SHAPES:
            del self._calls[next(key for key, call in self._calls.items() if call.context is None)]
        going_in, coming_out, left = self._grouped(shapes)
        (places_in, bytes_in), (places_out, bytes_out), (places_left, _) = map(_pack, (going_in, coming_out, left))
        addresses = {
            name: block.address + place
            for block, places in (
                (self._device_in, places_in),
                (self._device_out, places_out),
                (self._device_left, places_left),
            )
            for name, place in places.items()
        }
        call = self._calls[key] = _Call(
            shapes={name: shape for name, (_, shape) in going_in.items()},
            addresses=addresses,
            inputs=tuple(_view(self._host_in, places_in[name], *going_in[name]) for name in going_in),
            outputs={name: _view(self._host_out, places_out[name], *coming_out[name]) for name in coming_out},
            left={name: (places_left[name], *left[name]) for name in left},
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )
        return call

    def run(self, call: _Call) -> float:
        """Copy in, run, copy back and wait; the seconds that took, but for making a context.

        Raises:
            GenerationError: when the engine fails.
        """
        self._number += 1
        self._fetched.clear()
        with self._cuda.lock:
            call.runs, call.last = call.runs + 1, self._number
            if settles := call.context is None and call.recordable and call.runs >= RECORD_AFTER and self._has_room():
                context = self._context_of_all(one_shape=True)
                self._tell(context, call)
                call.context = context
                self._settled.append(call)
            before = perf_counter()
            if call.recording is not None:
                self._cuda.replay(call.recording)
            else:
                self._enqueue(call)
            self._cuda.synchronize()
            seconds = perf_counter() - before
            if settles and not self._engine.records_itself:
                self._record(call)
        return seconds

    def _has_room(self) -> bool:
        """Whether one more call may have a context of its own, for which one that is not used any more goes."""
        if len(self._settled) == KEPT_RECORDINGS:
            oldest = min(self._settled, key=lambda call: call.last)
            if self._number - oldest.last <= IDLE_RUNS:
                return False
            self._settled.remove(oldest)
            oldest.context, oldest.recording, oldest.runs = None, None, 0
        return True

    def left_behind(self, call: _Call) -> dict[str, Any]:
        """By name, what fetches an output of the run that has just been made."""
        return {name: partial(self._fetch, call, name, self._number) for name in call.left}

    def _fetch(self, call: _Call, name: str, number: int) -> Array:
        assert number == self._number, f"'{name}' was asked for after the next call had overwritten it"
        if name not in self._fetched:
            place, kind, shape = call.left[name]
            if self._host_left is None:
                self._host_left = self._cuda.host_memory(self._bytes_left)
            size = math.prod(shape) * np.dtype(kind).itemsize
            with self._cuda.lock:
                self._cuda.download(self._host_left[place:], self._device_left.address + place, size)
                self._cuda.synchronize()
            self._fetched[name] = _view(self._host_left, place, kind, shape)
        return self._fetched[name]

    def _enqueue(self, call: _Call) -> None:
        context = call.context
        if context is None:
            context = self._context
            if self._told is not call:
                self._told = None  # while it is neither the one nor the other
                self._tell(context, call)
                self._told = call
        self._cuda.upload(self._device_in.address, self._host_in, call.bytes_in)
        worked = context.execute_async_v3(self._cuda.stream_handle)
        self._engine.require(worked, "the engine failed")
        self._cuda.download(self._host_out, self._device_out.address, call.bytes_out)

    def _record(self, call: _Call) -> None:
        """Record a call whose own context has run it once."""
        try:
            call.recording = self._cuda.record(partial(self._enqueue, call))
        except GenerationError:  # not every engine can be recorded; it runs as it did before
            self._settled.remove(call)
            call.context, call.recordable = None, False
            self._engine.log.take_errors()

    def _context_of_all(self, one_shape: bool = False) -> Any:
        """A context that knows keys and values."""
        context = self._engine.context(one_shape)
        for name, shape in self._bound_shapes.items():
            self._engine.require(context.set_input_shape(name, shape), f"'{name}' cannot have shape {list(shape)}")
        for name, address in self._bound.items():
            self._engine.require(context.set_tensor_address(name, address), f"'{name}' cannot be bound")
        return context

    def _tell(self, context: Any, call: _Call) -> None:
        for name, shape in call.shapes.items():
            self._engine.require(context.set_input_shape(name, shape), f"'{name}' cannot have shape {list(shape)}")
        for name, address in call.addresses.items():
            self._engine.require(context.set_tensor_address(name, address), f"'{name}' cannot be bound")

    def _grouped(self, shapes: Shapes) -> tuple[Shapes, Shapes, Shapes]:
        """What goes in, what comes back with every call, and what is left on the device."""
        inputs = self._engine.inputs
        going_in = {name: entry for name, entry in shapes.items() if name in inputs}
        left = {name: entry for name, entry in shapes.items() if name not in inputs and name in self._LEFT}
        return going_in, {name: shapes[name] for name in shapes if name not in going_in and name not in left}, left

    def _check_shape(self, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
        bounds = zip(tensor.smallest, shape, tensor.largest, strict=True)
        if not all(low <= size <= high for low, size, high in bounds):
            raise GenerationError(
                f"{self._engine.path}: '{tensor.name}' of shape {list(shape)} does not fit this engine, which takes "
                f"{tensor.smallest} up to {tensor.largest}; build the engines with a larger --max-tree."
            )


def _pack(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Places of arrays in one block, and its size."""
    places, size = {}, 0
    for name, (kind, shape) in shapes.items():
        places[name] = place = -(-size // ALIGNMENT) * ALIGNMENT
        size = place + math.prod(shape) * np.dtype(kind).itemsize
    return places, size


def _view(block: npt.NDArray[np.uint8], place: int, kind: type[np.generic], shape: tuple[int, ...]) -> Array:
    size = math.prod(shape) * np.dtype(kind).itemsize
    return block[place : place + size].view(kind).reshape(shape)


def _first_sentence(errors: Sequence[str]) -> str:
    """Of what a library has logged."""
    first = errors[0].strip().splitlines()[0] if errors else "it says nothing of why"
    return first.partition(". ")[0].rstrip(".")[:300]


@cache
def collecting_log(module: Any) -> Any:
    """The logger of a library, which keeps what it says. A process has one and never frees it: the library may keep the
    first that it was given, and call it as long as anything of it is alive.

    Its errors are the process's, so whoever runs engines reads and clears them under `Cuda.lock`.
    """

    class Log(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: deque[str] = deque(maxlen=KEPT_WARNINGS)

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.INTERNAL_ERROR, module.ILogger.ERROR):
                self.errors.append(message)
            elif severity == module.ILogger.WARNING:
                self.warnings.append(message)

        def take_errors(self) -> list[str]:
            """What was logged since; it is forgotten."""
            taken, self.errors = self.errors, []
            return taken

        def take_warnings(self) -> list[str]:
            """The same, each once."""
            taken = list(dict.fromkeys(self.warnings))
            self.warnings.clear()
            return taken

    return Log()
