"""The little of CUDA that backends need, through cuda-python: memory, copies, one stream, recorded work, and the block
of keys and values that lies on a device."""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.graphs.errors import BundleError, GenerationError

ALIGNMENT = 256
"""What an address of a tensor is a multiple of (IExecutionContext.set_tensor_address asks for no more)."""

_discarded: deque[tuple[Callable[[Any], object], Any]] = deque()
"""What frees, and what nothing refers to any more."""

_recording = False  # somewhere in this process; changed under `Cuda.lock`


class Cuda:
    """The first device, and one stream on it.

    All work of a backend goes through this one stream, under `lock`, so that what two threads ask for does not mix:
    contexts of an engine share their scratch memory, and a stream that is being recorded may get nothing else, nor be
    waited for. The lock is the process's, as are the errors that a library logs.

    Args:
        runtime: `cuda.bindings.runtime`, or what behaves like it. Its functions return (status, *values).

    Raises:
        BundleError: when there is no device, or no driver for it.
    """

    lock = RLock()

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        status, count = runtime.cudaGetDeviceCount()
        if int(status) or not count:
            found = f"{status.name}, error {int(status)}" if int(status) else "0 devices"
            raise BundleError(
                f"CUDA: no GPU can be used here (cudaGetDeviceCount: {found}); install NVIDIA's driver, or run this "
                "bundle with the backend onnxruntime."
            )
        attributes = runtime.cudaDeviceAttr
        major = self._call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMajor, 0)
        minor = self._call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMinor, 0)
        self.target = f"sm{major}{minor}"
        self.stream = self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self.stream_handle = int(self.stream)
        self._to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._within = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._runtime, name)(*arguments)
        if int(status):
            full = status.name == "cudaErrorMemoryAllocation"
            remedy = "free memory or build engines with a smaller --max-length" if full else "start the program again"
            raise GenerationError(f"CUDA: {name} failed ({status.name}, error {int(status)}); {remedy}.")
        return values[0] if values else None

    # ---- memory ----

    def device_memory(self, size: int) -> DeviceMemory:
        """`size` bytes on the device, all zero."""
        size = max(size, 1)
        with self.lock:
            _free_discarded()
            memory = DeviceMemory(self._call("cudaMalloc", size))
            self._freed_with(memory, "cudaFree", memory.address)
            self._call("cudaMemsetAsync", memory.address, 0, size, self.stream)
        return memory

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """`size` bytes that the device can copy from and to without a detour, all zero."""
        size = max(size, 1)
        address = int(self._call("cudaHostAlloc", size, self._runtime.cudaHostAllocDefault))
        pages = (ctypes.c_uint8 * size).from_address(address)
        self._freed_with(pages, "cudaFreeHost", address)
        ctypes.memset(address, 0, size)
        return np.ctypeslib.as_array(pages)  # holds on to `pages`, as its views do

    def _freed_with(self, owner: object, name: str, handle: Any) -> None:
        """Let the function `name` free `handle` some time after `owner` has gone."""
        finalizer = weakref.finalize(owner, _discard, getattr(self._runtime, name), handle)
        finalizer.atexit = False  # the driver may be gone then

    # ---- work on the stream ----

    def upload(self, address: int, source: npt.NDArray[np.uint8], size: int) -> None:
        self._call("cudaMemcpyAsync", address, source.ctypes.data, size, self._to_device, self.stream)

    def download(self, target: npt.NDArray[np.uint8], address: int, size: int) -> None:
        self._call("cudaMemcpyAsync", target.ctypes.data, address, size, self._to_host, self.stream)

    def copy_blocks(self, target: int, source: int, pitch: int, width: int, count: int) -> None:
        """Copy `width` bytes on the device, `count` times, `pitch` bytes apart."""
        self._call("cudaMemcpy2DAsync", target, pitch, source, pitch, width, count, self._within, self.stream)

    def synchronize(self) -> None:
        """Wait until all work is done."""
        self._call("cudaStreamSynchronize", self.stream)
        _free_discarded()

    # ---- recorded work ----

    def record(self, work: Callable[[], None]) -> Recording:
        """Record what `work` puts on the stream, without running it.

        Raises:
            GenerationError: when something in it cannot be recorded; the stream is then as it was.
        """
        global _recording
        with self.lock:
            _recording = True
            try:
                executable = self._recorded(work)
            finally:
                _recording = False
                _free_discarded()
            recording = Recording(executable)
            self._freed_with(recording, "cudaGraphExecDestroy", executable)
        return recording

    def _recorded(self, work: Callable[[], None]) -> Any:
        runtime = self._runtime
        self._call(
            "cudaStreamBeginCapture", self.stream, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        )
        try:
            work()
        except BaseException:
            runtime.cudaStreamEndCapture(self.stream)
            runtime.cudaGetLastError()  # else the next one who asks would be told about this failure
            raise
        try:
            graph = self._call("cudaStreamEndCapture", self.stream)
            executable = self._call("cudaGraphInstantiate", graph, 0)
        except GenerationError:
            runtime.cudaGetLastError()
            raise
        runtime.cudaGraphDestroy(graph)
        return executable

    def replay(self, recording: Recording) -> None:
        self._call("cudaGraphLaunch", recording.executable, self.stream)


