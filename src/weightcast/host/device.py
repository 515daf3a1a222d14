"""GPUs: the order of their work, and their memory. Only this file uses torch.cuda's streams, events and waits.

Another stream, and the host, see the results of a stream only after they have waited for it. A weightcast thread in an
engine's process uses its own stream, so that the engine's kernels never wait for a transfer. For devices other than
GPUs the functions do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from weightcast.errors import InsufficientMemoryError, UnsupportedError

logger = logging.getLogger(__name__)

cuda: Any = torch.cuda
"""The module torch.cuda, which `tests/pretended` replaces by a GPU without hardware."""

POLL_SECONDS = 0.0005
"""How often a GPU is asked whether something on it is over."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
_INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""


class Event(Protocol):
    """Completion of the work that was queued on a stream when the event was recorded."""

    def query(self) -> bool:
        """Return whether that work is over. Does not wait."""

    def synchronize(self) -> None:
        """Wait until that work is over."""

    def wait(self, stream: Any) -> None:
        """Have a stream wait until that work is over; the thread does not wait."""


def stream(device: torch.device) -> Any:
    """Return a new stream of a GPU, else None."""
    return cuda.Stream(device) if device.type == "cuda" else None


def current_stream(device: torch.device) -> Any:
    """Return this thread's current stream of a GPU, else None."""
    return cuda.current_stream(device) if device.type == "cuda" else None


def present_stream() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return a context with this thread's GPU and stream, for another thread to enter; without CUDA an empty one."""
    return functools.partial(cuda.stream, cuda.current_stream()) if cuda.is_initialized() else contextlib.nullcontext


def recorded(device: torch.device) -> Event:
    """Return an event after all work that is queued on this thread's stream of a GPU."""
    event: Event = cuda.Event()
    event.record(cuda.current_stream(device))  # type: ignore[attr-defined]
    return event


def queue_behind(event: Event, device: torch.device) -> None:
    """Have this thread's stream of a GPU wait for an event of this process before its next work."""
    event.wait(cuda.current_stream(device))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished the work of all streams."""
    if device.type == "cuda":
        cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait until a GPU has finished the work of this thread's stream."""
    if device.type == "cuda":
        cuda.current_stream(device).synchronize()


def on(side: Any) -> contextlib.AbstractContextManager[object]:
    """Return a context in which work is queued on the stream `side`; None: on the current stream."""
    return contextlib.nullcontext() if side is None else cuda.stream(side)


@contextlib.contextmanager
def beside(side: Any, device: torch.device) -> Iterator[None]:
    """Context in which work is queued on `side`, which first waits for this thread's stream; at the end that waits too.

    So the caller's later kernels may write to memory that was read in the block, also after an error.
    """
    if side is None:
        yield
        return
    own = cuda.current_stream(device)
    side.wait_stream(own)
    try:
        with cuda.stream(side):
            yield
    finally:
        own.wait_stream(side)


@contextlib.contextmanager
def own_thread(device: torch.device) -> Iterator[None]:
    """Context of a weightcast thread: make `device` its current device, also while a CUDA graph is captured."""
    if device.type != "cuda":
        yield
        return
    if device.index is not None:
        # torch does not accept "cuda" without an index here.
        cuda.set_device(device)
    with _relaxed_capture(device):
        yield


@contextlib.contextmanager
def own_stream(device: torch.device, side: Any = None) -> Iterator[None]:
    """Do what `own_thread` does, and use the stream `side`, by default a new one.

    It does not wait: earlier writes of the engine are visible only after `synchronize`.
    """
    with own_thread(device), on(side or stream(device)):
        yield


@contextlib.contextmanager
def _relaxed_capture(device: torch.device) -> Iterator[None]:
    """Allow this thread's allocations and event queries while another thread captures a CUDA graph.

    In CUDA's default mode they would fail, and break the capture. Source: cuThreadExchangeStreamCaptureMode of the
    driver API. Without CUDA's driver the mode is not changed.
    """
    mode = ctypes.c_int(_RELAXED)
    code = _exchange_capture_mode(mode)
    if code == _INVALID_CONTEXT:
        # A thread gets a driver context only by a runtime call that needs one, and torch makes no such call to set the
        # first device, which is current already.
        cuda.mem_get_info(device)
        code = _exchange_capture_mode(mode)
    if code:
        _warn_of_captures(code)
    try:
        yield
    finally:
        if not code:
            _exchange_capture_mode(mode)


