"""Bytes to tensors and back: identity over the payload table, casts, digests against oracles, trailers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from weightcast.errors import IntegrityError
from weightcast.format import bucket
from weightcast.format.bucket import (
    TRAILER_BYTES,
    Layout,
    check_trailer,
    device_sums,
    narrow,
    payload_digest,
    root_digest,
    slot_size_bytes,
    write_trailer,
)
from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import DigestKind, TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.testing.payloads import DTYPES, PAYLOADS, Payload, random_tensor, raw_bytes
from weightcast.trainer.packer import Packer

VERSION = WeightVersion("0123456789abcdef" * 2, 7)
KINDS: tuple[DigestKind, ...] = ("xxh3-128", "sum-64x2")


def pack_all(payload: Payload, kind: DigestKind = "xxh3-128") -> tuple[Layout, list[torch.Tensor]]:
    layout = Layout(payload.manifest(digest_kind=kind))
    packer = Packer(layout, payload.tensors())
    buffers = []
    for index in range(len(layout.manifest.buckets)):
        buffer = torch.full((slot_size_bytes(layout.manifest),), 0xAA, dtype=torch.uint8)
        assert packer.pack(index, buffer, VERSION) is not None
        buffers.append(buffer)
    return layout, buffers


def unpack_by_hand(layout: Layout, buffers: list[torch.Tensor]) -> dict[str, bytes]:
    """Reads the buffers with numpy and the manifest alone, element by element region."""
    found: dict[str, bytes] = {}
    for record in layout.manifest.tensors:
        itemsize = DTYPES[record.dtype].itemsize
        out = np.zeros((*record.shape, itemsize), dtype=np.uint8)
        for piece in record.pieces:
            region, start = piece.region, piece.offset_bytes
            data = buffers[piece.bucket].numpy()[start : start + region.numel * itemsize]
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
        for entry, view in zip(entries, layout.views(index, buffers[index]), strict=True):
            assert view.shape == entry.piece.region.sizes
            narrow(out[entry.record.name], entry.piece.region).copy_(view)
    expected = payload.expected()
    assert {name: raw_bytes(tensor) for name, tensor in out.items()} == {name: expected[name] for name in out}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_every_trailer_is_accepted(payload: Payload, kind: DigestKind) -> None:
    layout, buffers = pack_all(payload, kind)
    for index, buffer in enumerate(buffers):
        size = layout.manifest.buckets[index]
        assert check_trailer(buffer, size, VERSION, index, kind) == payload_digest(buffer[:size], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_is_noticed(kind: DigestKind) -> None:
    payload = PAYLOADS[0]
    layout, buffers = pack_all(payload, kind)
    size, buffer = layout.manifest.buckets[0], buffers[0]
    for position in range(size + TRAILER_BYTES):
        buffer[position] ^= 0x10
        with pytest.raises(IntegrityError, match="bucket 0"):
            check_trailer(buffer, size, VERSION, 0, kind)
        buffer[position] ^= 0x10
    check_trailer(buffer, size, VERSION, 0, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_exchanged_words_are_noticed(kind: DigestKind) -> None:
    buffer = torch.arange(1024 + TRAILER_BYTES, dtype=torch.int16).to(torch.uint8)
    write_trailer(buffer, 1024, VERSION, 0, kind)
    words = buffer[:1024].view(torch.int64)
    words[3], words[9] = int(words[9]), int(words[3])
    with pytest.raises(IntegrityError, match=kind):
        check_trailer(buffer, 1024, VERSION, 0, kind)


@pytest.mark.parametrize(
    ("version", "index", "size"),
    [
        (WeightVersion(VERSION.run, 8), 1, 512),
        (WeightVersion("f" * 32, 7), 1, 512),
        (VERSION, 2, 512),
        (VERSION, 1, 256),
    ],
    ids=["other version", "other run", "other bucket", "other length"],
)
def test_a_trailer_of_another_bucket_is_refused(version: WeightVersion, index: int, size: int) -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    write_trailer(buffer, 512, VERSION, 1, "xxh3-128")
    with pytest.raises(IntegrityError):
        check_trailer(buffer, size, version, index, "xxh3-128")


def test_a_short_buffer_is_refused() -> None:
    with pytest.raises(IntegrityError, match="1000 bytes arrived, 1088 were expected"):
        check_trailer(torch.zeros(1000, dtype=torch.uint8), 1024, VERSION, 0, "xxh3-128")


def test_the_message_of_a_wrong_digest_says_what_to_do() -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    write_trailer(buffer, 512, VERSION, 0, "xxh3-128")
    buffer[5] = 1
    with pytest.raises(IntegrityError, match=r"its trailer says [0-9a-f]{32}: bytes were changed on the way; publish"):
        check_trailer(buffer, 512, VERSION, 0, "xxh3-128")


# sizes around the 4096 columns of 8 bytes that the sum's matrix has
@pytest.mark.parametrize("num_words", [1, 2, 4095, 4096, 4097, 8192, 3 * 4096 + 17, 100_003])
@pytest.mark.parametrize("fill", ["random", "ones"])
def test_sum_64x2_is_what_the_wire_format_says(num_words: int, fill: str) -> None:
    rng = np.random.default_rng(num_words)
    words = rng.integers(0, 1 << 64, num_words, dtype=np.uint64)
    if fill == "ones":
        words[:] = np.uint64((1 << 64) - 1)
    plain = int(words.astype(object).sum()) % (1 << 64)
    weighted = sum((i + 1) * int(w) for i, w in enumerate(words)) % (1 << 64)
    payload = torch.from_numpy(words.view(np.uint8).copy())
    assert [int(s) % (1 << 64) for s in device_sums(payload)] == [plain, weighted]
    expected = plain.to_bytes(8, "little") + weighted.to_bytes(8, "little")
    assert payload_digest(payload, "sum-64x2") == expected


@pytest.mark.parametrize("num_bytes", [8, 5000, 256 << 10, (256 << 10) + 8, 1_000_000])
def test_xxh3_digest_is_of_the_blocks_digests(num_bytes: int) -> None:
    payload = random_tensor("uint8", (num_bytes,), 3)
    data = raw_bytes(payload)
    blocks = [xxhash.xxh3_128(data[at : at + (256 << 10)]).digest() for at in range(0, num_bytes, 256 << 10)]
    assert payload_digest(payload, "xxh3-128") == xxhash.xxh3_128(b"".join(blocks)).digest()


def test_packing_digests_in_steps_as_in_one() -> None:
    """A bucket larger than one hashing step, with gaps of alignment at every step's end."""
    specs = [TensorSpec(f"t{i}", "uint8", ((1 << 20) + i,)) for i in range(12)]
    layout = Layout(plan(specs, 16 << 20))
    buffer = torch.full((slot_size_bytes(layout.manifest),), 0x55, dtype=torch.uint8)
    digest = Packer(layout, {s.name: random_tensor("uint8", s.shape, 1) for s in specs}).pack(0, buffer, VERSION)
    size = layout.manifest.buckets[0]
    assert digest == xxhash.xxh3_128(raw_bytes(buffer[:size])).digest()
    assert check_trailer(buffer, size, VERSION, 0, "xxh3-128") == digest


