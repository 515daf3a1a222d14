"""The exceptions of weightcast.

    WeightcastError
    ├── ManifestError               a manifest or message is invalid (`fault` says in which way)
    ├── IntegrityError              bytes that arrived are not the bytes that were sent
    ├── RefusedError                an engine declined an update before any byte moved
    │   ├── IncompatibleWeightsError    names, shapes or dtypes differ; names every offender
    │   ├── NotFiniteError              the trainer's weights hold NaN or infinity (`check_finite`)
    │   ├── StaleVersionError           the version does not grow, or belongs to another run
    │   ├── EngineBusyError             another publisher's run holds the engine
    │   ├── InsufficientMemoryError     staging or undo would not fit into the host's memory
    │   ├── WrongBaseError              a delta was offered, but the engine lacks the version that it changes
    │   └── UnsupportedError            the peer lacks an ability that the caller asked for
    ├── PeerError                   names the peer that failed
    │   ├── PeerDiedError               its connection ended
    │   ├── PeerTimeoutError            it did not answer before the deadline
    │   └── ControlError                its control route answered with an error
    ├── PeersLostError              an update lost peers; it can be opened again for the `survivors`
    ├── UpdateAbortedError          the update was aborted; the old version serves
    ├── IncompleteUpdateError       an update was sealed or installed before it was whole
    ├── InstallError                loading failed after validation; if `torn`, the engine refuses to serve
    ├── EngineTornError             the engine has no whole version and refuses to serve
    ├── VersionNotFoundError        a store has no version yet, or not the requested one
    ├── ClosedError                 the object was closed, or never opened
    ├── PublishInFlightError        the publisher's former publish has not ended yet (`overlap="raise"`)
    └── PublishError                a fleet's failures: {peer: cause}

A wrong argument raises ValueError or TypeError, never one of these. An error is sent to another process as an
`ErrorRecord`: a name from the table above and a text, never a pickled object. `PublishReport` is defined here too,
since `PublishError` has it.
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
"""Limit on the characters of a record's message, and of all its problems; each takes at most 6 bytes in JSON."""

_EXTRAS = {
    **dict.fromkeys(("starlette", "uvicorn", "transformers"), "serve"),
    "prometheus_client": "metrics",
    "torchrl": "torchrl",
    "tensordict": "torchrl",
    "trl": "trl",
    "verl": "verl",
    "fastapi": "verl",
    "ray": "ray",
    "httpx": "kubernetes",
    "obstore": "s3",
    "opentelemetry": "tracing",
}
"""Optional packages -> the extra that installs them."""

_ELSEWHERE = {
    "vllm": "install vLLM in this environment (docs/vllm.md names the versions that were tested)",
    "nemo_rl": "run this in NeMo-RL's own environment; it is on no package index (docs/nemo-rl.md)",
}
"""Packages that no extra installs -> the remedy."""


class WeightcastError(Exception):
    """Base class of all errors other than the caller's mistakes."""


class ManifestError(WeightcastError):
    """A manifest or a message is malformed. `fault`: one word of the list in `docs/wire-format.md`."""

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
    """The weights to publish have NaN or infinity (see `check_finite`). `problems` names each tensor."""


class StaleVersionError(RefusedError):
    """The version is not above the engine's last one of this run, or the update belongs to another run."""


class EngineBusyError(RefusedError):
    """Another publisher holds the engine: close it, or pass `takeover=True`. Its lease does not end while it lives."""


class InsufficientMemoryError(RefusedError):
    """Staging or an undo copy would not fit into the memory this host or container has left."""


class WrongBaseError(RefusedError):
    """A delta was offered on a version whose packed buckets the engine does not have; it needs a full update."""


class UnsupportedError(RefusedError):
    """The peer lacks a requested ability (an undo copy, a transport, a protocol version)."""


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
    """The peer's control route answered with an error, or with an unexpected reply. `status`: HTTP's, or 0."""

    def __init__(self, message: str, *, peer: str = "", status: int = 0) -> None:
        super().__init__(message, peer=peer)
        self.status = status


