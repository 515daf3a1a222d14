"""A trainer of one rank whose source holds tensors in several regions, as Megatron's fused qkv does."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gather.squad import CUTS, piece
from hypothesis import given, settings
from hypothesis import strategies as st
from publishers import publisher_of
from safetensors.torch import load_file

from core.direct import DirectEngine, RecordingEngine
from weightcast.errors import IncompatibleWeightsError
from weightcast.format import geometry
from weightcast.format.bucket import Layout
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec
from weightcast.format.plan import plan
from weightcast.seams.source import Held, Regions
from weightcast.sources.store import StoreSource
from weightcast.trainer import export
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.packer import Packer, SeenRegions, Shard
from weightcast.trainer.publisher import Publisher


class RegionSource:
    """Regions of tensors in memory of their own."""

    def __init__(self, tensors: dict[str, torch.Tensor], regions: Regions) -> None:
        self._specs = tuple(
            TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
        )
        self._regions = regions

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def heads(rows: int, groups: int, columns: int = 64) -> tuple[dict[str, torch.Tensor], dict[str, list[Held]]]:
    """Megatron's fused qkv of so many query groups, and the three tensors that a checkpoint has instead."""
    fused = torch.randn(groups, 3, rows, columns)
    names = ("q", "k", "v")
    tensors = {name: fused[:, number].reshape(-1, columns).clone() for number, name in enumerate(names)}
    regions = {
        name: [(Region((group * rows, 0), (rows, columns)), fused[group, number]) for group in range(groups)]
        for number, name in enumerate(names)
    }
    return tensors, regions


def published(source: Any, transport: str, **options: Any) -> dict[str, torch.Tensor]:
    with (
        contextlib.closing(DirectEngine("engine", RecordingEngine())) as engine,
        publisher_of(source, transport=transport, engines=[engine], **options, deadline_seconds=60.0) as publisher,
    ):
        publisher.publish()
        publisher.publish()
        return dict(engine.engine.held)


@pytest.mark.parametrize("transport", ["memory://", "ipc://"])
@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("bucket_size_bytes", [4096, 1 << 20])
def test_query_groups_of_one_rank_arrive_whole(transport: str, install: str, bucket_size_bytes: int) -> None:
    tensors, regions = heads(8, 4)
    held = published(RegionSource(tensors, regions), transport, install=install, bucket_size_bytes=bucket_size_bytes)
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


def test_large_regions_are_digested_and_copied_right() -> None:
    """Above the size from which a copy is made on its own."""
    tensors, regions = heads(600, 2, columns=256)
    held = published(RegionSource(tensors, regions), "memory://")
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


