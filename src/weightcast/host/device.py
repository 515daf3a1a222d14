"""GPUs: the order of their work, and their memory. No other file asks torch.cuda for streams, events or waits.

Another stream, and the host, see the work of a stream only after they have waited for it. A thread of ours that runs
beside an engine has a stream of its own, so that the engine's kernels never wait for a transfer. Host memory is always
in order: for a device other than a GPU everything here does nothing.
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
"""Module that this file calls; `tests/pretended` puts a GPU without hardware here."""

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


def has_streams(device: torch.device) -> bool:
    """Return whether work on that device is queued, and over later."""
    return device.type == "cuda"


def stream(device: torch.device) -> Any:
    """A stream of its own on a GPU, else None."""
    return cuda.Stream(device) if has_streams(device) else None


def current_stream(device: torch.device) -> Any:
    """This thread's on a GPU, else None."""
    return cuda.current_stream(device) if has_streams(device) else None


def present_stream() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """This thread's GPU and stream, for another thread to enter; without CUDA nothing."""
    return functools.partial(cuda.stream, cuda.current_stream()) if cuda.is_initialized() else contextlib.nullcontext


def recorded(device: torch.device) -> Event:
    """An event behind all that this thread's stream of a GPU has been given."""
    event: Event = cuda.Event()
    event.record(cuda.current_stream(device))  # type: ignore[attr-defined]
    return event


def queue_behind(event: Event, device: torch.device) -> None:
    """Have this thread's stream of a GPU wait for an event of this process before what it is given next."""
    event.wait(cuda.current_stream(device))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done everything that any stream has given it."""
    if has_streams(device):
        cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait until a GPU has done everything that this thread's stream has given it."""
    if has_streams(device):
        cuda.current_stream(device).synchronize()


@contextlib.contextmanager
def on(side: Any) -> Iterator[None]:
    """Queue on `side`, a stream; None: where it is queued anyway."""
    with contextlib.nullcontext() if side is None else cuda.stream(side):
        yield


@contextlib.contextmanager
def beside(side: Any, device: torch.device) -> Iterator[None]:
    """Queue on `side`, a stream that goes on where this thread's is now, and that this thread's waits for at the end.

    So the caller's next kernels may write what was read here, also after an error.
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
    """For a thread of ours: make `device` its current one, also while a graph is captured."""
    if not has_streams(device):
        yield
        return
    if device.index is not None:
        # "cuda" alone is the present one, which torch does not take here.
        cuda.set_device(device)
    with _relaxed_capture(device):
        yield


@contextlib.contextmanager
def own_stream(device: torch.device, side: Any = None) -> Iterator[None]:
    """Do as `own_thread`, with a stream of the thread's own: `side`, or another one.

    Waits for nothing: what the engine has written before is in order only after `synchronize`.
    """
    with own_thread(device), on(side or stream(device)):
        yield


@contextlib.contextmanager
def _relaxed_capture(device: torch.device) -> Iterator[None]:
    """Have this thread's allocations and questions for events succeed while another thread captures a graph.

    In CUDA's default mode they would fail, and end that capture. Source: cuThreadExchangeStreamCaptureMode of the
    driver API, which gives the former mode back. A torch for GPUs without CUDA keeps its mode.
    """
    mode = ctypes.c_int(_RELAXED)
    code = _exchange_capture_mode(mode)
    if code == _INVALID_CONTEXT:
        # A thread has a context of the driver's only after its first call of the runtime that needs one, and torch
        # makes none to set a device that is the thread's already, as the first one is.
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
    """Return the driver's error, 0 without one or without CUDA's driver."""
    try:
        return int(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    except (OSError, AttributeError):
        return 0


@functools.cache
def _warn_of_captures(code: int) -> None:
    """Once for each error."""
    logger.warning(
        "CUDA's driver did not take the relaxed capture mode (error %d of cuThreadExchangeStreamCaptureMode): a CUDA "
        "graph that is captured while an update arrives may fail to be captured; capture before the first update",
        code,
    )


def driver() -> Any:
    """CUDA's driver library, which is there wherever torch's CUDA build uses a GPU."""
    return ctypes.CDLL("libcuda.so.1")


def empty(num_bytes: int, device: torch.device, what: str, remedy: str) -> torch.Tensor:
    """Memory of a device, uint8, in any thread. Raises InsufficientMemoryError: `what` needs it, `remedy` helps."""
    try:
        # Offers and invitations to groups come in threads that are not ours, or have no stream of their own.
        with _relaxed_capture(device) if has_streams(device) else contextlib.nullcontext():
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as exc:
        raise out_of_memory(num_bytes, device, what, remedy) from exc


def pinned(num_bytes: int) -> torch.Tensor:
    """Host memory, uint8, that GPUs read and write themselves, from torch's cache. Raises InsufficientMemoryError."""
    try:
        with _relaxed_capture(torch.device("cuda")):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as exc:
        remedy = "free host memory, or raise the container's limit"
        raise InsufficientMemoryError(f"no {num_bytes} bytes of host memory can be pinned: {remedy}: {exc}") from exc


def empty_cache(device: torch.device) -> None:
    """Give back to a GPU what torch keeps of what this process has freed there; not while a graph is captured."""
    if has_streams(device):
        # torch asserts that no thread captures (CUDACachingAllocator's synchronize_and_free_events).
        with contextlib.suppress(RuntimeError):
            cuda.empty_cache()


def out_of_memory(num_bytes: int, device: torch.device, what: str, remedy: str) -> InsufficientMemoryError:
    """Return the error to raise: `what` needs so many bytes, `remedy` helps."""
    free, _ = cuda.mem_get_info(device)
    return InsufficientMemoryError(f"{what} needs {num_bytes} bytes, {device} has {free} left: {remedy}")


def tensor_of(memory: Any) -> torch.Tensor:
    """Memory that a GPU, `device`, can use, with `__cuda_array_interface__`, as a tensor of it that keeps the object.

    Not a copy. Raises UnsupportedError where torch would make one, of memory that lies on another GPU.
    """
    tensor = torch.as_tensor(memory, device=memory.device)
    if tensor.data_ptr() != memory.__cuda_array_interface__["data"][0]:
        raise UnsupportedError(
            f"torch {torch.__version__} makes no tensor on {memory.device} of memory that lies on another GPU"
        )
    return tensor


def can_access(device: torch.device, owner: torch.device) -> bool:
    """Return whether a GPU can read another GPU's memory itself, over NVLink or PCIe. Makes no context on either."""
    found = ctypes.c_int()
    code = driver().cuDeviceCanAccessPeer(ctypes.byref(found), ctypes.c_int(device.index), ctypes.c_int(owner.index))
    return not code and bool(found.value)


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU: its name in every process, whatever its index there."""
    return str(cuda.get_device_properties(device).uuid)


def of_uuid(uuid: str) -> torch.device | None:
    """This process's GPU of that UUID: indices differ between processes, by CUDA_VISIBLE_DEVICES. None: not seen."""
    devices = (torch.device("cuda", index) for index in range(cuda.device_count()))
    return next((device for device in devices if uuid_of(device) == uuid), None)
