"""The header of the checkpoint that this vLLM was started from."""

from __future__ import annotations

from typing import Any

from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin import checkpoint_header


def reference(vllm_config: Any) -> list[TensorSpec] | None:
    """Every tensor of the start-up checkpoint; None, and a warning in the log, if it can't be known."""
    model, load = vllm_config.model_config, vllm_config.load_config
    return checkpoint_header.reference(model.model, revision=model.revision, cache_dir=load.download_dir)
