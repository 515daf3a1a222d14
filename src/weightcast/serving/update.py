"""One update on the engine's side, a state machine: offered -> receiving -> received -> sealed -> installed | aborted.

Invariants: nothing reaches the engine before its bucket was checked; staged, nothing reaches it before the seal; an
unsealed update can't be installed; whichever way it ends, the receiver's buckets are released and the engine either
serves one whole version or is torn and says so.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeAlias

from msgspec import UNSET

from weightcast.engines.gate import Gate
from weightcast.errors import (
    ErrorRecord,
    IncompleteUpdateError,
    InstallError,
    IntegrityError,
    Translated,
    UpdateAbortedError,
    WeightcastError,
    from_record,
    to_record,
)
from weightcast.format.bucket import BucketHeader, check_bucket, decoded, root_digest
from weightcast.format.manifest import WeightVersion
from weightcast.format.messages import Offer, Seal
from weightcast.host import device as host_device
from weightcast.host.closing import on_failure
from weightcast.host.memory import host_identity
from weightcast.seams.engine import OnDevice, Undoable
from weightcast.seams.install_map import Mapped
from weightcast.seams.transport import Bucket, Portion, Receiver
from weightcast.serving.install import Install

logger = logging.getLogger(__name__)

Agree: TypeAlias = Callable[[ErrorRecord | None], ErrorRecord | None]
"""Called once per step on every rank of an engine with its own error or None; returns one for all if any had one."""


def alone(error: ErrorRecord | None) -> ErrorRecord | None:
    """The agreement of an engine of one rank."""
    return error


class _AgreedStep:
    """A context for one step of all ranks. If the step raises on one rank, it raises the same error on all."""

    def __init__(self, agree: Agree) -> None:
        self._agree = agree

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        own = None if error is None else to_record(error)
        agreed = self._agree(own)
        if agreed is not None and agreed != own:
            raise from_record(agreed) from error


class State(enum.Enum):
    OFFERED = "offered"
    RECEIVING = "receiving"
    RECEIVED = "received"
    SEALED = "sealed"
    INSTALLED = "installed"
    ABORTED = "aborted"


_ENDED = (State.INSTALLED, State.ABORTED)


class Update:
    """One version's way into one engine. `receive` has a thread of its own; the other calls come from the worker."""

    def __init__(
        self,
        offer: Offer,
        install: Install,
        *,
        receiver: Receiver,
        gate: Gate,
        deadline_seconds: float,
        settles: bool = False,
        portion: Portion | None = None,
        agree: Agree = alone,
    ) -> None:
        """`deadline_seconds`: how long a step of generation may take that the update has to wait for.

        `settles`: the undo copy is kept after the install, until `settle`. `portion`: what this rank is to check of a
        staged version; it is installed only when all ranks have received theirs. `agree`: how the ranks of an engine
        make each step of an install fail on all of them alike.
        """
        self.offer = offer
        self.version = WeightVersion(offer.run, offer.version)
        self.state = State.OFFERED
        self.offered_at = time.perf_counter()
        self.error: ErrorRecord | None = None
        self.num_buckets = len(install.layout.manifest.buckets)
        self._install = install
        self._manifest = install.layout.manifest
        self._engine = install.engine
        self._agree = agree
        self._receiver = receiver
        self._gate = gate
        self._writer = f"{offer.run}/{offer.version}"
        self._deadline_seconds = deadline_seconds
        self._streaming = offer.install == "streaming"
        self._undo = offer.undo
        self._num_workers = 1 if offer.workers is UNSET else offer.workers.get(host_identity(), 1)
        self._settles = settles
        self._portion = portion
        self.read_bytes = 0
        """Of the payloads that were checked here."""
        self._device = install.device
        self._former: tuple[WeightVersion | None, str] = (None, "")
        self._restore: Callable[[], None] | None = None
        self._touched = False
        self._has_begun = False
        self._assembly = install.assembly(is_staged=not self._streaming)
        self._root = ""
        # Held while the engine is being written, so that an abort waits for it.
        self._writing = threading.Lock()

    @property
    def installed_bytes(self) -> int:
        """Of what an install puts into place here."""
        return self._install.installed_bytes

    @property
    def is_streaming(self) -> bool:
        """True if the update is loaded while its buckets arrive."""
        return self._streaming

    @property
    def is_writing(self) -> bool:
        """True while this update is written to the engine, or installed."""
        return self._writing.locked()

    def has_ended(self) -> bool:
        """Wait for a write or install that is under way; return whether the update was installed or given up."""
        with self._writing:
            return self.state in _ENDED

    @contextlib.contextmanager
    def aborted_on_failure(self) -> Iterator[None]:
        """Abort the update if the body raises anything; the body's exception goes on."""
        try:
            yield
        except BaseException as exc:
            self.abort(exc if isinstance(exc, Exception) else UpdateAbortedError(repr(exc)))
            raise

    def open(self) -> None:
        """Prepare the receiver; streaming: pause generation until the update ends. Does not wait for the publisher.

        Raises InsufficientMemoryError; PeerTimeoutError if a step of generation does not end by the deadline.
        """
        if not self._streaming:
            self._install.require_memory(self._num_workers)
        if self._streaming or (self._portion and not self._receiver.read_together(self._manifest, self._portion)):
            self._portion = None
        if self._streaming:
            self._gate.begin_writing(self._writer, deadline_seconds=self._deadline_seconds)
            # The kernels of the last step may still run, and read the weights. Waited for before the receiver is open:
            # with NCCL the device is then busy until the publisher has sent.
            self._await_device()
        with self._writing:
            if self.state is State.ABORTED:  # before there was anything here that an abort ends
                self._gate.end_writing(self._writer)
            else:
                self._receiver.open(self._manifest, self.version, staged=not self._streaming)

    def receive(self) -> str:
        """Receive and check every bucket, in the order of the manifest's rounds; return the root digest.

        Streaming: load each as it comes. Staged: put together what straddles origins, as its pieces come.

        Raises IntegrityError, PeerDiedError, PeerTimeoutError, UpdateAbortedError, or what the engine's `load` raised
        as InstallError. The caller aborts then.
        """
        self._move(State.OFFERED, State.RECEIVING)
        digests: dict[int, bytes] = {}
        order, origins = iter(self._manifest.rounds), self._manifest.bucket_origins
        # An abort may come while this thread holds a bucket, and have released the others already.
        with on_failure(self._clear):
            for bucket in self._receiver:
                index = next(order, self.num_buckets)
                if bucket.index != index or index == self.num_buckets:
                    raise IntegrityError(f"bucket {bucket.index} arrived, bucket {index} was expected")
                header = self._check(bucket, origins[index])
                digests[index] = header.digest
                payload = decoded(bucket.buffer, header)
                if not self._streaming:
                    self._install.stage(index, payload, self._assembly, is_here=self._portion is None)
                    continue
                with self._loading(), Translated(Exception, self._raise_as_install):
                    # Once a bucket is here: until then the model's tensors may be exchanged.
                    self._begin()
                    self._install.load_bucket(index, payload, self._assembly)
            if len(digests) != self.num_buckets:
                raise IncompleteUpdateError(f"{len(digests)} of {self.num_buckets} buckets arrived")
            if self._streaming:
                with self._loading(), Translated(Exception, self._raise_as_install):
                    self._begin()
                    self._install.load_end(self._assembly)
                    # On this thread's stream; the thread that commits has another.
                    self._await_device()
            self._root = root_digest(
                self._install.manifest_digest, [digests[index] for index in range(self.num_buckets)]
            )
            self._move(State.RECEIVING, State.RECEIVED)
        return self._root

    def _check(self, bucket: Bucket, origin: int) -> BucketHeader:
        index = bucket.index
        num_bytes = self._manifest.buckets[index]
        others = self._portion is not None and index not in self._portion.buckets
        if others and self._install.has_lent_views:
            self._receiver.reread(bucket)
        try:
            header = check_bucket(bucket.buffer, num_bytes, self.version, index, origin, only_header=others)
        except IntegrityError:
            # A loader that writes into the tensors it is given may have spoilt this process's view of the bucket.
            if not self._receiver.reread(bucket):
                raise
            header = check_bucket(bucket.buffer, num_bytes, self.version, index, origin, only_header=others)
        self.read_bytes += 0 if others else header.encoded_bytes
        return header

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Streaming: one write into the live model, which is paused for the whole update."""
        with self._writing:
            if self.state is not State.RECEIVING:
                raise self._ended("the update was aborted")
            self._touch()
            yield

    def _raise_as_install(self, error: Exception) -> NoReturn:
        what = f"loading version {self.version.number} failed: {error}"
        raise InstallError(what, torn=not self._undo) from error

    def _begin(self) -> None:
        """Look where the live tensors are, right before the first of them is written. Idempotent."""
        if self._has_begun:
            return
        self._has_begun = True
        install = self._install.bound()
        if install is not self._install or self._portion is not None:
            payloads = sorted(self._assembly.payloads.items())
            self._install, self._assembly = install, install.assembly(is_staged=not self._streaming)
            for index, payload in payloads:
                install.stage(index, payload, self._assembly)
        if install.has_map and isinstance(self._engine, Mapped):
            self._engine.begin(install.copied)

    def _touch(self) -> None:
        """From here on the live weights change. Call while no step of generation runs."""
        if not self._touched:
            if not self._streaming:  # else `open` has waited
                self._await_device()
            if self._undo:
                assert isinstance(self._engine, Undoable)
                self._restore = self._engine.snapshot()
            self._touched = True

    def seal(self, seal: Seal) -> None:
        """Accept the publisher's word that this is all of it. Never waits.

        Raises IncompleteUpdateError if buckets are missing, IntegrityError if the roots differ. Idempotent.
        """
        if self.state in (State.SEALED, State.INSTALLED):
            return
        if self.state is not State.RECEIVED:
            raise IncompleteUpdateError(
                f"version {self.version.number} is {self.state.value}, not received: seal it after its last bucket"
            )
        if (seal.num_buckets, seal.root) != (self.num_buckets, self._root):
            raise IntegrityError(
                f"the seal names {seal.num_buckets} buckets with root {seal.root}, "
                f"received were {self.num_buckets} with root {self._root}"
            )
        self._move(State.RECEIVED, State.SEALED)

    def install(self) -> float:
        """Make the version serve, between two steps of generation; return the seconds the engine was paused for it.

        Raises IncompleteUpdateError if it is not sealed, PeerTimeoutError if a step does not end by the deadline
        (nothing happens then), InstallError if loading failed: the former version is restored if an undo was asked
        for, else the engine is torn.
        """
        with self._writing:
            if self.state is not State.SEALED:
                raise self.unsealed()
            with self._gate.exclusive(deadline_seconds=self._deadline_seconds):
                start = time.perf_counter()
                self._former = (self._gate.version, self._gate.torn)
                try:
                    with _AgreedStep(self._agree):
                        self._touch()
                    with _AgreedStep(self._agree):
                        if not self._streaming:
                            self._begin()
                            self._install.load_staged(self._assembly)
                            self._await_device()
                    with _AgreedStep(self._agree):
                        self._engine.commit(self.version)
                        self._install.prove(self._assembly)
                except BaseException as exc:
                    message = f"installing version {self.version.number} failed: {exc}"
                    self.error = to_record(InstallError(message, torn=True))
                    self.state = State.ABORTED
                    self.error = to_record(InstallError(message, torn=not self._go_back(message)))
                    self._release()
                    if not isinstance(exc, Exception):
                        raise
                    raise from_record(self.error) from exc
                self._gate.set_version(self.version)
                self.state = State.INSTALLED
                seconds = time.perf_counter() - start
        self._release()
        return seconds

    def settle(self, *, keep: bool) -> None:
        """After an install that others took part in: keep the version, or go back to the one before.

        Going back needs an undo copy; without one the engine is torn. Idempotent: only the first call that returns
        counts. Raises PeerTimeoutError, with nothing done, if a step does not end by the deadline: call it again.
        """
        with self._writing:
            if self.state is State.INSTALLED and self._settles:
                if not keep:
                    with self._gate.exclusive(deadline_seconds=self._deadline_seconds):
                        reason = f"version {self.version.number} was taken back: it was not installed everywhere"
                        self.error, self.state = to_record(UpdateAbortedError(reason)), State.ABORTED
                        logger.warning("%s", reason)
                        if self._go_back(reason):
                            version, torn = self._former
                            self._gate.set_version(version)
                            if torn:
                                self._gate.tear(torn)
                self._settles = False
            self._restore = None

    def describe(self, install_seconds: float) -> str:
        """Return the log's text on an install: its version and sizes, and how long it took."""
        of = f"version {self.version.number} of run {self.version.run[:8]}"
        num_tensors, num_bytes = len(self._manifest.tensors), self._manifest.num_bytes
        tensors = f"{num_tensors} tensor{'s' * (num_tensors != 1)}, {num_bytes:,} bytes"
        whole = time.perf_counter() - self.offered_at
        return f"installed {of} in {install_seconds:.3f} s: {tensors}, {whole:.3f} s after its offer"

    def unsealed(self) -> IncompleteUpdateError:
        """Why it can't be installed now."""
        return IncompleteUpdateError(
            f"version {self.version.number} is {self.state.value}, not sealed: it can't be installed"
        )

    def abort(self, error: Exception) -> bool:
        """Give the update up, after a write that is under way. False if it had ended before.

        An InstallError's `torn` becomes what the engine then is.

        Frees everything; a thread that is receiving is woken and raises.
        """
        with self._writing:
            if self.state in _ENDED:
                return False
            self.error, self.state = to_record(error), State.ABORTED
            try:
                # First, since going back waits for the device: a broadcast that runs there ends with its group only.
                self._receiver.end()
            finally:
                is_whole = self._go_back(f"version {self.version.number} was given up half-way: {self.error.message}")
                if isinstance(error, InstallError):
                    error.torn = not is_whole
                    self.error = to_record(error)
                # Before another call that aborts it can return: the publisher resumes the engine then.
                self._release()
        return True

    def _go_back(self, reason: str) -> bool:
        """Undo what was written; without an undo copy the engine is torn. True if a whole version is there."""
        try:
            if self._touched:
                # Copies that another thread has queued would come after what is restored.
                self._await_device()
            self._engine.discard()
            if self._restore is not None:
                self._restore()
                return True
        except Exception as exc:
            reason = f"{reason}; restoring the former version failed too: {exc}"
            logger.warning("%s", reason)
        if not self._touched:
            return True
        self._gate.tear(f"{reason}; publish a complete update to heal this engine")
        return False

    def _await_device(self) -> None:
        if self._device.type == "cuda":
            engine = self._engine
            for device in engine.devices if isinstance(engine, OnDevice) else ():
                host_device.synchronize(device)

    def _clear(self) -> None:
        self._assembly.clear()

    def _release(self) -> None:
        self._clear()
        if self.state is not State.INSTALLED or not self._settles:
            self._restore = None
        try:
            self._receiver.end()
        finally:
            self._gate.end_writing(self._writer)

    def _move(self, expected: State, state: State) -> None:
        with self._writing:
            if self.state is not expected:
                raise self._ended(f"the update is {self.state.value}, expected {expected.value}")
            self.state = state

    def _ended(self, otherwise: str) -> WeightcastError:
        """Why it was given up."""
        return UpdateAbortedError(otherwise) if self.error is None else from_record(self.error)
