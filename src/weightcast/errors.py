"""Every error weightcast raises on the world's account.

    WeightcastError
    ├── ManifestError               a manifest or message cannot be trusted (`fault` says in which way)
    ├── IntegrityError              bytes that arrived are not the bytes that were sent
    ├── RefusedError                an engine declined an update before any byte moved
    │   ├── IncompatibleWeightsError    names, shapes or dtypes differ; names every offender
    │   ├── NotFiniteError              the trainer's weights hold NaN or infinity (`check_finite`)
    │   ├── StaleVersionError           the version does not grow, or belongs to another run
    │   ├── EngineBusyError             another publisher's run holds the engine
    │   ├── InsufficientMemoryError     staging or undo would not fit into the host's memory
    │   └── UnsupportedError            the peer lacks an ability that the caller asked for
    ├── PeerError                   names the peer that failed
    │   ├── PeerDiedError               its connection ended
    │   ├── PeerTimeoutError            it did not answer before the deadline
    │   └── ControlError                its control route answered with an error
    ├── PeersLostError              an update lost peers; `survivors` can go on once it is opened again for them
    ├── UpdateAbortedError          the update was given up; the old version serves
    ├── IncompleteUpdateError       an update was sealed or installed before it was whole
    ├── InstallError                loading failed after validation; `torn` says whether the engine must be healed
    ├── EngineTornError             the engine holds no whole version and refuses to serve
    ├── VersionNotFoundError        a store has no version yet, or not the one that was asked for
    ├── ClosedError                 the object was closed, or never opened
    ├── PublishInFlightError        the publisher's former publish has not ended yet (`overlap="raise"`)
    └── PublishError                a fleet's failures: {peer: cause}

A caller's mistake (a wrong argument) is a ValueError or a TypeError, never one of these. An error crosses a process
boundary as an `ErrorRecord`: a name from the closed table above and a text, never a pickled object. The report of a
publish is here too, since `PublishError` carries it.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

MAX_LISTED_PROBLEMS = 1000
MAX_TEXT_CHARACTERS = 1 << 16
"""Of a record's message, and of all its problems together: either takes at most 6 bytes each in JSON."""

_EXTRAS = {
    **dict.fromkeys(("starlette", "uvicorn", "transformers"), "serve"),
    "prometheus_client": "metrics",
    "torchrl": "torchrl",
    "tensordict": "torchrl",
    "trl": "trl",
    "verl": "verl",
    "fastapi": "verl",
    "ray": "ray",
}
"""Packages that the core does not need -> the extra that installs them."""

_ELSEWHERE = {
    "vllm": "install vLLM in this environment (docs/vllm.md names the versions that were tested)",
    "nemo_rl": "run this in NeMo-RL's own environment; it is on no package index (docs/nemo-rl.md)",
}
"""Packages that no extra installs -> what to do."""


class WeightcastError(Exception):
    """Base class: anything that went wrong outside the caller's own code."""


class ManifestError(WeightcastError):
    """A manifest or a message is malformed. `fault` is one word of the closed list in `docs/wire-format.md`."""

    def __init__(self, message: str, *, fault: str = "invalid") -> None:
        super().__init__(message)
        self.fault = fault


class IntegrityError(WeightcastError):
    """A bucket's header, length or digest does not match what was expected, or the root digest differs."""


class RefusedError(WeightcastError):
    """An engine declined an update before any byte moved. `problems` lists every reason."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class IncompatibleWeightsError(RefusedError):
    """Offered tensors are unknown, missing, doubled or of another shape or dtype. `problems` names all of them."""


class NotFiniteError(RefusedError):
    """The weights to publish hold NaN or infinity (`check_finite` looks for that). `problems` names each tensor."""


class StaleVersionError(RefusedError):
    """The version is not above the engine's last one of this run, or the update belongs to another run."""


class EngineBusyError(RefusedError):
    """Another publisher holds the engine: close it, or pass `takeover=True`. Its lease does not end while it lives."""


