"""How a publisher updates its engines: the same for every publish of its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

from weightcast.errors import ErrorRecord
from weightcast.format.geometry import ALIGNMENT_BYTES
from weightcast.format.messages import MAX_LEASE_SECONDS, InstallMode
from weightcast.host.deadline import number_of_seconds
from weightcast.trainer.arguments import integer

Phase: TypeAlias = Literal["offered", "packed", "received", "installed"]


@dataclasses.dataclass(frozen=True, slots=True)
class PublishEvent:
    """A phase of a publish has ended, for one engine, or for the publish.

    `phase`: "offered" (the engine has accepted the version), "packed" (the weights may change; of the publish alone),
    "received" (the engine has checked all of it), "installed" (it serves it). `engine`: its name; None: the phase has
    ended for all engines. `error`: why the engine takes no further part, in the phase in which it failed.
    `seconds`: since the publish began.
    """

    version: int
    phase: Phase
    engine: str | None
    error: ErrorRecord | None
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishOptions:
    """How a publisher updates its engines. Raises ValueError or TypeError for other values than these.

    `install`: "staged" (the old version serves until the whole update has arrived) or "streaming" (bounded memory; the
    engine is paused during the transfer and must be healed by a complete update if it fails).
    `bucket_size_bytes`: by default an eighth of the model, at most the transport's choice for the device.
    `undo`: engines keep a copy of their weights while they install, and go back to it if the install fails.
    `takeover`: take engines that another run holds.
    `check_finite`: before anything is offered, look for NaN and infinity in all weights, and in what a cast makes of
    them: if there are any, the publish raises NotFiniteError, which names the tensors and the trainer rank, and engines
    keep their weights. It reads each weight once. Of a source that streams its tensors each is looked at when its turn
    comes: an engine with `install="streaming"` then refuses to serve until it is healed.
    `verify`: "installed" compares the digest of every tensor in the engines' live memory with that of what was sent: an
    engine in which one differs has failed, and refuses to serve until it is healed; what an engine can't prove is in
    the report.
    `verify_every`: compare after this publisher's first publish and each n-th after it, whatever the versions' numbers;
    a publish that failed before all was sent doesn't count. In between, an engine that has connected since (it was
    added or started again) is compared once: after the first publish that it takes.
    `on_event`: called with a `PublishEvent` for each phase and engine, in the publish's thread: it must not wait. An
    exception of it ends the publish. With several trainer ranks, on the publishing one.
    `on_failure`: whether a publish that an engine did not take raises PublishError or returns its report.
    `deadline_seconds`: of each single wait. `lease_seconds`: how long an engine stays held by a silent publisher.
    """

    bucket_size_bytes: int | None = None
    install: InstallMode = "staged"
    undo: bool = False
    takeover: bool = False
    verify: Literal["installed"] | None = None
    verify_every: int = 1
    check_finite: bool = False
    on_event: Callable[[PublishEvent], object] | None = None
    on_failure: Literal["raise", "report"] = "raise"
    deadline_seconds: float = 60.0
    lease_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.install not in ("staged", "streaming"):
            raise ValueError(f"install is {self.install!r}; it must be 'staged' or 'streaming'")
        if self.on_failure not in ("raise", "report"):
            raise ValueError(f"on_failure is {self.on_failure!r}; it must be 'raise' or 'report'")
        if self.verify not in (None, "installed"):
            raise ValueError(f"verify is {self.verify!r}; it must be 'installed' or None")
        if integer("verify_every", self.verify_every) < 1:
            raise ValueError(f"verify_every is {self.verify_every}; it must be at least 1")
        for name in ("undo", "takeover", "check_finite"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.on_event is not None and not callable(self.on_event):
            raise TypeError(f"on_event is {self.on_event!r}; it must be a function of one PublishEvent")
        number_of_seconds("deadline_seconds", self.deadline_seconds)
        if number_of_seconds("lease_seconds", self.lease_seconds) > MAX_LEASE_SECONDS:
            raise ValueError(f"lease_seconds is {self.lease_seconds}; it must be at most {MAX_LEASE_SECONDS}")
        if self.bucket_size_bytes is not None:
            size = integer("bucket_size_bytes", self.bucket_size_bytes)
            if size < ALIGNMENT_BYTES:
                raise ValueError(f"bucket_size_bytes is {size}; it must be at least {ALIGNMENT_BYTES}")
            object.__setattr__(self, "bucket_size_bytes", size)  # of numpy's integers none goes into a message
