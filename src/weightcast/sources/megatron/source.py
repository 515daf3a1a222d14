"""Source of a Megatron-core model: each rank's shards as regions of the checkpoint's tensors, without a copy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.checkpoint.live import CastTo, TensorChangeDetector, cast_target, require_here
from weightcast.errors import listed, warn_if_untested
from weightcast.format.amounts import count
from weightcast.format.bucket import narrow, split_like
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Held, Regions
from weightcast.sources.megatron.families import FAMILIES
from weightcast.sources.megatron.layouts import Axis
from weightcast.sources.megatron.mapping import Parallel, ParameterRegion, TensorMapping, read_config
from weightcast.sources.megatron.rules import Family

logger = logging.getLogger(__name__)

TESTED_WITH = "0.16"

_SAME_FIELDS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_moe_experts": "experts",
}
_ATTENTION_FIELDS = {"num_query_groups": "groups", "kv_channels": "head_dim"}


class MegatronSource:
    """A `Source` of a Megatron-core `GPTModel`, in any mix of tensor, pipeline, expert, context and data parallelism.

    Create one on every trainer rank. `specs` returns those of the Hugging Face checkpoint of `hf_config`, equal on
    every rank. `regions` returns this rank's parts: views of the live parameters and buffers, without communication.
    Copied are only tensors that the checkpoint has with another centre (one norm of each layer of Qwen3-Next).
    """

    def __init__(
        self,
        model_chunks: nn.Module | Sequence[nn.Module],
        hf_config: Any,
        *,
        dtype: CastTo | None = None,
        family: Family | str | None = None,
        parallel: Parallel | None = None,
        mtp: bool = True,
    ) -> None:
        """`model_chunks`: this rank's model, or a list of its virtual stages; wrappers are unwrapped. `hf_config`: a
        transformers configuration, its dict, or a path to config.json or its directory.

        `dtype`: that of the published tensors, by default the model's `params_dtype`; tensors for which a table has
        another one (expert biases in float32) keep it; "engine": the engines' dtypes. `family`: a table, or the
        `model_type` whose table is used. `parallel`: this rank's indices, by default from Megatron's `parallel_state`.
        `mtp`: publish multi-token prediction layers too.

        Raises ValueError for a parameter without a rule, shapes or layers that differ from `hf_config`, an unknown
        model type or dtype; here and, if the model changes, in `regions`.
        """
        chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        if not chunks:
            raise ValueError("model_chunks is empty: pass this rank's model, or a list of its virtual pipeline stages")
        config = read_config(hf_config)
        self._chunks, self._models = chunks, [_inner(chunk) for chunk in chunks]
        megatron = self._models[0].config
        self.casts_to_engines = dtype == "engine"
        target = cast_target(megatron.params_dtype if dtype in (None, "engine") else dtype)
        assert target is not None
        self._mtp = mtp
        table = _family(family, config["model_type"])
        self._mapping = TensorMapping(
            table,
            config,
            parallel or _parallel_state(),
            dtype=target,
            num_mtp_layers=(getattr(megatron, "mtp_num_layers", None) or 0) if mtp else 0,
        )
        _require_same(megatron, self._mapping, table)
        tied = bool(self._mapping.sizes["tied"])
        for model in self._models:
            shared = getattr(model, "share_embeddings_and_output_weights", None)
            if shared is not None and bool(shared) != tied:
                raise ValueError(
                    f"the Megatron model has share_embeddings_and_output_weights={shared}, but hf_config has "
                    f"tie_word_embeddings={tied}: set both to the same value"
                )
        self._regions: Regions | None = None
        self._shifted: list[tuple[torch.Tensor, ParameterRegion]] = []
        self._watches: list[TensorChangeDetector] = []
        self._parameter_regions()

    def specs(self) -> Sequence[TensorSpec]:
        """Return the whole model's specs; always the same object."""
        return self._mapping.specs

    def regions(self) -> Regions:
        """Return this rank's parts; the same object until parameters are replaced. Call it between steps.

        Raises ValueError while parameters are not yet gathered after an optimizer step (see docs/megatron.md), or have
        no memory.
        """
        for chunk in self._chunks:
            _require_gathered(chunk)
        if self._regions is None or any(watch.has_changed() for watch in self._watches):
            self._regions = self._found_regions()
        for copy, each in self._shifted:
            torch.add(each.held[1], each.plus, out=copy)
        return self._regions

    def _found_regions(self) -> Regions:
        self._shifted = []
        regions: dict[str, list[Held]] = {}
        owners: dict[tuple[str, Region], str] = {}
        for each in _with_memory(self._parameter_regions()):
            if each.is_copy:
                continue  # another stage owns it
            key = (each.name, each.held[0])
            if key in owners:
                raise ValueError(
                    f"{owners[key]!r} and {each.parameter!r} both map to {each.name!r} of the checkpoint: mend the "
                    "rules of the family's table (docs/megatron.md)"
                )
            owners[key] = each.parameter
            held = each.held
            if each.plus:
                held = (held[0], torch.empty_like(held[1]))
                self._shifted.append((held[1], each))
            regions.setdefault(each.name, []).append(held)
        return {name: tuple(held) for name, held in regions.items()}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's parts of a checkpoint into the model, and zero the padding of the vocabulary.

        `tensors`: may be a generator; each tensor is used once, and may be on any device. An optimizer with fp32 master
        weights must reload them afterwards (`optimizer.reload_model_params()`). Raises ValueError for a name that the
        model does not have (at once), and for missing names of this rank (at the end); the model is then incomplete.
        """
        places: dict[str, list[ParameterRegion]] = {}
        for each in _with_memory(self._parameter_regions()):
            places.setdefault(each.name, []).append(each)
        shapes = {spec.name: spec.shape for spec in self._mapping.specs}
        aliases = {alias for spec in self._mapping.specs for alias in spec.aliases}
        missing = set(places)
        for model in self._models:
            for name, parameter in model.named_parameters():
                # This zeroes their padding; the other rows are loaded next.
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    parameter.detach().zero_()
        for name, tensor in tensors:
            if name in aliases:
                continue
            if name not in shapes:
                raise ValueError(f"no rule of this family has the checkpoint's tensor {name!r}: leave it out")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(
                    f"{name!r} has the shape {list(tensor.shape)}; by hf_config it must be {list(shapes[name])}"
                )
            missing.discard(name)
            for each in places.get(name, ()):
                region, view = each.held
                value = split_like(narrow(tensor.detach(), region), view)
                view.copy_(value - each.plus if each.plus else value)
        if missing:
            raise ValueError(
                f"the given tensors lack {count(len(missing), 'tensor')} of this rank: {listed(sorted(missing))}; load "
                "a complete checkpoint"
            )

    def _parameter_regions(self) -> list[ParameterRegion]:
        """Return every part that this rank has now, and begin to look for changes of the model from here on."""
        self._regions = None
        self._watches = [TensorChangeDetector(model, with_buffers=True) for model in self._models]
        placed: list[ParameterRegion] = []
        for model in self._models:
            for name, parameter in model.named_parameters():
                require_here(name, parameter)
            tensors = (pair for pair in _tensors(model) if self._mtp or not pair[0].startswith("mtp."))
            layers = [int(layer.layer_number) - 1 for layer in model.decoder.layers]
            is_first = bool(getattr(model, "pre_process", True))
            placed += self._mapping.parameter_regions(tensors, layers, is_first=is_first)
        return placed


def _inner(chunk: nn.Module) -> Any:
    """Return the GPTModel inside wrappers such as DDP and Float16Module."""
    model: Any = chunk
    while not hasattr(model, "decoder"):
        inside = getattr(model, "module", None) or getattr(model, "language_model", None)
        if not isinstance(inside, nn.Module):
            raise ValueError(
                f"{type(chunk).__name__} is not a Megatron-core GPTModel or a wrapper of one, because it has no "
                "`decoder`: pass the model that Megatron's model provider returns"
            )
        model = inside
    return model


def _family(family: Family | str | None, model_type: str) -> Family:
    if isinstance(family, Family):
        return family
    name = family or model_type
    if name not in FAMILIES:
        raise ValueError(
            f"there is no table for the model type {name or None!r}; known: {', '.join(FAMILIES)}. Pass the `family` "
            "of a similar model, or your own table (docs/megatron.md)"
        )
    return FAMILIES[name]


def _parallel_state() -> Parallel:
    """Return this rank's indices from Megatron's global `parallel_state`.

    Raises ValueError if Megatron is not installed, or its model parallel groups were not created.
    """
    try:
        from megatron import core
        from megatron.core import parallel_state as state
    except ImportError as exc:
        raise ValueError(
            f"megatron.core can't be imported ({exc}): pip install 'megatron-core=={TESTED_WITH}.*', or pass this "
            "rank's indices as `parallel`"
        ) from exc
    warn_if_untested(logger, "Megatron-core", core.__version__, TESTED_WITH, symptom="the source fails")
    if not state.model_parallel_is_initialized():
        raise ValueError("Megatron's parallel_state is not initialized: call initialize_model_parallel first")
    return Parallel(
        tensor=Axis(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        expert=Axis(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        expert_tensor=Axis(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
    )


def _require_same(megatron: Any, mapping: TensorMapping, family: Family) -> None:
    """Raise ValueError unless the configurations agree. Equal shapes don't prove it: they hide the number of heads."""
    fields = _SAME_FIELDS | ({} if mapping.sizes["kv_rank"] else _ATTENTION_FIELDS)
    found = {name: getattr(megatron, name, None) for name in fields}
    problems = [
        f"{name} is {value}, hf_config says {mapping.sizes[fields[name]]}"
        for name, value in found.items()
        if value is not None and value != mapping.sizes[fields[name]]
    ]
    if not getattr(megatron, "gated_linear_unit", True):
        problems.append("gated_linear_unit is False, but every supported family has gate and up projections")
    centered = bool(getattr(megatron, "layernorm_zero_centered_gamma", False))
    if centered != family.zero_centered:
        problems.append(
            f"layernorm_zero_centered_gamma is {centered}, the checkpoints of this family have norms as if it were "
            f"{family.zero_centered}"
        )
    if problems:
        raise ValueError(
            f"the Megatron model differs from hf_config: {'; '.join(problems)}. Pass the configuration of the trained "
            "model"
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the buffers that are in the state dict."""
    for prefix, module in model.named_modules():
        saved = {n: buffer for n, buffer in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *saved.items()):
            if tensor is None:
                continue
            if not tensor.is_meta and tensor.numel() and not tensor.untyped_storage().size():
                # The parameter was offloaded: torch can make no views of a tensor without memory.
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            yield f"{prefix}.{name}" if prefix else name, tensor.detach()


def _require_gathered(chunk: nn.Module) -> None:
    """Raise ValueError if parameters are stale: with overlap_param_gather a step updates only this rank's shard of
    them, until the next forward pass gathers the others."""
    module: Any = chunk
    while module is not None:
        config = getattr(module, "ddp_config", None)
        if getattr(config, "overlap_param_gather", False):
            if getattr(module, "remove_forward_pre_hook_handles", None):
                raise ValueError(
                    "overlap_param_gather leaves old parameters in place until the next forward pass: call "
                    "disable_forward_pre_hook() on each model chunk before publish, and enable_forward_pre_hook() "
                    "after it"
                )
            groups = [*getattr(module, "bucket_groups", ()), *getattr(module, "expert_parallel_bucket_groups", ())]
            # False from the reduction of gradients until parameters are gathered. Without hooks no forward gathers
            # them.
            if not all(getattr(group, "param_gather_dispatched", True) for group in groups):
                raise ValueError(
                    "overlap_param_gather leaves old parameters in place, and the forward hooks that gather them are "
                    "disabled: call start_param_sync(force_sync=True) on each model chunk before publish"
                )
        module = module._modules.get("module")


def _with_memory(placed: Iterable[ParameterRegion]) -> Iterator[ParameterRegion]:
    """Yield the regions. Raises ValueError for a parameter without memory."""
    for each in placed:
        if each.held[1].is_meta:
            raise ValueError(
                f"{each.parameter!r} has no memory, because it was offloaded or is on the meta device: load the "
                "weights back before publish, to the GPU or to host memory"
            )
        yield each
