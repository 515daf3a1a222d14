"""Experts that vLLM's load balancer (EPLB) has moved between ranks, some of them in several places.

The oracle is a server that started cold from the published weights, and whose experts vLLM's own code has moved to the
same places: all its tensors and its answers are equal, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
from real_engines.setups import on

from real_vllm.conftest import Checkpoints
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.servers import BALANCED, Server
from real_vllm.trainer import IPC, trainer
from weightcast import Publisher
from weightcast.errors import InstallError

Load = Sequence[Sequence[int]]
"""Of each expert, by layer."""
LOADS: Sequence[Load] = (
    [[1, 9, 1, 5], [7, 1, 1, 1], [1, 1, 1, 8]],
    [[9, 1, 5, 1], [1, 7, 7, 1], [1, 8, 1, 1]],
    [[1, 1, 9, 9], [1, 1, 1, 7], [8, 8, 1, 1]],
)
