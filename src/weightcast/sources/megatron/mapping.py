"""A model's mapping: the checkpoint's specs, and for each Megatron parameter of a rank its parts of these.

Invariants: the specs follow from the configuration alone, so they are equal on every rank; a parameter without a rule,
or with another shape than the configuration's, is an error that names it. This module does not need Megatron.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weightcast.errors import listed
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Held
from weightcast.sources.megatron.layouts import ALONE, Axis, LayoutPart, Sizes, in_stack, local_size, unstacked
from weightcast.sources.megatron.rules import EXPERT, Config, Family, Match, Rule, Table

_EMBEDDING = "embedding.word_embeddings.weight"
_WRAPPERS = re.compile(r"^(?:module\.)*(?:language_model\.)?")
_INNER = r"(?:transformer_layer|mtp_model_layer)\."
_LAYER = re.compile(rf"(?P<block>decoder|mtp)\.layers\.(?P<index>\d+)\.(?P<inner>{_INNER})?(?P<rest>.+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Parallel:
    """A rank's tensor-parallel index and, for experts, its expert-parallel and expert-tensor-parallel indices.

    A pipeline stage is known by its layers; data- and context-parallel ranks have replicas.
    """

    tensor: Axis = ALONE
    expert: Axis = ALONE
    expert_tensor: Axis = ALONE


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterRegion:
    """A part of the checkpoint's tensor `name`, and the chunk's parameter that has it.

    `is_copy`: another stage owns it (the embedding of tied weights or of a prediction layer); it is loaded but not
    sent. `plus`: added to the parameter's values to get the checkpoint's.
    """

    name: str
    parameter: str
    held: Held
    is_copy: bool
    plus: float = 0.0


class TensorMapping:
    """Mapping of one model on one rank."""

    def __init__(
        self, family: Family, config: Config, parallel: Parallel, *, dtype: str, num_mtp_layers: int = 0
    ) -> None:
        """`dtype`: that of the specs. Raises ValueError for a configuration that lacks sizes."""
        self._family, self._config, self._parallel = family, config, parallel
        self.sizes = sizes_of(family, config)
        self._num_mtp_layers = num_mtp_layers
        self._dtype = dtype
        self._model = Table(family.model, self.sizes)
        self._layers = {
            (is_moe, is_linear): Table(
                family.layer,
                {**self.sizes, "moe": is_moe, "dense": not is_moe, "linear": is_linear, "softmax": not is_linear},
            )
            for is_moe, is_linear in itertools.product((False, True), repeat=2)
        }
        self._mtp = Table(family.mtp, self.sizes)

    # --- the checkpoint's side ---

    @functools.cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the whole model."""
        found: list[TensorSpec] = []
        sizes, tied = self.sizes, ("lm_head.weight",) if self.sizes["tied"] else ()
        for rule in self._model.rules:
            found += self._specs_of(rule, "", aliases=tied if rule.names == (_EMBEDDING,) else ())
        for layer in range(sizes["layers"] + self._num_mtp_layers):
            rules = tuple(rule for rule in self._table(layer).rules if not rule.is_fused)
            for rule in rules if layer < sizes["layers"] else (*self._mtp.rules, *rules):
                if not rule.is_of_experts or rule.is_in_stack:
                    found += self._specs_of(rule, self._prefix(layer))
            # Expert by expert, as in checkpoints, so that tensors that are loaded together are adjacent.
            for expert in range(sizes["experts"]):
                for rule in rules:
                    if rule.is_of_experts and not rule.is_in_stack:
                        found += self._specs_of(rule, self._prefix(layer), expert)
        return tuple(found)

    def _specs_of(
        self, rule: Rule, prefix: str, expert: int = 0, aliases: tuple[str, ...] = ()
    ) -> Iterator[TensorSpec]:
        names = _hf_names(rule, prefix, expert)
        group = prefix + rule.group if rule.group else names[0] if len(names) > 1 else ""
        for name, shape in zip(names, rule.layout.shapes(self.sizes), strict=True):
            if rule.is_in_stack:
                shape = (self.sizes["experts"], *reversed(shape))
            yield TensorSpec(name, rule.dtype or self._dtype, shape, aliases=aliases, group=group)

    def _prefix(self, layer: int) -> str:
        return self._family.layer_prefix.format(layer=layer)

    def _table(self, layer: int) -> Table:
        """Return the table of the rules that apply to a layer."""
        is_moe = bool(self.sizes["experts"]) and self._family.is_moe(self._config, layer)
        return self._layers[is_moe, self._family.is_linear(self._config, layer)]

    # --- Megatron's side ---

    def parameter_regions(
        self, tensors: Iterable[tuple[str, torch.Tensor]], layers: Sequence[int], *, is_first: bool
    ) -> list[ParameterRegion]:
        """Return every part that one rank has of one (virtual) pipeline stage.

        `tensors`: parameters and persistent buffers by name. `layers`: for each layer of the decoder its index in the
        whole model. `is_first`: True for the stage that owns the embedding; other stages have a copy. Raises ValueError
        with every parameter that has no rule or does not fit.
        """
        placed: list[ParameterRegion] = []
        unknown, unfit = [], []
        for name, tensor in tensors:
            # Without the prefixes of wrappers (DDP, Float16Module) and of multimodal models.
            own_name = _WRAPPERS.sub("", name)
            try:
                found = self._parameter_regions(own_name, tensor, layers, is_first)
            except ValueError as exc:
                unfit.append(f"{name!r}: {exc}")
                continue
            if found is None:
                unknown.append(f"{name!r} {list(tensor.shape)}")
            else:
                placed += found
        if unknown:
            raise ValueError(
                f"{len(unknown)} Megatron parameters have no rule in the table of this family: {listed(unknown)}; "
                "add rules to the table (docs/megatron.md), or pass another `family`"
            )
        if unfit:
            raise ValueError(
                f"{len(unfit)} Megatron parameters do not fit hf_config: {listed(unfit)}; pass the configuration of "
                "the trained model"
            )
        return placed

    def _parameter_regions(
        self, name: str, tensor: torch.Tensor, layers: Sequence[int], is_first: bool
    ) -> list[ParameterRegion] | None:
        """Return the parts of one parameter; None if it has no rule. Raises ValueError if it does not fit its rule."""
        is_copy = name == _EMBEDDING and not is_first
        if name == "output_layer.weight" and self.sizes["tied"]:
            name, is_copy = _EMBEDDING, True
        table, rest, prefix = self._model, name, ""
        found = _LAYER.fullmatch(name)
        if found is not None:
            layer, rest = self._layer_number(found["block"], int(found["index"]), layers), found["rest"]
            is_inside = found["block"] == "decoder" or found["inner"] is not None
            table = self._table(layer) if is_inside else self._mtp
            prefix = self._prefix(layer)
        match = table.find(rest)
        if match is None and rest == "mlp.router.qb_beta":
            raise ValueError(
                "it is the bias of quantile balancing, which no Hugging Face checkpoint has, and without which engines "
                "would choose other experts: train with another moe_router_load_balancing_type"
            )
        if match is None:
            return None
        return [
            ParameterRegion(
                _hf_names(match.rule, prefix, expert)[part.number],
                name,
                (part.region, part.view),
                is_copy,
                match.rule.plus,
            )
            for expert, part in self._parts(match, tensor)
        ]

    def _layer_number(self, block: str, index: int, layers: Sequence[int]) -> int:
        """Return the layer's number in the checkpoint, in which prediction layers come after the model's layers."""
        num_layers = self.sizes["layers"]
        limit = len(layers) if block == "decoder" else self._num_mtp_layers
        if index >= limit:
            raise ValueError(f"its layer is number {index}, but there are only {limit} such layers")
        if block == "mtp":
            return num_layers + index
        if not 0 <= layers[index] < num_layers:
            raise ValueError(f"its layer is number {layers[index]}, but hf_config has only {num_layers} layers")
        return layers[index]

    def _parts(self, match: Match, tensor: torch.Tensor) -> Iterator[tuple[int, LayoutPart]]:
        """Yield the parts of a parameter, each with the index of its expert in the whole model."""
        sizes, layout = self.sizes, match.rule.layout
        if not match.rule.is_of_experts:
            yield from ((0, part) for part in layout.parts(sizes, self._parallel.tensor, tensor))
            return
        axis = self._parallel.expert_tensor
        num_local = local_size(sizes["experts"], self._parallel.expert)
        if match.expert is None:
            shape = layout.local_shape(sizes, axis)
            matrices = list(enumerate(unstacked(tensor, num_local, shape, transposed=match.is_transposed)))
        elif match.expert < num_local:
            matrices = [(match.expert, tensor)]
        else:
            raise ValueError(
                f"its expert is number {match.expert}, but each of {self._parallel.expert.size} expert-parallel ranks "
                f"has only {num_local} experts"
            )
        for number, matrix in matrices:
            expert = num_local * self._parallel.expert.rank + number
            for part in layout.parts(sizes, axis, matrix):
                yield expert, in_stack(part, expert) if match.rule.is_in_stack else part


