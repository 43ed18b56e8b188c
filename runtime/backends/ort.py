"""ONNX Runtime: loaded graphs, and the key/value cache of one sequence bound to them in place.

Past and present of every layer are bound to one buffer, numpy's or one on the GPU, so that a step writes its rows where
they stay. Bindings are made once per shape and reused: a step fills inputs and runs. What calls of all shapes read and
write besides are slices of a few buffers that they share.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort

from speccompile.graphs import contract
from speccompile.graphs.errors import BundleError, GenerationError
from speccompile.runtime.backends.cuda import Cuda, DeviceKeysValues, open_cuda
from speccompile.runtime.backends.step import Array, StepOutput, call_shapes, check_room
from speccompile.runtime.bundle import Bundle

CPU_PROVIDER = "CPUExecutionProvider"
RTX_PROVIDER = "NvTensorRTRTXExecutionProvider"
GPU_PROVIDERS = ("CUDAExecutionProvider", "TensorrtExecutionProvider", RTX_PROVIDER)
"""Those that read keys and values where CUDA has put them."""

DEVICE, VENDOR = "cuda", ort.OrtDeviceVendorId.NVIDIA
"""Where that is, as ONNX Runtime calls it."""

PROVIDER_OPTIONS = {"CUDAExecutionProvider": {"use_tf32": "0"}}
"""TF32 would round what float32 products are made of to 10 bits."""

RTX_PACKAGE = "onnxruntime-ep-nv-tensorrt-rtx"
KEPT_SHAPES = 128
"""Of the calls of one cache; trees that are grown anew in every round come in dozens. A shape takes some kilobytes."""

ROOM = 16
"""Buffers grow by so many tokens or rows, so that a new largest tree rarely makes new ones."""

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}

Binder = Callable[[Any], dict[str, ort.OrtValue]]

_pool_is_shared = False  # since `share_threads` was called


class OrtGraphs:
    """The graphs of a bundle, run by ONNX Runtime. For the arguments see `open_session`; drafters never spin."""

    capacity = None

    def __init__(
        self, bundle: Bundle, threads: int | None = None, provider: str | None = None, fall_back: bool = False
    ) -> None:
        self._bundle, self._threads, self._provider, self._fall_back = bundle, threads, provider, fall_back

    def target(self, name: str = "target") -> OrtTarget:
        """The target, or the draft model or EAGLE head of that name."""
        path, info = self._bundle.graph(name)
        spin = name == "target"
        if info.precision == "bf16" and self._provider in (None, CPU_PROVIDER):
            raise BundleError(
                f"{path}: it is in bf16, which ONNX Runtime's CPU kernels do not compute in; run its engines with "
                "--backend tensorrt, or build the bundle with --precision fp16."
            )
        return OrtTarget(path, self._threads, self._provider, spin, self._fall_back)

    def heads(self) -> OrtHeads:
        """The Medusa heads."""
        return OrtHeads(self._bundle.graph("medusa")[0], self._threads, self._provider, self._fall_back)


def open_session(
    path: Path,
    threads: int | None = None,
    provider: str | None = None,
    spin: bool = True,
    fall_back: bool = False,
) -> ort.InferenceSession:
    """Load a graph.

    Args:
        threads: intra-op threads; None takes the cores this process may use. Never left to ONNX Runtime, whose
            own choice ignores affinity and containers. Without effect once `share_threads` was called.
        provider: execution provider; None is the CPU.
        spin: whether idle threads busy-wait, where the graph has a pool of its own. False for a drafter: two spinning
            pools on a small machine fight.
        fall_back: whether the CPU may stand in for a provider that cannot be used here.

    Raises:
        BundleError: when the provider is missing or cannot be used, or the file cannot be loaded.
    """
    provider = provider or CPU_PROVIDER
    try:
        return _open(path, threads, provider, spin)
    except _UnusableError as reason:
        if not fall_back:
            raise BundleError(str(reason)) from reason
    return _open(path, threads, CPU_PROVIDER, spin)


class _UnusableError(Exception):
    """A provider that cannot be used here, and what to do about it."""


def _open(path: Path, threads: int | None, provider: str, spin: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if saturates():
        options.add_session_config_entry("session.x64quantprecision", "1")
    # ONNX Runtime would make DequantizeLinear and MatMul one product that rounds its activations to bytes, which nobody
    # asked for: the same graph in TensorRT does not, and rows of other calls would tip other integers.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if _pool_is_shared:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads, options.inter_op_num_threads = threads or available_cores(), 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    chosen: dict[str, Any] = {"providers": [provider], "provider_options": [PROVIDER_OPTIONS.get(provider, {})]}
    if provider == RTX_PROVIDER:
        options.add_provider_for_devices(_rtx_devices(), {})
        chosen = {}
    elif provider not in ort.get_available_providers():
        raise _UnusableError(
            f"provider '{provider}' is not in this onnxruntime; available: {', '.join(ort.get_available_providers())}."
        )
    try:
        session = ort.InferenceSession(str(path), options, **chosen, enable_fallback=0)
    except Exception as error:  # onnxruntime's own exceptions share no public base class
        raise BundleError(f"{path}: onnxruntime cannot load this graph ({_first_line(error)}).") from error
    # A provider whose libraries or driver are missing is left out with no more than a line in a log.
    if (used := session.get_providers()[0]) != provider:
        raise _UnusableError(
            f"provider '{provider}': onnxruntime took '{used}' instead, as its libraries or its driver are missing; "
            "install them, or leave the provider out."
        )
    return session


def _rtx_devices() -> list[Any]:
    """What TensorRT-RTX's provider can run on. It is a package of its own, to be registered first."""
    if RTX_PROVIDER not in {device.ep_name for device in ort.get_ep_devices()}:
        try:
            package = importlib.import_module(RTX_PACKAGE.replace("-", "_"))
            ort.register_execution_provider_library(RTX_PROVIDER, package.get_library_path())
        except ImportError as error:
            raise _UnusableError(
                f"provider '{RTX_PROVIDER}': its package is missing; install it with pip install {RTX_PACKAGE}."
            ) from error
        except Exception as error:  # onnxruntime's own exceptions share no public base class
            raise _UnusableError(
                f"provider '{RTX_PROVIDER}': onnxruntime cannot load its library ({_first_line(error)}); install "
                "NVIDIA's driver, or leave the provider out."
            ) from error
    devices = [device for device in ort.get_ep_devices() if device.ep_name == RTX_PROVIDER]
    if not devices:
        raise _UnusableError(f"provider '{RTX_PROVIDER}': it finds no GPU that it can use; leave the provider out.")
    return devices


