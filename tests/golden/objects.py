"""What the bytes in this folder are of: messages, file name -> (object, the type it is decoded as), and a bucket."""

from __future__ import annotations

from typing import Any

import torch

from weightcast.errors import ErrorRecord
from weightcast.format.adapters import AdapterTarget, AdapterVersion, LoraConfig
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer
from weightcast.format.geometry import Region
from weightcast.format.manifest import Manifest, Piece, TensorRecord, TensorSpec, WeightVersion, decode
from weightcast.format.messages import (
    Abort,
    Accepted,
    DeltaBase,
    Dropped,
    DtypesQuestion,
    Failed,
    Heartbeat,
    HeldBlock,
    HeldWeights,
    Hello,
    InitInfo,
    Installed,
    LinkMessage,
    LocalRanks,
    Offer,
    Received,
    ReleaseMemory,
    Seal,
    TensorDtypes,
    UpdateInfo,
    WeightInfo,
)
from weightcast.store.records import FORMAT as STORE_FORMAT
from weightcast.store.records import Commit, SlotAttempt, Stored, WriterRecord, seal
from weightcast.testing.transport_kit import write_raw_header

RUN = "0123456789abcdeffedcba9876543210"
VERSION = WeightVersion(RUN, 7)

MANIFEST = Manifest.of(
    (
        TensorRecord(
            "model.embed_tokens.weight",
            "bfloat16",
            (16, 16),
            aliases=("lm_head.weight",),
            pieces=(Piece(0, 0, Region((0, 0), (8, 16))), Piece(1, 0, Region((8, 0), (8, 16)))),
        ),
        TensorRecord("norm.Größe", "float32", (16,), group="norm", pieces=(Piece(0, 256, Region((0,), (16,))),)),
        TensorRecord("empty", "int8", (0, 4)),
        TensorRecord("step", "int64", (), pieces=(Piece(1, 256, Region((), ())),)),
    ),
    (1024, 512),
    origins=(1, 1),
)


def _stored(number: int, *, slot: int, num_files: int) -> Stored:
    return Stored(RUN, number, slot, num_files, 2, "d" * 64, "e" * 32, 1700000000.25)


def _sealed(record: Commit | WriterRecord) -> Commit | WriterRecord:
    """As it is in the file, with its digest."""
    found: Commit | WriterRecord = decode(seal(record), type(record))
    return found


