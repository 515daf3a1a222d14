"""One update on the engine's side, a state machine: offered -> receiving -> received -> sealed -> installed | aborted.

Invariants: no bucket is loaded before it was checked, staged ones not before the seal; an unsealed update can't be
installed; when the update has ended, the receiver's buckets are released and the engine either serves one whole version
or is torn and refuses to serve.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from msgspec import UNSET

from weightcast.engines.gate import Gate
from weightcast.errors import (
    ErrorRecord,
    IncompleteUpdateError,
    InstallError,
    IntegrityError,
    UpdateAbortedError,
    WeightcastError,
    from_record,
    to_record,
)
from weightcast.format.bucket import Digest, as_bytes, check_bucket, root_digest
from weightcast.format.manifest import WeightVersion
from weightcast.format.messages import Offer, Seal
from weightcast.format.packed_base import PackedBase
from weightcast.host import device as host_device
from weightcast.host import memory as host_memory
from weightcast.host.memory import host_identity
from weightcast.native.deltas import ChangedWords
from weightcast.seams.engine import OnDevice, Undoable
from weightcast.seams.transport import Bucket, Portion, Receiver
from weightcast.serving.admission import replacement_of
from weightcast.serving.install import Assembly, Install

logger = logging.getLogger(__name__)

Agree: TypeAlias = Callable[[ErrorRecord | None], ErrorRecord | None]
"""Agreement of an engine's ranks on one step: each rank passes its error or None, and all get the same one back."""


class _AgreedStep:
    """Context of one step that all ranks take. If the step raises on one rank, the same error is raised on all."""

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


_LEAST_RATIO = 16
"""The list of what changed in a bucket is kept until the install if the bucket is at least so many times as large.
Copying by a longer one would take more time than copying the bucket."""
_ENDED = (State.INSTALLED, State.ABORTED)