def test_a_store_and_an_export_have_them_whole(tmp_path: Path) -> None:
    tensors, regions = heads(8, 4)
    source = RegionSource(tensors, regions)
    url = f"file://{tmp_path}/store"
    with Publisher(source, transport=url, options=PublishOptions(bucket_size_bytes=4096)) as publisher:
        publisher.publish()
    export.export(source, tmp_path / "direct")
    export.export(StoreSource(url), tmp_path / "stored")
    for directory in ("direct", "stored"):
        found = load_file(tmp_path / directory / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_masters_in_regions_are_cast(tmp_path: Path) -> None:
    tensors, regions = heads(8, 3)
    whole_tensor = torch.arange(6.0)
    source = RegionSource(
        {name: tensor.bfloat16() for name, tensor in tensors.items()} | {"whole": whole_tensor.bfloat16()},
        regions | {"whole": ((geometry.whole((6,)), whole_tensor),)},
    )
    held = published(source, "memory://", bucket_size_bytes=4096)
    export.export(source, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in (tensors | {"whole": whole_tensor}).items():
        assert torch.equal(held[name], tensor.bfloat16())
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(exported[name], tensor.bfloat16())


def test_other_views_of_the_same_memory_in_the_same_mapping_are_refused() -> None:
    """What is packed would be the former views, at the same address."""
    memory = torch.rand(4, 4)
    held: dict[str, Sequence[Held]] = {"w": ((geometry.whole((4, 4)), memory),)}
    seen = SeenRegions(held)
    held["w"] = ((geometry.whole((4, 4)), memory[:]),)
    assert seen.is_of(held)
    held["w"] = ((geometry.whole((4, 4)), memory.t()),)
    with pytest.raises(IncompatibleWeightsError, match="views of other shapes, strides or dtypes"):
        seen.is_of(held)


def test_the_same_regions_may_lie_otherwise_in_other_memory() -> None:
    layout = Layout(plan([TensorSpec("w", "float32", (4, 12))], 4096))
    payload = torch.zeros(layout.manifest.max_bucket_bytes, dtype=torch.uint8)
    packer: Packer | None = None
    for sizes in ((3, 4), (12,), (4, 3)):
        view = torch.rand(4, *sizes)
        shards = [Shard(0, geometry.whole((4, 12)), view)]
        if packer is None:
            packer = Packer(layout, shards)
        packer.rebind(shards)
        packer.pack(0, payload)
        assert torch.equal(payload[: view.nbytes].view(torch.float32), view.flatten())


@st.composite
def tilings(draw: st.DrawFn) -> tuple[torch.Tensor, list[Held]]:
    """A tensor cut at random planes, region by region, some of which lie transposed in memory of their own."""
    shape = draw(st.lists(st.integers(1, 9), max_size=3))
    tensor = (
        torch.arange(torch.Size(shape).numel()).reshape(shape).to(draw(st.sampled_from([torch.float32, torch.int8])))
    )
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for start, size in ((0, at), (at, sizes[dim] - at)):
            low, much = list(offsets), list(sizes)
            low[dim], much[dim] = offsets[dim] + start, size
            boxes.append((tuple(low), tuple(much)))
    held = []
    for offsets, sizes in draw(st.permutations(boxes)):
        region, view = piece(tensor, offsets, sizes)
        copied = view.clone() if draw(st.booleans()) else view.mT.contiguous().mT if view.dim() > 1 else view
        held.append((region, copied))
    return tensor, held + held[: draw(st.integers(0, 1))]


@settings(max_examples=60, deadline=None)
@given(st.lists(tilings(), min_size=1, max_size=4), st.sampled_from([256, 512, 1 << 16]))
def test_any_tiling_is_packed(cut: list[tuple[torch.Tensor, list[Held]]], bucket_size_bytes: int) -> None:
    tensors = {f"t{number}": tensor for number, (tensor, _) in enumerate(cut)}
    source = RegionSource(tensors, {f"t{number}": held for number, (_, held) in enumerate(cut)})
    found = published(source, "memory://", bucket_size_bytes=bucket_size_bytes)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("cut", ["strided", "transposed", "columns", "alternating"])
def test_every_shape_and_dtype_in_regions_of_one_rank(cut: str) -> None:
    """The shards that four ranks would have, all held by one."""
    from gather.squad import MODELS

    tensors = MODELS["table"](1)
    regions = {
        name: list(itertools.chain.from_iterable(CUTS[cut](tensor, rank, 4) for rank in range(4)))
        for name, tensor in tensors.items()
    }
    held = published(RegionSource(tensors, regions), "memory://", bucket_size_bytes=4096)
    assert all(
        torch.equal(held[n].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)) for n, t in tensors.items()
    )


@pytest.mark.parametrize("inner", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_what_alternates_is_packed_from_where_it_lies_in_blocks(inner: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(3 * 16 * 50).to(dtype).reshape(3, 16 * 50)
    blocks = tensor.reshape(3, -1, inner).transpose(1, 2).contiguous()
    source = RegionSource({"t": tensor}, {"t": [(Region((0, 0), (3, 16 * 50)), blocks.transpose(1, 2))]})
    assert torch.equal(published(source, "memory://", bucket_size_bytes=256)["t"], tensor)


def whole(rows: int, at: int = 0) -> Held:
    return Region((at, 0), (rows, 3)), torch.ones(rows, 3)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], r"'b' of shape \[4, 3\] from the regions none: .* hold 0 of its 12 elements: missing"),
        ([whole(2)], r"'b' of shape \[4, 3\] .* hold 6 of its 12 elements: missing or doubled"),
        ([whole(2), whole(1, at=3)], r"'b' .* from the regions \[0, 0\]\+\[2, 3\], .* hold 9 of its 12"),
        ([whole(3), whole(3, at=1)], r"'b' .* hold 18 of its 12 elements: missing or doubled"),
        ([whole(2), whole(2, at=1)], r"'b' .*overlap"),
        ([whole(5)], r"'b': found a region at \[0, 0\] of sizes \[5, 3\]"),
        ([(Region((0, 0), (4, 3)), torch.ones(3, 4))], r"'b': found a view of \[3, 4\]"),
        ([(Region((0, 0), (4, 3)), torch.ones(4, 1, 3))], r"'b': found a view of \[4, 1, 3\]"),
        ([(Region((0, 0), (4, 3)), torch.ones(4, 3, device="meta"))], "'b': found a view .* on meta.*, expected"),
        ([(Region((0, 0), (4, 3)), torch.ones(4, 3).to_sparse())], "'b': found a view .* without memory, expected"),
    ],
)
def test_what_does_not_tile_is_refused_by_name(held: list[Held], message: str) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(4, 3)}
    regions = {"a": [(Region((0,), (2,)), tensors["a"])], "b": held}
    with pytest.raises(IncompatibleWeightsError, match=f"the source's regions do not fit: {message}"):
        published(RegionSource(tensors, regions), "memory://")


def test_a_vector_in_the_place_of_a_scalar_is_refused_by_name() -> None:
    tensors = {"scale": torch.tensor(1.0)}
    source = RegionSource(tensors, {"scale": [(Region((), ()), torch.ones(1))]})
    with pytest.raises(IncompatibleWeightsError, match=r"'scale': found a view of \[1\], torch.float32 on cpu.* \[\]"):
        published(source, "memory://")
