"""ONNX Runtime: loaded graphs, and the key/value cache of one sequence bound to them in place.

Past and present of every layer are bound to one numpy buffer, so that a step writes its rows where they stay. Bindings
are made once per shape and reused: a step fills inputs and runs. What calls of all shapes read and write besides are
slices of a few buffers that they share.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from speccompile.graphs import contract
from speccompile.graphs.errors import BundleError, GenerationError

CPU_PROVIDER = "CPUExecutionProvider"
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

Array = npt.NDArray[Any]

_pool_is_shared = False  # since `share_threads` was called


def open_session(
    path: Path, threads: int | None = None, provider: str | None = None, spin: bool = True
) -> ort.InferenceSession:
    """Load a graph.

    Args:
        threads: intra-op threads; None takes the cores this process may use. Never left to ONNX Runtime, whose
            own choice ignores affinity and containers. Without effect once `share_threads` was called.
        provider: execution provider; None is the CPU.
        spin: whether idle threads busy-wait, where the graph has a pool of its own. False for a drafter: two spinning
            pools on a small machine fight.

    Raises:
        BundleError: when the provider is missing or the file cannot be loaded.
    """
    provider = provider or CPU_PROVIDER
    if provider not in ort.get_available_providers():
        raise BundleError(
            f"provider '{provider}' is not in this onnxruntime; available: {', '.join(ort.get_available_providers())}."
        )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if saturates():
        options.add_session_config_entry("session.x64quantprecision", "1")
    if _pool_is_shared:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads, options.inter_op_num_threads = threads or available_cores(), 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    try:
        return ort.InferenceSession(str(path), options, providers=[provider])
    except Exception as error:  # onnxruntime's own exceptions share no public base class
        raise BundleError(f"{path}: onnxruntime cannot load this graph ({_first_line(error)}).") from error


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


@dataclass(frozen=True)
class StepOutput:
    """What one call of a target leaves: views into buffers that the next call with the same cache overwrites.

    Args:
        next_ids: int64 [B,R].
        logits: float32 [B,R,V].
        hidden: float32 [B,T,F], or None when the graph does not give it.
        topk_ids, topk_logprobs: int64 and float32 [B,R,K], of a draft model or EAGLE head only.
    """

    next_ids: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32] | None = None
    topk_ids: npt.NDArray[np.int64] | None = None
    topk_logprobs: npt.NDArray[np.float32] | None = None


class OrtTarget:
    """A target, draft model or EAGLE head on the graph contract. Weights live here, once; each sequence opens its own
    cache.

    `vocab_size` is the width of the logits: V, or a draft model's Vd; `top_k` is K, 0 for a target; `width` is F of
    the output `hidden` and `features` F of the input of that name, None where there is none.
    """

    def __init__(self, path: Path, threads: int | None = None, provider: str | None = None, spin: bool = True) -> None:
        self.session = open_session(path, threads, provider, spin)
        inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.layers = sum(name.startswith("past_key_values.") for name in inputs) // 2
        expected = [*contract.TARGET_INPUTS, *contract.past_names(self.layers)]
        if not self.layers or set(inputs) - {contract.FEATURES} != set(expected):
            odd = sorted((set(inputs) - {contract.FEATURES}) ^ set(expected))
            raise BundleError(f"{path}: inputs {odd} differ from the graph contract; rebuild the bundle.")
        first = inputs[contract.past_names(self.layers)[0]]
        self.kv_heads, self.head_dim = int(first.shape[1]), int(first.shape[3])
        self.kv_dtype = _DTYPES[first.type]
        self.vocab_size = int(self.outputs[contract.LOGITS].shape[-1])
        self.width = int(self.outputs[contract.HIDDEN].shape[-1]) if contract.HIDDEN in self.outputs else None
        self.features = int(inputs[contract.FEATURES].shape[-1]) if contract.FEATURES in inputs else None
        self.top_k = int(self.outputs[contract.TOPK_IDS].shape[-1]) if contract.TOPK_IDS in self.outputs else 0

    def open(self, capacity: int, batch: int = 1) -> OrtCache:
        """A fresh, empty cache of `capacity` tokens for `batch` rows."""
        return OrtCache(self, capacity, batch)


class OrtCache:
    """Keys and values of one sequence (or of one batch of rows), and the bindings that let the target use them.

    `buffer` is [2 * layers, B, Hkv, C, D]: layer by layer, key before value, so that a commit is one numpy move.
    """

    def __init__(self, target: OrtTarget, capacity: int, batch: int) -> None:
        self.target, self.capacity, self.batch = target, capacity, batch
        self.length = 0
        self.seconds = 0.0  # inside the backend, in the last call
        rows = capacity + 1  # one for the twin of a lone token, see graphs.passes.derive_gqa_inputs
        shape = (2 * target.layers, batch, target.kv_heads, rows, target.head_dim)
        # An anonymous map of plain pages: only rows that are written take memory. numpy asks for huge pages, of which
        # the few rows of a short text would touch nearly all.
        pages = mmap.mmap(-1, math.prod(shape) * np.dtype(target.kv_dtype).itemsize)
        self.buffer = np.frombuffer(pages, target.kv_dtype).reshape(shape)
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
        """One call of the model; new rows are written behind those that are there, but not committed.

        Args:
            tree_mask: bool [T,M]; M - T of the rows it speaks about are uncommitted ones, which earlier calls have left
                behind `length`.
            past_length: rows before the new ones; default: this cache's length and those M - T.
            features: what an EAGLE head reads, and nothing else does; it may be a view of the last output.
            others: shapes as in `graphs.contract`; a [T], [T,M] or [T,F] argument stands for batch 1.

        Raises:
            GenerationError: when the new rows would not fit the cache.
        """
        tokens, masked = input_ids.shape[-1], tree_mask.shape[-1]
        past = self.length + masked - tokens if past_length is None else past_length
        longest = past if isinstance(past, int) else int(past.max())
        if longest + tokens > self.capacity:
            raise GenerationError(
                f"cache: {tokens} new tokens behind {longest} do not fit its capacity of {self.capacity}."
            )
        if self._calls is None:
            self._calls = _Calls(self.target, self.buffer)
        call = self._calls[tokens, masked, len(logit_rows)]
        given = (input_ids, position_ids, tree_mask, past, logit_rows, features)
        for array, value in zip(call.inputs, given, strict=False):  # only heads have an array for `features`
            array[...] = value
        before = perf_counter()
        self.target.session.run_with_iobinding(call.io)
        self.seconds = perf_counter() - before
        return call.output

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the rows `nodes` (ascending, relative to the current length) of the last calls, in this order, and
        advance the length. A path that is the first rows costs no move."""
        moved = next((index for index, node in enumerate(nodes) if index != node), len(nodes))
        if moved < len(nodes):
            source = [self.length + node for node in nodes[moved:]]
            self.buffer[:, :, :, self.length + moved : self.length + len(nodes)] = self.buffer[:, :, :, source]
        self.length += len(nodes)

    def truncate(self, length: int) -> None:
        """Forget everything behind `length`; the rows are simply overwritten later."""
        assert 0 <= length <= self.length
        self.length = length


