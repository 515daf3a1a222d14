"""The payload table: sets of tensors that have broken weight transfers, as data.

Invariants: a payload is built from a fixed seed, so that every process that builds it has the same bytes; the bytes
that are expected come from `raw_bytes` alone, which shares no code with what is tested.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
import torch

from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import ITEMSIZE_BYTES, Manifest, TensorSpec
from weightcast.format.plan import plan
from weightcast.seams.source import Regions

Item = tuple[TensorSpec, torch.Tensor]

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE_BYTES if hasattr(torch, name)}
"""Every dtype of the wire format that this torch has."""


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes in row-major order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def region_slices(region: Region) -> tuple[slice, ...]:
    """Return a region's slices in an array of its tensor's elements."""
    return tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """A named set of tensors, and a bucket size (in bytes) that makes it interesting."""

    name: str
    build: Callable[[], Sequence[Item]]
    bucket_size_bytes: int = 4096

    def specs(self) -> list[TensorSpec]:
        """Return the tensors' specs."""
        return list(_specs(self))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their first names."""
        return {spec.name: tensor for spec, tensor in self.build()}

    def regions(self) -> Regions:
        """Return each tensor as one region, as a source that holds all of them does."""
        return {name: ((whole(tensor.shape), tensor),) for name, tensor in self.tensors().items()}

    def expected(self) -> dict[str, bytes]:
        """Return the bytes that an engine must hold under every name, aliases included."""
        return dict(_expected(self))

    def manifest(self) -> Manifest:
        """Return the plan of a publish of this payload."""
        return plan(self.specs(), self.bucket_size_bytes)

    def __str__(self) -> str:
        return self.name


@functools.cache
def _specs(payload: Payload) -> Sequence[TensorSpec]:
    return [spec for spec, _ in payload.build()]


@functools.cache
def _expected(payload: Payload) -> Mapping[str, bytes]:
    return {name: raw_bytes(tensor) for spec, tensor in payload.build() for name in spec.names}


def random_tensor(dtype: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return a tensor of random bits; for bool, of random True and False."""
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == "bool" else 256
    bits = torch.randint(0, top, (numel * ITEMSIZE_BYTES[dtype],), dtype=torch.uint8, generator=generator)
    return bits.view(DTYPES[dtype]).view(tuple(shape))


def item(name: str, dtype: str, shape: Sequence[int], *, aliases: Sequence[str] = (), group: str = "") -> Item:
    """Return a spec and a tensor of random bits that depend only on the name."""
    spec = TensorSpec(name, dtype, tuple(shape), aliases=tuple(aliases), group=group)
    return spec, random_tensor(dtype, shape, sum(name.encode()) * 31 + len(name))


def _of_tensor(name: str, tensor: torch.Tensor) -> Item:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(tensor.shape)), tensor


def _empty_tensors() -> list[Item]:
    shapes = {"a": (0,), "b": (3,), "c": (3, 0, 2), "d": (2, 2), "e": (0,)}
    return [item(name, "bfloat16", shape) for name, shape in shapes.items()]


def _odd_byte_counts() -> list[Item]:
    dtypes = ["uint8", "float64", "bool", "float32", "float8_e4m3fn", "complex128", "int8", "int64"]
    return [item(f"odd.{i}", dtype, (2 * i + 1,)) for i, dtype in enumerate(dtypes)]


def _non_contiguous() -> list[Item]:
    wide = random_tensor("float32", (12, 20), 1)
    return [
        _of_tensor("transposed", wide.t()),
        _of_tensor("every_other_column", wide[:, ::2]),
        _of_tensor("inner_block", wide[3:9, 5:11]),
        _of_tensor("expanded", wide[0].expand(4, 20)),
        _of_tensor("channels_last", random_tensor("bfloat16", (2, 3, 4, 5), 2).permute(0, 2, 3, 1)),
    ]


def _exact_boundary() -> list[Item]:
    sizes = {"whole": 4096, "one_less": 4095, "one_more": 4097, "first_half": 2048, "second_half": 2048, "rest": 256}
    return [item(name, "uint8", (size,)) for name, size in sizes.items()]


def _tied() -> list[Item]:
    return [
        item("embed.weight", "bfloat16", (16, 8), aliases=("lm_head.weight",)),
        item("norm.weight", "float32", (8,), aliases=("norm_2.weight", "norm_3.weight")),
    ]


