"""Models with draft models that now and then propose what the model takes: as checkpoints, and as sources.

The blocks of both add little to the embedding of the last token, so that a draft model of the same embedding and head
often proposes what the model would, and one of another seed hardly ever does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from real_vllm.models import make_model, save
from real_vllm.trainer import checkpoint_tensors
from weightcast import ModuleSource, TensorSource
from weightcast.sources.joined import JoinedSource

MTP_LAYER = "model.layers.3."
Tensors = dict[str, torch.Tensor]


def make_main(family: str, seed: int) -> Any:
    model = make_model(family, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= 0.015
    return model


def draft_tensors(method: str, main: Any) -> Tensors:
    """The tensors of a draft model of that method for a model, as in the checkpoint that has them."""
    tensors, norm = checkpoint_tensors(main), main.model.norm.weight.data
    eye, zeros = torch.eye(len(norm)), torch.zeros(len(norm), len(norm))
    if method == "draft_model":
        return {name: t.clone() for name, t in tensors.items() if ".layers." not in name or ".layers.0." in name}
    if method == "eagle":
        block = {n.removeprefix("model."): t.clone() for n, t in tensors.items() if n.startswith("model.layers.0.")}
        for name in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm"):  # Llama's EAGLE has none
            del block[f"layers.0.{name}.weight"]
        return block | {"fc.weight": torch.cat([torch.diag(norm), zeros], dim=1)}
    block = {n: t.clone() for n, t in tensors.items() if n.startswith("model.layers.2.")}
    return {n.replace("model.layers.2.", MTP_LAYER): t for n, t in block.items()} | {
        f"{MTP_LAYER}enorm.weight": torch.ones_like(norm),
        f"{MTP_LAYER}hnorm.weight": torch.ones_like(norm),
        f"{MTP_LAYER}eh_proj.weight": torch.cat([eye, zeros], dim=1),
        f"{MTP_LAYER}shared_head.norm.weight": norm.clone(),
        # The checkpoints of DeepSeek and GLM have copies of these, which vLLM replaces by the model's.
        f"{MTP_LAYER}embed_tokens.weight": zeros.new_zeros(main.config.vocab_size, len(norm)),
    }


class Pair:
    """A model of `family` and its draft model, both of a seed: their checkpoints, and what a trainer publishes."""

    def __init__(self, family: str, method: str) -> None:
        self.family = family
        self.method = method
        self.prefix = "" if method == "mtp" else "draft."
        self._main = make_main(family, 0)
        self.draft = TensorSource(self.draft_of(0))
        self.main = ModuleSource(self._main)
        self.source = JoinedSource(self.main, self.draft)

    def draft_of(self, seed: int) -> Tensors:
        """The draft model's tensors under their published names."""
        tensors = draft_tensors(self.method, make_main(self.family, seed))
        if self.method == "mtp":  # trainers do not have these
            del tensors[f"{MTP_LAYER}embed_tokens.weight"]
        return {f"{self.prefix}{name}": tensor for name, tensor in tensors.items()}

    def step_to(self, seed: int) -> None:
        self._main.load_state_dict(make_main(self.family, seed).state_dict())
        self.draft.replace(self.draft_of(seed))

    def save(self, seed: int, folder: Path) -> tuple[Path, Path | None]:
        """Write the checkpoints of the model and of its draft model, if that has its own."""
        main = make_main(self.family, seed)
        own, draft = draft_tensors(self.method, main), folder / "draft"
        save(main, folder)
        config = json.loads((folder / "config.json").read_text())
        if self.method == "mtp":
            _write(folder, load_file(folder / "model.safetensors") | own, config | {"num_nextn_predict_layers": 1})
            return folder, None
        draft.mkdir()
        config["num_hidden_layers"] = 1
        del config["layer_types"]
        if self.method == "eagle":
            config |= {"model_type": "llama", "architectures": ["EagleLlamaForCausalLM"]}
        _write(draft, own, config)
        return folder, draft


def _write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
