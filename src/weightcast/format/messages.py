"""The records of the control protocol and of the link. JSON by msgspec, every one frozen, none ever pickled.

Control records travel as `init_info` and `update_info` of vLLM's four-phase routes, from the publisher to each engine.
Link records travel on the worker's own connection to the publisher. `docs/wire-format.md` has both in full.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from weightcast.errors import ErrorRecord
from weightcast.format.adapters import AdapterTarget, AdapterVersion
from weightcast.format.geometry import Region
from weightcast.format.manifest import (
    MAX_BUCKETS,
    MAX_BYTES,
    MAX_ORIGINS,
    MAX_TENSORS,
    MAX_VERSION,
    PROTOCOL,
    RunId,
    TensorSpec,
    VersionNumber,
    WeightVersion,
)

InstallMode = Literal["staged", "streaming"]
PauseMode = Literal["keep", "wait", "abort"]

MAX_LINK_MESSAGE_BYTES = 1 << 20
MAX_DEADLINE_SECONDS = 864_000
"""Ten days: poll(2), which sockets and pipes wait with, counts milliseconds in 31 bits."""
ShortText = Annotated[str, msgspec.Meta(max_length=4096)]
Digest128 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Digest256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
ByteCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Secret: TypeAlias = Digest256 | UnsetType
"""Shows that a record is of the publisher that holds the engine: its InitInfo has the same. Left out if unset."""


class WithSecret(msgspec.Struct, frozen=True):
    """Base of records that may have a secret, which must not get into a log."""

    def __repr__(self) -> str:
        """Return the fields without defaults, but for the secret."""
        fields = [each.name for each in msgspec.structs.fields(self) if each.required and each.name != "secret"]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"


# --- control: publisher -> engine ---


class InitInfo(WithSecret, frozen=True):
    """How an engine's workers reach a publisher, which says in `publisher`, for people, where it runs.

    `secret` is presented on the link, and in the publisher's offers, seals and aborts, so that strangers are refused.
    `token` is for engines whose control routes have none of their own (vLLM): the workers compare it with theirs.
    `deadline_seconds` is the publisher's: how long each of its steps may take.
    `transport` is the address of the sender; `origins` are the links of the other origins' senders, in order, which
    have the same secret.
    """

    run: RunId
    engine: ShortText
    transport: ShortText
    link: ShortText
    secret: Digest256
    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_SECONDS)]
    takeover: bool = False
    protocol: int = PROTOCOL
    token: ShortText = ""
    deadline_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_SECONDS)] = 60.0
    publisher: ShortText | UnsetType = UNSET
    origins: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_ORIGINS)] = ()


class LocalRanks(msgspec.Struct, frozen=True):
    """The ranks of one engine on one host, of which each reads and checks a share where all read the same memory.

    `memory`: that of the first one, by its Hello. They read a version into it, or keep the base of deltas there.
    """

    ranks: Annotated[tuple[Count, ...], msgspec.Meta(min_length=2, max_length=1 << 16)]
    memory: ShortText = ""


class DeltaBase(msgspec.Struct, frozen=True):
    """The version that deltas change, of the same run and manifest: its number and root digest.

    By bucket: `encoded_bytes`, the length as it is sent, of its delta or of the raw payload; `digests`, of the raw
    payload of the new version.
    """

    version: VersionNumber
    root: Digest128
    encoded_bytes: Annotated[tuple[ByteCount, ...], msgspec.Meta(max_length=MAX_BUCKETS)]
    digests: Annotated[tuple[Digest128, ...], msgspec.Meta(max_length=MAX_BUCKETS)]


class Offer(WithSecret, frozen=True, tag="offer", tag_field="kind"):
    """A version that a publisher is about to send.

    `manifest`: the manifest's text, of which `manifest_digest` is the digest; None if this link was sent it before. It
    is text because engines pass offers on as plain values: decoded, it would be several values for each tensor.
    `base`: the buckets come as deltas on it. `keeps_base`: the worker is asked to keep this version's packed buckets,
    so that the next version can come as deltas. `workers`: to how many workers of each host it is offered, as these
    call their hosts: they share the host's memory. `ranks`: by host, where several ranks of this engine are on one.
    `target`: left out for the model.
    """

    run: RunId
    version: VersionNumber
    manifest_digest: Digest256
    manifest: str | None = None
    base: DeltaBase | None = None
    keeps_base: bool = False
    install: InstallMode = "staged"
    undo: bool = False
    secret: Secret = UNSET
    workers: Annotated[dict[ShortText, Count], msgspec.Meta(max_length=1 << 16)] | UnsetType = UNSET
    ranks: Annotated[dict[ShortText, LocalRanks], msgspec.Meta(max_length=1 << 16)] | UnsetType = UNSET
    target: AdapterTarget | UnsetType = UNSET


class Seal(WithSecret, frozen=True, tag="seal", tag_field="kind"):
    """Every worker has received everything: `root` is the digest of all bucket digests, in order.

    To an engine that serves the version, before an offer of this session: it is the run's last one.
    """

    run: RunId
    version: VersionNumber
    num_buckets: Count
    root: Digest128
    secret: Secret = UNSET


class Abort(WithSecret, frozen=True, tag="abort", tag_field="kind"):
    """Give the update up; the old version stays."""

    run: RunId
    version: VersionNumber
    reason: ShortText
    secret: Secret = UNSET


UpdateInfo: TypeAlias = Offer | Seal | Abort

# --- control: engine -> publisher ---


class HeldBlock(msgspec.Struct, frozen=True):
    """A region of a tensor in the memory of one of an engine's ranks, and its share of the tensor's digest."""

    engine_rank: Count
    region: Region
    digest: str


class HeldWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of an engine, all of one version: a digest of each of `tensors` by name (see `tensor_digest`).

    `blocks`: what each rank holds of those that were asked for by name. `differing`: tensors of which the engine's
    ranks hold different values, or of which a rank computes with other values than it holds, by name, and where.
    `unproven`: those that can't be read out of the engine, and why. `next`: the number of the tensor to go on from; -1
    if that was all.
    """

    run: str
    weight_version: str
    tensors: list[TensorSpec]
    digests: dict[str, str]
    blocks: dict[str, list[HeldBlock]] = {}
    differing: dict[str, str] = {}
    unproven: dict[str, str] = {}
    next: int = -1