class Update:
    """The update of one engine to one version.

    `receive` runs in a background thread; the worker makes the other calls.
    """

    def __init__(
        self,
        offer: Offer,
        install: Install,
        *,
        receiver: Receiver,
        gate: Gate,
        deadline_seconds: float,
        settles: bool = False,
        base: PackedBase | None = None,
        portion: Portion | None = None,
        agree: Agree | None = None,
    ) -> None:
        """`deadline_seconds`: limit of each wait for the engine's current step of generation.

        `settles`: keep the undo copy after the install, until `settle`. `base`: the one that the offer's deltas are
        added to, or to which a full update's buckets are copied. `portion`: the part of a staged version that
        this rank checks; the version is installed only when all ranks have received theirs. `agree`: the agreement by
        which a step of an install fails on all ranks of the engine alike; None for an engine with one rank.
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
        self._agreed_step: contextlib.AbstractContextManager[None] = (
            contextlib.nullcontext() if agree is None else _AgreedStep(agree)
        )
        self._receiver = receiver
        self._gate = gate
        self._writer = f"{offer.run}/{offer.version}"
        self._deadline_seconds = deadline_seconds
        self.is_streaming = offer.install == "streaming"
        """True if the update is loaded while its buckets arrive."""
        # An adapter is loaded beside those that are served, so that taking it away again costs nothing.
        self._undo = offer.undo or offer.target is not UNSET
        self._settles = settles
        self._portion = portion
        self._base = base
        self.keeps_base = base is not None
        """True if the version's packed buckets are kept for the next one's deltas."""
        self._deltas = offer.base
        """The lengths of deltas, and the digests of what comes of them; None for a full update."""
        self.read_bytes = 0
        """Bytes of the payloads that this worker has read and checked."""
        self.installed_bytes = 0
        """Bytes that this worker has installed."""
        self._former: tuple[WeightVersion | None, str] = (None, "")
        self._restore: Callable[[], None] | None = None
        self._touched = False
        self._changes: dict[int, ChangedWords] = {}
        """By bucket, what a delta has changed."""
        self._installs_changes = False
        """True if the live tensors have the base's version, so that only what changed is copied."""
        self._assembly = Assembly(install.num_joined, is_staged=not self.is_streaming)
        self._root = ""
        # Locked while the engine's weights are written, so that an abort waits for the end of the write.
        self._writing = threading.Lock()

    @property
    def is_writing(self) -> bool:
        """True while this update is being written to the engine, or installed."""
        return self._writing.locked()

    def has_ended(self) -> bool:
        """Wait for a write or install in progress; return whether the update was installed or aborted."""
        with self._writing:
            return self.state in _ENDED

    def open(self) -> None:
        """Prepare the receiver; streaming: pause generation until the update ends. Does not wait for the publisher.

        Raises InsufficientMemoryError; PeerTimeoutError if a step of generation does not end by the deadline.
        """
        if self._install.straddling_bytes and not self.is_streaming:
            # All workers of the publish on this host check before any allocates.
            num_workers = 1 if self.offer.workers is UNSET else self.offer.workers.get(host_identity(), 1)
            workers = f", in each of {num_workers} workers" if num_workers > 1 else ""
            host_memory.require(
                num_workers * self._install.straddling_bytes,
                f"joining {self._install.num_straddling} tensors of which each trainer host sends a part{workers},",
                'publish with install="streaming", or free memory',
            )
        if self._portion is not None:
            # The ranks on this host share the work if they have this version in one memory.
            if self._deltas is None:
                is_shared = not self.is_streaming and self._receiver.read_together(self._manifest, self._portion)
            else:
                is_shared = self._base is not None and self._base.is_common
            self._portion = self._portion if is_shared else None
        if self.is_streaming:
            self._gate.begin_writing(self._writer, deadline_seconds=self._deadline_seconds)
            # Kernels of the last step may still read the weights. Wait for them before the receiver is open: with NCCL
            # the device is busy from then on until the publisher has sent.
            self._await_device()
        with self._writing:
            if self.state is State.ABORTED:  # aborted before the receiver was open
                self._gate.end_writing(self._writer)
            else:
                deltas = self._deltas
                manifest = self._manifest if deltas is None else self._manifest.with_sizes(deltas.encoded_bytes)
                self._receiver.open(manifest, self.version, staged=not self.is_streaming)

    def receive(self) -> str:
        """Receive and check every bucket, in the order of the manifest's rounds; return the root digest.

        Streaming: load each bucket as it comes. Staged: join the tensors with pieces from several origins.

        Raises IntegrityError, PeerDiedError, PeerTimeoutError, UpdateAbortedError, or InstallError from an exception of
        the engine's `load`. The caller then aborts the update.
        """
        self._move(State.OFFERED, State.RECEIVING)
        digests: dict[int, Digest] = {}
        if self._base is not None:
            self._base.begin()
        order, origins = iter(self._manifest.rounds), self._manifest.bucket_origins
        try:
            for bucket in self._receiver:
                index = next(order, self.num_buckets)
                if bucket.index != index or index == self.num_buckets:
                    raise IntegrityError(f"received bucket {bucket.index}, expected bucket {index}: publish again")
                digests[index], payload = self._check(bucket, origins[index])
                if self.is_streaming:
                    self._load_now((index, payload))
                else:
                    self._install.stage(index, payload, self._assembly, is_here=self._portion is None)
            if len(digests) != self.num_buckets:
                raise IncompleteUpdateError(f"received {len(digests)} of {self.num_buckets} buckets: publish again")
            if self.is_streaming:
                self._load_now(None)
            self._root = root_digest(
                self._install.manifest_digest, [digests[index] for index in range(self.num_buckets)]
            )
            self._move(State.RECEIVING, State.RECEIVED)
        except BaseException:
            # If an abort came while this thread used a bucket, it could not release that one.
            self._assembly.clear()
            raise
        return self._root

    def _check(self, bucket: Bucket, origin: int) -> tuple[Digest, torch.Tensor]:
        """Check a bucket, and have the base contain it, if there is one; return its raw payload with its digest."""
        index, payload, base, deltas = bucket.index, bucket.buffer.payload, self._base, self._deltas
        if base is not None and deltas is not None and index not in base.own:  # another rank adds the delta
            base.digests[index] = bytes.fromhex(deltas.digests[index])
            return base.digests[index], base.payloads[index]
        others = self._portion is not None and index not in self._portion.buckets
        if others and self._install.has_lent_views:
            self._receiver.reread(bucket)
        num_bytes = self._manifest.buckets[index]
        encoded_bytes = None if deltas is None else deltas.encoded_bytes[index]
        if encoded_bytes == num_bytes:  # a delta would be no shorter
            encoded_bytes = None
        check = functools.partial(check_bucket, bucket.buffer, num_bytes, self.version, index, origin)
        check = functools.partial(check, encoded_bytes=encoded_bytes, only_header=others)
        try:
            header = check()
        except IntegrityError:
            # A loader that writes into the tensors that it gets may have changed this process's copy of the bucket.
            if not self._receiver.reread(bucket):
                raise
            header = check()
        self.read_bytes += 0 if others else header.encoded_bytes
        if base is None:
            return header.digest, payload
        if header.is_delta:
            changes = base.add(index, payload[: header.encoded_bytes])
            if _LEAST_RATIO * changes.num_bytes <= base.payloads[index].nbytes and self._install.device.type == "cpu":
                self._changes[index] = changes
        else:
            base.keep(index, payload, header.digest)
        if deltas is None:
            return header.digest, payload
        digest = bytes.fromhex(deltas.digests[index])
        if base.digests[index] != digest:
            raise IntegrityError(
                f"bucket {index} has the digest {as_bytes(base.digests[index]).hex()} after its delta was added, "
                f"expected {digest.hex()}: publish again"
            )
        return digest, base.payloads[index]

    def _load_now(self, bucket: tuple[int, torch.Tensor] | None) -> None:
        """Streaming: write a bucket to the live model, which is paused for the whole update; None: what is in none."""
        with self._writing:
            if self.state is not State.RECEIVING:
                raise self._ended("the update was aborted")
            is_first = not self._touched
            if is_first:  # not before the first bucket: until then the model's tensors may be replaced
                self._bind()
            try:
                if is_first:
                    self._begin()
                if bucket is not None:
                    self._install.load_bucket(self._assembly, *bucket)
                else:
                    self._install.load_end(self._assembly)
                    # Wait for this thread's stream, since the committing thread uses another.
                    self._await_device()
            except Exception as exc:
                what = f"loading version {self.version.number} failed: {exc}"
                raise InstallError(what, torn=not self._undo) from exc

    def _bind(self) -> None:
        """Bind the install to the live tensors, and keep the undo copy. Nothing is written, and no step may run."""
        if not self.is_streaming:  # streaming, `open` has waited already
            self._await_device()
        is_same, served = self._install.is_bound(), self._gate.version
        install = self._install if is_same else replacement_of(self._install)
        has_moved = install.device != self._install.device
        if has_moved and self.is_streaming:  # with NCCL the new device can't be waited for any more
            devices = f"from {self._install.device} to {install.device}"
            raise InstallError(f"the weights were moved {devices} since the offer: publish again")
        if self._deltas is not None and self._changes and served is not None and not self._gate.torn:
            has_base = install.served == served == WeightVersion(self.version.run, self._deltas.version)
            self._installs_changes = has_base and is_same and install.install_map is not None
        install.served = self._install.served = None
        if not is_same or self._portion is not None:
            parts = sorted(self._assembly.parts.items())
            self._install, self._assembly = install, Assembly(install.num_joined, is_staged=not self.is_streaming)
            for index, part in parts:
                assert part.payload is not None
                install.stage(index, part.payload, self._assembly)
        if has_moved:
            self._await_device()
        if self._undo:
            assert isinstance(self._engine, Undoable)
            undo = install.undo_of(self._assembly, self._changes) if self._installs_changes else None
            self._restore = undo or self._engine.snapshot()

    def _begin(self) -> None:
        """Note that the live weights change from now on."""
        self._touched = True
        self._install.begin()

    def seal(self, seal: Seal) -> None:
        """Accept the publisher's seal, after which the update can be installed. Never waits. Idempotent.

        Raises IncompleteUpdateError if buckets are missing, IntegrityError if the root digests differ.
        """
        if self.state in (State.SEALED, State.INSTALLED):
            return
        if self.state is not State.RECEIVED:
            raise IncompleteUpdateError(
                f"version {self.version.number} is {self.state.value}, not received: send the seal after the last "
                "bucket"
            )
        if (seal.num_buckets, seal.root) != (self.num_buckets, self._root):
            raise IntegrityError(
                f"the seal names {seal.num_buckets} buckets with root digest {seal.root}, but {self.num_buckets} with "
                f"root digest {self._root} were received: publish again"
            )
        self._move(State.RECEIVED, State.SEALED)
        if self._base is not None:
            self._base.complete(self.version.number)

    def install(self) -> float:
        """Install the version between two steps of generation; return the seconds for which the engine was paused.

        Raises IncompleteUpdateError if it is not sealed, PeerTimeoutError (with nothing changed) if a step does not end
        by the deadline, InstallError if loading failed: with `undo` the former version is restored, otherwise the
        engine is torn.
        """
        with self._writing:
            if self.state is not State.SEALED:
                raise self.unsealed()
            with self._gate.exclusive(deadline_seconds=self._deadline_seconds):
                start = time.perf_counter()
                self._former = (self._gate.version, self._gate.torn)
                try:
                    with self._agreed_step:
                        if not self.is_streaming:
                            self._bind()
                    with self._agreed_step:
                        if not self.is_streaming:
                            self._begin()
                            changes = self._changes if self._installs_changes else None
                            self._install.load_staged(self._assembly, changes, lends=self._deltas is None)
                            self._await_device()
                    with self._agreed_step:
                        self._engine.commit(self.version)
                        if self._assembly.to_prove:
                            self._install.prove(self._assembly)
                except BaseException as exc:
                    message = f"installing version {self.version.number} failed: {exc if str(exc) else repr(exc)}"
                    self._fail(InstallError(message, torn=True), message)
                    if not isinstance(exc, Exception):
                        raise
                    raise self._ended(message) from exc
                if self.offer.target is UNSET:
                    self._gate.set_version(self.version)
                    self._install.served = self.version
                self.state, self.installed_bytes = State.INSTALLED, self._install.installed_bytes
                seconds = time.perf_counter() - start
        self._release()
        return seconds

    def settle(self, *, keep: bool) -> None:
        """Second phase of a two-phase install: keep the version, or roll back since another worker failed.

        Without an undo copy a roll-back leaves the engine torn. Idempotent: only the first call that returns counts.
        Raises PeerTimeoutError, with nothing changed, if a step does not end by the deadline: call it again.
        """
        with self._writing:
            if self.state is State.INSTALLED and self._settles:
                if not keep:
                    with self._gate.exclusive(deadline_seconds=self._deadline_seconds):
                        reason = f"version {self.version.number} was rolled back: another worker did not install it"
                        self.error, self.state = to_record(UpdateAbortedError(reason)), State.ABORTED
                        logger.warning("%s", reason)
                        self._install.served = None
                        if self._go_back(reason):
                            version, torn = self._former
                            self._gate.set_version(version)
                            if torn:
                                self._gate.tear(torn)
                self._settles = False
            self._restore, self._changes = None, {}

    def describe(self, install_seconds: float) -> str:
        """Return the log line of an install: version, seconds, sizes."""
        of = f"version {self.version.number} of run {self.version.run[:8]}"
        num_tensors, num_bytes = len(self._manifest.names), self._manifest.num_bytes
        tensors = f"{num_tensors} tensor{'s' * (num_tensors != 1)}, {num_bytes:,} bytes"
        whole = time.perf_counter() - self.offered_at
        return f"installed {of} in {install_seconds:.3f} s: {tensors}, {whole:.3f} s after its offer"

    def unsealed(self) -> IncompleteUpdateError:
        """Return the error for an update that is not sealed."""
        return IncompleteUpdateError(
            f"version {self.version.number} can't be installed yet, because it is {self.state.value}, not sealed: send "
            "its seal first"
        )

    def abort(self, error: BaseException) -> bool:
        """Abort the update, after a write in progress. Returns False if it had ended before.

        Sets an InstallError's `torn` to the resulting state of the engine. Frees everything; a thread that is receiving
        wakes up and raises.
        """
        with self._writing:
            if self.state in _ENDED:
                return False
            if not isinstance(error, Exception):
                error = UpdateAbortedError(repr(error))
            message = to_record(error).message
            self._fail(error, f"version {self.version.number} was aborted half-way: {message}")
        return True

    def _fail(self, error: Exception, reason: str) -> None:
        """End as aborted: undo the writes, and free everything. Sets an InstallError's `torn`. Called while locked."""
        self.error, self.state = to_record(error), State.ABORTED
        try:
            # First, because the roll-back waits for the device, where a running broadcast ends only with its group.
            self._receiver.end()
        finally:
            try:
                self._go_back(reason)
                if isinstance(error, InstallError):
                    error.torn = bool(self._gate.torn)
                    self.error = to_record(error)
            finally:
                # Before a concurrent abort can return, after which the publisher resumes the engine.
                self._release()

    def _go_back(self, reason: str) -> bool:
        """Undo the writes; without an undo copy the engine is torn. Returns True if it has what it had before.

        A Ctrl-C before all is undone leaves the engine torn, too.
        """
        is_whole = not self._touched
        try:
            if self._touched:
                # Copies that another thread has queued would otherwise run after the restore.
                self._await_device()
            self._engine.discard()
            if self._restore is not None:
                self._restore()
                is_whole = True
        except Exception as exc:
            reason = f"{reason}; restoring the former version failed too: {exc}"
            logger.warning("%s", reason)
        finally:
            if not is_whole:
                self._gate.tear(f"{reason}; publish a complete update to heal this engine")
        return is_whole

    def _await_device(self) -> None:
        if self._install.device.type == "cuda":
            engine = self._engine
            for device in engine.devices if isinstance(engine, OnDevice) else ():
                host_device.synchronize(device)

    def _release(self) -> None:
        self._assembly.clear()
        self._base = None  # the session has it, and may release it
        if self.state is not State.INSTALLED or not self._settles:
            self._restore, self._changes = None, {}
        try:
            self._receiver.end()
        finally:
            if self.is_streaming:
                self._gate.end_writing(self._writer)

    def _move(self, expected: State, state: State) -> None:
        with self._writing:
            if self.state is not expected:
                raise self._ended(f"the update is {self.state.value}, expected {expected.value}")
            self.state = state

    def _ended(self, otherwise: str) -> WeightcastError:
        """Return the error with which the update was aborted, or UpdateAbortedError with this text."""
        return UpdateAbortedError(otherwise) if self.error is None else from_record(self.error)
