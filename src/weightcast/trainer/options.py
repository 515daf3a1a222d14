"""Options of a publisher: how it updates its engines, for every publish of its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from weightcast.errors import ErrorRecord
from weightcast.format.adapters import MAX_KEPT, AdapterName
from weightcast.format.geometry import ALIGNMENT_BYTES
from weightcast.format.manifest import RunId, VersionNumber
from weightcast.format.messages import InstallMode
from weightcast.host.deadline import number_of_seconds
from weightcast.trainer.arguments import integer

_MAX_BUCKET_BYTES = 1 << 32
"""A delta counts the words of a bucket in 32 bits."""

Phase: TypeAlias = Literal["offered", "packed", "received", "installed"]
DeltaMode: TypeAlias = Literal["auto", "always"]
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "install": ("staged", "streaming"),
    "verify": ("installed", None),
    "delta": ("auto", "always", None),
    "on_failure": ("raise", "report"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class PublishEvent:
    """The end of a phase of a publish, for one engine or for the whole publish.

    `phase`: "offered" (the engine has accepted the version), "packed" (the weights may change; has no engine),
    "received" (the engine has received and checked all buckets), "installed" (the engine serves the version).
    `engine`: its name; None if the phase has ended for all engines. `error`: the error with which the engine failed in
    this phase, after which it takes no further part. `seconds`: time since the publish began.
    """

    version: int
    phase: Phase
    engine: str | None
    error: ErrorRecord | None
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as the target of a publish; the source is a `PeftAdapterSource`.

    Version 7 of "policy" is `policy@7`, also in requests. Those that name `policy` are answered by the newest version,
    each to its end by the one that was current when it came; stock servers have no such name. `keep`: how many older
    versions can still be named. `base`: the version of the model that the adapter was trained on, `(report.run,
    report.version)` of the report with which the model was published; an engine that serves another one refuses the
    adapter. None: for any.
    Raises ValueError or TypeError.
    """

    name: str
    keep: int = 1
    base: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self.name, AdapterName)
        except msgspec.ValidationError:
            raise ValueError(
                f"the adapter's name is {self.name!r}; it must be up to 128 letters, digits, dots, dashes and "
                "underscores, beginning with a letter or digit"
            ) from None
        if not 0 <= integer("keep", self.keep) <= MAX_KEPT:
            raise ValueError(f"keep is {self.keep}; it must be from 0 to {MAX_KEPT}")
        if self.base is not None:
            try:
                msgspec.convert(self.base, tuple[RunId, VersionNumber])
            except msgspec.ValidationError:
                raise ValueError(f"base is {self.base!r}; it must be (report.run, report.version) or None") from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishOptions:
    """Options of a publisher: how it updates its engines. Raises ValueError or TypeError for unsupported values.

    `target`: the adapter to update in place of the model.
    `install`: "staged" (the old version serves until the whole update has arrived) or "streaming" (bounded memory; the
    engine is paused during the transfer and must be healed by a complete update if it fails).
    `bucket_size_bytes`: by default an eighth of the model, at most the transport's choice for the device.
    `undo`: engines keep a copy of their weights while they install, and roll back to it if the install fails.
    `takeover`: take over engines that another run has.
    `check_finite`: before the offer, check all weights for NaN and infinity, before and after the cast. If there are
    any, the publish raises NotFiniteError, which names the tensors and the trainer rank, and engines keep their
    weights. The check reads each weight once. A source that streams its tensors is checked tensor by tensor while it is
    packed: with `install="streaming"` the engine then refuses to serve until a complete update.
    `verify`: "installed" compares the digest of every tensor in the engines' live memory with that of the sent tensor.
    An engine in which one differs has failed and refuses to serve until a complete update. The report names the tensors
    of which an engine can't compute the digest.
    `verify_every`: compare after this publisher's first publish and every n-th after it, counting publishes that sent a
    whole version. Besides, an engine that has connected since (it was added or started again) is compared after its
    first publish.
    `delta`: engines that have the last version get only what changed since then; the others get a full update in the
    same publish. "always", or "auto": not over shared memory, and not while the last deltas took longer than a full
    update; None: full updates only. One more model of host memory is needed in this process, and on each host of an
    engine, whose ranks there share it.
    `on_event`: called with a `PublishEvent` for each phase and engine, in the publish's thread, so it must not block.
    An exception that it raises ends the publish. With several trainer ranks it is called on the publishing rank.
    `on_failure`: if an engine did not install the version, "raise" raises PublishError, "report" returns the report.
    `deadline_seconds`: limit of each single wait. `lease_seconds`: time after which another publisher may take an
    engine whose publisher is silent.
    """

    target: Adapter | None = None
    bucket_size_bytes: int | None = None
    install: InstallMode = "staged"
    undo: bool = False
    takeover: bool = False
    verify: Literal["installed"] | None = None
    verify_every: int = 1
    check_finite: bool = False
    delta: DeltaMode | None = None
    on_event: Callable[[PublishEvent], object] | None = None
    on_failure: Literal["raise", "report"] = "raise"
    deadline_seconds: float = 60.0
    lease_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {' or '.join(map(repr, choices))}")
        if self.target is not None:
            if not isinstance(self.target, Adapter):
                raise TypeError(f"target is {self.target!r}; it must be an Adapter(...) or None for the model")
            if self.install != "staged" or self.verify is not None:
                raise ValueError(
                    "an adapter is installed as a whole, and digests are of the model's tensors: with target= leave "
                    "out install='streaming' and verify"
                )
        if self.delta == "always" and self.install != "staged":
            raise ValueError('deltas need install="staged": leave `install` out, or publish with delta=None')
        if integer("verify_every", self.verify_every) < 1:
            raise ValueError(f"verify_every is {self.verify_every}; it must be at least 1")
        for name in ("undo", "takeover", "check_finite"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.on_event is not None and not callable(self.on_event):
            raise TypeError(f"on_event is {self.on_event!r}; it must be a function of one PublishEvent")
        number_of_seconds("deadline_seconds", self.deadline_seconds)
        number_of_seconds("lease_seconds", self.lease_seconds)
        if self.bucket_size_bytes is not None:
            size = integer("bucket_size_bytes", self.bucket_size_bytes)
            if not ALIGNMENT_BYTES <= size <= _MAX_BUCKET_BYTES:
                raise ValueError(
                    f"bucket_size_bytes is {size}; it must be from {ALIGNMENT_BYTES} to {_MAX_BUCKET_BYTES}"
                )
            object.__setattr__(self, "bucket_size_bytes", size)  # an int: messages can't encode numpy's integers
