"""Records of LoRA adapters, in PEFT's words. Each version of an adapter has a name of its own for ever, `NAME@NUMBER`.

The tensors of an adapter have the names of PEFT's files: `base_model.model.MODULE.lora_A.weight` of shape (rank,
inputs), and `lora_B` of shape (outputs, rank).
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from weightcast.format.manifest import MAX_NAME_BYTES, MAX_TENSORS, RunId, VersionNumber, WeightVersion

MAX_KEPT = 1 << 10
MAX_ALPHA = 1 << 32
_MODULE = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
_RANK = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
AdapterName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
"""Without "@", so that no name is another adapter's version."""


class LoraConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of a LoRA adapter. `target_modules`: the full name of each module that it changes.

    `rank_pattern`, `alpha_pattern`: by full module name, where these differ from `r` and `lora_alpha`. Raises
    ValueError for an alpha that is not finite, or above 2^32.
    """

    r: _RANK
    lora_alpha: float
    target_modules: Annotated[tuple[_MODULE, ...], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    use_rslora: bool = False
    rank_pattern: Annotated[dict[_MODULE, _RANK], msgspec.Meta(max_length=MAX_TENSORS)] = {}
    alpha_pattern: Annotated[dict[_MODULE, float], msgspec.Meta(max_length=MAX_TENSORS)] = {}

    def __post_init__(self) -> None:
        for name, alpha in (("lora_alpha", self.lora_alpha), *self.alpha_pattern.items()):
            if not abs(alpha) <= MAX_ALPHA:
                where = name if name == "lora_alpha" else f"the alpha of {name!r}"
                raise ValueError(f"{where} is {alpha}; it must be a finite number, at most {MAX_ALPHA}")

    def rank(self, module: str) -> int:
        return self.rank_pattern.get(module, self.r)

    def scaling(self, module: str) -> float:
        """Return the factor of the product of B and A."""
        alpha, rank = self.alpha_pattern.get(module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def peft(self) -> dict[str, Any]:
        """Return the settings as a PEFT directory has them in `adapter_config.json`."""
        return {
            "peft_type": "LORA",
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "target_modules": list(self.target_modules),
            "use_rslora": self.use_rslora,
            # Regular expressions there.
            "rank_pattern": {re.escape(name): rank for name, rank in self.rank_pattern.items()},
            "alpha_pattern": {re.escape(name): alpha for name, alpha in self.alpha_pattern.items()},
        }


class AdapterTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """The adapter that an update is of. `keep`: number of older versions that requests can name besides the new one.

    `base`: the version of the model that it was trained on; left out if it is for any.
    """

    name: AdapterName
    config: LoraConfig
    keep: Annotated[int, msgspec.Meta(ge=0, le=MAX_KEPT)] = 1
    base: WeightVersion | UnsetType = UNSET


class AdapterVersion(msgspec.Struct, frozen=True):
    """A version of an adapter that requests can name by its `label`; if `is_current`, also by the adapter's name."""

    name: AdapterName
    number: VersionNumber
    run: RunId
    is_current: bool

    @property
    def label(self) -> str:
        return adapter_label(self.name, self.number)


def adapter_label(name: str, number: int) -> str:
    """Return the name of one version, such as `policy@7`."""
    return f"{name}@{number}"


def tensor_name(module: str, half: str) -> str:
    """Return the name of an adapter's tensor. `half`: "A" or "B"."""
    return f"base_model.model.{module}.lora_{half}.weight"