def _discard(free: Callable[[Any], object], handle: Any) -> None:
    """What the end of an object calls: in any thread, between any two lines."""
    _discarded.append((free, handle))
    _free_discarded()


def _free_discarded() -> None:
    """Free what was discarded, unless something is being recorded, which that would end, or another thread is at work:
    then whoever comes next does it."""
    if not _discarded or not Cuda.lock.acquire(blocking=False):
        return
    try:
        with suppress(IndexError):  # it may be called in the midst of itself, too
            while not _recording:
                free, handle = _discarded.popleft()
                free(handle)
    finally:
        Cuda.lock.release()


class DeviceMemory:
    """Memory on the device, freed with this object."""

    def __init__(self, address: Any) -> None:
        self.address = int(address)


class Recording:
    """Recorded work, forgotten with this object."""

    def __init__(self, executable: Any) -> None:
        self.executable = executable


class DeviceKeysValues:
    """Keys and values of one sequence (or of one batch of rows) in one block on the device: [2 * layers, B, Hkv, C, D],
    layer by layer, key before value. All zero at first: a row that nobody may see still must not hold NaN."""

    def __init__(self, cuda: Cuda, shape: tuple[int, int, int, int, int], itemsize: int) -> None:
        self._cuda, (parts, batch, heads, rows, width) = cuda, shape
        self._row, self._part = width * itemsize, batch * heads * rows * width * itemsize
        self._pitch, self._count = rows * self._row, parts * batch * heads
        self._memory = cuda.device_memory(parts * self._part)
        self.addresses = [self._memory.address + part * self._part for part in range(parts)]
        """Of each layer's keys, then values."""

    def keep(self, length: int, nodes: Sequence[int]) -> None:
        """See `Cache.commit`: the moves are put on the stream, one for all layers and heads."""
        base = self._memory.address
        with self._cuda.lock:
            for target, source, count in moves(length, nodes):
                self._cuda.copy_blocks(
                    base + target * self._row, base + source * self._row, self._pitch, count * self._row, self._count
                )


def moves(length: int, nodes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """What moves the rows `nodes` (ascending) behind `length` together, in order: (to, from, number of rows). Rows that
    follow one another move at once, as far as they do not lie where they go: what copies within a device takes care
    of no overlap."""
    place = 0
    while place < len(nodes):
        target, source, count = length + place, length + nodes[place], 1
        while place + count < len(nodes) and nodes[place + count] == nodes[place] + count:
            count += 1
        place += count
        while source > target and count:
            step = min(count, source - target)
            yield target, source, step
            target, source, count = target + step, source + step, count - step


def open_cuda(name: str = "cuda.bindings.runtime") -> Cuda:
    """The device of this machine.

    Raises:
        BundleError: when cuda-python is missing, or there is no device.
    """
    try:
        runtime = importlib.import_module(name)
    except ImportError as error:
        raise BundleError(
            f"CUDA: the package cuda-python is missing ({error}); install it with pip install 'cuda-python>=13'."
        ) from error
    return Cuda(runtime)
