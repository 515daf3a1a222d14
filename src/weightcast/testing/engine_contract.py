"""Tests for every `Engine`: subclass `EngineContract` in a test module and define `engine` and `raw`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from weightcast.errors import IncompleteUpdateError, WeightcastError
from weightcast.format.geometry import Region
from weightcast.format.manifest import WeightVersion
from weightcast.seams.engine import Engine, ExposesTensors, Undoable
from weightcast.seams.install_map import Mapped
from weightcast.serving.admission import require_fit
from weightcast.serving.install import BlockCopies
from weightcast.testing.payloads import OverPayloads, Payload, random_tensor, raw_bytes

ONE, TWO = (WeightVersion("5a" * 16, number) for number in (1, 2))


class EngineContract(OverPayloads):
    """The contract, run over the payload table; override `payload` to leave out payloads the engine can't hold."""

    @pytest.fixture
    def engine(self, payload: Payload) -> Engine:
        """An engine whose model has the payload's names, dtypes, shapes and ties, and other values in them."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture `engine`")

    def raw(self, engine: Engine) -> Mapping[str, bytes]:
        """Return the model's present values under every name, by `raw_bytes`, without any method of the engine."""
        raise NotImplementedError(f"{type(self).__name__} must define `raw`")

    def test_specs_are_those_of_the_model(self, engine: Engine, payload: Payload) -> None:
        specs = engine.specs()
        if specs is None:
            return
        require_fit(payload.specs(), specs)
        assert {n for s in specs for n in s.names} == payload.expected().keys()
        assert engine.specs() is specs

    def test_all_in_one_call(self, engine: Engine, payload: Payload) -> None:
        engine.load((name, tensor) for name, tensor in payload.tensors().items())
        engine.commit(ONE)
        self.assert_holds(engine, payload)

    def test_group_by_group(self, engine: Engine, payload: Payload) -> None:
        calls: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for spec, tensor in payload.build():
            calls.setdefault(spec.load_group, []).append((spec.name, tensor))
        for call in calls.values():
            engine.load(call)
        engine.commit(ONE)
        self.assert_holds(engine, payload)

    def test_twice(self, engine: Engine, payload: Payload) -> None:
        engine.load([(s.name, random_tensor(s.dtype, s.shape, 99)) for s in payload.specs()])
        engine.commit(ONE)
        engine.load(payload.tensors().items())
        engine.commit(TWO)
        self.assert_holds(engine, payload)

    def test_tensors_are_valid_only_during_the_call(self, engine: Engine, payload: Payload) -> None:
        """Their memory is a slot that is overwritten as soon as the call returns."""
        lent = {name: tensor.clone() for name, tensor in payload.tensors().items()}
        engine.load(lent.items())
        for tensor in lent.values():
            tensor.contiguous().reshape(-1).view(torch.uint8).fill_(1)
            if tensor.numel() and tensor.is_contiguous():
                assert set(raw_bytes(tensor)) == {1}
        engine.commit(ONE)
        self.assert_holds(engine, payload)

    def test_an_update_that_lacks_a_tensor_is_not_committed(self, engine: Engine, payload: Payload) -> None:
        """Each of up to four tensors is left out in turn; a tensor without elements may be missing."""
        names = [s.name for s in payload.specs() if 0 not in s.shape]
        for missing in dict.fromkeys([*names[:3], *names[-1:]]):
            engine.load((n, t) for n, t in payload.tensors().items() if n != missing)
            with pytest.raises(IncompleteUpdateError, match=_quoted(missing)):
                engine.commit(ONE)
            engine.discard()
        engine.load(payload.tensors().items())
        engine.commit(ONE)
        self.assert_holds(engine, payload)

    def test_nothing_of_a_discarded_update_counts_for_the_next(self, engine: Engine, payload: Payload) -> None:
        if all(0 in s.shape for s in payload.specs()):
            return
        engine.load(payload.tensors().items())
        engine.discard()
        engine.discard()
        with pytest.raises(IncompleteUpdateError):
            engine.commit(ONE)

    def test_an_unknown_tensor_is_refused_before_anything_is_written(self, engine: Engine, payload: Payload) -> None:
        before = self.raw(engine)
        foreign = ("no.such.tensor", torch.zeros(3))
        with pytest.raises(WeightcastError, match=r"no\.such\.tensor"):
            engine.load([*payload.tensors().items(), foreign])
        assert self.raw(engine) == before

    def test_another_shape_is_refused_before_anything_is_written(self, engine: Engine, payload: Payload) -> None:
        before = self.raw(engine)
        for spec in payload.specs()[-1:]:
            pairs = payload.tensors() | {spec.name: random_tensor(spec.dtype, (*spec.shape, 2), 3)}
            with pytest.raises(WeightcastError, match=_quoted(spec.name)):
                engine.load(pairs.items())
            assert self.raw(engine) == before

    def test_undo(self, engine: Engine, payload: Payload) -> None:
        if not isinstance(engine, Undoable):
            return
        before = self.raw(engine)
        restore = engine.snapshot()
        engine.load(payload.tensors().items())
        restore()
        assert self.raw(engine) == before

    def test_reading(self, engine: Engine, payload: Payload) -> None:
        if not isinstance(engine, ExposesTensors):
            return
        engine.load(payload.tensors().items())
        engine.commit(ONE)
        read = {name: raw_bytes(tensor) for name, tensor in engine.tensors()}
        held = self.raw(engine)
        assert read == {name: held[name] for name in read}
        require_fit([s for s in payload.specs() if s.name in read], payload.specs())

    def test_piece_by_piece(self, engine: Engine, payload: Payload) -> None:
        """Rows are copied as an install does, the last row first; a tensor without rows comes whole."""
        install_map = engine.install_map if isinstance(engine, Mapped) else None
        if not isinstance(engine, Mapped) or install_map is None or not install_map.bind():
            return
        parts: list[tuple[str, Region | None, torch.Tensor]] = []
        others: list[tuple[str, torch.Tensor]] = []
        for name, tensor in payload.tensors().items():
            if name not in install_map.proven:
                others.append((name, tensor))
            elif not (tensor.ndim and tensor.numel() and len(tensor) <= 100 and install_map.can_copy_pieces(name)):
                parts.append((name, None, tensor.contiguous()))
            else:
                parts += (
                    (name, Region((row, *(0 for _ in tensor.shape[1:])), (1, *tensor.shape[1:])), tensor[row, None])
                    for row in reversed(range(len(tensor)))
                )
        engine.begin({name for name, _, _ in parts})
        half = len(parts) // 2
        for some in (parts[:half], parts[half:]):
            blocks = [(name, region) for name, region, _ in some]
            sources = [each for name, region, part in some for each in install_map.source_blocks(name, part, region)]
            BlockCopies(install_map, blocks, sources).run()
        engine.load(others)
        engine.commit(ONE)
        self.assert_holds(engine, payload)

    def assert_holds(self, engine: Engine, payload: Payload) -> None:
        """Assert that the engine's weights are the payload's, bit for bit."""
        found, expected = self.raw(engine), payload.expected()
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []


def _quoted(name: str) -> str:
    """Return a pattern for the start of a name as messages quote it."""
    return "".join(c if c.isalnum() else "." for c in name[:20] if c != "\\")
