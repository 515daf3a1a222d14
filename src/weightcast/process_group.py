"""weightcast's own torch.distributed process groups, separate from the trainer's and the engine's default ones.

Invariants: a group is made from a given store and ranks, never from environment variables, and never uses the default
group; a broken group is closed and replaced; torch's watchdog thread for NCCL is off, since it would end the process
upon an error. Errors of torch are translated here.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]

from weightcast.errors import (
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    Translated,
    UnsupportedError,
    WeightcastError,
)
from weightcast.host import device as host_device
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, Deadline, in_background
from weightcast.host.descriptors import require_free

_MAX_CTAS = 8
"""Thread blocks that a broadcast may take from the engine's own kernels."""

_NCCL_ENVIRONMENT = {
    # torch's ProcessGroupNCCL reads these in its constructor, and Options has no field for them. This disables torch's
    # watchdog thread. It would set a process-wide flag when an operation has failed or is late, upon which the monitor
    # of the process's first NCCL group (the trainer's or the engine's) ends the process. Instead, errors are read from
    # each operation; `Work.wait`, which this variable makes blocking, is not called.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # No warning that transfers between two ranks share a communicator, which is intended.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
Store: TypeAlias = Any
"""A c10d store: TCPStore, PrefixStore, ..."""
_STORE_DESCRIPTORS = 16
"""Descriptors that a store's server and first client need at most: without them libuv ends the process."""
_GLOO_DESCRIPTORS = 8
"""Descriptors that gloo needs at most, besides a socket for each member: its error would blame the network."""
_CHATTER = re.compile(r"Exception raised from|This is typically caused by")
"""Beginning of the part of a torch message that is a trace, or inapplicable advice."""
_environment_lock = threading.Lock()
T = TypeVar("T")


def serve_store(host: str, timeout_seconds: float) -> tuple[Store, int]:
    """Serve a store on a free port of only `host`; return store and port. It is served as long as the object exists.

    Raises PeerError if none could be started by the deadline, or if this process has too few file descriptors left.
    """
    require_free(_STORE_DESCRIPTORS, "a store")
    end = time.monotonic() + timeout_seconds
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    attempt = datetime.timedelta(seconds=min(timeout_seconds, GRACE_SECONDS))
    tcp_store: Any = TCPStore
    while True:
        listener = socket.create_server((host, 0), family=family)
        port: int = listener.getsockname()[1]
        try:
            with translated(f"a store at {host}:{port}"):
                # The store closes it.
                store = tcp_store(
                    host, port, None, True, attempt, wait_for_workers=False, master_listen_fd=listener.detach()
                )
            store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
            return store, port
        except PeerError:
            # Sometimes torch's server never answers its own first client: try another port.
            if time.monotonic() >= end:
                raise


def join_store(host: str, port: int, timeout_seconds: float) -> Store:
    """Return a client of a store. Raises PeerError if the store can't be reached."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    with translated(f"the store at {host}:{port}"):
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def make_nccl(
    store: Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    device: torch.device | None,
    max_ctas: int | None,
) -> Any:  # torch's ProcessGroupNCCL
    """Make an NCCL group. With `device` the members connect now, without a deadline; else at the first operation."""
    nccl = cast(Any, dist).ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    with _environment_lock, _environment(_NCCL_ENVIRONMENT):
        group = nccl(store, rank, size, options)
    if device is not None:
        group.eager_connect_single_device(device)
    return group


class ProcessGroup:
    """One process group. Its operations are asynchronous: pass their results to `wait`."""

    def __init__(
        self,
        backend: str,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout_seconds: float,
        host: str = "",
        device: torch.device | None = None,
        max_ctas: int | None = _MAX_CTAS,
        is_left: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect all `size` members; blocks until they are there, at most `timeout_seconds`, each operation's as well.

        `backend`: "gloo" or "nccl". `host`: for gloo, the address at which others reach this host; by default that of
        the interfaces in GLOO_SOCKET_IFNAME, else of this host's name, as for torch's groups. `device`: for NCCL, this
        rank's; without it NCCL's first operation connects, which only `in_time` limits. `max_ctas`: limit on the thread
        blocks of NCCL's kernels, equal at all members; None: NCCL's own limit. `is_left`: called while NCCL connects;
        returns True if the group is no longer needed. Raises PeerError.
        """
        self.backend = backend
        self.rank, self.size = rank, size
        self._store = store  # NCCL still uses it later
        self._device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        self._timeout_seconds = timeout_seconds
        self._closing = threading.Lock()
        self._given_up: list[Work] = []
        """Abandoned operations of NCCL, which keep the tensors that kernels may still write to until they are aborted.
        """
        self._met: set[int] = set()
        """The ranks to which NCCL has a point-to-point connection."""
        timeout = datetime.timedelta(seconds=timeout_seconds)
        torch_groups: Any = dist
        with translated("the process group"):
            if backend == "gloo":
                require_free(_GLOO_DESCRIPTORS + size, "the process group")
                gloo = torch_groups.ProcessGroupGloo
                options = gloo._Options()
                interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
                if host:
                    options._devices = [gloo.create_device(hostname=host)]
                elif interfaces:
                    options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
                else:
                    options._devices = [gloo.create_default_device()]
                options._timeout, options._threads = timeout, 2
                self._group: Any = gloo(store, rank, size, options)
            else:
                connect = functools.partial(make_nccl, store, rank, size, timeout, device, max_ctas)
                discard = functools.partial(_abort, device=self._device)
                self._group = in_time(connect, self._device, timeout_seconds, "connecting the group", is_left, discard)

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if self.backend == "nccl":
            # A group that was made without a device connects only now.
            self._device = tensor.device
        with translated("a broadcast"):
            return cast(Work, self._group.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, rank: int) -> Work:
        """Send to one rank.

        With NCCL the first transfer with a rank may wait for it, at most for the group's timeout.
        """
        with translated("a send"):
            return self._transfer(functools.partial(self._group.send, [tensor], rank, 0), rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> Work:
        """Receive from one rank; see `send`."""
        with translated("a receive"):
            return self._transfer(functools.partial(self._group.recv, [tensor], rank, 0), rank)

    def _transfer(self, begin_transfer: Callable[[], Work], rank: int) -> Work:
        if self.backend != "nccl" or rank in self._met:
            return begin_transfer()
        # Depending on torch's version, NCCL makes point-to-point connections only now.
        what = f"connecting with rank {rank} of the group"
        work = in_time(begin_transfer, self._device, self._timeout_seconds, what, lambda: self._group is None)
        self._met.add(rank)
        return work

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        with translated("an all-gather"):
            return cast(Work, self._group.allgather([outputs], [tensor]))

    def wait(self, work: Work, is_left: Callable[[], bool] = lambda: False) -> None:
        """Wait on the host for an operation of this group, also with NCCL, at most for the group's timeout.

        With NCCL the wait also ends once `is_left` returns True. Raises PeerError; the group must then be closed: until
        then a broken operation keeps a GPU's kernels running.
        """
        try:
            if self.backend == "gloo":
                wait(work)
                return
            for _ in Deadline(self._timeout_seconds).polls(0.0002, 0.0002):
                # NCCL's own wait returns at once, and makes a stream wait, forever if a member has died.
                if work.is_completed():
                    if error := _nccl_error(work):
                        raise PeerDiedError(f"a transfer failed: {error}")
                    return
                if is_left():
                    raise PeerDiedError("the group was left")
            raise PeerTimeoutError(f"a transfer was not over within {self._timeout_seconds:g} s")
        except Exception:
            if self.backend == "nccl":
                self._given_up.append(work)
            raise
        finally:
            del work

    def close(self) -> None:
        """Disconnect, after pending operations have ended. Idempotent; may be called from any thread.

        gloo's operations are waited for, at most for their timeout; NCCL's are aborted, even if another thread waits.
        """
        with self._closing:
            group, self._group = self._group, None
            if group is not None and self.backend == "nccl":
                _abort(group, self._device)
            self._given_up.clear()
            del group


def _nccl_error(work: Work) -> str:
    """Return the error of a completed NCCL operation (errors complete it, too); empty if it has succeeded."""
    try:
        error = work.exception()
        return "" if error is None else str(error) or repr(error)
    except TypeError:
        # torch before 2.13 hands neither its exceptions nor their absence to Python (pytorch#147312), and NCCL's
        # `is_success` always raises. An error that completes the operation completes this future, with its kind.
        result = cast(Any, work).get_future_result()
        return "torch's log says how" if result.done() and result.value() != 0 else ""


def _abort(nccl: Any, device: torch.device) -> None:
    """Abort NCCL's operations. Call it in a weightcast thread; it works also after an error of the GPU."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(host_device.own_thread(device))
        with contextlib.suppress(RuntimeError):
            nccl.abort()


def in_time(
    call: Callable[[], T],
    device: torch.device,
    seconds: float,
    what: str,
    is_left: Callable[[], bool] = lambda: False,
    discard: Callable[[T], object] = lambda result: None,
) -> T:
    """Run an NCCL call that connects, and so may wait forever and can't be ended, in a background thread.

    The call queues its work on the caller's stream of `device`. Raises PeerTimeoutError after `seconds`, PeerDiedError
    once `is_left` returns True (the result is no longer needed); the thread goes on, and its late result is discarded.
    """
    stream = host_device.current_stream(device)

    def run() -> T:
        with host_device.own_thread(device), host_device.on(stream):
            return call()

    future, deadline = in_background(run, name="weightcast-connect"), Deadline(seconds)
    try:
        while not future.done() and not (deadline.has_passed or is_left()):
            futures.wait([future], min(POLL_SECONDS, deadline.remaining_seconds))
        if future.done():
            return future.result()
        future.add_done_callback(lambda done: None if done.exception() else discard(done.result()))
        if is_left():
            raise PeerDiedError(f"{what}: the update was aborted before all members had connected")
        raise PeerTimeoutError(f"{what} took over {seconds:g} s: not all members have connected")
    finally:
        del future  # an error's traceback refers to this frame, and the future may refer to the error: a cycle


class Broadcast:
    """A broadcast by rank 0. `error`: once `is_over`, its error, or an empty string.

    On a CPU `condition` is notified at its end; on a GPU it must be polled. If the GPU itself has failed, it is unknown
    whether it still reads the buffer: then the broadcast has an error, and is not over.
    """

    def __init__(self, group: ProcessGroup, buffer: torch.Tensor, condition: threading.Condition) -> None:
        self._error = ""
        self._has_landed = False
        self._condition = condition
        self._work = group.broadcast(buffer, root=0)
        self._is_polled = buffer.is_cuda
        if not self._is_polled:
            # An NCCL future is done as soon as the broadcast is queued, so it can't be used.
            self._work.get_future().add_done_callback(self._land)

    @property
    def is_over(self) -> bool:
        if not self._is_polled:
            return self._has_landed
        try:
            with translated("a broadcast"):
                return self._work.is_completed()
        except WeightcastError as exc:
            self._error = str(exc)
            return False

    @property
    def error(self) -> str:
        if self._is_polled and not self._error and self.is_over and (reason := _nccl_error(self._work)):
            self._error = f"a broadcast failed: {reason}"
        return self._error

    def _land(self, future: torch.futures.Future[object]) -> None:
        error = ""
        try:
            with translated("a broadcast"):
                future.value()
        except WeightcastError as exc:
            error = str(exc)
        # Before the condition, since torch drops a Ctrl-C that comes in here.
        self._error, self._has_landed = error, True
        with self._condition:
            self._condition.notify_all()


def wait(work: Work) -> None:
    """Wait for an operation. Raises PeerDiedError or PeerTimeoutError, after which the group can't be used.

    An operation refers to its group's sockets, and an error's traceback to the variables of its frames: a caller whose
    group is closed upon an error must have no variable with the operation.
    """
    try:
        with translated("a transfer"):
            work.wait()
    finally:
        del work


def translated(what: str) -> Translated:
    """Return a context that translates errors of torch.distributed to PeerErrors without a peer's name."""

    def raise_as_peers(error: Exception) -> NoReturn:
        text = str(error)
        reason = _CHATTER.split(text)[0].strip()[:400]
        is_late = "imed out" in text or "imeout" in text
        raise (PeerTimeoutError if is_late else PeerDiedError)(f"{what} failed: {reason}") from error

    return Translated((dist.DistError, RuntimeError, ValueError), raise_as_peers)


def require(backend: str) -> None:
    """Raise UnsupportedError if this torch has no such backend."""
    if backend == "gloo":
        # Without initialising CUDA, since forked children could not use it afterwards.
        is_here = dist.is_available() and cast(Any, dist).is_gloo_available()
    else:
        is_here = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    if not is_here:
        raise UnsupportedError(
            f"torch {torch.__version__} can't use {backend} here: install a build that has it; NCCL needs a GPU"
        )


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables and restore them afterwards; unchanged values are not set. One thread at a time.

    C code that calls getenv at the same moment may crash if the C library moves the environment for a new variable
    (glibc before 2.41), and a group that other code makes meanwhile gets these values, too.
    """
    former = {name: os.environ.get(name) for name, value in values.items() if os.environ.get(name) != value}
    try:
        for name in former:
            os.environ[name] = values[name]
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
