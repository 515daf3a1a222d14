"""A torch.distributed process group of our own, beside the trainer's and the engine's default ones.

Invariants: it is made from a store and ranks that are handed in, never from environment variables, and never touches
the default group; a broken group is closed and replaced, never mended; no thread of torch's watches NCCL's operations,
since its findings end the process. Errors of torch become errors of weightcast here.
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
from weightcast.host.descriptors import require_free, shortage

_MAX_CTAS = 8
"""Thread blocks that a broadcast may take from the engine's own kernels."""

_NCCL_ENVIRONMENT = {
    # torch's ProcessGroupNCCL reads these in its constructor, and Options has no field for them.
    # No watchdog thread of torch's: it sets a flag of the whole process when an operation has failed or is late, and
    # the monitor of the process's first NCCL group (the trainer's or the engine's own) ends the process for it. The
    # errors are asked of each operation here, and `Work.wait`, which the variable makes block, is not called.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # No warning that transfers between two ranks share a communicator: that is intended.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
Store: TypeAlias = Any
"""A c10d store: TCPStore, PrefixStore, ..."""
_STORE_DESCRIPTORS = 16
"""At least as many as the server and its first client open: libuv ends the process if its first loop finds none."""
_GLOO_DESCRIPTORS = 8
"""At least as many as gloo opens besides a socket for each member. Its errors then blame the network."""
_CHATTER = re.compile(r"Exception raised from|This is typically caused by")
"""Beginning of the part of a torch message that is a trace, or advice that does not apply here."""
_environment_lock = threading.Lock()
T = TypeVar("T")


def serve_store(host: str, timeout_seconds: float) -> tuple[Store, int]:
    """A store on a free port of `host` and of no other address, and that port. It lives as long as the object.

    Raises PeerError if none could be had by the deadline, or if this process has too few file descriptors left.
    """
    _require_descriptors("a store", _STORE_DESCRIPTORS)
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
            # Now and then torch's server never answers, not even its own first client: another port, another try.
            if time.monotonic() >= end:
                raise


def join_store(host: str, port: int, timeout_seconds: float) -> Store:
    """A client of that store. Raises PeerError if it is not there."""
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
    """Connects the members if `device` is given, else they connect at the first operation; waits without a deadline."""
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
    """One group, from its making to its end. Its operations are asynchronous: `wait` for what they return."""

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

        `backend`: "gloo" or "nccl". `host`: the address of this host that the others reach, for gloo; by default that
        of the interfaces in GLOO_SOCKET_IFNAME, else of this host's name, as for torch's own groups. `device`: this
        rank's, for NCCL; without it NCCL's first operation connects, and that only `in_time` bounds. `max_ctas`: thread
        blocks that NCCL's kernels may take, equal at all members; None: NCCL's own limit. `is_left`: asked while NCCL
        connects, whether the group is of no more use. Raises PeerError.
        """
        self.backend = backend
        self.rank, self.size = rank, size
        self._store = store  # NCCL looks into it later on
        self._device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        self._timeout_seconds = timeout_seconds
        self._closing = threading.Lock()
        self._given_up: list[Work] = []
        """Of NCCL: they keep the tensors that kernels may still write to, until these have been aborted."""
        self._met: set[int] = set()
        """The ranks with which NCCL has a connection for transfers between two."""
        timeout = datetime.timedelta(seconds=timeout_seconds)
        torch_groups: Any = dist
        with translated("the process group"):
            if backend == "gloo":
                _require_descriptors("the process group", _GLOO_DESCRIPTORS + size)
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
            # A group that was made without one has connected nothing before.
            self._device = tensor.device
        with translated("a broadcast"):
            return cast(Work, self._group.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, rank: int) -> Work:
        """To one rank. With NCCL the first transfer with each may wait for it, at most for the group's timeout."""
        with translated("a send"):
            return self._transfer(functools.partial(self._group.send, [tensor], rank, 0), rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> Work:
        """From one rank; otherwise as `send`."""
        with translated("a receive"):
            return self._transfer(functools.partial(self._group.recv, [tensor], rank, 0), rank)

    def _transfer(self, begin_transfer: Callable[[], Work], rank: int) -> Work:
        if self.backend != "nccl" or rank in self._met:
            return begin_transfer()
        # Depending on torch's version, NCCL connects each two ranks by themselves only now.
        what = f"connecting with rank {rank} of the group"
        work = in_time(begin_transfer, self._device, self._timeout_seconds, what, lambda: self._group is None)
        self._met.add(rank)
        return work

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        with translated("an all-gather"):
            return cast(Work, self._group.allgather([outputs], [tensor]))

    def wait(self, work: Work, is_left: Callable[[], bool] = lambda: False) -> None:
        """Wait for an operation of this group, on the host with NCCL too, at most for the group's timeout.

        With NCCL it ends as well once `is_left` says that nobody wants the group any more. Raises PeerError; the group
        is then of no more use, and has to be closed: until then a broken operation keeps a GPU's kernels running.
        """
        try:
            if self.backend == "gloo":
                wait(work)
                return
            for _ in Deadline(self._timeout_seconds).polls(0.0002, 0.0002):
                # NCCL's own wait returns at once, and has a stream wait: for ever if a member has died.
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
        """Disconnect; operations under way are over when it returns. Idempotent, from any thread.

        With gloo it waits for them, at most for their timeout; NCCL's are aborted, also where another thread waits.
        """
        with self._closing:
            group, self._group = self._group, None
            if group is not None and self.backend == "nccl":
                _abort(group, self._device)
            self._given_up.clear()
            del group


def _nccl_error(work: Work) -> str:
    """How an operation of NCCL's that is completed, which an error does too, has failed; empty: it has not."""
    try:
        error = work.exception()
        return "" if error is None else str(error) or repr(error)
    except TypeError:
        # torch before 2.13 hands neither its exceptions nor their absence to Python (pytorch#147312), and NCCL's
        # `is_success` always raises. An error that completes the operation completes this future, with its kind.
        result = cast(Any, work).get_future_result()
        return "torch's log says how" if result.done() and result.value() != 0 else ""


def _abort(nccl: Any, device: torch.device) -> None:
    """Call it in a thread of ours. Also after an error of the GPU, which the thread may then not have as its own."""
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
    """Run an NCCL call that connects, and so may wait for ever and can't be ended, in a thread of its own.

    The call queues its work on the caller's stream of `device`. Raises PeerTimeoutError after `seconds`, PeerDiedError
    once `is_left` is true (nobody wants the result); the thread is left behind, and its late result is discarded.
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
            raise PeerDiedError(f"{what}: the group was left before all members had connected")
        raise PeerTimeoutError(f"{what} took over {seconds:g} s: not all members have come")
    finally:
        del future  # an error's traceback has this frame, and the error may be the future's own


class Broadcast:
    """A broadcast of rank 0's under way. `error`: how it failed, once `is_over`; empty if it did not.

    On a CPU `condition` is notified of its end; on a GPU it has to be asked. Of a GPU that has failed nobody can say
    whether it still reads the buffer: there it has an error, and is not over.
    """

    def __init__(self, group: ProcessGroup, buffer: torch.Tensor, condition: threading.Condition) -> None:
        self._error = ""
        self._has_landed = False
        self._condition = condition
        self._work = group.broadcast(buffer, root=0)
        self._is_polled = buffer.is_cuda
        if not self._is_polled:
            # A future of NCCL's is done as soon as the broadcast is queued.
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
        with self._condition:
            self._has_landed, self._error = True, error
            self._condition.notify_all()


def wait(work: Work) -> None:
    """Wait for an operation. Raises PeerDiedError or PeerTimeoutError; the group is then of no more use.

    An operation holds its group's sockets, and an error's traceback holds the variables of every frame that it passed:
    a caller that has the group closed at an error keeps the operation in none.
    """
    try:
        with translated("a transfer"):
            work.wait()
    finally:
        del work


def translated(what: str) -> Translated:
    """Errors of torch.distributed as PeerErrors. It does not know which peer it was; the caller may."""

    def raise_as_peers(error: Exception) -> NoReturn:
        text = str(error)
        reason = _CHATTER.split(text)[0].strip()[:400]
        is_late = "imed out" in text or "imeout" in text
        raise (PeerTimeoutError if is_late else PeerDiedError)(f"{what} failed: {reason}") from error

    return Translated((dist.DistError, RuntimeError, ValueError), raise_as_peers)


def _require_descriptors(what: str, count: int) -> None:
    try:
        require_free(count)
    except OSError as exc:
        raise PeerError(f"{what} needs {count} file descriptors: {shortage(exc) or exc}") from exc


def require(backend: str) -> None:
    """Raises UnsupportedError if torch has no such backend here."""
    if backend == "gloo":
        # CUDA is not asked: that would start it, and children that are forked later could not use it.
        is_here = dist.is_available() and cast(Any, dist).is_gloo_available()
    else:
        is_here = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    if not is_here:
        raise UnsupportedError(
            f"torch {torch.__version__} can't use {backend} here: install a build that has it; NCCL needs a GPU"
        )


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set what is not so already, and restore it. One thread at a time.

    C code of the process that calls getenv in the same moment may crash where the C library moves the environment for
    a new variable (glibc before 2.41), and a group that other code makes then gets these values too.
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