def _exchange_capture_mode(mode: ctypes.c_int) -> int:
    """Exchange the thread's capture mode. Return the driver's error code, 0 on success or without CUDA's driver."""
    try:
        return int(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    except (OSError, AttributeError):
        return 0


@functools.cache
def _warn_of_captures(code: int) -> None:
    """Log a warning, once for each error code."""
    logger.warning(
        "CUDA's driver refused the relaxed capture mode (error %d of cuThreadExchangeStreamCaptureMode), so the "
        "capture of a CUDA graph may fail while an update arrives: capture graphs before the first update",
        code,
    )


def driver() -> Any:
    """Return CUDA's driver library, which every GPU with torch's CUDA build has."""
    return ctypes.CDLL("libcuda.so.1")


def empty(num_bytes: int, device: torch.device, what: str, remedy: str) -> torch.Tensor:
    """Allocate uint8 memory of a device, in any thread. Raises InsufficientMemoryError with `what` and `remedy`."""
    try:
        # Some callers' threads are not in `own_thread`.
        with _relaxed_capture(device) if device.type == "cuda" else contextlib.nullcontext():
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as exc:
        raise out_of_memory(num_bytes, device, what, remedy) from exc


def pinned(num_bytes: int) -> torch.Tensor:
    """Allocate pinned uint8 host memory from torch's cache. Raises InsufficientMemoryError."""
    try:
        with _relaxed_capture(torch.device("cuda")):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as exc:
        remedy = "free host memory, or raise the container's limit"
        raise InsufficientMemoryError(
            f"{num_bytes} bytes of pinned host memory could not be allocated ({exc}): {remedy}"
        ) from exc


def empty_cache(device: torch.device) -> None:
    """Free torch's cache of a GPU's memory, except while a CUDA graph is captured."""
    if device.type == "cuda":
        # torch raises while a thread captures (CUDACachingAllocator's synchronize_and_free_events).
        with contextlib.suppress(RuntimeError):
            cuda.empty_cache()


def out_of_memory(num_bytes: int, device: torch.device, what: str, remedy: str) -> InsufficientMemoryError:
    """Return the error for a failed allocation of `num_bytes` for `what`, with the remedy."""
    free, _ = cuda.mem_get_info(device)
    return InsufficientMemoryError(f"{what} needs {num_bytes} bytes, {device} has {free} left: {remedy}")


def tensor_of(memory: Any) -> torch.Tensor:
    """Return an object with `__cuda_array_interface__` as a tensor of its `device`, which keeps the object alive.

    It is not a copy. Raises UnsupportedError if torch would copy, because the memory is on another GPU.
    """
    tensor = torch.as_tensor(memory, device=memory.device)
    if tensor.data_ptr() != memory.__cuda_array_interface__["data"][0]:
        raise UnsupportedError(
            f"torch {torch.__version__} can't make a tensor on {memory.device} of another GPU's memory: use a newer "
            "torch, or put trainer and engine on the same GPU"
        )
    return tensor


def can_access(device: torch.device, owner: torch.device) -> bool:
    """Return whether a GPU can read another GPU's memory directly, over NVLink or PCIe. Creates no context."""
    found = ctypes.c_int()
    code = driver().cuDeviceCanAccessPeer(ctypes.byref(found), ctypes.c_int(device.index), ctypes.c_int(owner.index))
    return not code and bool(found.value)


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU, which is equal in every process, unlike its index."""
    return str(cuda.get_device_properties(device).uuid)


def of_uuid(uuid: str) -> torch.device | None:
    """Return this process's GPU with this UUID; None if it is not visible (CUDA_VISIBLE_DEVICES)."""
    devices = (torch.device("cuda", index) for index in range(cuda.device_count()))
    return next((device for device in devices if uuid_of(device) == uuid), None)