def test_root_digest_depends_on_manifest_and_order() -> None:
    one, two = b"a" * 16, b"b" * 16
    expected = xxhash.xxh3_128_hexdigest(bytes.fromhex("ab" * 32) + one + two)
    assert root_digest("ab" * 32, [one, two]) == expected
    assert len({root_digest("ab" * 32, [two, one]), root_digest("ac" * 32, [one, two]), expected}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64", "int32"])
def test_packing_casts_to_the_manifest_dtype(dtype: str) -> None:
    source = torch.arange(-40, 41, dtype=torch.float32).reshape(9, 9)
    specs = [TensorSpec("w", dtype, (9, 9)), TensorSpec("w_t", dtype, (9, 9))]
    layout = Layout(plan(specs, 4096))
    buffer = torch.zeros(slot_size_bytes(layout.manifest), dtype=torch.uint8)
    Packer(layout, {"w": source, "w_t": source.t()}).pack(0, buffer, VERSION)
    straight, turned = layout.views(0, buffer)
    assert raw_bytes(straight) == raw_bytes(source.to(DTYPES[dtype]))
    assert raw_bytes(turned) == raw_bytes(source.t().to(DTYPES[dtype]))


def test_packing_sees_the_source_as_it_is_now_and_leaves_it_alone() -> None:
    source = torch.nn.Parameter(torch.ones(10))
    layout = Layout(plan([TensorSpec("w", "float32", (10,))], 4096))
    packer = Packer(layout, {"w": source})
    buffer = torch.zeros(slot_size_bytes(layout.manifest), dtype=torch.uint8)
    with torch.no_grad():
        source.mul_(3)
    packer.pack(0, buffer, VERSION)
    assert layout.views(0, buffer)[0].tolist() == [3.0] * 10
    assert source.requires_grad
    assert source.grad is None


def test_views_are_kept_for_the_same_buffer_only() -> None:
    layout = Layout(PAYLOADS[0].manifest())
    one, two = (torch.zeros(slot_size_bytes(layout.manifest), dtype=torch.uint8) for _ in range(2))
    first = layout.views(0, one)
    assert layout.views(0, one) is first
    assert layout.views(0, two)[0].untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    layout.forget_views()
    assert layout.views(0, two) is not first


def test_views_into_a_slot_in_the_middle_of_an_arena() -> None:
    payload = next(p for p in PAYLOADS if p.name == "every_dtype")
    layout = Layout(payload.manifest())
    slot = slot_size_bytes(layout.manifest)
    arena = torch.zeros(3 * slot, dtype=torch.uint8)
    Packer(layout, payload.tensors()).pack(0, arena[slot : 2 * slot], VERSION)
    assert not arena[:slot].any()
    assert not arena[2 * slot :].any()
    check_trailer(arena[slot : 2 * slot], layout.manifest.buckets[0], VERSION, 0, "xxh3-128")


def test_narrow_is_the_region() -> None:
    tensor = torch.arange(60).reshape(3, 4, 5)
    part = narrow(tensor, Region((1, 0, 2), (2, 4, 3)))
    assert torch.equal(part, tensor[1:3, :, 2:5])
    assert narrow(tensor, whole((3, 4, 5))) is tensor


def test_a_slot_holds_any_bucket_and_its_trailer() -> None:
    for payload in PAYLOADS:
        manifest = payload.manifest()
        size = slot_size_bytes(manifest)
        assert size % 256 == 0
        assert size >= manifest.max_bucket_bytes + TRAILER_BYTES


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(bucket.TORCH_DTYPES, "float8_e8m0fnu")
    with pytest.raises(ValueError, match=r"has no dtype float8_e8m0fnu: use a newer one"):
        Layout(plan([TensorSpec("w", "float8_e8m0fnu", (4,))], 4096))
