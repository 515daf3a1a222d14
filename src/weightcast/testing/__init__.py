"""Contract suites, fault wrappers and the payload table, for people who write a source, a transport or an engine.

Needs pytest; `transport_machine` needs hypothesis as well. For readable failures, call
`pytest.register_assert_rewrite("weightcast.testing")` in your conftest.py before importing anything from here.
"""

from __future__ import annotations

from weightcast.testing.engine_contract import EngineContract
from weightcast.testing.faults import (
    Corrupt,
    Drop,
    Duplicate,
    FaultyReceiver,
    FaultySender,
    FaultyTransport,
    Kill,
    Reorder,
    Stall,
)
from weightcast.testing.payloads import PAYLOADS, Payload, payloads, raw_bytes
from weightcast.testing.source_contract import SourceContract
from weightcast.testing.transport_contract import TransportContract
from weightcast.testing.versioned_transport_contract import VersionedTransportContract

__all__ = [
    "PAYLOADS",
    "Corrupt",
    "Drop",
    "Duplicate",
    "EngineContract",
    "FaultyReceiver",
    "FaultySender",
    "FaultyTransport",
    "Kill",
    "Payload",
    "Reorder",
    "SourceContract",
    "Stall",
    "TransportContract",
    "VersionedTransportContract",
    "payloads",
    "raw_bytes",
]
