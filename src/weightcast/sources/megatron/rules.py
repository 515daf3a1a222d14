"""Rules of a family's table, which map names of Megatron parameters to names of a checkpoint.

A rule is independent of rank and layer. Names are relative to their layer; `{expert}` stands for an expert's index,
among all experts of the model in a checkpoint's name, among this rank's experts in Megatron's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from weightcast.sources.megatron.layouts import ShardLayout, Sizes

Config: TypeAlias = Mapping[str, Any]
"""The fields of a Hugging Face config.json."""

EXPERT = "{expert}"


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Maps one Megatron parameter, with any of its `names`, to the tensors `hf` of the checkpoint.

    `names`: those of the different layer specs (local, Transformer Engine); at most one occurs in a layer. Names with
    `{expert}` are of a parameter that is sharded over the expert-tensor-parallel ranks; if `hf` does not have that, the
    checkpoint has all experts in one tensor, with matrices as (in, out). `stacked`: other names, of a parameter with
    all experts of a rank. `transposed`: like `stacked`, with each matrix transposed. `when`: names of sizes that must
    not be zero for the rule to apply; a layer has `dense` or `moe`, and by its attention `softmax` or `linear`.
    `group`: name of the load group; several `hf` of a rule are always loaded in one call. `dtype`: the checkpoint's, if
    it differs from the other tensors'. `plus`: added to Megatron's values to get the checkpoint's. `is_fused`: a layer
    may have this parameter in place of several parameters with their own rules.
    """

    names: tuple[str, ...]
    hf: tuple[str, ...]
    layout: ShardLayout
    when: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    group: str = ""
    dtype: str = ""
    plus: float = 0.0
    is_fused: bool = False

    @property
    def is_of_experts(self) -> bool:
        return any(EXPERT in name for name in self.names)

    @property
    def is_in_stack(self) -> bool:
        """True if the checkpoint has all experts in one tensor, their matrices transposed."""
        return self.is_of_experts and EXPERT not in self.hf[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A family of models: its tables, and the names in its configuration that differ from other families'.

    `sizes`: a size's name -> the config's field (with a default after a `|`), or a number. `is_moe`: returns True if a
    layer has experts. `is_linear`: returns True if its attention is linear. `mtp`: rules of a multi-token prediction
    layer in addition to those of a layer. `zero_centered`: norms multiply by 1 + weight.
    """

    model: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    mtp: tuple[Rule, ...] = ()
    sizes: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    is_moe: Callable[[Config, int], bool] = lambda config, layer: False
    is_linear: Callable[[Config, int], bool] = lambda config, layer: False
    zero_centered: bool = False
    layer_prefix: str = "model.layers.{layer}."


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """The rule for a parameter. `expert`: the local index of its expert, None if it is not of a single expert."""

    rule: Rule
    expert: int | None = None
    is_transposed: bool = False


class Table:
    """The rules that apply to one kind of layer, found by a parameter's name."""

    def __init__(self, rules: tuple[Rule, ...], sizes: Sizes) -> None:
        self.rules = tuple(rule for rule in rules if all(sizes.get(name, 0) for name in rule.when))
        self._exact: dict[str, Match] = {}
        self._patterns: list[tuple[re.Pattern[str], Rule]] = []
        for rule in self.rules:
            self._exact |= {name: Match(rule) for name in (*rule.names, *rule.stacked) if EXPERT not in name}
            self._exact |= {name: Match(rule, is_transposed=True) for name in rule.transposed}
            patterns = [re.escape(name).replace(re.escape(EXPERT), r"(\d+)") for name in rule.names if EXPERT in name]
            self._patterns += [(re.compile(pattern), rule) for pattern in patterns]

    def find(self, name: str) -> Match | None:
        match = self._exact.get(name)
        if match is not None:
            return match
        for pattern, rule in self._patterns:
            found = pattern.fullmatch(name)
            if found is not None:
                return Match(rule, int(found[1]))
        return None
