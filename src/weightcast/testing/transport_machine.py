"""A state machine that takes the same steps with any transport and with `memory://`, and compares the outcomes.

Needs hypothesis. Received bytes are also compared with the payload's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightcast.errors import PeerDiedError, UpdateAbortedError, WeightcastError
from weightcast.format.bucket import HEADER_BYTES, Layout
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.testing.payloads import PAYLOADS, Payload
from weightcast.testing.transport_kit import Reader, RecoveringSender, TransportEnds, pack_and_send, unpack, version
from weightcast.trainer.packer import Packer, tiling

_PEERS = ("a", "b")
_SMALL = [p for p in PAYLOADS if p.name not in ("many_tiny", "special_floats")]
_OVER = (UpdateAbortedError, PeerDiedError)


class Rig(TransportEnds):
    """A sender, its receivers and what they have read, driven step by step."""

    def __init__(self, url: str) -> None:
        self.url, self.stack = url, contextlib.ExitStack()
        self.end = RecoveringSender(self.sender())
        self.stack.callback(self.end.close)
        self.receivers = {peer: self.receiver(self.end, peer) for peer in _PEERS}
        self.readers: dict[str, Reader] = {}
        self._packer: Packer | None = None

    def open(self, payload: Payload, manifest: Manifest, version: WeightVersion, staged: bool) -> None:
        self.readers = {p: Reader(r, manifest, version, staged=staged) for p, r in self.receivers.items()}
        self.end.open(manifest, version, peers=list(self.receivers), staged=staged)
        self._packer = Packer(Layout(manifest), tiling(manifest.tensors, payload.regions()))

    def send(self, index: int, manifest: Manifest, version: WeightVersion) -> None:
        assert self._packer is not None
        pack_and_send(self.end, self._packer, manifest, version, index)

    def outcome(self, peer: str) -> list[bytes] | str:
        """Return the buckets that the peer received, or "over", or the name of the error that ended its update."""
        try:
            return self.readers.pop(peer).result()
        except _OVER:
            return "over"
        except WeightcastError as exc:
            return type(exc).__name__

    def close(self) -> None:
        self.stack.close()
        if self._packer is not None:
            # Its views would keep the memory for as long as hypothesis keeps the machine.
            self._packer.forget_views()


class TransportMachine(RuleBasedStateMachine):
    """Updates, one at a time, to two peers that come and go. Set `url` in a subclass and run its `TestCase`."""

    url = "memory://"

    def __init__(self) -> None:
        super().__init__()
        self.rigs = {"reference": Rig("memory://"), "tested": Rig(self.url)}
        self.number = 0
        self.payload = _SMALL[0]
        self.manifest: Manifest | None = None
        self.num_sent = 0

    def both(self, call: Callable[[Rig], object]) -> None:
        """Call with both rigs, and fail unless both return or raise the same."""
        outcomes: dict[str, object] = {}
        for name, rig in self.rigs.items():
            try:
                outcomes[name] = call(rig)
            except (WeightcastError, ValueError) as exc:
                outcomes[name] = type(exc).__name__
        assert outcomes["tested"] == outcomes["reference"]

    @precondition(lambda self: self.manifest is None)
    @rule(payload=st.sampled_from(_SMALL), staged=st.booleans())
    def open(self, payload: Payload, staged: bool) -> None:
        self.number += 1
        self.payload, self.manifest, self.num_sent = payload, payload.manifest(), 0
        for rig in self.rigs.values():
            rig.open(payload, self.manifest, version(self.number), staged)
        self.both(lambda rig: sorted(rig.end.failures))

    @precondition(lambda self: self.manifest is not None and self.num_sent < len(self.manifest.buckets))
    @rule(count=st.integers(1, 8))
    def send(self, count: int) -> None:
        manifest = self.manifest
        assert manifest is not None
        for _ in range(min(count, len(manifest.buckets) - self.num_sent)):
            self.both(lambda rig: rig.send(self.num_sent, manifest, version(self.number)))
            self.num_sent += 1

    @precondition(lambda self: self.manifest is not None)
    @rule(skip=st.integers(1, 3))
    def send_out_of_turn(self, skip: int) -> None:
        self.both(lambda rig: rig.end.send(self.num_sent + skip, HEADER_BYTES))

    @precondition(lambda self: self.manifest is not None and self.num_sent == len(self.manifest.buckets))
    @rule()
    def finish(self) -> None:
        assert self.manifest is not None
        expected = self.payload.expected()
        for rig in self.rigs.values():
            for peer in list(rig.readers):
                found = rig.outcome(peer)
                assert isinstance(found, list), found
                assert unpack(self.manifest, found) == expected
                rig.receivers[peer].end()
        self.both(lambda rig: sorted(rig.end.failures))
        self.manifest = None

    @precondition(lambda self: self.manifest is not None and self.num_sent < len(self.manifest.buckets))
    @rule()
    def abort(self) -> None:
        for rig in self.rigs.values():
            rig.end.abort("aborted by a step of the machine")
            for peer in list(rig.readers):
                assert rig.outcome(peer) == "over"
                rig.receivers[peer].end()
        self.manifest = None

    @precondition(lambda self: self.manifest is None or self.num_sent < len(self.manifest.buckets))
    @rule(peer=st.sampled_from(_PEERS))
    def leave_and_come_back(self, peer: str) -> None:
        """The other peer's update goes on, and this peer takes part in the next one."""
        for rig in self.rigs.values():
            reader = rig.readers.pop(peer, None)
            rig.receivers.pop(peer).close()
            if reader is not None:
                with contextlib.suppress(WeightcastError):
                    reader.result()
            rig.receivers[peer] = rig.receiver(rig.end, peer)

    @invariant()
    def aborting_nothing_is_harmless(self) -> None:
        if self.manifest is None:
            for rig in self.rigs.values():
                rig.end.abort("nothing")

    def teardown(self) -> None:
        for rig in self.rigs.values():
            rig.close()
            for peer in list(rig.readers):
                rig.outcome(peer)
