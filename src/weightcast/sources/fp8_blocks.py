"""Source that quantises another source's weights to fp8 by blocks, the form of DeepSeek's and Qwen's FP8 checkpoints.

`X.weight` becomes float8_e4m3fn, and `X.weight_scale_inv` has one float32 scale for each block of it. The arithmetic is
that of `per_block_cast_to_fp8` of DeepGEMM and vLLM, bit for bit, on every device: blocks at the edges are smaller.

Invariants: a weight that the config quantises is quantised or is an error by name, never sent as it is; quantised
memory is made once and filled again by each publish.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from weightcast.checkpoint.fp8_blocks import BlockQuantiser, num_blocks
from weightcast.errors import NotFiniteError, listed
from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Gather, Held, Regions, Source, StreamSource
from weightcast.sources.joined import JoinedSource

_QUANTISABLE = frozenset({"float16", "bfloat16", "float32"})
_LEFT = frozenset({"embed_tokens", "lm_head", "gate", "shared_expert_gate", "router"})
"""Last parts of the names of modules that engines never quantise by blocks: embeddings, heads and routers."""


class ToDict(Protocol):
    """A quantization config as an object, such as transformers' `FineGrainedFP8Config`."""

    def to_dict(self) -> dict[str, Any]: ...


class Fp8BlockSource:
    """A `Source` of another source's tensors, with linear weights quantised to fp8 by blocks: half of bfloat16's bytes.

    For engines that were started from an fp8 checkpoint with `weight_block_size`. `quantization_config`: that
    checkpoint's (the dict of its config.json, or transformers' object). Each tensor `X.weight` of two or more dims is
    quantised, except for X in `modules_to_not_convert` or `ignored_layers` (read as transformers does: from the start
    of the name, as a regular expression, or its end), and embed_tokens, lm_head, gate, shared_expert_gate and router,
    which engines never quantise. All other tensors pass unchanged. A weight is quantised from the dtype in the source's
    specs; with dtype="engine", from the module's.

    Shards (FSDP2, tensor parallelism) are quantised by the rank that has them. No rank may have a part of a block.
    Memory: one byte for each quantised element that this rank has, on its device, and a few MiB; kept.

    Raises ValueError, with every name, for weights that can't be quantised: dtypes other than float16, bfloat16 and
    float32, other than two dims, blocks that are cut by shards; and for configs of other kinds. `regions` quantises,
    and waits for the device once; it raises NotFiniteError for weights with NaN or infinity. Raises TypeError for a
    source that streams its tensors.
    """

    def __init__(self, source: Source, quantization_config: Mapping[str, Any] | ToDict) -> None:
        if isinstance(source, StreamSource):
            raise TypeError(
                f"{type(source).__name__} streams its tensors, which can't be quantised here: yield quantised tensors "
                "and their scales from the stream"
            )
        self._block, self._ignored = _read(quantization_config)
        self._source = JoinedSource(source)  # whose regions are the same object while nothing has moved
        self.casts_to_engines = self._source.casts_to_engines
        self._of: object = None
        self._specs: tuple[TensorSpec, ...] = ()
        self._quantised: Mapping[str, TensorSpec] = {}
        """The specs of the weights before they are quantised, by name."""
        self._found: Regions | None = None
        self._regions: Regions = {}
        self._parts: list[_Part] = []
        self._views: list[torch.Tensor] = []
        """The source's view of each part."""
        self._scales: dict[torch.device, torch.Tensor] = {}
        """All scales of each device, for one look at them."""
        self._quantisers: dict[torch.device, BlockQuantiser] = {}

    def specs(self) -> Sequence[TensorSpec]:
        """Return the specs, quantised; the same object while the source's specs are the same object."""
        found = self._source.specs()
        if found is not self._of:
            quantised = {spec.name: spec for spec in found if self._is_quantised(spec)}
            _require_quantisable(quantised.values())
            specs = tuple(each for spec in found for each in self._with_scale(spec, spec.name in quantised))
            counts = collections.Counter(name for spec in specs for name in spec.names)
            repeated = [name for name, count in counts.items() if count > 1]
            if repeated:
                raise ValueError(f"the source has scales already, {listed(repeated)}: its weights are quantised")
            self._specs = self._specs if specs == self._specs else specs
            self._of, self._quantised = found, quantised
        return self._specs

    def regions(self) -> Regions:
        """Return this rank's regions with the present weights quantised; the same object while the source's are."""
        found = self._source.regions()
        if found is not self._found:
            self._found = None
            self._lay_out(found)
            self._found = found
        if not self.num_gathers:
            self._quantise()
        return self._regions

    @property
    def num_gathers(self) -> int:
        """The source's: see `CollectiveSource`."""
        return self._source.num_gathers

    def complete(self, gather: Gather) -> None:
        """Complete the source, then quantise. See `CollectiveSource`."""
        self._source.complete(gather)
        self._quantise()

    def _is_quantised(self, spec: TensorSpec) -> bool:
        found = {
            name: len(spec.shape) > 1
            and name.endswith(".weight")
            and (module := name.removesuffix(".weight")).rpartition(".")[2] not in _LEFT
            and not any(ignored.match(module) for ignored in self._ignored)
            for name in spec.names
        }
        if len(set(found.values())) > 1:
            each = ", ".join(f"{name!r} is {'' if is_due else 'not '}quantised" for name, is_due in found.items())
            raise ValueError(f"these names are of one tensor, but {each}: untie them, or list them all as ignored")
        return found[spec.name]

    def _with_scale(self, spec: TensorSpec, is_quantised: bool) -> Iterator[TensorSpec]:
        if not is_quantised:
            yield spec
            return
        # A weight reaches an engine in one call with its scale.
        group, shape = spec.group or spec.name, tuple(map(num_blocks, spec.shape, self._block))
        yield msgspec.structs.replace(spec, dtype="float8_e4m3fn", group=group)
        aliases = tuple(map(_scale_name, spec.aliases))
        yield TensorSpec(_scale_name(spec.name), "float32", shape, aliases=aliases, group=group)

    def _lay_out(self, found: Regions) -> None:
        """Make the regions, and a part for each quantised region; memory is kept where it has the same sizes."""
        self.specs()
        regions, problems = dict[str, list[Held]](), list[str]()
        wanted, views = list[tuple[str, torch.dtype, Region, torch.device]](), list[torch.Tensor]()
        for name, held in found.items():
            spec = self._quantised.get(name)
            if spec is None:
                regions[name] = list(held)
                continue
            for region, view in held:
                if region.numel:
                    wanted.append((name, TORCH_DTYPES[spec.dtype], region, view.device))
                    views.append(view)
                    problems += _cut_blocks(spec, region, self._block)
        if problems:
            raise ValueError(
                f"shards cut blocks of {list(self._block)}, whose scale would need several ranks: {listed(problems)}; "
                "shard over a number of ranks that divides the weights into whole blocks, or gather the weights and "
                "publish them from one rank"
            )
        if wanted != [(part.name, part.dtype, part.region, part.weight.device) for part in self._parts]:
            self._parts, self._scales = [], {}  # before the new memory is made
            with torch.inference_mode(False):
                self._make_parts(wanted)
        for part in self._parts:
            regions.setdefault(part.name, []).append((part.region, part.weight))
            scales = regions.setdefault(_scale_name(part.name), [])
            scales.append((_scale_region(part.region, self._block), part.scale))
        self._regions, self._views = regions, views

    def _make_parts(self, wanted: Sequence[tuple[str, torch.dtype, Region, torch.device]]) -> None:
        shapes = [_scale_region(region, self._block).sizes for _, _, region, _ in wanted]
        scales: dict[torch.device, Iterator[torch.Tensor]] = {}
        for device in {device for *_, device in wanted}:
            here = [math.prod(shape) for (*_, other), shape in zip(wanted, shapes, strict=True) if other == device]
            self._scales[device] = torch.empty(sum(here), device=device)
            self._quantisers[device] = BlockQuantiser(device, self._block)
            scales[device] = iter(torch.split(self._scales[device], here))
        for (name, dtype, region, device), shape in zip(wanted, shapes, strict=True):
            weight = torch.empty(region.sizes, dtype=torch.float8_e4m3fn, device=device)
            self._parts.append(_Part(name, dtype, region, weight, next(scales[device]).view(shape)))

    @torch.no_grad()
    def _quantise(self) -> None:
        """Quantise the present weights. Raises NotFiniteError with each weight that has NaN or infinity."""
        with torch.inference_mode(False):
            for part, view in zip(self._parts, self._views, strict=True):
                self._quantisers[part.weight.device].quantise(view, part.dtype, part.weight, part.scale)
            if all(bool(torch.isfinite(scales).all()) for scales in self._scales.values()):
                return
            found = [part.name for part in self._parts if not torch.isfinite(part.scale).all()]
        problems = [f"{name!r} holds NaN or infinity" for name in dict.fromkeys(found)]
        raise NotFiniteError(
            f"weights can't be quantised, so nothing was sent: {listed(problems)}; mend the weights", problems
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A region of a weight that this rank quantises, cast to `dtype` before, and the memory of the outcome."""

    name: str
    dtype: torch.dtype
    region: Region
    weight: torch.Tensor
    scale: torch.Tensor


def _read(config: Mapping[str, Any] | ToDict) -> tuple[tuple[int, int], list[re.Pattern[str]]]:
    """Return a quantization config's block size, and the patterns of modules that stay as they are."""
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_dict"):
            raise TypeError(
                f"quantization_config is a {type(config).__name__}; it must be a dict, such as that of a checkpoint's "
                "config.json, or have to_dict()"
            )
        config = config.to_dict()
    if "quantization_config" in config:
        raise ValueError("this is a model's config: pass its quantization_config")
    expected: dict[str, Sequence[object]] = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic", None),
        "scale_fmt": ("float", None),
        "expert_dtype": ("fp8", None),
        "store_dtype": (None,),
        "modules_to_convert": (None, []),
    }
    problems = [
        f"{name} is {config.get(name)!r}, expected {allowed[0]!r}"
        for name, allowed in expected.items()
        if config.get(name) not in allowed
    ]
    block = config.get("weight_block_size")
    is_block = isinstance(block, Sequence) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not is_block:
        problems.append(f"weight_block_size is {block!r}, expected two sizes such as [128, 128]")
    if problems:
        raise ValueError(
            f"quantization_config is of another kind: {listed(problems)}. Pass that of a checkpoint with fp8 weights "
            "and float32 scales by blocks, or quantise the weights yourself and publish them from a TensorSource"
        )
    assert block is not None
    ignored = [*(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ())]
    try:
        # transformers' rule: from the start of a name to the end of one of its parts, or the end of a name.
        patterns = [re.compile(rf"(?:{each})(?:(?<=\.)|(?=\.|$))|.*{re.escape(each)}$") for each in ignored]
    except (re.error, TypeError) as exc:
        raise ValueError(f"modules_to_not_convert has what is not a regular expression: {ignored} ({exc})") from exc
    return (block[0], block[1]), patterns


