"""Bytes to tensors and back: identity over the payload table, casts, digests against oracles, headers."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch

from weightcast.errors import IntegrityError
from weightcast.format import bucket
from weightcast.format.bucket import (
    HEADER_BYTES,
    BucketBuffer,
    Buffers,
    Layout,
    arena_layout_of,
    check_bucket,
    narrow,
    payload_digest,
    root_digest,
    slot_size_bytes,
    write_header,
)
from weightcast.format.bucket_digest import torch_digest
from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.sources.tensors import TensorSource
from weightcast.testing.payloads import DTYPES, PAYLOADS, Payload, random_tensor, raw_bytes
from weightcast.testing.transport_kit import write_raw_header
from weightcast.trainer.packer import Packer, Shard, pack, tiling

VERSION = WeightVersion("0123456789abcdef" * 2, 7)


def buffer_for(layout: Layout, filled_with: int = 0xAA) -> BucketBuffer:
    return BucketBuffer.of(torch.full((slot_size_bytes(layout.manifest),), filled_with, dtype=torch.uint8))


def pack_all(payload: Payload) -> tuple[Layout, list[BucketBuffer]]:
    layout = Layout(payload.manifest())
    packer = Packer(layout, tiling(layout.manifest.tensors, payload.regions()))
    buffers = []
    for index, size in enumerate(layout.manifest.buckets):
        buffer = buffer_for(layout)
        num_bytes, _ = pack(packer, layout.manifest, VERSION, index, buffer)
        assert num_bytes == HEADER_BYTES + size
        buffers.append(buffer)
    return layout, buffers


def unpack_by_hand(layout: Layout, buffers: list[BucketBuffer]) -> dict[str, bytes]:
    """Reads the buffers with numpy and the manifest alone, element by element region."""
    found: dict[str, bytes] = {}
    for record in layout.manifest.tensors:
        itemsize = DTYPES[record.dtype].itemsize
        out = np.zeros((*record.shape, itemsize), dtype=np.uint8)
        for piece in record.pieces:
            region, start = piece.region, piece.offset_bytes
            data = buffers[piece.bucket].payload.numpy()[start : start + region.numel * itemsize]
            where = tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))
            out[where] = data.reshape((*region.sizes, itemsize))
        found |= dict.fromkeys(record.names, out.tobytes())
    return found


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_packed_bytes_are_the_source_bytes(payload: Payload) -> None:
    layout, buffers = pack_all(payload)
    assert unpack_by_hand(layout, buffers) == payload.expected()


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_views_give_the_tensors_back(payload: Payload) -> None:
    layout, buffers = pack_all(payload)
    out = {r.name: torch.zeros(r.shape, dtype=DTYPES[r.dtype]) for r in layout.manifest.tensors}
    for index, entries in enumerate(layout.entries):
        for entry, view in zip(entries, layout.views(index, buffers[index].payload), strict=True):
            assert view.shape == entry.piece.region.sizes
            narrow(out[entry.record.name], entry.piece.region).copy_(view)
    expected = payload.expected()
    assert {name: raw_bytes(tensor) for name, tensor in out.items()} == {name: expected[name] for name in out}


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_every_bucket_is_accepted(payload: Payload) -> None:
    layout, buffers = pack_all(payload)
    for index, buffer in enumerate(buffers):
        size = layout.manifest.buckets[index]
        header = check_bucket(buffer, size, VERSION, index)
        assert header.digest == payload_digest(buffer.payload[:size])
        assert (header.is_delta, header.raw_bytes, header.encoded_bytes) == (False, size, size)


def test_any_changed_byte_is_noticed() -> None:
    payload = PAYLOADS[0]
    layout, buffers = pack_all(payload)
    size, buffer = layout.manifest.buckets[0], buffers[0]
    whole = buffer.flat(HEADER_BYTES + size)
    for position in range(HEADER_BYTES + size):
        whole[position] ^= 0x10
        with pytest.raises(IntegrityError, match="bucket 0"):
            check_bucket(buffer, size, VERSION, 0)
        whole[position] ^= 0x10
    check_bucket(buffer, size, VERSION, 0)


def raw_bucket(size: int = 512, index: int = 1) -> BucketBuffer:
    """A bucket whose payload counts up."""
    buffer = BucketBuffer.of(torch.arange(HEADER_BYTES + size, dtype=torch.int16).to(torch.uint8))
    assert write_raw_header(buffer, size, VERSION, index) == HEADER_BYTES + size
    return buffer


def test_exchanged_words_are_noticed() -> None:
    buffer = raw_bucket(1024, 0)
    words = buffer.payload.view(torch.int64)
    words[3], words[9] = int(words[9]), int(words[3])
    with pytest.raises(IntegrityError, match="bytes were changed during the transfer"):
        check_bucket(buffer, 1024, VERSION, 0)


@pytest.mark.parametrize(
    ("version", "index", "size", "message"),
    [
        (WeightVersion(VERSION.run, 8), 1, 512, "version 7, expected version 8"),
        (WeightVersion("f" * 32, 7), 1, 512, f"run {VERSION.run}, expected run {'f' * 32}"),
        (VERSION, 2, 512, "index 1, expected index 2"),
        (VERSION, 1, 256, "raw length 512, encoded length 512, expected raw length 256, encoded length 256"),
    ],
    ids=["other version", "other run", "other bucket", "other length"],
)
def test_a_header_of_another_bucket_is_refused(version: WeightVersion, index: int, size: int, message: str) -> None:
    with pytest.raises(IntegrityError, match=f"^bucket {index}: its header says {message}$"):
        check_bucket(raw_bucket(), size, version, index)


@pytest.mark.parametrize(
    ("start", "data", "message"),
    [
        (
            0,
            b"wcbuckt1",
            "magic b'wcbuckt1', expected magic b'wcbucket': install the same version of weightcast at both ends",
        ),
        (8, b"\1\0\0\0", "protocol 1, expected protocol 4: install the same version of weightcast at both ends"),
        (8, b"\5\0\0\0", "protocol 5, expected protocol 4: install the same version of weightcast at both ends"),
        (12, b"\1", "origin 1, expected origin 0"),
        (48, b"zstd", "codec b'zstd', expected codec b'raw'"),
        (48, b"\0\0\0", "codec b'', expected codec b'raw'"),
        (48, b"\xff", r"codec b'\\xffaw', expected codec b'raw'"),
        (52, b"x", r"codec b'raw\\x00x', expected codec b'raw'"),
        (56, b"\xff" * 8, f"raw length {2**64 - 1}, expected raw length 512"),
        (64, b"\0\0", "encoded length 0, expected encoded length 512"),
        (64, b"\xff" * 8, f"encoded length {2**64 - 1}, expected encoded length 512"),
        (255, b"\1", "reserved bytes that are not zero, expected reserved bytes that are zero"),
    ],
)
def test_a_header_is_refused_by_the_field_that_is_wrong(start: int, data: bytes, message: str) -> None:
    buffer = raw_bucket()
    buffer.header[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(IntegrityError, match=f"^bucket 1: its header says {message}$"):
        check_bucket(buffer, 512, VERSION, 1)


def test_a_short_buffer_is_refused() -> None:
    with pytest.raises(IntegrityError, match="received 100 bytes, expected a header of 256"):
        check_bucket(BucketBuffer.of(torch.zeros(100, dtype=torch.uint8)), 1024, VERSION, 0)
    whole = raw_bucket()
    short = BucketBuffer(whole.header, whole.payload[:500])
    with pytest.raises(IntegrityError, match="received 500 bytes after its header, expected 512"):
        check_bucket(short, 512, VERSION, 1)


def test_the_message_of_a_wrong_digest_says_what_to_do() -> None:
    buffer = raw_bucket()
    buffer.payload[5] ^= 1
    with pytest.raises(IntegrityError, match=r"its header says [0-9a-f]{32}: bytes were changed"):
        check_bucket(buffer, 512, VERSION, 1)


def test_a_delta_is_accepted_only_where_it_was_offered() -> None:
    layout = Layout(plan([TensorSpec("w", "uint8", (2048,))], 4096))
    buffer = buffer_for(layout)
    digest = payload_digest(buffer.payload[:1024])
    write_header(buffer.header, VERSION, 0, digest, raw_bytes=2048, encoded_bytes=1024)
    header = check_bucket(buffer, 2048, VERSION, 0, encoded_bytes=1024)
    assert (header.is_delta, header.raw_bytes, header.encoded_bytes, header.digest) == (True, 2048, 1024, digest)
    with pytest.raises(IntegrityError, match="codec b'delta', encoded length 1024, expected codec b'raw'"):
        check_bucket(buffer, 2048, VERSION, 0)
    with pytest.raises(IntegrityError, match="encoded length 1024, expected encoded length 1032"):
        check_bucket(buffer, 2048, VERSION, 0, encoded_bytes=1032)
    buffer.payload[1023] += 1
    with pytest.raises(IntegrityError, match="bytes were changed"):
        check_bucket(buffer, 2048, VERSION, 0, encoded_bytes=1024)


@pytest.mark.parametrize("num_bytes", [0, 8, 5000, 256 << 10, (256 << 10) + 8, 1_000_000])
def test_a_payloads_digest_is_that_of_gpus(num_bytes: int) -> None:
    payload = random_tensor("uint8", (num_bytes,), 3)
    assert payload_digest(payload) == torch_digest(payload.view(torch.int64)).numpy().tobytes()


def test_packing_digests_gaps_too() -> None:
    specs = [TensorSpec(f"t{i}", "uint8", ((1 << 20) + i,)) for i in range(12)]
    layout = Layout(plan(specs, 16 << 20))
    payload = torch.full((layout.manifest.buckets[0],), 0x55, dtype=torch.uint8)
    source = TensorSource({s.name: random_tensor("uint8", s.shape, 1) for s in specs})
    digest = Packer(layout, tiling(layout.manifest.tensors, source.regions())).fill(0, payload, VERSION)
    assert digest == payload_digest(payload)


def test_root_digest_depends_on_manifest_and_order() -> None:
    one, two = b"a" * 16, b"b" * 16
    expected = hashlib.blake2b(bytes.fromhex("ab" * 32) + one + two, digest_size=16).hexdigest()
    assert root_digest("ab" * 32, [one, two]) == expected
    assert len({root_digest("ab" * 32, [two, one]), root_digest("ac" * 32, [one, two]), expected}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64", "int32"])
def test_packing_casts_to_the_manifest_dtype(dtype: str) -> None:
    source = torch.arange(-40, 41, dtype=torch.float32).reshape(9, 9)
    specs = [TensorSpec("w", dtype, (9, 9)), TensorSpec("w_t", dtype, (9, 9))]
    layout = Layout(plan(specs, 4096))
    payload = torch.zeros(layout.manifest.buckets[0], dtype=torch.uint8)
    Packer(layout, [Shard(n, whole((9, 9)), data) for n, data in enumerate((source, source.t()))]).fill(
        0, payload, VERSION
    )
    straight, turned = layout.views(0, payload)
    assert raw_bytes(straight) == raw_bytes(source.to(DTYPES[dtype]))
    assert raw_bytes(turned) == raw_bytes(source.t().to(DTYPES[dtype]))


def test_packing_sees_the_source_as_it_is_now_and_leaves_it_alone() -> None:
    source = torch.nn.Parameter(torch.ones(10))
    layout = Layout(plan([TensorSpec("w", "float32", (10,))], 4096))
    packer = Packer(layout, tiling(layout.manifest.tensors, TensorSource({"w": source}).regions()))
    payload = torch.zeros(layout.manifest.buckets[0], dtype=torch.uint8)
    with torch.no_grad():
        source.mul_(3)
    packer.fill(0, payload, VERSION)
    assert layout.views(0, payload)[0].tolist() == [3.0] * 10
    assert source.requires_grad
    assert source.grad is None


def test_views_are_kept_for_the_same_payload_only() -> None:
    layout = Layout(PAYLOADS[0].manifest())
    one, two = (torch.zeros(layout.manifest.buckets[0], dtype=torch.uint8) for _ in range(2))
    first = layout.views(0, one)
    assert layout.views(0, one) is first
    assert layout.views(0, two)[0].untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    layout.forget_views()
    assert layout.views(0, two) is not first


def test_views_into_a_slot_in_the_middle_of_an_arena() -> None:
    payload = next(p for p in PAYLOADS if p.name == "every_dtype")
    layout = Layout(payload.manifest())
    slot, size = slot_size_bytes(layout.manifest), layout.manifest.buckets[0]
    arena = torch.zeros(3 * slot, dtype=torch.uint8)
    buffer = Buffers(arena).get(0, slot, slot + HEADER_BYTES, size)
    pack(Packer(layout, tiling(layout.manifest.tensors, payload.regions())), layout.manifest, VERSION, 0, buffer)
    assert not arena[:slot].any()
    assert not arena[2 * slot :].any()
    check_bucket(buffer, size, VERSION, 0)


@pytest.mark.parametrize(("staged", "adjoining"), [(False, False), (True, False), (True, True)])
def test_buckets_are_placed_apart_and_aligned(staged: bool, adjoining: bool) -> None:
    manifest = plan([TensorSpec(f"t{i}", "uint8", (300 + 2000 * i,)) for i in range(20)], 8192)
    layout = arena_layout_of(manifest, num_slots=3, staged=staged, adjoining=adjoining)
    spans: dict[int, list[tuple[int, int]]] = {}
    for slot, header, payload, size in zip(
        layout.slots, layout.headers, layout.payloads, layout.sizes_bytes, strict=True
    ):
        assert header % 256 == payload % 256 == 0
        assert adjoining or (header % 4096 == 0 and payload == header + HEADER_BYTES)
        spans.setdefault(slot, []).extend([(header, header + HEADER_BYTES), (payload, payload + size)])
    by_start = sorted((min(parts)[0], slot) for slot, parts in spans.items())
    assert max(end for parts in spans.values() for _, end in parts) == layout.size_bytes
    if adjoining:
        ends = [payload + size for payload, size in zip(layout.payloads, layout.sizes_bytes, strict=True)]
        assert list(layout.payloads[1:]) == ends[:-1]
        assert layout.payloads[0] % 4096 == 0
        assert max(layout.headers) + HEADER_BYTES <= layout.payloads[0]
    else:
        assert all(max(e for _, e in spans[slot]) <= start for (_, slot), (start, _) in itertools.pairwise(by_start))


def test_narrow_is_the_region() -> None:
    tensor = torch.arange(60).reshape(3, 4, 5)
    part = narrow(tensor, Region((1, 0, 2), (2, 4, 3)))
    assert torch.equal(part, tensor[1:3, :, 2:5])
    assert narrow(tensor, whole((3, 4, 5))) is tensor


def test_a_slot_holds_any_bucket_and_its_header() -> None:
    for payload in PAYLOADS:
        manifest = payload.manifest()
        size = slot_size_bytes(manifest)
        assert size % 256 == 0
        assert size >= manifest.max_bucket_bytes + HEADER_BYTES


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(bucket.TORCH_DTYPES, "float8_e8m0fnu")
    with pytest.raises(ValueError, match=r"has no dtype float8_e8m0fnu: use a newer one"):
        Layout(plan([TensorSpec("w", "float8_e8m0fnu", (4,))], 4096))
