"""One rank's model of a running vLLM as an engine: dry runs, installs through vLLM's own loader, undo.

Invariants: a load is one layerwise reload, after which no layer is left on the meta device, also if it fails; a dry run
does not change vLLM's own records.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from weightcast.errors import UnsupportedError, listed
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin import checkpoint_header
from weightcast.integrations.plugin import dry_run as loader_dry_run
from weightcast.integrations.plugin.draft import ModelWithDraft
from weightcast.integrations.plugin.dry_run import DryRunOutcome, present
from weightcast.integrations.plugin.model import LoaderEngine, Tensors
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.adapters import VllmAdapters
from weightcast.integrations.vllm.expert_placement import (
    Placement,
    expert_placements,
    require_unmoved,
    with_placement,
)
from weightcast.integrations.vllm.layerwise_load import (
    Filling,
    has_packed_copy,
    has_plain_weights,
    in_checkpoint_form,
    is_cpu_experts,
    is_packed,
    packed_copy_fault,
    without_memory,
)


class VllmModel(LoaderEngine):
    """The model of a vLLM worker. `draft`: a draft model that is updated with it.

    Raises UnsupportedError if this vLLM lacks a required name, or if the model's loader fails in a dry run. With a
    feature of `internals.unsupported` every offer is refused.
    """

    host = "vLLM"
    may_move = True

    def __init__(
        self, model: nn.Module, vllm_config: Any, device: torch.device, *, draft: nn.Module | None = None
    ) -> None:
        internals.require()
        self.device = device
        self._vllm_config = vllm_config
        unsupported = internals.unsupported(vllm_config, model)
        if draft is None and not unsupported and internals.updates_draft(vllm_config):
            unsupported.append(
                f"speculative_config (vLLM's worker has no draft model; {internals.KEEP_DRAFT} permits it)"
            )
        has_adapters = vllm_config.lora_config is not None
        self.adapters = VllmAdapters(model, vllm_config, self._header) if has_adapters else None
        if draft is not None and not unsupported:
            model = self._with_draft(model, draft)
        self._fillings: list[Filling] = []
        self._placements: dict[nn.Module, Placement] = {}
        parallel = vllm_config.parallel_config
        num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        super().__init__(model, unsupported, is_alone=num_ranks == 1)

    def _with_draft(self, model: nn.Module, draft: nn.Module) -> nn.Module:
        """Return both models as one.

        Raises UnsupportedError if the names of the draft model's tensors can't be known, or if it depended on the
        values at the start whether a tensor is the model's.
        """
        config = self._vllm_config
        started, remedy = config.speculative_config.draft_model_config, f"start vLLM with {internals.KEEP_DRAFT}"
        is_in_model = started.model == config.model_config.model and config.speculative_config.method == "mtp"
        both = ModelWithDraft(
            model,
            draft,
            None if self._header() is None else self._header(started),
            self._dry_run,
            is_in_model=is_in_model,
            remedy=remedy,
            loading=internals.require().any_mtp_layers,
        )
        if both.replaced and not is_in_model:
            raise UnsupportedError(
                f"vLLM has replaced {listed(both.replaced)} of {started.model} by the main model's, and might not if "
                f"their values differ: leave them out of that checkpoint, so that it always does, or {remedy}"
            )
        return both

    def _header(self, started: Any = None) -> Sequence[TensorSpec] | None:
        """Return the tensors of the checkpoint of a vLLM model configuration, by default the main model's."""
        config, started = self._vllm_config, started or self._vllm_config.model_config
        cache = config.load_config.download_dir
        return checkpoint_header.reference(started.model, revision=started.revision, cache_dir=cache)

    def _dry_run(self, model: nn.Module, specs: Sequence[TensorSpec]) -> DryRunOutcome:
        return dry_run(model, self._vllm_config, specs)

    def _prepare_dry_run(self) -> None:
        """Find the layers. Raises UnsupportedError if one lacks a name that a workaround for it needs, or if vLLM has
        freed weights that it would have to load again.
        """
        self._packed = {name: layer for name, layer in self._model.named_modules() if is_packed(layer)}
        self._attention: list[Any] = [
            layer for layer in self._model.modules() if internals.require().is_attention(layer)
        ]
        self._tied: list[Any] = []
        """Packed layers in host memory whose weight is an earlier layer's. Other shared tensors, such as a router's
        bias, are never packed."""
        seen: set[int] = set()
        for layer in self._model.modules():
            weight = layer._parameters.get("weight")
            if weight is not None and weight.is_cpu and weight.numel():
                if id(weight) in seen and is_packed(layer):
                    self._tied.append(layer)
                seen.add(id(weight))
        if any(getattr(layer, "is_amx_bmm_enabled", False) for layer in self._attention):
            raise UnsupportedError(
                f"vLLM {internals.version()} frees the weights of kv_b_proj after its AMX_MLA attention has packed "
                "them, and can't load them again: start it with --attention-backend CPU_MLA"
            )
        experts: list[Any] = [layer for layer in self._packed.values() if is_cpu_experts(layer)]
        methods = [layer.quant_method for layer in experts]
        lacking = {f"{type(method).__name__}.moe_kernel" for method in methods if not hasattr(method, "moe_kernel")}
        lacking |= {f"{type(layer).__name__}.cpu_linear" for layer in self._tied if "cpu_linear" not in vars(layer)}
        if lacking:
            raise UnsupportedError(
                f"vLLM {internals.version()} packs weights on a CPU in a way that weightcast does not support, since "
                f"it has no {', '.join(sorted(lacking))}: use vLLM {internals.TESTED_WITH}"
            )

    def snapshot(self) -> Callable[[], None]:
        """See `LoaderEngine.snapshot`. The undo raises InstallError (torn) if vLLM has moved experts meanwhile."""
        restore, placements = super().snapshot(), expert_placements(self._model)

        def put_back() -> None:
            restore()
            require_unmoved(self._model, placements)

        return put_back

    def _begin_load(self, calls: Mapping[str, int]) -> None:
        assert self.install_map is not None  # of the offer
        # An unfinished reload of another client would go on with its buffered tensors.
        self._end_load()
        self._placements = placements = expert_placements(self._model)
        packing, layers = self.install_map.quantising, ((name, self._packed[name], n) for name, n in calls.items())
        self._fillings = [Filling(name, layer, n, packing, placements.get(layer)) for name, layer, n in layers]

    def _load_some(self, tensors: Tensors) -> None:
        with internals.require().current_config(self._vllm_config):
            super()._load_some(tensors)

    def _finish_load(self) -> list[str]:
        """Raises InstallError (torn) if vLLM has moved experts meanwhile."""
        require_unmoved(self._model, self._placements)
        missing = [str(filling) for filling in self._fillings if not filling.is_done]
        if missing:
            return missing
        self._fillings = []
        with internals.require().current_config(self._vllm_config):
            for layer in self._attention:
                layer.process_weights_after_loading(self._vllm_config.model_config.dtype)
            for layer in self._tied:
                layer.quant_method.process_weights_after_loading(layer)
        return []

    def _written(self, outcome: DryRunOutcome) -> set[str]:
        # With the layers for which a load computes more than their tensors set.
        processed = {*self._attention, *self._tied}
        return outcome.modules | {name for name, layer in self._model.named_modules() if layer in processed}

    def _end_load(self) -> None:
        """Give every layer its live tensors back, and free buffered tensors."""
        vllm, model = internals.require(), cast(Any, self._model)
        self._fillings = []
        for layer in model.modules():
            info = vllm.layer_info(layer)
            if info.kernel_tensors is not None:
                vllm.put_live_back(layer, info)
            if info.kernel_tensors is not None or info.can_load():
                info.reset()
        vllm.loading_layers.clear()
        if hasattr(model, "_original_do_torchao_reload"):
            model._do_torchao_reload = model._original_do_torchao_reload