class DtypesQuestion(msgspec.Struct, frozen=True):
    """A publisher to an engine: in which dtypes it has these tensors."""

    tensors: Annotated[list[TensorSpec], msgspec.Meta(max_length=MAX_TENSORS)]


class TensorDtypes(msgspec.Struct, frozen=True):
    """The answer to a `DtypesQuestion`: dtypes by record name, of the tensors that the engine knows."""

    dtypes: dict[str, str]


class WeightInfo(msgspec.Struct, frozen=True):
    """An engine's state: `weight_version` is "default" before its first update, `run` is that version's.

    `holder` is the run that may update it now, or empty. `world_size` workers connect a link each.
    `abilities`: "lease" (a pause ends with the lease of the run that asked for it), "install" (`finish` pauses and
    resumes by itself), "undo", "streaming", "inspect" (specs can be read), "prove" (digests of live tensors can),
    "dtypes" (it answers a `DtypesQuestion`), "adapters" (it takes updates of adapters).
    `torn`: why it refuses to serve, or empty. `instance`: a random id of the engine's life; one engine has one, however
    it is called. `offered`: the last version that a publisher offered, also if it was refused or has failed. `dropped`:
    that publisher has said since that its run goes on without this engine, so there may be later versions.
    `num_missed`: how many versions were offered since the one that is served was installed; left out for none.
    `adapters`: the versions of adapters that requests can name.
    """

    weight_version: str
    run: str = ""
    holder: str = ""
    paused: bool = False
    torn: str = ""
    world_size: Count = 1
    abilities: tuple[str, ...] = ()
    protocol: int = PROTOCOL
    instance: ShortText | UnsetType = UNSET
    offered: WeightVersion | UnsetType = UNSET
    adapters: tuple[AdapterVersion, ...] | UnsetType = UNSET
    dropped: bool | UnsetType = UNSET
    num_missed: Count | UnsetType = UNSET

    @property
    def version(self) -> int | None:
        """The number that `weight_version` is; None for a label that is none of a publisher's."""
        text = self.weight_version
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_VERSION))
        return int(text) if is_number and int(text) <= MAX_VERSION else None

    def current(self, adapter: str = "") -> tuple[str, int | None]:
        """Return the run and number of the model's version, or of the current one of an adapter; None for none."""
        if not adapter:
            return self.run, self.version
        found = (v for v in self.adapters or () if v.name == adapter and v.is_current)
        return next(((v.run, v.number) for v in found), ("", None))

    def stale_reason(self, max_behind: int) -> str:
        """Return why the engine serves no weights, or others than one of the last versions; "" if it does.

        `max_behind`: by how many numbers it may be behind the version that was offered to it last.
        """
        if self.torn:
            return f"the engine is torn: {self.torn}"
        if self.version is None or not self.run:
            return "no publisher's version was installed yet"
        if self.offered is UNSET:
            return ""
        if self.dropped:
            return (
                f"run {self.offered.run} goes on without this engine, which did not answer in time or was removed: "
                f"version {self.version} is served until it is offered another one"
            )
        # Another run may count from 0 again.
        behind = max(self.offered.number - self.version, 0 if self.num_missed is UNSET else self.num_missed)
        if behind <= max_behind:
            return ""
        return (
            f"version {self.version} is served, {behind} behind {self.offered.number}; at most {max_behind} is allowed"
        )