HELD_BLOCK = HeldBlock(1, Region((0,), (8,)), "0e" * 16)
MESSAGES: dict[str, tuple[Any, Any]] = {
    "manifest.json": (MANIFEST, Manifest),
    "init.json": (
        InitInfo(
            RUN, "http://127.0.0.1:8000", "ipc://@a", "unix:@b", "c" * 64, 10.0, takeover=True, origins=("ipc://@d",)
        ),
        InitInfo,
    ),
    "offer.json": (
        Offer(RUN, 7, "d" * 64, manifest=MANIFEST.text, base=None, install="streaming", undo=True),
        UpdateInfo,
    ),
    "offer_known.json": (Offer(RUN, 8, "d" * 64), UpdateInfo),
    "delta_base.json": (DeltaBase(7, "e" * 32, (512, 1024), ("a" * 32, "b" * 32)), DeltaBase),
    "offer_delta.json": (
        Offer(RUN, 8, "d" * 64, base=DeltaBase(7, "e" * 32, (512,), ("a" * 32,)), keeps_base=True),
        UpdateInfo,
    ),
    "local_ranks.json": (LocalRanks((0, 1)), LocalRanks),
    "offer_ranks.json": (
        Offer(
            RUN,
            8,
            "d" * 64,
            ranks={"host/a": LocalRanks((0, 1), "7/8/0/weightcast-buckets-x"), "b": LocalRanks((2, 3))},
        ),
        UpdateInfo,
    ),
    "offer_adapter.json": (
        Offer(
            RUN,
            8,
            "d" * 64,
            target=AdapterTarget(
                "policy",
                LoraConfig(16, 32.0, ("layers.0.q_proj",), rank_pattern={"layers.0.q_proj": 8}),
                keep=2,
                base=VERSION,
            ),
        ),
        UpdateInfo,
    ),
    "info_adapters.json": (
        WeightInfo("7", run=RUN, abilities=("adapters",), adapters=(AdapterVersion("policy", 7, RUN, True),)),
        WeightInfo,
    ),
    "info_dropped.json": (WeightInfo("7", run=RUN, offered=WeightVersion(RUN, 7), dropped=True), WeightInfo),
    "offer_workers.json": (Offer(RUN, 8, "d" * 64, workers={"host/a": 2, "host/b": 1}), UpdateInfo),
    "seal.json": (Seal(RUN, 7, 2, "e" * 32), UpdateInfo),
    "abort_secret.json": (Abort(RUN, 7, "the trainer ended", "c" * 64), UpdateInfo),
    "abort.json": (Abort(RUN, 7, "the trainer ended"), UpdateInfo),
    "dtypes_question.json": (
        DtypesQuestion([TensorSpec("norm.Größe", "float32", (16,), aliases=("tied",), group="g")]),
        DtypesQuestion,
    ),
    "dtypes.json": (TensorDtypes({"norm.Größe": "float32"}), TensorDtypes),
    "info.json": (
        WeightInfo("7", run=RUN, holder=RUN, paused=True, torn="", world_size=2, abilities=("lease", "undo")),
        WeightInfo,
    ),
    "hello.json": (Hello(RUN, "http://127.0.0.1:8000", 1, "c" * 64), LinkMessage),
    "hello_memory.json": (
        Hello(RUN, "http://127.0.0.1:8000", 1, "c" * 64, host="h", memory="7/8/0/weightcast-buckets-x"),
        LinkMessage,
    ),
    "hello_host.json": (Hello(RUN, "http://127.0.0.1:8000", 1, "c" * 64, host="boot/net/1000"), LinkMessage),
    "heartbeat.json": (Heartbeat(), LinkMessage),
    "release_memory.json": (ReleaseMemory(), LinkMessage),
    "dropped.json": (Dropped(), LinkMessage),
    "accepted.json": (Accepted(7), LinkMessage),
    "received.json": (Received(7, 2, "e" * 32, 4096), LinkMessage),
    "installed.json": (Installed(7, 0.25, 8192), LinkMessage),
    "failed.json": (
        Failed(7, ErrorRecord("IncompatibleWeightsError", "2 problems", problems=("missing 'a'", "unknown 'b'"))),
        LinkMessage,
    ),
    "current.json": (
        _sealed(Commit(STORE_FORMAT, _stored(8, slot=1, num_files=4), _stored(7, slot=0, num_files=1))),
        Commit,
    ),
    "writer.json": (_sealed(WriterRecord(STORE_FORMAT, RUN, "trainer-0", 42, 3, 8, "a rank has failed")), WriterRecord),
    "place.json": (SlotAttempt(1, 3), SlotAttempt),
    "held_block.json": (HELD_BLOCK, HeldBlock),
    "held.json": (
        HeldWeights(
            RUN,
            "7",
            [TensorSpec("norm.Größe", "float32", (16,)), TensorSpec("step", "int64", ())],
            {"norm.Größe": "0f" * 16},
            {"norm.Größe": [HELD_BLOCK]},
            {"embed": "rank 0 holds another one than rank 1"},
            {"step": "it is computed"},
            2,
        ),
        HeldWeights,
    ),
}


def payload() -> torch.Tensor:
    """1,024 bytes that count up, modulo 251."""
    return torch.tensor([i % 251 for i in range(1024)], dtype=torch.uint8)


def bucket() -> BucketBuffer:
    """Bucket 5 of the version, with that payload."""
    buffer = BucketBuffer.of(torch.full((2048,), 0xAA, dtype=torch.uint8)[: HEADER_BYTES + 1024])
    buffer.payload.copy_(payload())
    write_raw_header(buffer, 1024, VERSION, 5)
    return buffer


def delta_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Payloads of 16-bit words: a gap that escapes, both signs, magnitudes of several lengths, two chunks."""
    base = torch.zeros((1 << 20) + 64, dtype=torch.int16)
    base[: 1 << 12] = torch.arange(1 << 12, dtype=torch.int16) * 8
    payload = base.clone()
    for at, difference in [(0, 1), (3, -1), (4, 2), (9, -7), (2000, 100), (2001, 1), (900_000, -1), (1 << 20, 300)]:
        payload[at] += difference
    return base.view(torch.uint8), payload.view(torch.uint8)
