"""Publishes a Megatron-core model: each rank's shards as regions of the checkpoint's tensors, without a copy."""

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
from weightcast.sources.megatron.mapping import Chunk, Parallel, ParameterRegion, TensorMapping, read_config
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

    Make one on every trainer rank. `specs` are those of the Hugging Face checkpoint of `hf_config`, on every rank
    alike; `regions` what this rank holds: views of the live parameters and buffers, without communication and without a
    copy, but for the few values that a checkpoint has with another centre (of Qwen3-Next, one norm of each layer).
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
        """`model_chunks`: this rank's model, or a list of its virtual stages; wrappers are looked through. `hf_config`:
        a transformers configuration, its dict, or a path to config.json or its directory.

        `dtype` of what is published, by default the model's `params_dtype`; what a table has in another (expert biases
        in float32) stays; "engine": the dtypes that the engines have. `family`: a table, or the `model_type` whose
        table is to be used. `parallel`: this rank's place, by default Megatron's own `parallel_state`.
        `mtp`: publish multi-token prediction layers too.

        Raises ValueError for a parameter that the family's table does not know, shapes or layers that are not those of
        `hf_config`, an unknown model type or dtype; here and, if the model changes, in `regions`.
        """
        chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        if not chunks:
            raise ValueError("model_chunks is empty: give this rank's model, a list for virtual pipeline stages")
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
                    f"share_embeddings_and_output_weights is {shared}, but tie_word_embeddings of hf_config is {tied}: "
                    "train what you serve, or set the other one"
                )
        self._regions: Regions | None = None
        self._shifted: list[tuple[torch.Tensor, ParameterRegion]] = []
        self._watches: list[TensorChangeDetector] = []
        self._parameter_regions()

    def specs(self) -> Sequence[TensorSpec]:
        """The whole model's records; always the same object."""
        return self._mapping.specs

    def regions(self) -> Regions:
        """Return this rank's parts; the same object until parameters are replaced. Call it between steps.

        Raises ValueError while parameters are not what the optimizer has made them (see docs/megatron.md), or have no
        memory.
        """
        for chunk in self._chunks:
            _require_gathered(chunk)
        if self._regions is not None and not any(watch.has_changed() for watch in self._watches):
            self._shift()
            return self._regions
        self._shifted = []
        regions: dict[str, list[Held]] = {}
        owners: dict[tuple[str, Region], str] = {}
        for each in _with_memory(self._parameter_regions()):
            if each.is_copy:
                continue  # another stage owns it
            key = (each.name, each.held[0])
            if key in owners:
                raise ValueError(f"{owners[key]!r} and {each.parameter!r} are both {each.name!r} of the checkpoint")
            owners[key] = each.parameter
            held = each.held
            if each.plus:
                held = (held[0], torch.empty_like(held[1]))
                self._shifted.append((held[1], each))
            regions.setdefault(each.name, []).append(held)
        self._regions = {name: tuple(held) for name, held in regions.items()}
        self._shift()
        return self._regions

    def _shift(self) -> None:
        """Have the copies follow their parameters."""
        for copy, each in self._shifted:
            torch.add(each.held[1], each.plus, out=copy)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The other way: copy this rank's parts of a checkpoint into the model, and zero what pads the vocabulary.

        `tensors` may be a generator; each is used once, and may be on any device. An optimizer with fp32 masters has to
        reload them afterwards (`optimizer.reload_model_params()`). Raises ValueError, naming them, for names that are
        not the model's (at once), and for those of this rank that were missing (at the end); the model is then not
        whole.
        """
        places: dict[str, list[ParameterRegion]] = {}
        for each in _with_memory(self._parameter_regions()):
            places.setdefault(each.name, []).append(each)
        shapes = {spec.name: spec.shape for spec in self._mapping.specs}
        aliases = {alias for spec in self._mapping.specs for alias in spec.aliases}
        missing = set(places)
        for model in self._models:
            for name, parameter in model.named_parameters():
                # Their padding; the rest is loaded next.
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    parameter.detach().zero_()
        for name, tensor in tensors:
            if name in aliases:
                continue
            if name not in shapes:
                raise ValueError(f"no rule of this family makes {name!r} {list(tensor.shape)}: leave it out")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name!r} is {list(tensor.shape)}, by the configuration it is {list(shapes[name])}")
            missing.discard(name)
            for each in places.get(name, ()):
                region, view = each.held
                value = split_like(narrow(tensor.detach(), region), view)
                view.copy_(value - each.plus if each.plus else value)
        if missing:
            raise ValueError(f"this rank lacks {count(len(missing), 'tensor')} still: {listed(sorted(missing))}")

    def _parameter_regions(self) -> list[ParameterRegion]:
        """Every part that this rank holds now; changes are looked for from here on."""
        self._regions = None
        self._watches = [TensorChangeDetector(model, with_buffers=True) for model in self._models]
        placed: list[ParameterRegion] = []
        for model in self._models:
            for name, parameter in model.named_parameters():
                require_here(name, parameter)
            tensors = [pair for pair in _tensors(model) if self._mtp or not pair[0].startswith("mtp.")]
            layers = [int(layer.layer_number) - 1 for layer in model.decoder.layers]
            placed += self._mapping.parameter_regions(Chunk(tensors, layers, bool(getattr(model, "pre_process", True))))
        return placed


def _inner(chunk: nn.Module) -> Any:
    """The GPTModel inside DDP, Float16Module and the like."""
    model: Any = chunk
    while not hasattr(model, "decoder"):
        inside = getattr(model, "module", None) or getattr(model, "language_model", None)
        if not isinstance(inside, nn.Module):
            raise ValueError(
                f"{type(chunk).__name__} is no Megatron-core GPTModel, nor a wrapper of one: it has no `decoder`"
            )
        model = inside
    return model


def _family(family: Family | str | None, model_type: str) -> Family:
    if isinstance(family, Family):
        return family
    name = family or model_type
    if name not in FAMILIES:
        raise ValueError(
            f"no table for the model type {name or None!r}; known: {', '.join(FAMILIES)}. Give the `family` that it "
            "is like, or a table of your own (docs/megatron.md)"
        )
    return FAMILIES[name]


def _parallel_state() -> Parallel:
    """This rank's place, as Megatron's own global state has it.

    Raises ValueError where Megatron is missing, or its model parallel groups were not made.
    """
    try:
        from megatron import core
        from megatron.core import parallel_state as state
    except ImportError as exc:
        raise ValueError(
            f"megatron.core can't be imported here ({exc}): pip install 'megatron-core=={TESTED_WITH}.*', or give this "
            "rank's place as `parallel`"
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
    """Require equal configurations. Shapes don't prove this: other heads and groups may make as many rows."""
    fields = _SAME_FIELDS | ({} if mapping.sizes["kv_rank"] else _ATTENTION_FIELDS)
    found = {name: getattr(megatron, name, None) for name in fields}
    problems = [
        f"{name} is {value}, hf_config says {mapping.sizes[fields[name]]}"
        for name, value in found.items()
        if value is not None and value != mapping.sizes[fields[name]]
    ]
    if not getattr(megatron, "gated_linear_unit", True):
        problems.append("gated_linear_unit is False; every family here has gate and up")
    centered = bool(getattr(megatron, "layernorm_zero_centered_gamma", False))
    if centered != family.zero_centered:
        problems.append(
            f"layernorm_zero_centered_gamma is {centered}, the checkpoints of this family have norms as if it were "
            f"{family.zero_centered}"
        )
    if problems:
        raise ValueError(f"the Megatron model is not the one of hf_config: {'; '.join(problems)}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that its state dict has."""
    for prefix, module in model.named_modules():
        saved = {n: buffer for n, buffer in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *saved.items()):
            if tensor is None:
                continue
            if not tensor.is_meta and tensor.numel() and not tensor.untyped_storage().size():
                # Its memory was taken away; torch makes no views of that.
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            yield f"{prefix}.{name}" if prefix else name, tensor.detach()


def _require_gathered(chunk: nn.Module) -> None:
    """With overlap_param_gather a step leaves only this rank's share of the parameters new, until the next forward."""
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
            # False from the reduction of gradients until parameters are gathered, which no forward does without hooks.
            if not all(getattr(group, "param_gather_dispatched", True) for group in groups):
                raise ValueError(
                    "overlap_param_gather leaves old parameters in place, and the forward hooks that gather them are "
                    "off: call start_param_sync(force_sync=True) on each model chunk before publish"
                )
        module = module._modules.get("module")


def _with_memory(placed: Iterable[ParameterRegion]) -> Iterator[ParameterRegion]:
    """The same. Raises ValueError for a parameter without memory."""
    for each in placed:
        if each.held[1].is_meta:
            raise ValueError(
                f"{each.parameter!r} has no memory here: it was offloaded, or is on the meta device. Bring the weights "
                "back before publish; weights in host memory will do"
            )
        yield each