# --- link: worker <-> publisher ---


class Hello(WithSecret, frozen=True, tag="hello", tag_field="kind"):
    """The worker's first message. `host`: equal for workers that share a host's memory.

    `memory`: where the engine's other ranks on this host find some of this one's, to read a version into together, or
    to keep one base of deltas for all.
    """

    run: RunId
    engine: ShortText
    engine_rank: Count
    secret: Digest256
    protocol: int = PROTOCOL
    host: ShortText | UnsetType = UNSET
    memory: ShortText | UnsetType = UNSET


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat", tag_field="kind"):
    """Publisher to worker: the lease goes on. `waits`: since the last one, the publisher has waited for a peer."""

    waits: bool = False


class ReleaseMemory(msgspec.Struct, frozen=True, tag="release_memory", tag_field="kind"):
    """Publisher to worker: give back the memory that is kept for the next update, unless one is under way."""


class Dropped(msgspec.Struct, frozen=True, tag="dropped", tag_field="kind"):
    """Publisher to worker, its last message: the run goes on without this engine, until it is connected again."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted", tag_field="kind"):
    """The worker takes the offer and receives in the background."""

    version: VersionNumber


class Received(msgspec.Struct, frozen=True, tag="received", tag_field="kind"):
    """The worker has received every bucket; `root` as in Seal.

    `read_bytes`: of these buckets' payloads, what it has read and checked itself: ranks of one host share that.
    `keeps_base`: it has kept the packed buckets, so that the next version can come as deltas.
    """

    version: VersionNumber
    num_buckets: Count
    root: Digest128
    read_bytes: ByteCount = 0
    keeps_base: bool = False


class Installed(msgspec.Struct, frozen=True, tag="installed", tag_field="kind"):
    """The worker serves the version. `seconds`: what the install took, without the pause around it.

    `installed_bytes`: of the tensors that it put into place; one that went through the engine's loader counts whole.
    """

    version: VersionNumber
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_DEADLINE_SECONDS)]
    installed_bytes: ByteCount = 0


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="kind"):
    """The worker refused, aborted or could not install the version; it says why."""

    version: VersionNumber
    error: ErrorRecord


LinkMessage: TypeAlias = Hello | Heartbeat | ReleaseMemory | Dropped | Accepted | Received | Installed | Failed
