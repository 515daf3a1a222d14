"""The control protocol for an engine with its own RPC: one method of the engine's workers, JSON values in and out.

vLLM runs a method on every rank and returns all results (`collective_rpc`). weightcast adds a method named `METHOD`,
which takes a `RankCall` and returns a `RankReply`, both as plain JSON values. It never raises for a failed update: vLLM
stops reading replies at the first error, and returns the unread ones to later calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from weightcast.errors import ControlError, ErrorRecord
from weightcast.format.manifest import MAX_BYTES, RunId, TensorSpec, VersionNumber, convert
from weightcast.format.messages import Count, InitInfo, UpdateInfo, WeightInfo
from weightcast.serving.install_map import HeldTensor

METHOD = "weightcast"


class Init(msgspec.Struct, frozen=True, tag="init", tag_field="call"):
    """Begin a run's session on this rank, which connects in the background."""

    info: InitInfo


class UpdateCall(msgspec.Struct, frozen=True, tag="update", tag_field="call"):
    """An offer, a seal or an abort."""

    info: UpdateInfo


class InstallCall(msgspec.Struct, frozen=True, tag="install", tag_field="call"):
    """Install the sealed version, on all ranks of the engine or on none. The engine is paused.

    `world_size`: number of called ranks, over all data-parallel engines. With several engines the install is
    provisional until `Settle`, and the engine is torn until then. `keep`: there is only one engine; commit at once.
    """

    run: RunId
    version: VersionNumber
    world_size: Count = 1
    keep: bool = False


class Settle(msgspec.Struct, frozen=True, tag="settle", tag_field="call"):
    """Keep the installed version, or roll back, after the installs of the other data-parallel engines have ended."""

    run: RunId
    version: VersionNumber
    keep: bool


class Ask(msgspec.Struct, frozen=True, tag="ask", tag_field="call"):
    """Ask for this rank's state."""


class Leave(msgspec.Struct, frozen=True, tag="leave", tag_field="call"):
    """End the present run's session; the engine goes on serving."""


class Prove(msgspec.Struct, frozen=True, tag="prove", tag_field="call"):
    """Read digests of live tensors, from index `start` of the catalog on, up to `limit_bytes` of whole tensors.

    `names`: only these tensors; if empty, all.
    """

    start: Count = 0
    limit_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)] = MAX_BYTES
    names: tuple[str, ...] = ()


class Dtypes(msgspec.Struct, frozen=True, tag="dtypes", tag_field="call"):
    """Ask for this rank's dtypes of these tensors."""

    tensors: list[TensorSpec]


class Quarantine(msgspec.Struct, frozen=True, tag="quarantine", tag_field="call"):
    """Refuse to serve until a complete update."""

    reason: Annotated[str, msgspec.Meta(max_length=4096)]


class Unload(msgspec.Struct, frozen=True, tag="unload", tag_field="call"):
    """Unload these versions of adapters, which no request uses; those that requests can name stay."""

    labels: tuple[str, ...]


RankCall: TypeAlias = Init | UpdateCall | InstallCall | Settle | Ask | Leave | Prove | Quarantine | Dtypes | Unload


class RankReply(msgspec.Struct, frozen=True):
    """One rank's reply to any call. `info`: state after the call. `error`: None if the call succeeded.

    `weights_asleep`: the engine has put the weights' memory to sleep. `serial`: that of the call, if it had one.
    `held`: reply to `Prove`; `next`: index of the next tensor, -1 after the last. `is_loading`: a streaming update is
    in progress. `dtypes`: reply to `Dtypes`, by record name, for the tensors of which this rank has a part. `adapter`:
    the one that the update in progress is of. `adapter_ids`: by label, the loaded versions of adapters (see
    `AdapterLayers.ids`).
    """

    engine_rank: Count
    info: WeightInfo
    error: ErrorRecord | None = None
    weights_asleep: bool = False
    serial: str = ""
    held: list[HeldTensor] = []
    next: int = -1
    is_loading: bool = False
    dtypes: dict[str, str] = {}
    adapter: str = ""
    adapter_ids: dict[str, int | str] = {}


def numbered(call: RankCall) -> dict[str, Any]:
    """Return the call as plain JSON values, with a serial that its replies must have."""
    return {**msgspec.to_builtins(call), "serial": secrets.token_hex(8)}


def replies_to(values: Mapping[str, Any], answers: Any, peer: str) -> list[RankReply]:
    """Return the ranks' replies to a `numbered` call, decoded from plain JSON values.

    Raises ControlError for invalid replies, and if the engine returns replies to an earlier call.
    """
    try:
        replies: list[RankReply] = convert(answers, list[RankReply])
    except msgspec.ValidationError as exc:
        raise ControlError(
            f"the ranks of {peer} did not answer as weightcast's plugin does: {exc}; install the same version of "
            "weightcast in the trainer and the engine",
            peer=peer,
        ) from exc
    if not replies:
        raise ControlError(f"no rank of {peer} answered: see the engine's log", peer=peer)
    # A rank with another version of weightcast may send no serial.
    if any(reply.serial not in ("", values["serial"]) for reply in replies):
        raise ControlError(
            f"the workers of {peer} are out of step: another client's call (/collective_rpc?) failed on several of "
            "them, and the engine returns its unread replies to later calls; start the server again",
            peer=peer,
        )
    return replies
