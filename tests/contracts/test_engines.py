"""The engine contract over every engine there is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from contracts.modules import bits_of, module_of

from weightcast.engines.module import ModuleEngine
from weightcast.seams.engine import Engine
from weightcast.testing import EngineContract, Payload
from weightcast.testing.payloads import random_tensor


class TestModuleEngine(EngineContract):
    @pytest.fixture
    def engine(self, payload: Payload) -> Engine:
        self.module = module_of([(spec, random_tensor(spec.dtype, spec.shape, 5)) for spec in payload.specs()])
        return ModuleEngine(self.module)

    def raw(self, engine: Engine) -> Mapping[str, bytes]:
        return bits_of(self.module)


class TestModuleEngineOfStridedParameters(TestModuleEngine):
    """Parameters whose memory is not in row-major order, as after a transposition or in channels_last."""

    @pytest.fixture
    def engine(self, payload: Payload) -> Engine:
        items = [(s, _strided(random_tensor(s.dtype, s.shape, 5))) for s in payload.specs()]
        self.module = module_of(items)
        return ModuleEngine(self.module)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim < 2:
        return tensor
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)
