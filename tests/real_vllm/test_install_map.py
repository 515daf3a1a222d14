"""Installs by copies on a real vLLM of one rank: of layers that it does not pack; of the others by its loader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from publishers import publisher_of

from real_vllm.offline import Offline, OfflineSetup, offline_on
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.test_model import BF16, DENSE, EXPERTS, TIED, engine_of, weights
from weightcast import LocalEngine, TensorSource
from weightcast.errors import PublishError

PLAIN, PLAIN_TIED, PLAIN_EXPERTS = (OfflineSetup(f, packs=False) for f in ("qwen3", "llama-tied", "qwen3-moe"))
PLAIN_LATENT = OfflineSetup("deepseek-v2", packs=False, attention="CPU_MLA")


@contextlib.contextmanager
def loads_counted(offline: Offline) -> Iterator[list[str]]:
    """The names that vLLM's own loader is given."""
    loader, names = offline.model.load_weights, list[str]()

    def counting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return loader(((names.append(name), (name, tensor))[1] for name, tensor in tensors), *args, **kwargs)

    offline.model.load_weights = counting
    try:
        yield names
    finally:
        del offline.model.load_weights


@offline_on(PLAIN, PLAIN_TIED, PLAIN_EXPERTS, PLAIN_LATENT, DENSE, EXPERTS, TIED, BF16)
def test_what_is_copied_is_what_a_cold_start_has(offline: Offline) -> None:
    tensors = {name: tensor.clone() for name, tensor in weights(offline, 0).items()}
    engine = engine_of(offline)
    options = {"transport": "ipc://", "verify": "installed", "bucket_size_bytes": 1 << 18}
    with publisher_of(TensorSource(tensors), engines=[LocalEngine(engine)], **options) as publisher:
        for number, seed in enumerate((1, 0, 1, 0), 1):
            for name, tensor in weights(offline, seed).items():
                tensors[name].copy_(tensor)
            with loads_counted(offline) as names:
                report = publisher.publish(number)
            assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[seed]
    (result,) = report.engines.values()
    assert engine.install_map is not None
    # Nothing that is proven is loaded, and all that is loaded has a reason.
    assert set(names) == engine.install_map.opaque.keys()
    # Some CPUs have no kernel for packed bfloat16: vLLM leaves its layers as they are there.
    if offline.setup.packs and (names or offline.setup != BF16):
        assert any("in another form than a checkpoint" in reason for reason in engine.install_map.opaque.values())
    elif offline.setup in (PLAIN, PLAIN_TIED, BF16):
        assert not names
        assert not result.unproven or offline.setup == BF16  # whose weights are cast on the way
    else:
        assert all("experts" in name or "gate" in name for name in names)


@offline_on(PLAIN, DENSE)
def test_a_loader_that_computes_something_fills_every_layer(offline: Offline) -> None:
    """It is tried twice, and a load fills the layers that vLLM packs in the calls of one of these."""
    loader = offline.model.load_weights

    def computing(tensors: Any) -> Any:
        return loader((name, tensor * 1 if name.endswith("norm.weight") else tensor) for name, tensor in tensors)

    tensors = {name: tensor.clone() for name, tensor in weights(offline, 0).items()}
    offline.model.load_weights = computing
    try:
        engine = engine_of(offline)
        with publisher_of(TensorSource(tensors), transport="ipc://", engines=[LocalEngine(engine)]) as publisher:
            for number, seed in enumerate((1, 0), 1):
                for name, tensor in weights(offline, seed).items():
                    tensors[name].copy_(tensor)
                assert publisher.publish(number).ok
                assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[seed]
    finally:
        del offline.model.load_weights
    assert engine.install_map is not None
    reasons = [reason for name, reason in engine.install_map.opaque.items() if name.endswith("norm.weight")]
    assert reasons
    assert all("made from it" in reason for reason in reasons)


@offline_on(PLAIN)
def test_one_bit_of_a_fused_weight_is_found(offline: Offline) -> None:
    tensors = {name: tensor.clone() for name, tensor in weights(offline, 0).items()}
    engine = engine_of(offline)
    with publisher_of(
        TensorSource(tensors), transport="ipc://", engines=[LocalEngine(engine)], verify="installed"
    ) as publisher:
        publisher.publish(1)
        qkv = offline.model.get_parameter("model.layers.1.self_attn.qkv_proj.weight")
        commit = engine.commit

        def corrupting(version: Any) -> None:
            commit(version)
            qkv.data[-1].view(torch.int32)[3] ^= 1

        engine.commit = corrupting  # type: ignore[method-assign]
        with pytest.raises(PublishError, match=r"'model\.layers\.1\.self_attn\.v_proj\.weight' on rank 0 at \[0, 0\]"):
            publisher.publish(2)
        engine.commit = commit  # type: ignore[method-assign]
        assert publisher.publish(3).ok
    assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[0]