def _groups() -> list[Item]:
    members = [("q_a", "attn"), ("other", ""), ("kv_a", "attn"), ("gate", "mlp"), ("weight", "w"), ("up", "mlp")]
    sized = [item(name, "bfloat16", (30, 20), group=group) for name, group in members]
    return [*sized, item("scale", "float32", (1,), group="w"), item("large", "uint8", (9000,), group="w")]


def _special_floats() -> list[Item]:
    """Return every 16-bit NaN, quiet and signalling NaNs of 32 and 64 bits, -0.0, infinities and subnormals."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    words = [0x7FC00001, 0x7F800001, -0x3FEDCC, -0x7FFFFF, 0x7F800000, -0x800000, -0x80000000, 1]
    longs = [0x7FF8000000000001, 0x7FF0000000000001, -0x7EDCBA9876543, -(1 << 63), 1, 0x7FF0000000000000]
    return [
        _of_tensor("every.float16_", halves.view(torch.float16)),
        _of_tensor("every.bfloat16_", halves.view(torch.bfloat16)),
        _of_tensor("every.columns", halves.view(torch.bfloat16).view(256, 256).t()),
        _of_tensor("some.float32_", torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)),
        _of_tensor("some.float64_", torch.tensor(longs, dtype=torch.int64).view(torch.float64)),
        _of_tensor("minus_zero", torch.tensor([-0.0, 0.0, -0.0])),
    ]


def _names() -> list[Item]:
    names = ["a", "b.c", "model.layers.0.self_attn.q_proj.weight", "Grüße.重み.🙂", "with space/slash\\", "x" * 1024]
    return [item(name, "int32", (3,)) for name in names]


PAYLOADS: tuple[Payload, ...] = (
    Payload("plain", lambda: [item(f"layers.{i}.weight", "bfloat16", (8, 16)) for i in range(6)], 1024),
    Payload("empty_stream", list),
    Payload("empty_tensors", _empty_tensors),
    Payload("only_empty_tensors", lambda: [item("a", "float32", (0, 4)), item("b", "bool", (0,))]),
    Payload("zero_dims", lambda: [item(f"zero.of_{dtype}", dtype, ()) for dtype in ("bool", "bfloat16", "int64")]),
    Payload("sixteen_dims", lambda: [item("deep", "float16", (1, 2) * 8)]),
    Payload("every_dtype", lambda: [item(f"of.{dtype}_", dtype, (3, 5)) for dtype in DTYPES]),
    Payload("odd_byte_counts", _odd_byte_counts),
    Payload("non_contiguous", _non_contiguous),
    Payload("tied", _tied),
    Payload("groups", _groups),
    Payload(
        "larger_than_bucket",
        lambda: [
            item("before", "int16", (100,)),
            item("rows", "bfloat16", (100, 200)),
            item("row_wider_than_a_bucket", "float32", (3, 1500)),
            item("deep", "int16", (2, 3, 2500)),
            item("flat", "uint8", (10_001,)),
            item("after", "int16", (3,)),
        ],
    ),
    Payload("exact_boundary", _exact_boundary),
    Payload("many_tiny", lambda: [item(f"tiny.{i}", "bfloat16", (i % 7 + 1,)) for i in range(2000)], 1 << 16),
    Payload("special_floats", _special_floats, 1 << 17),
    Payload("names", _names),
)
"""Ordered from plain to odd; every seam's contract suite runs over all of it."""


def payloads(*, without_dtypes: Iterable[str] = (), without: Iterable[str] = ()) -> list[Payload]:
    """Return the table without the payloads that hold one of these dtypes or have one of these names.

    Raises ValueError for a name that is not in the table, so that a renamed payload is not kept by accident.
    """
    unknown = set(without) - {payload.name for payload in PAYLOADS}
    if unknown:
        raise ValueError(
            f"`without` names payloads that are not in PAYLOADS: {', '.join(sorted(unknown))}; known: "
            f"{', '.join(payload.name for payload in PAYLOADS)}"
        )
    left_out = set(without_dtypes)
    return [p for p in PAYLOADS if p.name not in set(without) and left_out.isdisjoint(s.dtype for s in p.specs())]


class OverPayloads:
    """Tests over the payload table. Override `payload`, with `params=payloads(...)`, to leave out payloads."""

    @pytest.fixture(params=PAYLOADS, ids=str)
    def payload(self, request: pytest.FixtureRequest) -> Payload:
        payload: Payload = request.param
        return payload
