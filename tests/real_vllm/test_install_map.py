"""Installs by copies on a real vLLM: of layers that it does not pack; of others by its loader. What is then proven."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from publishers import publisher_of
from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.offline import Offline, OfflineSetup, offline_on
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.packed_copy import pack_with_a_flipped_bit
from real_vllm.servers import TWO, Server
from real_vllm.test_model import BF16, DENSE, EMBEDDING, EXPERTS, HEAD, TIED, engine_of, weights
from real_vllm.trainer import trainer
from weightcast import LocalEngine, TensorSource, cli
from weightcast.cli import exits
from weightcast.errors import PublishError

PLAIN, PLAIN_TIED, PLAIN_EXPERTS = (OfflineSetup(f, packs=False) for f in ("qwen3", "llama-tied", "qwen3-moe"))
TIED_BF16 = OfflineSetup("llama-tied", torch.bfloat16, torch.bfloat16)
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


# --- tables of which vLLM keeps a packed copy, for logits on a CPU ---


@offline_on(TIED, TIED_BF16, DENSE)
@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_one_bit_of_a_packed_copy_is_found(offline: Offline, install: str) -> None:
    tensors = {name: tensor.clone() for name, tensor in weights(offline, 0).items()}
    engine, head = engine_of(offline), offline.model.lm_head
    options = {"transport": "ipc://", "verify": "installed", "install": install, "bucket_size_bytes": 1 << 18}
    with publisher_of(TensorSource(tensors), engines=[LocalEngine(engine)], **options) as publisher:
        for _ in range(2):
            (result,) = publisher.publish().engines.values()
            assert result.unproven.keys().isdisjoint({EMBEDDING, HEAD})
        commit = engine.commit
        for bit in (0, -1):  # the lowest one and the sign

            def corrupting(version: Any, bit: int = bit) -> None:
                commit(version)
                pack_with_a_flipped_bit(head, row=301, column=77, bit=bit)

            engine.commit = corrupting  # type: ignore[method-assign]
            with pytest.raises(PublishError, match=f"{HEAD!r} on rank 0 has .* packed copy .* row 301, column 77: "):
                publisher.publish()
            engine.commit = commit  # type: ignore[method-assign]
            assert publisher.publish().ok
    assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[0]


@offline_on(TIED, TIED_BF16, DENSE)
def test_a_packed_copy_of_any_values_is_known_to_be_whole(offline: Offline) -> None:
    """Kernels may take subnormal numbers for 0, and infinities make NaNs of their rows."""
    tensors = {name: tensor.clone() for name, tensor in weights(offline, 0).items()}
    for name in {EMBEDDING, HEAD} & tensors.keys():
        rows = tensors[name]
        rows[7, :5] = torch.tensor([-0.0, 0.0, 1e-39, -1e-39, torch.finfo(rows.dtype).max])
        rows[8], rows[9], rows[10, 3], rows[11, 3] = 0, 1e-39, torch.inf, torch.nan
    source = TensorSource(tensors)
    engine = engine_of(offline)
    with publisher_of(source, transport="ipc://", engines=[LocalEngine(engine)], verify="installed") as publisher:
        for _ in range(2):
            (result,) = publisher.publish().engines.values()
            assert result.unproven.keys().isdisjoint({EMBEDDING, HEAD})
        for name, tensor in weights(offline, 0).items():
            tensors[name].copy_(tensor)
        assert publisher.publish().ok
    assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[0]


@offline_on(TIED_BF16)
def test_each_bit_that_flips_in_a_packed_copy_is_found(offline: Offline) -> None:
    values = [cell.cell_contents for cell in offline.model.lm_head.cpu_linear.__closure__]
    packed = [value for value in values if isinstance(value, torch.Tensor)]
    if not packed:
        pytest.skip("this CPU has no AMX: vLLM packs with oneDNN, whose memory can't be reached")
    engine = engine_of(offline)
    with publisher_of(TensorSource(weights(offline, 0)), transport="ipc://", engines=[LocalEngine(engine)]) as it:
        it.publish()
        packed = [cell.cell_contents for cell in offline.model.lm_head.cpu_linear.__closure__]
        (words,) = [value.view(torch.int16).view(-1) for value in packed if isinstance(value, torch.Tensor)]
        assert engine.install_map is not None
        for bit in range(16):
            place = 31 + 997 * bit
            words[place] ^= torch.tensor(1 << bit).to(torch.int16)
            (held, head), _ = engine.install_map.held(0, 1 << 20, [EMBEDDING])
            assert (held.unproven, held.fault) == ("", "")
            assert "packed copy" in head.fault, bit
            words[place] ^= torch.tensor(1 << bit).to(torch.int16)
            assert not any(tensor.fault for tensor in engine.install_map.held(0, 1 << 20, [EMBEDDING])[0])


@on(TWO)
def test_a_server_with_a_flipped_bit_in_a_packed_copy_is_found_and_taken_out_of_service(server: Server) -> None:
    verify = ["verify", str(server.folder), "--engine", server.url, "--quarantine"]
    with trainer(server.setup, server.url, verify="installed") as it:
        for _ in range(2):
            (result,) = it.publish(0).engines.values()
            assert result.unproven.keys().isdisjoint({EMBEDDING, HEAD})
            assert cli.main(verify) == exits.OK
        server.call("test_flip_packed_bit", 1)
        assert cli.main(verify) == exits.NEGATIVE
        assert server.complete(PROMPT, 1).status_code != 200
        it.publish(0)
        assert cli.main(verify) == exits.OK
        for path in ("/sleep?level=1", "/wake_up"):
            assert server.post(path).status_code == 200
        assert cli.main(verify) == exits.OK
    assert_serves(server, 0)