def share_threads(threads: int | None = None) -> None:
    """Let all sessions of this process run in one pool of `threads` threads (default: the cores it may use).

    Target and drafter take turns. In one pool, the threads that one has just used still spin when the other starts;
    with a pool each, they have gone to sleep, or fight over the cores (two cores, SmolLM2: a draft step takes 1.3 ms
    instead of 2.3). It is for whoever owns the process, before anything is loaded: ONNX Runtime then refuses every
    session that wants threads of its own, the application's too. A second call changes nothing.

    Raises:
        GenerationError: when the process has a pool that was made elsewhere.
    """
    global _pool_is_shared
    if _pool_is_shared:
        return
    try:
        ort.set_global_thread_pool_sizes(threads or available_cores(), 1)
    except Exception as error:  # onnxruntime's own exceptions share no public base class
        raise GenerationError(
            f"threads: this process already has a shared pool ({_first_line(error)}); call share_threads() before "
            "anything else makes one."
        ) from error
    _pool_is_shared = True


@cache
def saturates() -> bool:
    """Whether this CPU's products of bytes and signed bytes may saturate: an x86 without VNNI, or one that cannot be
    asked. ONNX Runtime then has to be told to take another kernel; it must not be told so elsewhere, where that kernel
    takes twice the time for eight rows."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return True
    return "vnni" not in flags


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class OrtTarget:
    """A target, draft model or EAGLE head; see `step.Target`.

    Raises:
        BundleError: when the graph cannot be loaded, or does not speak the graph contract.
    """

    max_tokens: int | None = None
    max_masked: int | None = None

    def __init__(
        self,
        path: Path,
        threads: int | None = None,
        provider: str | None = None,
        spin: bool = True,
        fall_back: bool = False,
    ) -> None:
        self.session = open_session(path, threads, provider, spin, fall_back)
        inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.layers = sum(name.startswith("past_key_values.") for name in inputs) // 2
        expected = [*contract.TARGET_INPUTS, *contract.past_names(self.layers)]
        if not self.layers or set(inputs) - {contract.FEATURES} != set(expected):
            odd = sorted((set(inputs) - {contract.FEATURES}) ^ set(expected))
            raise BundleError(f"{path}: inputs {odd} differ from the graph contract; rebuild the bundle.")
        self.on_gpu = _is_on_gpu(self.session)
        self.cuda: Cuda | None = open_cuda() if self.on_gpu and _reads_cache_on_gpu(self.session) else None
        first = inputs[contract.past_names(self.layers)[0]]
        self.kv_heads, self.head_dim = int(first.shape[1]), int(first.shape[3])
        if first.type not in _DTYPES:
            raise BundleError(
                f"{path}: its cache is {first.type}, which this backend does not bind; build the bundle with "
                "--precision fp32 or fp16."
            )
        self.kv_dtype = _DTYPES[first.type]
        self.vocab_size = int(self.outputs[contract.LOGITS].shape[-1])
        self.width = int(self.outputs[contract.HIDDEN].shape[-1]) if contract.HIDDEN in self.outputs else None
        self.features = int(inputs[contract.FEATURES].shape[-1]) if contract.FEATURES in inputs else None
        self.top_k = int(self.outputs[contract.TOPK_IDS].shape[-1]) if contract.TOPK_IDS in self.outputs else 0

    def open(self, capacity: int, batch: int = 1) -> OrtCache:
        """A fresh, empty cache of `capacity` tokens for `batch` rows."""
        return OrtCache(self, capacity, batch) if self.cuda is None else OrtGpuCache(self, capacity, batch)


def _is_on_gpu(session: ort.InferenceSession) -> bool:
    return session.get_providers()[0] in GPU_PROVIDERS


def _reads_cache_on_gpu(session: ort.InferenceSession) -> bool:
    """Whether keys and values of all layers are read where CUDA puts them. A provider leaves nodes that it cannot run
    to the CPU, and their inputs with them."""
    return all(
        place.device_vendor_id == VENDOR and place.device_mem_type == ort.OrtDeviceMemoryType.DEFAULT
        for value, place in zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        if value.name.startswith("past_key_values.")
    )


class OrtCache:
    """Keys and values of one sequence (or of one batch of rows), and the bindings that let the target use them; see
    `step.Cache`.

    `buffer` is [2 * layers, B, Hkv, C, D]: layer by layer, key before value, so that a commit is one numpy move.
    """

    def __init__(self, target: OrtTarget, capacity: int, batch: int) -> None:
        self.target, self.capacity, self.batch = target, capacity, batch
        self.length = 0
        self.seconds = 0.0  # inside the backend, in the last call
        rows = capacity + 1  # one for the twin of a lone token, see graphs.passes.derive_gqa_inputs
        shape = (2 * target.layers, batch, target.kv_heads, rows, target.head_dim)
        self._allocate(shape)
        self._calls: _Calls | None = None  # made by the first one

    def _allocate(self, shape: tuple[int, int, int, int, int]) -> None:
        # An anonymous map of plain pages: only rows that are written take memory. numpy asks for huge pages, of which
        # the few rows of a short text would touch nearly all.
        pages = mmap.mmap(-1, math.prod(shape) * np.dtype(self.target.kv_dtype).itemsize)
        self.buffer: Array = np.frombuffer(pages, self.target.kv_dtype).reshape(shape)

    def run(
        self,
        input_ids: Array,
        position_ids: Array,
        tree_mask: Array,
        logit_rows: Array,
        past_length: Array | None = None,
        features: Array | None = None,
    ) -> StepOutput:
        """See `step.Cache`."""
        tokens, masked = input_ids.shape[-1], tree_mask.shape[-1]
        past = self.length + masked - tokens if past_length is None else past_length
        check_room(past, tokens, self.capacity)
        if self._calls is None:
            self._calls = _Calls(self.target, self.batch, self.binder())
        call = self._calls[tokens, masked, len(logit_rows)]
        given = (input_ids, position_ids, tree_mask, past, logit_rows, features)
        for array, value in zip(call.inputs, given, strict=False):  # only heads have an array for `features`
            array[...] = value
        before = perf_counter()
        if self.target.on_gpu:
            _bind_anew(call.io, call.on_host)
        self.target.session.run_with_iobinding(call.io)
        self.seconds = perf_counter() - before
        return call.output

    def commit(self, nodes: Sequence[int]) -> None:
        """See `step.Cache`."""
        moved = next((index for index, node in enumerate(nodes) if index != node), len(nodes))
        if moved < len(nodes):
            source = [self.length + node for node in nodes[moved:]]
            self.buffer[:, :, :, self.length + moved : self.length + len(nodes)] = self.buffer[:, :, :, source]
        self.length += len(nodes)

    def truncate(self, length: int) -> None:
        """See `step.Cache`."""
        assert 0 <= length <= self.length
        self.length = length

    def binder(self) -> Binder:
        """What binds keys and values, past and present of a layer to the same place; it returns the inputs that lie in
        the host's memory."""
        values = [ort.OrtValue.ortvalue_from_numpy(part) for part in self.buffer]
        on_host = dict(zip(contract.past_names(self.target.layers), values, strict=True))

        def bind(io: Any) -> dict[str, ort.OrtValue]:
            for (past, present), value in zip(_cache_names(self.target), values, strict=True):
                io.bind_ortvalue_input(past, value)
                io.bind_ortvalue_output(present, value)
            return on_host

        return bind