def dry_run(model: nn.Module, vllm_config: Any, specs: Sequence[TensorSpec]) -> DryRunOutcome:
    """Return the effect of vLLM's loader on tensors of these names, shapes and dtypes, in this order.

    The outcome's `calls` counts the loader calls of the layers that `layerwise_load.Filling` fills.
    """
    calls: Counter[str] = Counter()
    packed: dict[str, nn.Module] = {}
    moving = expert_placements(model)
    form = functools.partial(_checkpoint_form, calls=calls, packed=packed, moving=moving)
    with internals.require().current_config(vllm_config):
        outcome = loader_dry_run.dry_run(model, form, specs)
    packed_copies = {
        f"{name}.weight": functools.partial(packed_copy_fault, layer, vllm_config)
        for name, layer in packed.items()
        if has_packed_copy(layer)
    }
    # vLLM packs these, so a copy to their parameters is not enough.
    quantised = frozenset(name for name, layer in packed.items() if internals.is_quantised(layer))
    reasons: dict[str, str] = {}
    # Tensors of layers that must be filled by their loaders, but are set by other means.
    passed_by, gone, layers = [], [], dict(model.named_modules())
    for target in outcome.targets.values():
        name, _, leaf = target.name.rpartition(".")
        if target.loaded and name not in packed and getattr(layers[name], leaf, None) is None:
            gone.append(target.name)
        if name in packed and target.loaded:
            if packed[name] in moving:
                reasons[target.name] = f"vLLM moves the experts of {name}"
            elif target.name not in packed_copies and name not in quantised and not has_plain_weights(packed[name]):
                reasons[target.name] = f"vLLM keeps {name} in another form than a checkpoint's"
            if name not in calls:
                passed_by.append(target.name)
    for copy in outcome.copies if reasons else ():
        if copy.target in reasons:
            outcome.opaque.setdefault(copy.name, reasons[copy.target])
    if passed_by:
        outcome.faults[""] = f"without a call of their loaders it sets {', '.join(passed_by)}"
    outcome.faults.update(dict.fromkeys(gone, "vLLM has dropped it after its start, and would not read another value"))
    return dataclasses.replace(outcome, calls=calls, packed_copies=packed_copies, quantised=quantised)


