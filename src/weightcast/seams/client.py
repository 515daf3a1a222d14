"""The seam of engine clients: an engine's control calls, from the trainer's side.

One update, called by the publisher:

    EngineClient.init(info)              the workers connect their links and make their receivers, in the background
    EngineClient.update(Offer)           every worker answers on its link
        ... the buckets are sent; every worker says Received on its link
    EngineClient.update(Seal)
    Pausable.pause()                     streaming: before the first bucket instead
    EngineClient.finish()                the workers install
    Settling.settle(...)                 where the workers of an engine can't agree by themselves
    Pausable.resume()

Engines that bring a sender of their own (`BringsSender`) come after all others: paused, sent to, finished, resumed.
Any failure: EngineClient.update(Abort). Optional abilities are Protocols, asked with `isinstance`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from weightcast.format.messages import InitInfo, UpdateInfo, WeightInfo
from weightcast.links.watchdog import RecoveryRequest, Watchdog
from weightcast.seams.transport import Sender


class EngineClient(Protocol):
    """One engine's control routes, from the trainer's side. Every call has a deadline and raises PeerError.

    `name` is how errors and reports call the engine. `abilities` in `info()` says what it can do besides.
    """

    name: str

    def info(self) -> WeightInfo: ...

    def init(self, info: InitInfo) -> None: ...

    def update(self, info: UpdateInfo) -> None: ...

    def finish(self, version: int) -> float | None:
        """Install the sealed version. With the ability "install": the seconds that the engine stood still for it."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DetectsServer(Protocol):
    """A client of an address where engines of several kinds may answer: it asks, and returns the client for this one.

    Asked whenever a publisher connects, since another kind may have been started there. Raises ControlError.
    """

    def detect_server(self) -> EngineClient: ...


@runtime_checkable
class TwoPhaseInstall(Protocol):
    """A client whose engine's workers can't all agree on an install: it is told what became of it everywhere.

    Called after every `finish`, once all workers have answered or failed to. With `keep` all have installed; without,
    one has not: those that installed go back if they can, and every worker tells on its link that it failed.
    """

    def settle(self, version: int, *, keep: bool) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class SenderContext:
    """What a publisher tells whoever makes a sender: its transport's URL, its run, where the weights are, its guard."""

    url: str
    run: str
    device: torch.device
    deadline_seconds: float
    watchdog: Watchdog


@runtime_checkable
class BringsSender(Protocol):
    """A client whose engine has no worker of ours and a data plane of its own: it brings the `Sender` for that.

    Asked whenever a publisher connects. `known` are the senders that others have brought: engines of one kind share
    one, and each sender is packed for once. Its peers are the clients' names. Such an engine stands still while it is
    sent to, unless the sender is `NonBlockingSend`; then `finish` follows as ever. Raises UnsupportedError.
    """

    def sender(self, known: Sequence[Sender], context: SenderContext) -> Sender: ...


@runtime_checkable
class NonBlockingSend(Protocol):
    """A brought sender that can say whether its engines serve on until the install."""

    @property
    def is_staged(self) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """One value for all weights that an engine holds. Of two engines of one `kind`, equal weights have equal values."""

    kind: str
    value: str


@runtime_checkable
class Fingerprinted(Protocol):
    """A client whose engine can say what it holds, as of now: it was just updated. None: this one can't."""

    def fingerprint(self) -> Fingerprint | None: ...


@runtime_checkable
class Quarantinable(Protocol):
    """A client that can keep an engine from serving weights which are not what others hold.

    Called before the engine is resumed, where it stands still. The next complete update heals it.
    """

    def quarantine(self, reason: str) -> None: ...


@runtime_checkable
class Pausable(Protocol):
    """A client whose engine serves traffic that must stand still during an install. `run` owns the pause."""

    def pause(self, run: str) -> None: ...

    def resume(self, run: str) -> None: ...


@runtime_checkable
class Recoverable(Protocol):
    """A client whose pause no lease ends. The watchdog process sends `recovery_requests` if the publisher dies."""

    def recovery_requests(self, run: str) -> Sequence[RecoveryRequest]: ...
