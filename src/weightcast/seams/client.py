"""The seam of engine clients: an engine's control calls, from the trainer's side.

One update, called by the publisher:

    EngineClient.connect(), .info()
    EngineClient.init(info)              the workers connect their links and make their receivers, in the background
    EngineClient.update(Offer)           every worker answers on its link
        ... the buckets are sent; every worker says Received on its link
    EngineClient.update(Seal)
    ServesTraffic.pause()                streaming: before the first bucket instead; not where finish pauses
    EngineClient.finish()                the workers install
    TwoPhaseInstall.settle(...)          where the workers of an engine can't agree by themselves
    ServesTraffic.resume()

Engines that provide a sender of their own (`BringsSender`) come after all others: paused, sent to, finished, resumed.
Any failure: EngineClient.update(Abort). Optional abilities are Protocols, asked with `isinstance`.
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

    `name` is the engine's name in errors and reports. Optional abilities are asked of the client that `connect` has
    returned, with `isinstance`; the names of abilities in a server's `info()` are for the server's client to read.
    """

    name: str
    paused_seconds: float | None = None
    """None: the publisher pauses the engine for an install. Else the engine does so by itself, and was paused for this
    long in the last `finish`: as it says, or for as long as the call took, also where the answer was lost.

    A version that is streamed is loaded before that: the publisher pauses the engine for it, if it `ServesTraffic`.
    """

    def connect(self) -> EngineClient:
        """The client to call from now on: this one, or that of the server found, where several kinds may answer.

        Called whenever a publisher connects, since another server may have been started meanwhile. Raises PeerDiedError
        if nothing answers yet, which a publisher may wait for, or another PeerError.
        """
        return self

    def info(self) -> WeightInfo: ...

    def init(self, info: InitInfo) -> None: ...

    def update(self, info: UpdateInfo) -> None: ...

    def finish(self, version: int) -> None:
        """Install the sealed version."""

    def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
        """The digests of its live tensors (or of those named), for `verify="installed"`; None if they can't be read."""
        return None

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str] | None:
        """The dtype in which it has each tensor of these names and shapes, by record name, for `dtype="engine"`.

        Names that it does not know are left out. None for an engine that can't say.
        """
        return None

    def quarantine(self, reason: str) -> None:
        """Keep the engine from serving weights which are not what they should be, until a complete update has come."""
        return

    def close(self) -> None: ...


class ClientSender(Sender, Protocol):
    """A sender that an engine's client provides. `is_staged`: its engines serve until the install."""

    @property
    def is_staged(self) -> bool: ...


@runtime_checkable
class TwoPhaseInstall(Protocol):
    """Second phase of an install, for engines whose workers share no process group.

    `settle(keep=True)` after all workers have installed; `keep=False` if one has not: those that installed roll back if
    they can, and every worker reports Failed on its link.
    """

    def settle(self, version: int, *, keep: bool) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class SenderContext:
    """Settings of a client's sender: the transport's URL, the run, the device of the weights, the deadline.

    `has_several_ranks`: several trainer ranks publish, and pack into the buffers of `Sender.buffer`: shared host memory
    (`host.memory.SharedMemory`).
    """

    url: str
    run: str
    device: torch.device
    deadline_seconds: float
    has_several_ranks: bool = False


@runtime_checkable
class BringsSender(Protocol):
    """A client whose engine has no worker of ours but a data plane of its own, for which the client provides a sender.

    The publisher calls `sender` whenever it connects. `known` are the senders of other clients: engines of one kind
    share a sender, and buckets are packed once for each sender. The sender's peers are the clients' names. Such an
    engine is paused while it is sent to, unless the sender is staged; then `finish` follows as usual. `sender` returns
    None if the engine takes the publisher's own buckets with this transport. Raises UnsupportedError.
    """

    def sender(self, known: Sequence[ClientSender], context: SenderContext) -> ClientSender | None: ...


@runtime_checkable
class ServesTraffic(Protocol):
    """A client whose engine serves traffic, which must pause during an install. `run` owns the pause.

    Derive from it if the pause ends with a lease, and the engine itself refuses to serve what it should not.
    """

    def pause(self, run: str) -> None: ...

    def resume(self, run: str) -> None: ...

    def recovery_requests(self, run: str) -> Sequence[RecoveryRequest]:
        """Return the watchdog process's requests for a publisher's death during a pause that no lease ends."""
        return ()