class OrtGpuCache(OrtCache):
    """The same for a provider that runs on the GPU: keys and values stay there, and all else is copied by ONNX Runtime.
    It works on a stream of its own, so what is put on ours is waited for."""

    def _allocate(self, shape: tuple[int, int, int, int, int]) -> None:
        assert self.target.cuda is not None
        self._cuda, self._place_shape = self.target.cuda, shape[1:]
        self.keys_values = DeviceKeysValues(self._cuda, shape, np.dtype(self.target.kv_dtype).itemsize)
        self._cuda.synchronize()

    def commit(self, nodes: Sequence[int]) -> None:
        """See `step.Cache`."""
        self.keys_values.keep(self.length, nodes)
        self._cuda.synchronize()
        self.length += len(nodes)

    def binder(self) -> Binder:
        """See `OrtCache`."""

        def bind(io: Any) -> dict[str, ort.OrtValue]:
            for (past, present), address in zip(_cache_names(self.target), self.keys_values.addresses, strict=True):
                place = DEVICE, 0, self.target.kv_dtype, self._place_shape, address
                io.bind_input(past, *place)
                io.bind_output(present, *place)
            return {}

        return bind


def _bind_anew(io: Any, values: dict[str, ort.OrtValue]) -> None:
    """Bind inputs that have been filled. For a provider on the GPU, binding an array of the host copies it; it would
    compute on what was there when it was first bound."""
    for name, value in values.items():
        io.bind_ortvalue_input(name, value)
    io.synchronize_inputs()


