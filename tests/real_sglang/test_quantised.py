"""A real SGLang of a quantised checkpoint, which starts on any CPU, though it needs AMX to answer: refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from real_vllm.models import make_model, model_of, save
from safetensors.torch import load_file, save_file

from real_sglang.servers import Server, Setup
from weightcast import ModuleSource, Publisher, PublishError, TensorSource

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def quantised(folder: Path) -> Path:
    """A checkpoint in AWQ's form, with some weights: nobody computes with them."""
    file, config = save(make_model("qwen3", 0, torch.float16), folder) / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        num_outputs, num_inputs = tensors.pop(name).shape
        layer, num_groups = name.removesuffix("weight"), num_inputs // AWQ["group_size"]
        tensors[f"{layer}qweight"] = torch.zeros(num_inputs, num_outputs // 8, dtype=torch.int32)
        tensors[f"{layer}qzeros"] = torch.zeros(num_groups, num_outputs // 8, dtype=torch.int32)
        tensors[f"{layer}scales"] = torch.zeros(num_groups, num_outputs, dtype=torch.float16)
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": AWQ}))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("plugin", [True, False], ids=["plugin", "stock"])
def test_a_quantised_checkpoint_is_refused_without_an_option(tmp_path: Path, plugin: bool) -> None:
    """Whether what comes is quantised or not. No weight of the server changes."""
    said = "quantization='awq'" if plugin else "serves weights such as 'model.layers.0.mlp.down_proj.qweight'"
    setup, folder = Setup(dtype=torch.float16, plugin=plugin), quantised(tmp_path)
    plain, own = ModuleSource(model_of("qwen3", 0, torch.float16)), load_file(folder / "model.safetensors")
    with Server(setup, folder) as server:
        before = server.checksums(), server.version()
        for source in (plain, TensorSource(own)):
            with Publisher(source, engines=[server.url]) as publisher, pytest.raises(PublishError) as refused:
                publisher.publish()
            assert said in str(refused.value)
            assert "that is not quantised" in str(refused.value)
            assert (server.checksums(), server.version()) == before
