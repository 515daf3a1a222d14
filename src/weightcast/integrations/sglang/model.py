"""One rank's model of a running SGLang as an engine: dry runs, installs through its own loader, undo.

Invariant: a load makes the same calls as SGLang's own weight update session, begun and ended around the install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.errors import InstallError
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.checkpoint_header import reference
from weightcast.integrations.plugin.draft import ModelWithDraft
from weightcast.integrations.plugin.dry_run import DryRunOutcome, dry_run, twin
from weightcast.integrations.plugin.model import LoaderEngine
from weightcast.integrations.sglang import internals
from weightcast.integrations.sglang.adapters import SglangAdapters


class SglangModel(LoaderEngine):
    """The model of a scheduler process. `runner`: SGLang's ModelRunner.

    `draft`: that of a draft model that is updated with it. `flush`: empties every cache, and returns whether it could.
    Raises UnsupportedError if this SGLang lacks a required name, or if a model's loader fails in a dry run. With
    `unsupported` features every offer is refused.
    """

    host = "SGLang"

    def __init__(
        self,
        runner: Any,
        *,
        unsupported: Sequence[str],
        flush: Callable[[], bool],
        draft: Any = None,
        is_alone: bool = True,
    ) -> None:
        runners = [runner] if draft is None else [runner, draft]
        for each in runners:
            internals.require(each, "model", "model_config", "weight_updater", "server_args", "lora_manager")
            internals.require(each.weight_updater, "begin_weight_update", "end_weight_update")
        model: nn.Module = runner.model
        self._runner = runner
        if draft is not None and not unsupported:
            path = draft.model_config.model_path
            model = ModelWithDraft(
                model,
                draft.model,
                None if self._header() is None else self._header(draft),
                self._dry_run,
                # A small model has a checkpoint of its own, even if that is the main model's.
                is_in_model=path == runner.model_config.model_path and not draft.spec_algorithm.is_standalone(),
                remedy=f"start SGLang with {internals.KEEP_DRAFT}",
            )
        self._sessions: list[Any] = [each.weight_updater for each in runners]
        self._is_in_session = False
        self._flush = flush
        self.device = next(model.parameters()).device
        manager = runner.lora_manager
        self.adapters = None if manager is None else SglangAdapters(manager, runner.server_args, self._header)
        super().__init__(model, unsupported, is_alone=is_alone)

    def _header(self, runner: Any = None) -> Sequence[TensorSpec] | None:
        """Return the tensors of a runner's checkpoint, by default the main model's."""
        runner = runner or self._runner
        config, cache = runner.model_config, runner.server_args.download_dir
        return reference(config.model_path, revision=config.revision, cache_dir=cache)

    def _dry_run(self, model: nn.Module, specs: Sequence[TensorSpec]) -> DryRunOutcome:
        return dry_run(model, _without_memory, specs)

    def _begin_load(self, calls: Mapping[str, int]) -> None:
        self._is_in_session = True
        for session in self._sessions:
            session.begin_weight_update()

    def _end_load(self) -> None:
        if self._is_in_session:
            self._is_in_session = False
            for session in self._sessions:
                session.end_weight_update(run_post_load=False)

    def _drop_caches(self) -> None:
        if not self._flush():
            raise InstallError(
                "SGLang could not drop the caches of the former weights, since requests were running: publish again",
                torn=True,
            )


def _without_memory(layer: nn.Module, _: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the layer's tensors without memory, in their present form, since SGLang does not repack plain weights."""
    parameters = {name: twin(t) for name, t in layer._parameters.items() if t is not None}
    # Loaders read integer buffers, such as maps of experts.
    buffers = {name: twin(t) if t.is_floating_point() else t for name, t in layer._buffers.items() if t is not None}
    return parameters, buffers