def _hf_names(rule: Rule, prefix: str, expert: int) -> list[str]:
    return [prefix + name.replace(EXPERT, str(expert)) for name in rule.hf]


# --- the configuration ---


def read_config(source: Any) -> Config:
    """Return the fields of a transformers configuration, a mapping, a config.json or a directory with one.

    Raises ValueError for anything else, FileNotFoundError for a path without a config.json.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source, "config.json") if os.path.isdir(source) else Path(source)
        if not path.is_file():
            raise FileNotFoundError(
                f"hf_config is {str(source)!r}, but {path} does not exist: pass a local path (nothing is downloaded)"
            )
        config: Any = json.loads(path.read_bytes())
    else:
        config = source.to_dict() if hasattr(source, "to_dict") else source
    try:
        fields = dict(config)
    except (TypeError, ValueError) as exc:
        raise ValueError(
            f"hf_config is {type(source).__name__}; it must be a transformers config, a dict or a path"
        ) from exc
    if "model_type" not in fields:
        fields["model_type"] = getattr(source, "model_type", "")
    # A model with a vision tower: a field on both levels is the whole model's.
    text = fields.get("text_config")
    return {**text, **fields} if isinstance(text, Mapping) else fields


def sizes_of(family: Family, config: Config) -> Sizes:
    """Return every size that a table may name, 0 for those that a model lacks.

    Raises ValueError if the configuration lacks a required field.
    """
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if name not in config]
    if missing:
        raise ValueError(f"hf_config lacks {', '.join(missing)}: pass the model's config.json")
    get = config.get
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups, head_dim = get("num_key_value_heads") or heads, get("head_dim") or hidden // heads
    # Sizes of multi-head latent attention.
    nope, rope, value = get("qk_nope_head_dim") or 0, get("qk_rope_head_dim") or 0, get("v_head_dim") or 0
    q_rank, kv_rank = get("q_lora_rank") or 0, get("kv_lora_rank") or 0
    sizes = {
        "one": 1,
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "twice_hidden": 2 * hidden,
        "vocab": config["vocab_size"],
        "tied": int(get("tie_word_embeddings") or 0),
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim,
        "query": heads * head_dim,
        "gated_query": 2 * heads * head_dim,
        "key": groups * head_dim,
        "qkv_bias": int(get("attention_bias") or 0),
        "proj_bias": int(get("attention_bias") or 0),
        "mlp_bias": int(get("mlp_bias") or 0),
        "ffn": get("intermediate_size") or 0,
        "experts": get("n_routed_experts") or get("num_experts") or get("num_local_experts") or 0,
        "moe_ffn": get("moe_intermediate_size") or 0,
        # transformers' configurations of DeepSeek-V3, which uses noaux_tc, have no topk_method.
        "expert_bias": int(get("topk_method") in (None, "noaux_tc")),
        "shared_ffn": (get("n_shared_experts") or 0) * (get("moe_intermediate_size") or 0),
        "q_rank": q_rank,
        "no_q_rank": int(not q_rank),
        "kv_rank": kv_rank,
        "latent_kv": kv_rank + rope,
        "latent_query": heads * (nope + rope),
        "latent_key_value": heads * (nope + value),
        "latent_out": heads * value,
    }
    # Sizes of a gated delta net.
    key_heads, value_heads = get("linear_num_key_heads") or 0, get("linear_num_value_heads") or 0
    key_dim, value_dim = get("linear_key_head_dim") or 0, get("linear_value_head_dim") or 0
    sizes |= {
        "delta_key_heads": key_heads,
        "delta_value_heads": value_heads,
        "delta_key_dim": key_dim,
        "delta_value_dim": value_dim,
        "delta_key": key_heads * key_dim,
        "delta_value": value_heads * value_dim,
        "delta_qkvz": 2 * (key_heads * key_dim + value_heads * value_dim),
        "delta_ba": 2 * value_heads,
        "delta_kernel": get("linear_conv_kernel_dim") or 0,
    }
    for name, source in family.sizes.items():
        if isinstance(source, int):
            sizes[name] = source
            continue
        field, _, default = source.partition("|")
        if get(field) is None and not default:
            raise ValueError(f"hf_config lacks {field}: pass the model's config.json")
        sizes[name] = int(default if get(field) is None else config[field])
    sizes["untied"] = int(not sizes["tied"])
    return sizes
