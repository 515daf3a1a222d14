"""Tests for every `Source`: subclass `SourceContract` in a test module and define the fixture `source`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightcast.format.bucket import Layout
from weightcast.format.geometry import check_tiling
from weightcast.format.plan import plan
from weightcast.seams.source import Source
from weightcast.testing.payloads import DTYPES, OverPayloads, Payload, raw_bytes, region_slices
from weightcast.testing.transport_kit import unpack, version
from weightcast.trainer.packer import Packer, tiling


class SourceContract(OverPayloads):
    """The contract, run over the payload table; override `payload` to leave out payloads the source can't hold."""

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
        """The only trainer rank holds everything here, so its regions tile each tensor."""
        expected = payload.expected()
        regions = source.regions()
        for spec in source.specs():
            for region, view in regions[spec.name]:
                sizes = view.flatten(-2).shape if view.dim() > len(region.sizes) else view.shape
                assert (tuple(sizes), view.dtype) == (region.sizes, DTYPES[spec.dtype])
            filled = [region for region, _ in regions[spec.name] if region.numel]
            check_tiling(filled, spec.shape, spec.name)
            itemsize = DTYPES[spec.dtype].itemsize
            joined = np.zeros((*spec.shape, itemsize), np.uint8)
            for region, view in regions[spec.name]:
                data = np.frombuffer(raw_bytes(view), np.uint8)
                joined[region_slices(region)] = data.reshape((*region.sizes, itemsize))
            assert {joined.tobytes()} == {expected[name] for name in spec.names}

    def test_nothing_changes_while_nothing_changes(self, source: Source) -> None:
        """A publisher keeps its plan as long as the source returns the same objects."""
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
        packer = Packer(Layout(manifest), tiling(manifest.tensors, source.regions()))
        packed = []
        for index, num_bytes in enumerate(manifest.buckets):
            payload_bytes = torch.zeros(num_bytes, dtype=torch.uint8)
            packer.fill(index, payload_bytes, version(1))
            packed.append(raw_bytes(payload_bytes))
        expected = payload.expected()
        assert unpack(manifest, packed) == {name: expected[name] for r in manifest.tensors for name in r.names}