def _checkpoint_form(
    layer: nn.Module,
    name: str,
    *,
    calls: Counter[str],
    packed: dict[str, nn.Module],
    moving: Mapping[nn.Module, Placement],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the layer's parameters and buffers before packing, as recorded by vLLM at start-up.

    A layer that vLLM may pack is added to `packed`, and calls of its tensors' loaders are counted in `calls`, by name.
    `moving`: the placements of experts that vLLM may move.
    """
    if not name:  # the first layer of each run
        calls.clear()
    vllm = internals.require()
    if type(layer).__name__ in vllm.kept_modules:
        return present(layer._parameters), present(layer._buffers)
    made = in_checkpoint_form(layer)
    noted = [tensor for tensors in made for tensor in tensors.values()]
    live: tuple[Any, Any] = layer._parameters, layer._buffers
    for tensors, held in zip(made, live, strict=True):
        # Of the tensors that vLLM keeps live in a reload, biases are loaded; maps of experts are read by loaders.
        for kept, tensor in held.items():
            if kept in vllm.kept_tensors and tensor is not None:
                tensors[kept] = without_memory(tensor, layer) if tensor.is_floating_point() else tensor
    if any(made) and is_packed(layer):
        packed[name] = layer
        for tensor in noted:
            counted = _counted(tensor.weight_loader, calls, name)  # type: ignore[attr-defined]
            tensor.weight_loader = with_placement(counted, moving.get(layer))  # type: ignore[attr-defined]
    return made


def _counted(loader: Callable[..., Any], calls: Counter[str], name: str) -> Callable[..., Any]:
    @functools.wraps(loader, assigned=())  # vLLM inspects its attributes and signature
    def load(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return loader(*args, **kwargs)

    return load