@dataclass(frozen=True)
class _Part:
    """An array that a call reads or writes, and the value that binds it."""

    array: Array
    value: ort.OrtValue


@dataclass(frozen=True)
class _Call:
    """What calls of one shape read and write, bound. `inputs` are in the order of `OrtCache.run`'s arguments."""

    io: Any
    inputs: tuple[Array, ...]
    output: StepOutput


class _Calls:
    """The calls of one cache, by shape. They share keys and values, and buffers for the rest."""

    def __init__(self, target: OrtTarget, cache: Array) -> None:
        self._target, self._batch = target, cache.shape[1]
        self._cache = [ort.OrtValue.ortvalue_from_numpy(part) for part in cache]
        self._buffers: dict[str, Array] = {}
        self._parts: dict[tuple[str, tuple[int, ...]], _Part] = {}
        self._calls: dict[tuple[int, int, int], _Call] = {}

    def __getitem__(self, shape: tuple[int, int, int]) -> _Call:
        """(new tokens, rows that the mask speaks about, rows of logits) -> the call."""
        call = self._calls.get(shape)
        if call is None:
            if len(self._calls) == KEPT_SHAPES:
                self._forget()
            call = self._make(*shape)
            self._calls[shape] = call
        return call

    def _make(self, *shape: int) -> _Call:
        target, io = self._target, self._target.session.io_binding()
        names = zip(contract.past_names(target.layers), contract.present_names(target.layers), strict=True)
        for (past, present), value in zip(names, self._cache, strict=True):
            io.bind_ortvalue_input(past, value)
            io.bind_ortvalue_output(present, value)
        exact, roomy = self._shapes(*shape), self._shapes(*(-(-size // ROOM) * ROOM for size in shape))
        parts = {
            name: self._part(name, kind, sizes, math.prod(roomy[name][1])) for name, (kind, sizes) in exact.items()
        }
        inputs = {name: parts.pop(name) for name in (*contract.TARGET_INPUTS, contract.FEATURES) if name in parts}
        for name, part in inputs.items():
            io.bind_ortvalue_input(name, part.value)
        for name, part in parts.items():
            io.bind_ortvalue_output(name, part.value)
        output = StepOutput(**{name: part.array for name, part in parts.items()})
        return _Call(io, tuple(part.array for part in inputs.values()), output)

    def _shapes(self, tokens: int, masked: int, rows: int) -> dict[str, tuple[type, tuple[int, ...]]]:
        """By name, dtype and shape of all that is not keys and values."""
        target, batch = self._target, self._batch
        shapes: dict[str, tuple[type, tuple[int, ...]]] = {
            contract.INPUT_IDS: (np.int64, (batch, tokens)),
            contract.POSITION_IDS: (np.int64, (batch, tokens)),
            contract.TREE_MASK: (np.bool_, (batch, tokens, masked)),
            contract.PAST_LENGTH: (np.int64, (batch,)),
            contract.LOGIT_ROWS: (np.int64, (rows,)),
            contract.NEXT_IDS: (np.int64, (batch, rows)),
            contract.LOGITS: (np.float32, (batch, rows, target.vocab_size)),
        }
        if target.features:
            shapes[contract.FEATURES] = (np.float32, (batch, tokens, target.features))
        if target.width:
            shapes[contract.HIDDEN] = (np.float32, (batch, tokens, target.width))
        if target.top_k:
            shapes[contract.TOPK_IDS] = (np.int64, (batch, rows, target.top_k))
            shapes[contract.TOPK_LOGPROBS] = (np.float32, (batch, rows, target.top_k))
        return shapes

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
    """A Medusa heads graph: one feature row in, the best tokens of each head out."""

    def __init__(self, path: Path, threads: int | None = None, provider: str | None = None) -> None:
        self.session = open_session(path, threads, provider, spin=False)
        hidden = self.session.get_inputs()[0]
        ids = next(value for value in self.session.get_outputs() if value.name == contract.TOPK_IDS)
        self.width, self.heads, self.top_k = int(hidden.shape[-1]), int(ids.shape[2]), int(ids.shape[3])
        self.seconds = 0.0  # inside the backend, in the last call
        self.io = self.session.io_binding()
        self.hidden = np.zeros((1, 1, self.width), np.float32)
        shape = (1, 1, self.heads, self.top_k)
        self.ids, self.logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        arrays = (self.hidden, self.ids, self.logprobs)
        self._kept = hidden_value, ids_value, logprobs_value = [
            ort.OrtValue.ortvalue_from_numpy(array) for array in arrays
        ]
        self.io.bind_ortvalue_input(contract.HIDDEN, hidden_value)
        self.io.bind_ortvalue_output(contract.TOPK_IDS, ids_value)
        self.io.bind_ortvalue_output(contract.TOPK_LOGPROBS, logprobs_value)

    def run(self, hidden: Array) -> tuple[Array, Array]:
        """hidden float32 [F] -> ids int64 [heads,K], logprobs float32 [heads,K]: views the next call overwrites."""
        self.hidden[0, 0] = hidden
        before = perf_counter()
        self.session.run_with_iobinding(self.io)
        self.seconds = perf_counter() - before
        return self.ids[0, 0], self.logprobs[0, 0]


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
