"""The replies of all ranks of an engine to one call, combined to one reply."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import UNSET

from weightcast.control.worker_rpc import RankReply
from weightcast.errors import EngineTornError, from_record
from weightcast.format.manifest import ITEMSIZE_BYTES
from weightcast.format.messages import HeldWeights, WeightInfo
from weightcast.serving.install_map import held_weights


class Replies(NamedTuple):
    """The replies of every rank of `num_engines` engine cores to one call."""

    ranks: list[RankReply]
    num_engines: int

    @property
    def torn(self) -> str:
        """Return why the ranks together have no whole version, or an empty string."""
        infos = [reply.info for reply in self.ranks]
        versions = sorted({f"{info.weight_version} of run {info.run or 'none'}" for info in infos})
        torn = next((info.torn for info in infos if info.torn), "")
        return torn or (f"its ranks have different versions: {', '.join(versions)}" if len(versions) > 1 else "")

    @property
    def is_loading(self) -> bool:
        """True while a version is being streamed in on any rank."""
        return any(reply.is_loading for reply in self.ranks)

    @property
    def info(self) -> WeightInfo:
        """The state of all ranks as one engine's, without the pause, which the host controls."""
        infos = [reply.info for reply in self.ranks]
        first = infos[0]
        return msgspec.structs.replace(
            first,
            holder=first.holder if all(info.holder == first.holder for info in infos) else "",
            torn=self.torn,
            adapters=first.adapters if all(info.adapters == first.adapters for info in infos) else (),
            dropped=True if any(info.dropped is True for info in infos) else UNSET,
            abilities=tuple(a for a in first.abilities if all(a in info.abilities for info in infos)),
        )

    def held(self, *, with_blocks: bool) -> HeldWeights:
        """Combine replies to `Prove`. Raises the first error of any rank, or EngineTornError."""
        self.raise_first()
        if self.torn:
            raise EngineTornError(self.torn)
        info, ranks = self.info, {reply.engine_rank: reply.held for reply in self.ranks}
        held = held_weights(info.run, info.weight_version, ranks, with_blocks=with_blocks)
        return msgspec.structs.replace(held, next=self.ranks[0].next)

    def dtypes(self) -> dict[str, str]:
        """Combine replies to `Dtypes` to one dtype for each tensor. Raises the first error of any rank.

        If ranks differ, it is the widest dtype, so that each rank rounds the values only once, to its own dtype.
        """
        self.raise_first()
        found: dict[str, str] = {}
        for reply in self.ranks:
            for name, dtype in reply.dtypes.items():
                found[name] = max(found.get(name, dtype), dtype, key=ITEMSIZE_BYTES.__getitem__)
        return found

    def raise_first(self, peer: str = "") -> None:
        """Raise the first error of any rank. `peer`: the name in a PeerError."""
        error = next((reply.error for reply in self.ranks if reply.error is not None), None)
        if error is not None:
            raise from_record(msgspec.structs.replace(error, peer=peer or error.peer))
