"""Publishes a Megatron-core model: each rank's shards as regions of the checkpoint's tensors, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.checkpoint.live import CASTABLE, TensorChangeDetector, require_here
from weightcast.errors import listed
from weightcast.format.bucket import DTYPE_NAMES, narrow
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Held, Regions
from weightcast.sources.megatron import parallel as parallel_state
from weightcast.sources.megatron.families import FAMILIES
from weightcast.sources.megatron.mapping import Chunk, Parallel, PlacedRegion, TensorMapping
from weightcast.sources.megatron.rules import Family
from weightcast.sources.megatron.sizes import read_config

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
    alike; `regions` what this rank holds: views of the live parameters and buffers, without a copy or communication.
    """

    def __init__(
        self,
        model_chunks: nn.Module | Sequence[nn.Module],
        hf_config: Any,
        *,
        dtype: torch.dtype | None = None,
        family: Family | str | None = None,
        parallel: Parallel | None = None,
        mtp: bool = True,
    ) -> None:
        """`model_chunks`: this rank's model, or a list of its virtual stages; wrappers are looked through. `hf_config`:
        a transformers configuration, its dict, or a path to config.json or its directory.

        `dtype` of what is published, by default the model's `params_dtype`; what a table has in another (expert biases
        in float32) stays. `family`: a table, or the `model_type` whose table is to be used. `parallel`: this rank's
        place, by default Megatron's own `parallel_state`. `mtp`: publish multi-token prediction layers too.

        Raises ValueError for a parameter that the family's table does not know, shapes or layers that are not those of
        `hf_config`, an unknown model type or dtype; here and, if the model changes, in `regions`.
        """
        chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        if not chunks:
            raise ValueError("model_chunks is empty: give this rank's model, a list for virtual pipeline stages")
        config = read_config(hf_config)
        self._chunks, self._models = chunks, [_inner(chunk) for chunk in chunks]
        megatron = self._models[0].config
        published = megatron.params_dtype if dtype is None else dtype
        if DTYPE_NAMES.get(published) not in CASTABLE:
            raise ValueError(f"dtype is {published}; weights can be published in {', '.join(sorted(CASTABLE))}")
        self._mtp = mtp
        self._mapping = TensorMapping(
            _family(family, config["model_type"]),
            config,
            parallel or parallel_state.current(),
            dtype=DTYPE_NAMES[published],
            num_mtp_layers=(getattr(megatron, "mtp_num_layers", None) or 0) if mtp else 0,
        )
        _require_same(megatron, self._mapping)
        for model in self._models:
            _require_tying(model, tied=bool(self._mapping.sizes["tied"]))
        self._regions: Regions | None = None
        self._placed: list[PlacedRegion] = []
        self._watches: list[TensorChangeDetector] = []
        self._derive()

    def specs(self) -> Sequence[TensorSpec]:
        """The whole model's records; always the same object."""
        return self._mapping.specs

    def regions(self) -> Regions:
        """What this rank holds; the same object until parameters are replaced. Call it between steps.

        Raises ValueError while parameters are not what the optimizer has made them (see docs/megatron.md), or have no
        memory.
        """
        for chunk in self._chunks:
            _require_gathered(chunk)
        if self._regions is None or any(watch.has_changed() for watch in self._watches):
            self._derive()
            _require_memory(self._placed)
            self._regions = _regions(self._placed)
        return self._regions

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The other way: copy this rank's parts of a checkpoint into the model, and zero what pads the vocabulary.

        `tensors` may be a generator; each is used once, and may be on any device. Optimizers with fp32 masters must be
        told (`optimizer.reload_model_params()`). Raises ValueError, naming them, for names that are not the model's
        (at once), and for those of this rank that were missing (at the end); the model is then not whole.
        """
        self._derive()
        _require_memory(self._placed)
        places: dict[str, list[PlacedRegion]] = {}
        for each in self._placed:
            places.setdefault(each.name, []).append(each)
        shapes = {spec.name: spec.shape for spec in self._mapping.specs}
        aliases = {alias for spec in self._mapping.specs for alias in spec.aliases}
        missing = set(places)
        self._zero_padding()
        for name, tensor in tensors:
            if name in aliases:
                continue
            if name not in shapes:
                raise ValueError(f"no rule of this family makes {name!r} {list(tensor.shape)}")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name!r} is {list(tensor.shape)}, by the configuration it is {list(shapes[name])}")
            missing.discard(name)
            _fill(places.get(name, ()), tensor)
        if missing:
            raise ValueError(f"{len(missing)} tensors of this rank were not given: {listed(sorted(missing))}")

    @torch.no_grad()
    def _zero_padding(self) -> None:
        """Of the vocabulary: all of these parameters, since what is not padding is loaded next."""
        for model in self._models:
            for name, tensor in model.named_parameters():
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    tensor.zero_()

    def _derive(self) -> None:
        self._watches = [TensorChangeDetector(model, with_buffers=True) for model in self._models]
        self._placed = [each for model in self._models for each in self._mapping.placed(self._chunk(model))]

    def _chunk(self, model: nn.Module) -> Chunk:
        for name, parameter in model.named_parameters():
            require_here(name, parameter)
        named = ((name, _placeable(tensor)) for name, tensor in _tensors(model))
        tensors = [(name, tensor) for name, tensor in named if self._mtp or not name.startswith("mtp.")]
        decoder: Any = model.decoder
        layers = [int(layer.layer_number) - 1 for layer in decoder.layers]
        return Chunk(tensors, layers, bool(getattr(model, "pre_process", True)))


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
            f"no table for the model type {name!r}; known: {', '.join(FAMILIES)}. Give the `family` that it is "
            "like, or a table of your own (docs/megatron.md)"
        )
    return FAMILIES[name]


def _require_same(megatron: Any, mapping: TensorMapping) -> None:
    """Shapes do not tell all: other heads and groups may make as many rows."""
    fields = _SAME_FIELDS | ({} if mapping.sizes["kv_rank"] else _ATTENTION_FIELDS)
    found = {name: getattr(megatron, name, None) for name in fields}
    problems = [
        f"{name} is {value}, hf_config says {mapping.sizes[fields[name]]}"
        for name, value in found.items()
        if value is not None and value != mapping.sizes[fields[name]]
    ]
    if not getattr(megatron, "gated_linear_unit", True):
        problems.append("gated_linear_unit is False; every family here has gate and up")
    if problems:
        raise ValueError(f"the Megatron model is not the one of hf_config: {'; '.join(problems)}")


def _require_tying(model: Any, *, tied: bool) -> None:
    shared = getattr(model, "share_embeddings_and_output_weights", None)
    if shared is not None and bool(shared) != tied:
        raise ValueError(
            f"share_embeddings_and_output_weights is {shared}, but tie_word_embeddings of hf_config is {tied}: train "
            "what you serve, or set the other one"
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that its state dict has."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter.detach()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _placeable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one without data where its memory was taken away: torch makes no views of that."""
    if tensor.is_meta or not tensor.numel() or tensor.untyped_storage().size():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _require_gathered(chunk: nn.Module) -> None:
    """With overlap_param_gather a step leaves only this rank's share of the parameters new, until the next forward."""
    module: Any = chunk
    while module is not None:
        config = getattr(module, "ddp_config", None)
        if getattr(config, "overlap_param_gather", False) and getattr(module, "remove_forward_pre_hook_handles", None):
            raise ValueError(
                "overlap_param_gather leaves old parameters in place until the next forward pass: call "
                "disable_forward_pre_hook() on each model chunk before publish, and enable_forward_pre_hook() after it"
            )
        module = module._modules.get("module")


def _require_memory(placed: Iterable[PlacedRegion]) -> None:
    for each in placed:
        if each.held[1].is_meta:
            raise ValueError(
                f"{each.parameter!r} has no memory here: it was offloaded, or is on the meta device. Bring the weights "
                "back before publish; weights in host memory will do"
            )


def _regions(placed: Iterable[PlacedRegion]) -> dict[str, tuple[Held, ...]]:
    """Parts by name, what other stages own left out. Raises ValueError for a region that two parameters hold."""
    regions: dict[str, list[Held]] = {}
    owners: dict[tuple[str, Region], str] = {}
    for each in placed:
        if each.is_copy:
            continue
        key = (each.name, each.held[0])
        if key in owners:
            raise ValueError(f"{owners[key]!r} and {each.parameter!r} are both {each.name!r} of the checkpoint")
        owners[key] = each.parameter
        regions.setdefault(each.name, []).append(each.held)
    return {name: tuple(held) for name, held in regions.items()}


@torch.no_grad()
def _fill(places: Iterable[PlacedRegion], tensor: torch.Tensor) -> None:
    for each in places:
        region, view = each.held
        view.copy_(narrow(tensor, region))