class InsufficientMemoryError(RefusedError):
    """Staging or an undo copy would not fit into the memory this host or container has left."""


class UnsupportedError(RefusedError):
    """The peer lacks an ability that was asked for (an undo copy, a transport, a protocol version)."""


class PeerError(WeightcastError):
    """A peer failed. `peer` is its name: an engine's URL, or `trainer`."""

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class PeerDiedError(PeerError):
    """The peer's connection ended in the middle of an update."""


class PeerTimeoutError(PeerError):
    """The peer did not answer before the deadline."""


class ControlError(PeerError):
    """The peer's control route answered with an error, or is not what was expected there."""


class PeersLostError(WeightcastError):
    """An update can't go on with all of its peers. `survivors`: those that take it once it is opened again for them."""

    def __init__(self, message: str, survivors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.survivors = tuple(survivors)


class UpdateAbortedError(WeightcastError):
    """The update was given up by one side; the old version serves."""


class IncompleteUpdateError(WeightcastError):
    """An update was sealed or installed before every bucket and every tensor of it had arrived."""


class InstallError(WeightcastError):
    """Loading failed after validation. If `torn`, the engine refuses to serve until a complete update heals it."""

    def __init__(self, message: str, *, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class EngineTornError(WeightcastError):
    """The engine's weights are of no whole version; publish a complete update to heal it."""


class VersionNotFoundError(WeightcastError):
    """A store holds no version yet, is not there, or does not hold the version that was asked for."""


class ClosedError(WeightcastError):
    """The object was closed, or was never opened."""


class PublishInFlightError(WeightcastError):
    """`Publisher.start(overlap="raise")` was called while a publish of this publisher was in flight."""


class PublishError(WeightcastError):
    """At least one engine did not take the version. `failures` maps each to its cause; `report` has the rest."""

    def __init__(self, message: str, failures: Mapping[str, WeightcastError], report: PublishReport) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.report = report


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels: its class name in the tree above, its text, and what the class carries besides."""

    kind: str
    message: str
    problems: tuple[str, ...] = ()
    peer: str = ""
    torn: bool = False
    fault: str = ""
    survivors: tuple[str, ...] = ()


class StageSeconds(msgspec.Struct):
    """Seconds of a publish by stage. Stages overlap with the engines' own work, and don't add up to the engines' times.

    `gather`: asking the source for its regions. `offer`: joining engines, with the wait for those that are starting,
    and offering. `pack`: filling buckets and digesting them. `send`: waiting for free slots and for the engines' last
    buckets. `memory`: the part of `send` that waits for the transport's memory, which the next publish finds there.
    `seal`: sealing. `pause`: the longest time any engine was paused. `total`: from call to return, or of
    `Publisher.start` to the end. `stall`: how long the caller waited: until all was packed with `start`, else `total`.
    """

    gather: float = 0.0
    offer: float = 0.0
    pack: float = 0.0
    send: float = 0.0
    memory: float = 0.0
    seal: float = 0.0
    pause: float = 0.0
    total: float = 0.0
    stall: float = 0.0


class EngineResult(msgspec.Struct):
    """One engine's outcome. `ok`: it serves the version. `error`: why not, else None.

    `pause_seconds`: how long the engine was paused: as it says where it pauses by itself (vLLM with weightcast's own
    routes), else from the pause's request until it was resumed, as the publisher saw it. `install_seconds`: what the
    engine itself took to install. `unproven`: with `verify="installed"`, the tensors that could not be read out of the
    engine's live memory, each with the reason. `read_bytes`, `installed_bytes`: of each of the engine's workers, by
    rank: of the buckets what it read and checked, where ranks of one host share that; and of the model what it put into
    place (a tensor that goes through the engine's own loader counts whole). `differs`: the engine's live memory is not
    what was sent, so that it was quarantined.
    """

    ok: bool = False
    error: ErrorRecord | None = None
    pause_seconds: float = 0.0
    install_seconds: float = 0.0
    unproven: dict[str, str] = {}
    read_bytes: list[int] = []
    installed_bytes: list[int] = []
    differs: bool = False


class PublishReport(msgspec.Struct, frozen=True):
    """One version's publish. `num_bytes` counts tensor data once, however many engines took it."""

    run: str
    version: int
    num_bytes: int
    num_tensors: int
    num_buckets: int
    install: str
    seconds: StageSeconds
    engines: dict[str, EngineResult]

    @property
    def ok(self) -> bool:
        """True if every engine serves the version."""
        return all(result.ok for result in self.engines.values())

    @property
    def gb_per_second(self) -> float:
        """Tensor data over the whole time, in 1e9 bytes a second."""
        return self.num_bytes / self.seconds.total / 1e9 if self.seconds.total else 0.0

    def metrics(self, prefix: str = "weightcast/") -> dict[str, float]:
        """Return figures for a tracker (wandb, TensorBoard), by the name that each has behind the prefix.

        Seconds end with `_s`. Trackers that average what they collect find by `_max` and `_total` what to do instead.
        """
        seconds = self.seconds
        figures = {
            "version_max": float(self.version),
            "update_s": seconds.total,
            "stall_s": seconds.stall,
            "pack_s": seconds.pack,
            "send_s": seconds.send,
            "pause_s": seconds.pause,
            "gb_per_s": self.gb_per_second,
            "failed_engines_total": float(sum(not result.ok for result in self.engines.values())),
        }
        return {prefix + name: value for name, value in figures.items()}

    def to_json(self) -> bytes:
        """The report as one JSON object."""
        return msgspec.json.encode(self)

    def __str__(self) -> str:
        """The sizes and times, a table of the engines, then each problem of those that failed on a line of its own."""
        seconds = self.seconds
        lines = [f"version {self.version} was not installed anywhere"]
        if not self.engines or any(result.ok for result in self.engines.values()):
            lines = [
                f"version {self.version}: {self.num_bytes:,} bytes (tensors: {self.num_tensors:,}, "
                f"buckets: {self.num_buckets:,}) in {seconds.total:.2f} s",
                f"offer {seconds.offer:.2f} s, pack {seconds.pack:.2f} s, send {seconds.send:.2f} s "
                f"(memory {seconds.memory:.2f} s), seal {seconds.seal:.2f} s, longest pause {seconds.pause:.2f} s, "
                f"trainer stalled {seconds.stall:.2f} s",
            ]
        rows = [("engine", "result", "pause", "install")] if self.engines else []
        for name, result in self.engines.items():
            outcome = f"serves {self.version}" if result.error is None else result.error.kind
            rows.append((name, outcome, f"{result.pause_seconds:.3f} s", f"{result.install_seconds:.3f} s"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, outcome, pause, install in rows:
            lines.append(f"{name:{widths[0]}}  {outcome:{widths[1]}}  {pause:>{widths[2]}}  {install:>{widths[3]}}")
        for name, result in self.engines.items():
            if result.error is not None:
                lines.append(f"{name}: {result.error.kind}: {result.error.message}")
                lines += (f"  {problem}" for problem in result.error.problems if problem not in result.error.message)
        return "\n".join(map(printable, lines))


def publish_error(report: PublishReport) -> PublishError:
    """Return the error for a publish that an engine did not take."""
    failures = {name: from_record(r.error) for name, r in report.engines.items() if r.error is not None}
    engines = "1 engine" if len(report.engines) == 1 else f"{len(report.engines):,} engines"
    causes = "; ".join(f"{name}: {error}" for name, error in failures.items())
    what = f"{len(failures):,} of {engines} did not take version {report.version}"
    return PublishError(f"{what}: {causes}", failures, report)


def to_record(error: BaseException) -> ErrorRecord:
    """Describe `error` for a peer. A foreign exception becomes a WeightcastError that keeps its type's name."""
    if not isinstance(error, WeightcastError):
        error = WeightcastError(f"{type(error).__name__}: {error}")
    message, problems = str(error), getattr(error, "problems", ())
    if len(message) > MAX_TEXT_CHARACTERS:
        message = f"{message[: MAX_TEXT_CHARACTERS - 8]} ... cut"
    # As many problems as fit into a record; the message says how many there are in all.
    ends = list(itertools.accumulate(map(len, problems[:MAX_LISTED_PROBLEMS])))
    problems = tuple(problems[: bisect.bisect_right(ends, MAX_TEXT_CHARACTERS)])
    peer, torn = getattr(error, "peer", ""), getattr(error, "torn", False)
    fault, survivors = getattr(error, "fault", ""), getattr(error, "survivors", ())
    return ErrorRecord(type(error).__name__, message, problems, peer, torn, fault, survivors)


def from_record(record: ErrorRecord) -> WeightcastError:
    """Rebuild the error a peer described; a kind that this version does not know becomes a WeightcastError."""
    cls = _BY_NAME.get(record.kind, WeightcastError)
    if issubclass(cls, RefusedError):
        return cls(record.message, record.problems)
    if issubclass(cls, PeerError):
        return cls(record.message, peer=record.peer)
    if issubclass(cls, InstallError):
        return cls(record.message, torn=record.torn)
    if issubclass(cls, ManifestError):
        return cls(record.message, fault=record.fault or "invalid")
    if issubclass(cls, PeersLostError):
        return cls(record.message, record.survivors)
    return WeightcastError(record.message) if issubclass(cls, PublishError) else cls(record.message)


def trace_of(error: BaseException) -> str:
    """The traceback, for a log, of what an engine's own code has raised; empty for an error that says all by itself.

    A text: a handler that keeps an exception keeps the tensors of its frames.
    """
    if isinstance(error, WeightcastError) and not isinstance(error, InstallError):
        return ""
    return "\n" + "".join(traceback.format_exception(error))


class Translated:
    """A context: `raise_as` gets an error of `kinds` that leaves it, and raises another one from it or lets it go on.

    It is no generator: Python 3.12 and 3.13 keep an error that was thrown into one, and for which the generator raises
    another, in a cycle with all its frames. Sockets that only torch can close would stay open until a collection.
    """

    def __init__(
        self, kinds: type[BaseException] | tuple[type[BaseException], ...], raise_as: Callable[[Any], object]
    ) -> None:
        self._kinds = kinds
        self._raise_as = raise_as

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._kinds):
            self._raise_as(error)


def malformed(fault: str, message: str) -> ManifestError:
    """A ManifestError whose message ends with its fault."""
    return ManifestError(f"{message} [{fault}]", fault=fault)


def listed(items: Sequence[str], *, most: int = 8, separator: str = "; ") -> str:
    """The first items as a text, which says how many more there are."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *more])


def printable(text: str) -> str:
    """The text on one line of a terminal, which acts on nothing in it: names of tensors may be a stranger's."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def with_extra(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error, or one that also says how to get the missing package."""
    package = (error.name or "").partition(".")[0]
    extra, remedy = _EXTRAS.get(package), _ELSEWHERE.get(package)
    if extra is not None:
        remedy = f"it comes with weightcast's extra `{extra}`: pip install 'PATH_TO_WEIGHTCAST[{extra}]'"
    if remedy is None:
        return error
    return ModuleNotFoundError(f"{error}; {remedy}", name=error.name)


def warn_if_untested(
    logger: logging.Logger, name: str, found: str, *tested: str, symptom: str = "updates fail"
) -> None:
    """Log a warning, with its remedy, if the version `found` of a framework belongs to none of the `tested` releases.

    0.32.1 belongs to the release "0.32". pip knows the framework by its `name` in small letters.
    """
    if not any(re.match(rf"{re.escape(release)}(?![0-9])", found) for release in tested):
        logger.warning(
            "weightcast was tested with %s %s, and this is %s %s: if %s, install a tested one: pip install '%s==%s.*'",
            *(name, " and ".join(tested), name, found, symptom, name.lower(), tested[0]),
        )


def _tree(cls: type[WeightcastError]) -> dict[str, type[WeightcastError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


_BY_NAME = _tree(WeightcastError)