def _require_quantisable(specs: Collection[TensorSpec]) -> None:
    problems = [
        f"{spec.name!r} is {spec.dtype}, expected {', '.join(sorted(_QUANTISABLE))}"
        if spec.dtype not in _QUANTISABLE
        else f"{spec.name!r} has the shape {list(spec.shape)}, expected two dims"
        for spec in specs
        if spec.dtype not in _QUANTISABLE or len(spec.shape) != 2
    ]
    if problems:
        raise ValueError(
            f"weights can't be quantised by blocks: {listed(problems)}; if engines have them as they are, list their "
            "modules in modules_to_not_convert"
        )
    if not specs:
        raise ValueError(
            "no tensor is quantised: the source has no weight of a linear layer (X.weight), or all are ignored"
        )


def _cut_blocks(spec: TensorSpec, region: Region, block: tuple[int, int]) -> Iterator[str]:
    """Yield a problem for each dim along which a region begins or ends inside a block."""
    for dim, (offset, size, whole, of_block) in enumerate(
        zip(region.offsets, region.sizes, spec.shape, block, strict=True)
    ):
        if offset % of_block or ((offset + size) % of_block and offset + size != whole):
            yield f"{spec.name!r} of {list(spec.shape)}: this rank has {offset} to {offset + size} of dim {dim}"


def _scale_region(region: Region, block: tuple[int, int]) -> Region:
    offsets = tuple(offset // size for offset, size in zip(region.offsets, block, strict=True))
    return Region(offsets, tuple(map(num_blocks, region.sizes, block)))


def _scale_name(name: str) -> str:
    return f"{name}_scale_inv"
