"""What every `Source` must do. Subclass `SourceContract` in a test module and fill in one fixture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from weightcast.format.bucket import Layout, slot_size_bytes
from weightcast.format.geometry import check_tiling
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.seams.source import Held, Source
from weightcast.testing.payloads import DTYPES, PAYLOADS, Payload, raw_bytes
from weightcast.trainer.packer import Packer, tiling

_VERSION = WeightVersion("5a" * 16, 1)


def _joined(spec: TensorSpec, held: Sequence[Held]) -> bytes:
    """The bytes of a tensor from its regions."""
    itemsize = DTYPES[spec.dtype].itemsize
    tensor = np.zeros((*spec.shape, itemsize), np.uint8)
    for region, view in held:
        where = tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))
        tensor[where] = np.frombuffer(raw_bytes(view), np.uint8).reshape((*region.sizes, itemsize))
    return tensor.tobytes()


class SourceContract:
    """Runs over the payload table; override `payload` with `params=payloads(without=...)` for what can't be held."""

    @pytest.fixture(params=PAYLOADS, ids=str)
    def payload(self, request: pytest.FixtureRequest) -> Payload:
        payload: Payload = request.param
        return payload

    @pytest.fixture
    def source(self, payload: Payload) -> Source:
        """A source that holds what `payload.build()` gives. Tied names may be records of their own."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture `source`")

    def test_specs_name_every_tensor_once(self, source: Source, payload: Payload) -> None:
        expected = {n: (s.dtype, s.shape) for s, _ in payload.build() for n in s.names}
        found = [(name, (spec.dtype, spec.shape)) for spec in source.specs() for name in spec.names]
        assert len(found) == len(expected)
        assert dict(found) == expected

    def test_a_region_for_every_spec(self, source: Source) -> None:
        assert {spec.name for spec in source.specs()} == set(source.regions())

    def test_regions_are_the_bits_of_the_tensors(self, source: Source, payload: Payload) -> None:
        """One trainer rank holds everything here, so that its regions tile each tensor."""
        expected = payload.expected()
        regions = source.regions()
        for spec in source.specs():
            for region, view in regions[spec.name]:
                assert (tuple(view.shape), view.dtype) == (region.sizes, DTYPES[spec.dtype])
            filled = [region for region, _ in regions[spec.name] if region.numel]
            check_tiling(filled, spec.shape, spec.name)
            assert {_joined(spec, regions[spec.name])} == {expected[name] for name in spec.names}

    def test_nothing_changes_while_nothing_changes(self, source: Source) -> None:
        """A publisher keeps its plan as long as it is given the same objects."""
        assert source.specs() is source.specs()
        assert source.regions() is source.regions()

    def test_regions_are_views_and_no_copies(self, source: Source) -> None:
        pointers, again = (
            [[view.data_ptr() for _, view in held] for held in source.regions().values()] for _ in range(2)
        )
        assert pointers == again

    @pytest.mark.parametrize("bucket_size_bytes", [256, 4096, 1 << 20])
    def test_what_it_describes_can_be_packed(self, source: Source, payload: Payload, bucket_size_bytes: int) -> None:
        manifest = plan(source.specs(), max(bucket_size_bytes, payload.bucket_size_bytes // 64))
        layout = Layout(manifest)
        packer = Packer(layout, tiling(source.specs(), source.regions()))
        expected = payload.expected()
        held = {r.name: np.zeros((*r.shape, DTYPES[r.dtype].itemsize), np.uint8) for r in manifest.tensors}
        for index, entries in enumerate(layout.entries):
            buffer = torch.zeros(slot_size_bytes(manifest), dtype=torch.uint8)
            packer.pack(index, buffer, _VERSION)
            for entry in entries:
                region, itemsize = entry.piece.region, DTYPES[entry.record.dtype].itemsize
                start = entry.piece.offset_bytes
                data = buffer.numpy()[start : start + region.numel * itemsize].reshape((*region.sizes, itemsize))
                where = tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))
                held[entry.record.name][where] = data
        assert {n: a.tobytes() for n, a in held.items()} == {r.name: expected[r.name] for r in manifest.tensors}
