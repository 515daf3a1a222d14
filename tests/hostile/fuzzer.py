"""Feeds mutated messages to every decoder. Run as a program it does so for a given time: scripts/fuzz 3600.

A decoder may give a valid message or raise ManifestError (a header: IntegrityError), soon. What it accepts
must encode, decode again to the same, and, for a manifest, be laid out over a buffer.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from golden.objects import MESSAGES
from hostile.cases import VALID

from weightcast.errors import ErrorRecord, IntegrityError, ManifestError, WeightcastError, from_record
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, Layout, check_bucket
from weightcast.format.manifest import Manifest, WeightVersion, decode, encode
from weightcast.format.messages import InitInfo, LinkMessage, Offer, UpdateInfo, WeightInfo
from weightcast.links.link import Frames, frame
from weightcast.store.records import Commit, SlotAttempt, WriterRecord, seal, unseal
from weightcast.testing.transport_kit import write_raw_header
from weightcast.transports.collective import records as collective
from weightcast.transports.ipc import IpcReceiver, IpcSender
from weightcast.transports.records import BucketReady, FromSender

SLOW_SECONDS = 5.0
_LAID_OUT_BYTES = 1 << 22

Target = Callable[[bytes], bool]


def manifest(data: bytes | str) -> bool:
    try:
        found = Manifest.decode(data)
    except ManifestError:
        return False
    assert Manifest.decode(found.encode()) == found
    assert found.num_bytes <= sum(found.buckets)
    assert sorted(found.rounds) == list(range(len(found.buckets)))
    parts = [found.of_origin(origin) for origin, _ in enumerate(found.spans)]
    assert sum((part.buckets for part in parts), ()) == found.buckets
    assert len(found.bucket_origins) == len(found.buckets)
    if sum(found.buckets) < _LAID_OUT_BYTES:
        layout = Layout(found)
        payload = torch.empty(found.max_bucket_bytes, dtype=torch.uint8)
        for index, entries in enumerate(layout.entries):
            for entry, view in zip(entries, layout.views(index, payload), strict=True):
                assert view.shape == entry.piece.region.sizes
        for record in found.tensors:
            torch.empty(record.shape, dtype=torch.uint8, device="meta")
    return True


def _message(kind: Any, max_bytes: int = 1 << 28) -> Target:
    def target(data: bytes) -> bool:
        try:
            found: Any = decode(data, kind, max_bytes=max_bytes)
        except ManifestError:
            return False
        again = encode(found)
        assert encode(decode(again, kind)) == again
        if isinstance(found, Offer) and found.manifest is not None:
            return manifest(found.manifest)
        error = getattr(found, "error", None)
        if isinstance(error, ErrorRecord):
            assert isinstance(from_record(error), WeightcastError)
        return True

    return target


def _sealed(kind: Any) -> Target:
    """Only what was written is accepted: whatever is changed, the digest does not fit."""

    def target(data: bytes) -> bool:
        try:
            found = unseal(data, kind, Path("file"))
        except IntegrityError:
            return False
        assert seal(found) == encode(found)
        return True

    return target


def frames(data: bytes) -> bool:
    """The stream may be cut anywhere: what comes out must not depend on it."""
    outcomes = []
    for step in (len(data) or 1, 7):
        found: list[Any] = []
        reader = Frames()
        try:
            for start in range(0, len(data), step):
                found += reader.feed(data[start : start + step])
        except ManifestError as exc:
            found.append(exc.fault)
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    return bool(outcomes[0])


_VERSION = WeightVersion("0123456789abcdef" * 2, 7)
_BUCKET = BucketBuffer.of(torch.zeros(HEADER_BYTES + 512, dtype=torch.uint8))
write_raw_header(_BUCKET, 512, _VERSION, 3, origin=2)
_HEADER = bytes(_BUCKET.header.tolist())


def header(data: bytes) -> bool:
    """Only the one right header is accepted."""
    found = torch.frombuffer(bytearray(data[:HEADER_BYTES].ljust(1)), dtype=torch.uint8)
    try:
        check_bucket(BucketBuffer(found, _BUCKET.payload), 512, _VERSION, 3, origin=2)
    except IntegrityError:
        return False
    assert data[:HEADER_BYTES] == _HEADER
    return True


TARGETS: dict[str, Target] = {
    "manifest": manifest,
    "update": _message(UpdateInfo),
    "init": _message(InitInfo),
    "info": _message(WeightInfo),
    "link": _message(LinkMessage, 1 << 20),
    "frames": frames,
    "ipc to sender": _message(IpcSender.messages, 1 << 20),
    "ipc to receiver": _message(IpcReceiver.announcements | BucketReady | FromSender, 1 << 20),
    "collective to sender": _message(collective.FromReceiver, 1 << 20),
    "collective to receiver": _message(collective.ToReceiver, 1 << 20),
    "header": header,
    "store commit": _sealed(Commit),
    "store writer": _sealed(WriterRecord),
    "store place": _message(SlotAttempt),
}

_GOLDEN = {name: encode(message) for name, (message, _) in MESSAGES.items()}
_IPC_SENDER = [
    {"kind": "opened", "version": 1, "generation": 1},
    {"kind": "released", "version": 1, "generation": 1, "index": 0},
    {"kind": "ended", "version": 1},
]
_IPC_RECEIVER = [
    {"kind": "shared_arena", "generation": 1, "size_bytes": 4096},
    {"kind": "begin", "version": 1, "staged": True, "num_buckets": 2},
    {"kind": "ready", "version": 1, "generation": 1, "index": 0, "offset_bytes": 0, "num_bytes": 256},
    {"kind": "aborted", "version": 1, "reason": "r"},
]

_COLLECTIVE_SENDER = [
    {"kind": "joining", "epoch": 1, "memory": "1/2/0/weightcast-buckets-x"},
    {"kind": "join_failed", "epoch": 1, "reason": "r", "is_own": True},
    {"kind": "progress", "epoch": 1, "version": 1, "num_received": 2, "num_awaited": 3},
]
_COLLECTIVE_RECEIVER = [
    {
        "kind": "join",
        "epoch": 1,
        "group_rank": 1,
        "group_size": 2,
        "host": "127.0.0.1",
        "port": 1,
        "deadline_seconds": 3.0,
        "is_read_along": True,
    },
    {"kind": "read_along", "epoch": 1, "memory": "1/2/0/weightcast-buckets-x"},
    {"kind": "begin", "version": 1, "staged": True, "num_buckets": 2},
    {"kind": "arrived", "version": 1, "num_buckets": 2},
]

SEEDS: dict[str, list[bytes]] = {
    "manifest": [json.dumps(VALID).encode(), _GOLDEN["manifest.json"]],
    "update": [_GOLDEN[f"{n}.json"] for n in ("offer", "offer_known", "offer_workers", "seal", "abort")],
    "init": [_GOLDEN["init.json"]],
    "info": [_GOLDEN["info.json"]],
    "link": [
        _GOLDEN[f"{n}.json"]
        for n in ("hello", "hello_host", "heartbeat", "accepted", "received", "installed", "failed")
    ],
    "frames": [frame(MESSAGES["hello.json"][0]) + frame(MESSAGES["failed.json"][0])],
    "ipc to sender": [json.dumps(m).encode() for m in _IPC_SENDER],
    "ipc to receiver": [json.dumps(m).encode() for m in _IPC_RECEIVER],
    "collective to sender": [json.dumps(m).encode() for m in _COLLECTIVE_SENDER],
    "collective to receiver": [json.dumps(m).encode() for m in _COLLECTIVE_RECEIVER],
    "header": [_HEADER],
    "store commit": [_GOLDEN["current.json"]],
    "store writer": [_GOLDEN["writer.json"]],
    "store place": [_GOLDEN["place.json"]],
}

_ODD_VALUES: list[Any] = [
    *(None, True, "", "x", "0" * 32, "a\n", "\ud800", "\0", 0, 1, -1, 255, 256, 1 << 31, 1 << 32, (1 << 53) + 1),
    *((1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 1 << 200, 0.5, 1e308, -0.0, [], {}, [[]], [0], [-1, 1], ["a"]),
]


def mutated(rng: random.Random, seed: bytes) -> bytes:
    """One to four changes: of bytes, or of the values of the JSON."""
    for _ in range(rng.randint(1, 4)):
        seed = _mutate_json(rng, seed) if rng.random() < 0.6 else _mutate_bytes(rng, seed)
    return seed


def _mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return rng.randbytes(rng.randint(1, 16))
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randint(1, 16))
    match rng.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:at] + rng.randbytes(end - at) + data[end:]
        case 3:
            return data[:at] + data[at:end] * rng.randint(2, 50) + data[end:]
        case 4:
            return data[:at]
        case _:
            return data[:at] + rng.choice([b"[", b"{", b'"', b"\\u", b"9" * 40, b"-", b"e9", b"null,"]) + data[at:]


def _mutate_json(rng: random.Random, data: bytes) -> bytes:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _mutate_bytes(rng, data)
    places = list(_places(document))
    if not places:
        return _mutate_bytes(rng, data)
    holder, key = rng.choice(places)
    match rng.randrange(5):
        case 0:
            holder[key] = rng.choice(_ODD_VALUES)
        case 1:
            del holder[key]
        case 2 if isinstance(holder[key], int):
            holder[key] += rng.choice([-256, -8, -1, 1, 8, 256])
        case 3:
            other, its_key = rng.choice(places)
            holder[key] = copy.deepcopy(other[its_key])
        case _ if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case _:
            holder[key] = rng.choice(_ODD_VALUES)
    try:
        return json.dumps(document, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except ValueError:
        return data


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    stack = [document]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            yield node, key
            stack.append(node[key])


def inputs(name: str, rng: random.Random) -> Iterator[bytes]:
    """An endless stream for one target."""
    while True:
        yield mutated(rng, rng.choice(SEEDS[name]))


def try_one(name: str, data: bytes) -> bool:
    """Whether it was accepted. Raises whatever no decoder may raise, and AssertionError if it took too long."""
    start = time.process_time()
    accepted = TARGETS[name](data)
    assert time.process_time() - start < SLOW_SECONDS, f"{name}: {len(data)} bytes took over {SLOW_SECONDS} s"
    return accepted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="to repeat a run")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"fuzzing {len(TARGETS)} decoders for {arguments.seconds:g} s, seed {seed}", flush=True)
    rng = random.Random(seed)
    streams = {name: inputs(name, rng) for name in TARGETS}
    start = said = time.monotonic()
    tried, accepted = dict.fromkeys(TARGETS, 0), dict.fromkeys(TARGETS, 0)
    while (now := time.monotonic()) - start < arguments.seconds:
        for name, stream in streams.items():
            data = next(stream)
            try:
                accepted[name] += try_one(name, data)
            except Exception:
                print(f"{name} failed on {data[:4000]!r}; seed {seed}", file=sys.stderr, flush=True)
                raise
            tried[name] += 1
        if now - said > 10:
            said = now
            total = sum(tried.values())
            print(f"{now - start:.0f} s: {total} inputs, {total / (now - start):.0f} per second", flush=True)
    for name in TARGETS:
        print(f"{name}: {tried[name]} inputs, {accepted[name]} of them accepted")
    seconds = time.monotonic() - start
    print(
        f"{sum(tried.values())} inputs in {seconds:.0f} s, {sum(tried.values()) / seconds:.0f} per second, no failure"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
