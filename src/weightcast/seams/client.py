"""The seam of engine clients: an engine's control calls, from the trainer's side.

One update, called by the publisher:

    EngineClient.connect(), .info()
    EngineClient.init(info)              the workers connect their links and make their receivers, in the background
    EngineClient.update(Offer)           every worker replies over its link
        ... the buckets are sent; every worker reports Received over its link
    EngineClient.update(Seal)
    ServesTraffic.pause()                streaming: before the first bucket; not if `finish` pauses by itself
    EngineClient.finish()                the workers install
    TwoPhaseInstall.settle(...)          if the workers of an engine can't agree by themselves
    ServesTraffic.resume()

Engines whose client has its own sender (`BringsSender`) are updated after all others: paused, sent to, finished,
resumed. After any failure: EngineClient.update(Abort). Optional abilities are Protocols, checked with `isinstance`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldWeights, InitInfo, UpdateInfo, WeightInfo
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.transport import Sender


class EngineClient(Protocol):
    """One engine's control calls, from the trainer's side. Every call has a deadline and raises PeerError.

    `name`: the engine's name in errors and reports. Optional abilities are checked with `isinstance` on the client that
    `connect` has returned; the abilities in a server's `info()` are read only by that server's client.
    """

    name: str
    paused_seconds: float | None = None
    """None: the publisher pauses the engine for an install. Otherwise the engine pauses by itself, and this is its
    pause in the last `finish`: as reported, or the duration of the call if the answer was lost.

    A version that is streamed is loaded before that: the publisher pauses the engine for it, if it `ServesTraffic`.
    """

    def connect(self) -> EngineClient:
        """Return the client to use from now on: this one, or one for the kind of server that was detected.

        Called whenever a publisher connects, since another server may have been started meanwhile. Raises PeerDiedError
        if nothing answers yet, for which a publisher may wait, or another PeerError.
        """
        return self

    def info(self) -> WeightInfo:
        """Return the engine's state: version, run, state, abilities. Raises PeerError."""

    def init(self, info: InitInfo) -> None:
        """Begin a publisher's session. Raises EngineBusyError if another publisher has the engine, PeerError."""

    def update(self, info: UpdateInfo) -> None:
        """Offer, seal or abort a version, without waiting for bytes. Raises the engine's error."""

    def finish(self, version: int) -> None:
        """Install the sealed version."""

    def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
        """Return digests of the live tensors (or of `names`), for `verify="installed"`; None if they can't be read."""
        return None

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str] | None:
        """Return, by name, the engine's dtypes of these tensors, for `dtype="engine"`; None if it can't report them.

        Unknown names are left out.
        """
        return None

    def quarantine(self, reason: str) -> None:
        """Have an engine with wrong weights refuse to serve until a complete update."""
        return

    def close(self) -> None:
        """Close the connections to the engine. Idempotent."""


class ClientSender(Sender, Protocol):
    """A sender that an engine's client provides. `is_staged`: its engines serve until the install."""

    @property
    def is_staged(self) -> bool: ...


@runtime_checkable
class TwoPhaseInstall(Protocol):
    """Second phase of an install, for engines whose workers share no process group.

    `settle(keep=True)` follows if all workers have installed. `keep=False` if one has not: those that installed roll
    back if they can, and every worker reports Failed over its link.
    """

    def settle(self, version: int, *, keep: bool) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class SenderContext:
    """Settings of a client's sender: the transport's URL, the run, the device of the weights, the deadline.

    `has_several_ranks`: several trainer ranks publish, and pack into the buffers of `Sender.buffer`, which must be
    shared host memory (`host.memory.SharedMemory`).
    """

    url: str
    run: str
    device: torch.device
    deadline_seconds: float
    has_several_ranks: bool = False


@runtime_checkable
class BringsSender(Protocol):
    """A client with its own sender, for an engine without weightcast workers.

    The publisher calls `sender` whenever it connects. `known`: the senders of other clients; engines of one kind share
    a sender, and buckets are packed once for each sender. The sender's peers are the clients' names. Such an engine is
    paused during the transfer, unless the sender is staged; then `finish` follows as usual. `sender` returns None if
    the engine receives the publisher's own buckets with this transport. Raises UnsupportedError.
    """

    def sender(self, known: Sequence[ClientSender], context: SenderContext) -> ClientSender | None: ...


@runtime_checkable
class ServesTraffic(Protocol):
    """A client whose engine serves traffic, which must pause during an install. `run` owns the pause.

    Derive from it for the default `recovery_requests`, none, if the pause ends with a lease and the engine itself
    refuses to serve while torn.
    """

    def pause(self, run: str) -> None: ...

    def resume(self, run: str) -> None: ...

    def recovery_requests(self, run: str) -> Sequence[RecoveryRequest]:
        """Return the watchdog process's requests for a publisher's death during a pause that no lease ends."""
        return ()