class PeersLostError(WeightcastError):
    """An update can't go on with all of its peers. `survivors`: the peers for which it can be opened again."""

    def __init__(self, message: str, survivors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.survivors = tuple(survivors)


class UpdateAbortedError(WeightcastError):
    """The update was aborted by one side; the old version serves."""


class IncompleteUpdateError(WeightcastError):
    """An update was sealed or installed before every bucket and every tensor of it had arrived."""


class InstallError(WeightcastError):
    """Loading failed after validation. If `torn`, the engine refuses to serve until a complete update heals it."""

    def __init__(self, message: str, *, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class EngineTornError(WeightcastError):
    """The engine has no whole version; publish a complete update to heal it."""


class VersionNotFoundError(WeightcastError):
    """A store does not exist, has no version yet, or lacks the requested version."""


class ClosedError(WeightcastError):
    """The object was closed, or was never opened."""


class PublishInFlightError(WeightcastError):
    """`Publisher.start(overlap="raise")` was called while a publish of this publisher was in flight."""


class PublishError(WeightcastError):
    """At least one engine did not install the version. `failures`: by engine, the cause; `report`: all results."""

    def __init__(self, message: str, failures: Mapping[str, WeightcastError], report: PublishReport) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.report = report


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it is sent: its class name in the tree above, its text, and the class's other fields."""

    kind: str
    message: str
    problems: tuple[str, ...] = ()
    peer: str = ""
    torn: bool = False
    fault: str = ""
    survivors: tuple[str, ...] = ()


class StageSeconds(msgspec.Struct):
    """Seconds of a publish by stage. Stages overlap with the engines' own work, and don't add up to the engines' times.

    `gather`: getting the source's regions. `offer`: connecting engines, including the wait for those that are starting,
    and offering. `pack`: filling and digesting buckets. `send`: waiting for free slots and for the engines' last
    buckets. `memory`: the part of `send` that allocates the transport's memory, which later publishes reuse. `seal`:
    sealing. `pause`: the longest pause of any engine. `total`: from the call to the end of the publish. `stall`: the
    time for which the caller waited: with `start` until all was packed, otherwise `total`.
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
    """One engine's result. `ok`: it serves the version. `error`: the cause if it does not, else None.

    `pause_seconds`: the engine's pause, as reported if it pauses by itself (with weightcast's routes), otherwise
    from the pause request to the resume, as seen by the publisher. `install_seconds`: duration of the install in the
    engine. `unproven`: with `verify="installed"`, the tensors that could not be read from the engine's live memory,
    with the reason; `num_compared`: how many of the sent tensors were compared with it. `read_bytes`,
    `installed_bytes`: by engine rank, the bytes of buckets that its worker has read and checked (ranks of one host
    divide these), and the bytes that it has installed (a tensor that goes through the engine's loader counts with all
    its bytes). `differs`: the engine's live memory is not what was sent, and the engine
    was quarantined. `has_left`: it failed, and then the directory of engines did not have it any more.
    """

    ok: bool = False
    error: ErrorRecord | None = None
    pause_seconds: float = 0.0
    install_seconds: float = 0.0
    unproven: dict[str, str] = {}
    num_compared: int = 0
    read_bytes: list[int] = []
    installed_bytes: list[int] = []
    differs: bool = False
    has_left: bool = False


class DeltaReport(msgspec.Struct):
    """Deltas that a publish sent. `reason`: why it sent none, or empty.

    `base`: number of the version that they change. `num_changed`, `num_words`: how many words of the packed buckets
    changed, and how many there are; a word is an element of up to 4 bytes. `num_bytes`: what each engine that took
    deltas was sent. `encode_seconds`: time for packing, comparing and encoding. `num_engines`: how many took deltas;
    the others took a full update.
    """

    reason: str = ""
    base: int | None = None
    num_changed: int = 0
    num_words: int = 0
    num_bytes: int = 0
    encode_seconds: float = 0.0
    num_engines: int = 0


class PublishReport(msgspec.Struct, frozen=True):
    """Report of one publish. `num_bytes`: bytes of tensor data, counted once for all engines.

    `delta`: what was sent as deltas; None with `delta=None`. `directory_error`: the error for which the directory of
    engines could not be read, so that the engines are those of the publish before.
    """

    run: str
    version: int
    num_bytes: int
    num_tensors: int
    num_buckets: int
    install: str
    seconds: StageSeconds
    engines: dict[str, EngineResult]
    delta: DeltaReport | None = None
    directory_error: ErrorRecord | None = None

    @property
    def ok(self) -> bool:
        """True if every engine serves the version, but for those that have left."""
        return all(result.ok or result.has_left for result in self.engines.values())

    @property
    def failures(self) -> dict[str, ErrorRecord]:
        """By engine, why it does not serve the version; without engines that have left."""
        return {name: r.error for name, r in self.engines.items() if r.error is not None and not r.has_left}

    @property
    def gb_per_second(self) -> float:
        """Bytes of tensor data divided by the total time, in 1e9 bytes per second."""
        return self.num_bytes / self.seconds.total / 1e9 if self.seconds.total else 0.0

    def metrics(self, prefix: str = "weightcast/") -> dict[str, float]:
        """Return figures for a tracker (wandb, TensorBoard), by name with the prefix.

        Names of seconds end with `_s`. The endings `_max` and `_total` tell trackers that aggregate values to use the
        maximum or the sum.
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
            "failed_engines_total": float(len(self.failures)),
        }
        if self.delta is not None:
            figures["delta_bytes_total"] = float(self.delta.num_bytes)
            figures["delta_density"] = self.delta.num_changed / max(1, self.delta.num_words)
            figures["delta_engines_total"] = float(self.delta.num_engines)
        return {prefix + name: value for name, value in figures.items()}

    def to_json(self) -> bytes:
        """Return the report as one JSON object."""
        return msgspec.json.encode(self)

    def __str__(self) -> str:
        """Return sizes and times, a table of the engines, and one line for each problem of the failed ones."""
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
        if (delta := self.delta) is not None:
            lines.append(f"no deltas: {delta.reason}")
            if not delta.reason:
                share = delta.num_changed / max(1, delta.num_words)
                lines[-1] = (
                    f"deltas on version {delta.base} to {delta.num_engines:,} engines: {delta.num_bytes:,} bytes, "
                    f"{share:.2%} of the words changed, encoded in {delta.encode_seconds:.2f} s"
                )
        rows = [("engine", "result", "pause", "install")] if self.engines else []
        for name, result in self.engines.items():
            outcome = f"serves {self.version}" if result.error is None else result.error.kind
            outcome = "has left" if result.has_left else outcome
            rows.append((name, outcome, f"{result.pause_seconds:.3f} s", f"{result.install_seconds:.3f} s"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, outcome, pause, install in rows:
            lines.append(f"{name:{widths[0]}}  {outcome:{widths[1]}}  {pause:>{widths[2]}}  {install:>{widths[3]}}")
        for name, result in self.engines.items():
            if result.error is not None:
                lines.append(f"{name}: {result.error.kind}: {result.error.message}")
                lines += (f"  {problem}" for problem in result.error.problems if problem not in result.error.message)
        if self.directory_error is not None:
            lines.append(f"the directory of engines could not be read: {self.directory_error.message}")
        return "\n".join(map(printable, lines))


def publish_error(report: PublishReport) -> PublishError:
    """Return the error for a publish that an engine did not install."""
    failures = {name: from_record(error) for name, error in report.failures.items()}
    engines = "1 engine" if len(report.engines) == 1 else f"{len(report.engines):,} engines"
    causes = "; ".join(
        str(error) if str(error).startswith((f"{name} ", f"{name}/")) else f"{name}: {error}"
        for name, error in failures.items()
    )
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
    """Return the traceback, for a log, of an exception of an engine's own code; empty for weightcast's own errors.

    It is a text, since a log handler that keeps an exception would keep the tensors of its frames.
    """
    if isinstance(error, WeightcastError) and not isinstance(error, InstallError):
        return ""
    return "\n" + "".join(traceback.format_exception(error))


class Translated:
    """Context that passes an error of `kinds` to `raise_as`, which raises another one from it or lets it go on.

    It is a class and not a generator: in Python 3.12 and 3.13 an error that was thrown into a generator, and for which
    the generator raises another one, is kept in a cycle with all its frames. Sockets that only torch can close would
    stay open until a garbage collection.
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
    """Return a ManifestError whose message ends with its fault."""
    return ManifestError(f"{message} [{fault}]", fault=fault)


def listed(items: Sequence[str], *, most: int = 8, separator: str = "; ") -> str:
    """Return the first items as one text, with the number of the others."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *more])


def printable(text: str) -> str:
    """Return the text on one line, without control characters, since tensor names may come from anyone."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def with_extra(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error, or one that also says how to install the missing package."""
    package = (error.name or "").partition(".")[0]
    extra, remedy = _EXTRAS.get(package), _ELSEWHERE.get(package)
    if extra is not None:
        remedy = f"it comes with weightcast's extra `{extra}`: pip install 'PATH_TO_WEIGHTCAST[{extra}]'"
    if remedy is None:
        return error
    return ModuleNotFoundError(f"{error}; {remedy}", name=error.name)


def import_of_extra() -> Translated:
    """Return a context for an import, in which a missing package's error also says how to install it."""

    def raise_with_extra(error: ModuleNotFoundError) -> None:
        raise with_extra(error) from error

    return Translated(ModuleNotFoundError, raise_with_extra)


def lacking(framework: str, found: str, tested: str, names: Sequence[str]) -> UnsupportedError:
    """Return the error for a version of a framework without undocumented names. `tested`: the version that has them."""
    return UnsupportedError(
        f"{framework} {found} lacks {len(names)} names that weightcast needs ({'; '.join(names)}): use {framework} "
        f"{tested}, or a weightcast version for this {framework}",
        names,
    )


def warn_if_untested(
    logger: logging.Logger, name: str, found: str, *tested: str, symptom: str = "updates fail"
) -> None:
    """Log a warning with a remedy if the version `found` of a framework belongs to none of the `tested` releases.

    0.32.1 belongs to the release "0.32". pip's name of the framework is `name` in lower case.
    """
    if not any(re.match(rf"{re.escape(release)}(?![0-9])", found) for release in tested):
        logger.warning(
            "weightcast was tested with %s %s, found %s %s: if %s, install a tested version: pip install '%s==%s.*'",
            *(name, " and ".join(tested), name, found, symptom, name.lower(), tested[0]),
        )


def _tree(cls: type[WeightcastError]) -> dict[str, type[WeightcastError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


_BY_NAME = _tree(WeightcastError)
