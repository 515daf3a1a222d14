"""The bytes on the wire are those of the files here, in both directions: a change of them needs a new protocol."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.objects import MANIFEST, MESSAGES, VERSION, bucket, payload
from nh_128 import nh_128

from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, check_bucket, payload_digest, root_digest
from weightcast.format.manifest import Manifest, decode, encode
from weightcast.links.link import Frames, frame

HERE = Path(__file__).parent
DIGESTS = json.loads((HERE / "digests.json").read_text())


@pytest.mark.parametrize("name", MESSAGES)
def test_encodes_to_the_file(name: str) -> None:
    message, _ = MESSAGES[name]
    assert encode(message) == (HERE / name).read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_the_file_decodes_to_the_message(name: str) -> None:
    message, kind = MESSAGES[name]
    assert decode((HERE / name).read_bytes(), kind) == message


@pytest.mark.parametrize("name", MESSAGES)
def test_the_file_is_plain_json_without_white_space(name: str) -> None:
    data = (HERE / name).read_bytes()
    assert json.dumps(json.loads(data), separators=(",", ":"), ensure_ascii=False).encode() == data


def test_no_file_is_left_over() -> None:
    assert {p.name for p in HERE.glob("*.json")} == {*MESSAGES, "digests.json"}


def test_the_manifest_is_a_valid_one_and_has_its_digest() -> None:
    data = (HERE / "manifest.json").read_bytes()
    assert Manifest.decode(data) == MANIFEST
    assert MANIFEST.digest() == hashlib.sha256(data).hexdigest() == DIGESTS["manifest"]


def test_digest_of_a_payload() -> None:
    assert payload_digest(payload()).hex() == DIGESTS["nh-128"]


def test_nh_128_by_its_definition() -> None:
    assert nh_128(bytes(payload().tolist())).hex() == DIGESTS["nh-128"]
    assert nh_128(b"").hex() == "0" * 32
    assert nh_128(b"abc").hex() == "53edaf8685e329c4980a8d59ce5ddf05"


def test_header() -> None:
    """Written: the file's bytes. Read: accepted, and nothing else is."""
    file = (HERE / "header.bin").read_bytes()
    assert len(file) == HEADER_BYTES == 256
    assert bytes(bucket().header.tolist()) == file

    buffer = BucketBuffer.of(torch.cat([torch.tensor(list(file), dtype=torch.uint8), payload()]))
    assert check_bucket(buffer, 1024, VERSION, 5).digest.hex() == DIGESTS["nh-128"]
    magic, protocol, origin, run, number, index, codec, raw, encoded, digest = struct.unpack(
        "<8sII16sQQ8sQQ16s", file[:88]
    )
    assert (magic, protocol, origin, run.hex(), number, index) == (b"wcbucket", 4, 0, VERSION.run, 7, 5)
    assert (codec, raw, encoded, digest.hex()) == (b"raw\0\0\0\0\0", 1024, 1024, DIGESTS["nh-128"])
    assert file[88:] == bytes(168)


def test_root_digest() -> None:
    digests = [bytes.fromhex(DIGESTS["nh-128"]), bytes(16)]
    expected = hashlib.blake2b(bytes.fromhex(DIGESTS["manifest"]) + b"".join(digests), digest_size=16).hexdigest()
    assert root_digest(DIGESTS["manifest"], digests) == expected == DIGESTS["root"]


def test_a_link_frame_is_a_length_and_the_record() -> None:
    message: Any = MESSAGES["hello.json"][0]
    data = (HERE / "hello.json").read_bytes()
    assert frame(message) == len(data).to_bytes(4, "big") + data
    assert list(Frames().feed(frame(message))) == [message]


def test_frames_may_come_in_any_cuts() -> None:
    messages = [message for name, (message, kind) in MESSAGES.items() if name in ("hello.json", "failed.json")] * 3
    stream = b"".join(map(frame, messages))
    for size in (1, 2, 3, 7, 64, len(stream)):
        frames = Frames()
        found = [m for start in range(0, len(stream), size) for m in frames.feed(stream[start : start + size])]
        assert found == messages