def _cache_names(target: OrtTarget) -> Iterator[tuple[str, str]]:
    return zip(contract.past_names(target.layers), contract.present_names(target.layers), strict=True)


@dataclass(frozen=True)
class _Part:
    """An array that a call reads or writes, and the value that binds it."""

    array: Array
    value: ort.OrtValue


@dataclass(frozen=True)
class _Call:
    """What calls of one shape read and write, bound. `inputs` are in the order of `OrtCache.run`'s arguments; `on_host`
    is all that is read from the host's memory."""

    io: Any
    inputs: tuple[Array, ...]
    output: StepOutput
    on_host: dict[str, ort.OrtValue]


class _Calls:
    """The calls of one cache, by shape. They share keys and values, and buffers for the rest."""

    def __init__(self, target: OrtTarget, batch: int, bind_cache: Binder) -> None:
        self._target, self._batch, self._bind_cache = target, batch, bind_cache
        self._buffers: dict[str, Array] = {}
        self._parts: dict[tuple[str, tuple[int, ...]], _Part] = {}
        self._calls: dict[tuple[int, int, int], _Call] = {}

    def __getitem__(self, shape: tuple[int, int, int]) -> _Call:
        """(new tokens, rows that the mask speaks about, rows of logits) -> the call."""
        call = self._calls.get(shape)
        if call is None:
            if len(self._calls) == KEPT_SHAPES:
                self._forget()
            call = self._make(shape)
            self._calls[shape] = call
        return call

    def _make(self, shape: tuple[int, int, int]) -> _Call:
        target, io = self._target, self._target.session.io_binding()
        on_host = self._bind_cache(io)
        exact, roomy = (
            call_shapes(target, self._batch, *sizes) for sizes in (shape, [-(-size // ROOM) * ROOM for size in shape])
        )
        parts = {
            name: self._part(name, kind, sizes, math.prod(roomy[name][1])) for name, (kind, sizes) in exact.items()
        }
        inputs = {name: parts.pop(name) for name in (*contract.TARGET_INPUTS, contract.FEATURES) if name in parts}
        for name, part in inputs.items():
            io.bind_ortvalue_input(name, part.value)
        for name, part in parts.items():
            io.bind_ortvalue_output(name, part.value)
        output = StepOutput(**{name: part.array for name, part in parts.items()})
        on_host = {**on_host, **{name: part.value for name, part in inputs.items()}}
        return _Call(io, tuple(part.array for part in inputs.values()), output, on_host)

    def _part(self, name: str, kind: type, shape: tuple[int, ...], room: int) -> _Part:
        """The front of the buffer `name`, which is made anew with `room` when it is too small."""
        part = self._parts.get((name, shape))
        if part is None:
            size = math.prod(shape)
            if name not in self._buffers or len(self._buffers[name]) < size:
                self._forget()  # they hold the old one
                self._buffers[name] = np.zeros(room, kind)  # pages that are never written take no memory
            array = self._buffers[name][:size].reshape(shape)
            part = self._parts[name, shape] = _Part(array, ort.OrtValue.ortvalue_from_numpy(array))
        return part

    def _forget(self) -> None:
        self._calls.clear()
        self._parts.clear()


class OrtHeads:
    """A Medusa heads graph; see `step.Heads`."""

    def __init__(
        self, path: Path, threads: int | None = None, provider: str | None = None, fall_back: bool = False
    ) -> None:
        self.session = open_session(path, threads, provider, spin=False, fall_back=fall_back)
        hidden = self.session.get_inputs()[0]
        ids = next(value for value in self.session.get_outputs() if value.name == contract.TOPK_IDS)
        self.width, self.heads, self.top_k = int(hidden.shape[-1]), int(ids.shape[2]), int(ids.shape[3])
        self.seconds = 0.0  # inside the backend, in the last call
        self.io = self.session.io_binding()
        self.hidden = np.zeros((1, 1, self.width), np.float32)
        shape = (1, 1, self.heads, self.top_k)
        self.ids, self.logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        self._lock = Lock()  # one set of arrays for all sequences
        arrays = (self.hidden, self.ids, self.logprobs)
        self._kept = hidden_value, ids_value, logprobs_value = [
            ort.OrtValue.ortvalue_from_numpy(array) for array in arrays
        ]
        self._on_gpu, self._on_host = _is_on_gpu(self.session), {contract.HIDDEN: hidden_value}
        self.io.bind_ortvalue_input(contract.HIDDEN, hidden_value)
        self.io.bind_ortvalue_output(contract.TOPK_IDS, ids_value)
        self.io.bind_ortvalue_output(contract.TOPK_LOGPROBS, logprobs_value)

    def run(self, hidden: Array) -> tuple[Array, Array]:
        """See `step.Heads`."""
        with self._lock:
            self.hidden[0, 0] = hidden
            before = perf_counter()
            if self._on_gpu:
                _bind_anew(self.io, self._on_host)
            self.session.run_with_iobinding(self.io)
            self.seconds = perf_counter() - before
            return self.ids[0, 0].copy(), self.logprobs[0, 0].copy()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def graph_io(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Names, types and shapes of a graph's inputs and outputs; weights are mapped, not prepared."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(str(path), options, providers=[CPU_PROVIDER])
    inputs, outputs = (
        [{"name": value.name, "type": value.type, "shape": list(value.shape)} for value in values]
        for values in (session.get_inputs(), session.get_outputs())
    )
    return inputs, outputs
