"""Publishes a live `nn.Module`: its parameters and buffers as `save_pretrained` would write them, without a copy."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from weightcast.checkpoint.live import (
    Buffers,
    CastTo,
    LiveCheckpoint,
    Names,
    OnAdapters,
    cast_specs,
    cast_target,
    state_dict_hooks,
)
from weightcast.errors import listed
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Gather, LookedAtRegions, Regions

logger = logging.getLogger(__name__)


class ModuleSource:
    """A `Source` of any module on one device or several; wrappers (DDP, torch.compile, ...) are looked through.

    Sharded parameters (FSDP2, FSDP1, tensor-parallel DTensor, HSDP, and their mixtures) are taken as they are: `specs`
    has their global shapes, on every rank alike; `regions` what this rank holds, on whichever device: several regions
    of a tensor, or none. Call both between steps: parameters that FSDP2 has left whole after a forward pass are
    resharded first, which frees their memory. Partial sums, parameters partitioned by DeepSpeed ZeRO-3, and others that
    the module does not hold as plain memory are errors.

    `dtype`: what half, bfloat16, single and double precision tensors are cast to while they are packed; others stay.
    "engine": each to the dtype that the engines have it in, which they are asked for (`specs` have the module's).
    `adapters`: a model with LoRA adapters of PEFT (a `PeftModel`, or one into which they were injected) is published
    "merge"d: what `merge_and_unload` gives on a copy, bit for bit, under the names of its base; "refuse" makes it an
    error. The trainer's tensors stay as they are. Memory: a copy of the base tensors that adapters change, on their
    device, made here and kept; `regions` merges into it each time. Disabled adapters are merged too, as peft does.
    Layers that the trainer has merged itself (`merge_adapter`), with adapters of any kind, are read in place. In layers
    whose adapters are sharded over ranks `complete` merges: adapters are gathered, some layers at a time, and each rank
    adds to its shards of the base. Memory: a copy of this rank's shards of adapted weights; while a publish begins, the
    whole delta of the largest of these (about twice its weight), and up to 64 MiB of adapters.
    `names` renames checkpoint names; `buffers` are by default those of the state dict.
    Raises TypeError for what is no module or dtype; ValueError for what can't be seen in checkpoint form without a copy
    (see `checkpoint`), for packed weights and extra state, which are no tensors of the module, for weights that torch
    computes from others (parametrizations, weight norm, pruning), and for adapters other than LoRA, here and, if
    the module changes, in `specs` and `regions`. Both cost about 0.5 us per tensor while nothing has changed; but for
    adapters, neither copies, communicates nor waits for a device. A model on the meta device has specs, but no regions.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: CastTo | None = None,
        names: Names | None = None,
        *,
        buffers: Buffers = "persistent",
        adapters: OnAdapters = "merge",
    ) -> None:
        self._dtype = None if dtype is None else cast_target(dtype)
        self.casts_to_engines = dtype == "engine"
        self._live = LiveCheckpoint(model, buffers=buffers, names=names, sharded=True, on_adapters=adapters)
        if hooks := state_dict_hooks(model, loading=False):
            logger.warning(
                "what the module holds is published, under its own names: these are not called, which may change its "
                "state dict: %s. Where their outcome is wanted, publish TensorSource(model.state_dict())",
                listed(hooks, separator=", "),
            )
        self._of: object = None
        self._specs: tuple[TensorSpec, ...] = ()
        self._views: object = None
        self._regions = LookedAtRegions()

    def specs(self) -> Sequence[TensorSpec]:
        """The whole model's records; the same object until names, shapes or dtypes change."""
        self._live.refresh()
        if self._of is not self._live.specs:
            self._of = self._live.specs
            self._specs = cast_specs(self._live.specs, self._dtype)
        return self._specs

    def regions(self) -> Regions:
        """Return this rank's tensors or shards; the same object until the module's tensors are replaced."""
        self._live.refresh(merge=True)
        if self._views is not self._live.views:
            self._live.require_memory()
            self._views = self._live.views
            self._regions = LookedAtRegions(self._live.regions())
        return self._regions

    @property
    def num_gathers(self) -> int:
        """How often `complete` gathers: not at all without adapters in sharded layers."""
        return self._live.num_gathers

    def complete(self, gather: Gather) -> None:
        """Merge the adapters of sharded layers; `regions` has their memory. See `CollectiveSource`."""
        self._live.complete(gather)
