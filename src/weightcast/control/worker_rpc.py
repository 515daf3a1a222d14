"""The control protocol for an engine that has a control plane of its own: one method of its workers, JSON in and out.

vLLM runs a method on every rank and hands back what each returned (`collective_rpc`). weightcast adds one, named
`METHOD`: it takes a `RankCall` as plain JSON values, returns a `RankReply` as plain JSON values, and never raises for a
failed update, since vLLM stops reading replies at the first that did (and answers later calls with them).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from weightcast.errors import ControlError, ErrorRecord
from weightcast.format.manifest import MAX_BYTES, RunId, TensorSpec, VersionNumber
from weightcast.format.messages import Count, InitInfo, UpdateInfo, WeightInfo
from weightcast.serving.install_map import HeldTensor

METHOD = "weightcast"


class Init(msgspec.Struct, frozen=True, tag="init", tag_field="call"):
    """Let a run hold this rank; it connects in the background."""

    info: InitInfo


class UpdateCall(msgspec.Struct, frozen=True, tag="update", tag_field="call"):
    """An offer, a seal or an abort."""

    info: UpdateInfo


class InstallCall(msgspec.Struct, frozen=True, tag="install", tag_field="call"):
    """Install the sealed version, on all ranks of the engine or on none. The engine is paused.

    `world_size`: number of ranks called, over all data-parallel engines. If that is more than one engine, the install
    is provisional until `Settle`, and torn until then. `keep`: it is one engine; commit at once.
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
    """End the present run's hold; the engine serves on."""


class Prove(msgspec.Struct, frozen=True, tag="prove", tag_field="call"):
    """Read the live weights of tensors, from number `start` of the catalog on, up to `limit_bytes` of whole tensors.

    `names`: of these alone; none for all.
    """

    start: Count = 0
    limit_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)] = MAX_BYTES
    names: tuple[str, ...] = ()


class Dtypes(msgspec.Struct, frozen=True, tag="dtypes", tag_field="call"):
    """Say in which dtypes this rank has these tensors."""

    tensors: list[TensorSpec]


class Quarantine(msgspec.Struct, frozen=True, tag="quarantine", tag_field="call"):
    """Refuse to serve until a complete update has come."""

    reason: Annotated[str, msgspec.Meta(max_length=4096)]


RankCall: TypeAlias = Init | UpdateCall | InstallCall | Settle | Ask | Leave | Prove | Quarantine | Dtypes


class RankReply(msgspec.Struct, frozen=True):
    """One rank's answer to any call. `info` is as after the call; `error` is None where the call did what it should.

    `weights_asleep`: the host has taken the weights' memory away for now. `serial`: the call's, where it had one.
    `instance`: this rank's, as in WeightInfo, which is the same on all ranks and has none. `held`: what `Prove` asked
    for; `next`: the number of the tensor to go on from, -1 after the last. `is_loading`: a version is streamed in.
    `dtypes`: what `Dtypes` asked for, by record name, of the tensors that this rank takes any of.
    """

    engine_rank: Count
    info: WeightInfo
    error: ErrorRecord | None = None
    seconds: float = 0.0
    weights_asleep: bool = False
    serial: str = ""
    instance: str = ""
    held: list[HeldTensor] = []
    next: int = -1
    is_loading: bool = False
    dtypes: dict[str, str] = {}


def numbered(call: RankCall) -> dict[str, Any]:
    """The call as plain JSON values, with a serial that its replies must have."""
    return {**msgspec.to_builtins(call), "serial": secrets.token_hex(8)}


def replies_to(values: Mapping[str, Any], answers: Any, peer: str) -> list[RankReply]:
    """The ranks' replies to a `numbered` call, from plain JSON values.

    Raises ControlError for what is none, and where an engine gives the answers to an earlier call.
    """
    try:
        replies = msgspec.convert(answers, list[RankReply])
    except msgspec.ValidationError as exc:
        raise ControlError(f"{peer} did not answer as weightcast's ranks do: {exc}", peer=peer) from exc
    if not replies:
        raise ControlError(f"no rank of {peer} answered", peer=peer)
    # A rank of another version of weightcast may say none.
    if any(reply.serial not in ("", values["serial"]) for reply in replies):
        raise ControlError(
            f"the workers of {peer} are out of step: another client's call (/collective_rpc?) failed on several of "
            "them, and the replies that it left unread are taken for those to later calls; start the server again",
            peer=peer,
        )
    return replies
