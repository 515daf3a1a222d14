"""Source of a live `nn.Module`: parameters and buffers under the names of `save_pretrained`, without a copy."""

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
    state_dict_hooks,
)
from weightcast.errors import listed
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Gather, Regions

logger = logging.getLogger(__name__)


class ModuleSource:
    """A `Source` of any module, on one or several devices. Wrappers (DDP, torch.compile, ...) are unwrapped.

    Sharded parameters (FSDP2, FSDP1, tensor-parallel DTensor, HSDP, and combinations) are not gathered: `specs` has
    their global shapes, equal on every rank; `regions` has this rank's shards, on any device: several regions of a
    tensor, one or none. Call both between training steps: parameters that FSDP2 left unsharded after a forward pass are
    resharded first, which frees their memory. Partial sums, parameters partitioned by DeepSpeed ZeRO-3, and others that
    are not plain memory are errors.

    `dtype`: half, bfloat16, single and double precision tensors are cast to it while they are packed; others are not.
    "engine": each tensor is cast to the engines' dtype of it (`specs` has the module's dtypes).
    `adapters`: for a model with LoRA adapters of PEFT (a `PeftModel`, or injected adapters), "merge" publishes what
    `merge_and_unload` makes of a copy, bit for bit, under the names of the base model; "refuse" raises. The trainer's
    tensors are not changed. Memory: a copy of the adapted base tensors, on their device, made here and kept; `regions`
    merges into it each time. Disabled adapters are merged too, as peft does. Layers that the trainer has merged itself
    (`merge_adapter`), with adapters of any kind, are read in place. Adapters that are sharded over ranks are merged by
    `complete`: they are gathered, a few layers at a time, and each rank adds to its shards of the base. Memory then: a
    copy of this rank's shards of adapted weights and, at the beginning of a publish, the whole delta of the largest of
    them (about twice its weight), and up to 64 MiB of adapters.
    `names`: renames checkpoint names. `buffers`: by default those of the state dict.
    Raises TypeError for arguments of other types. Raises ValueError for tensors that have no checkpoint form without a
    copy (see `checkpoint`), packed weights and extra state, weights that torch computes from others (parametrizations,
    weight norm, pruning), and adapters other than LoRA; here and, if the module changes, in `specs` and `regions`.
    While nothing has changed these two cost well below 1 us per tensor. Except for adapters, they neither copy nor
    communicate nor wait for a device. A model on the meta device has specs, but no regions.
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
        self.casts_to_engines = dtype == "engine"
        self._live = LiveCheckpoint(
            model, buffers=buffers, names=names, dtype=dtype, sharded=True, on_adapters=adapters
        )
        if hooks := state_dict_hooks(model, loading=False):
            logger.warning(
                "the module's parameters and buffers are published under their own names; these hooks, which may "
                "change its state dict, are not called: %s. To publish the changed state dict, use "
                "TensorSource(model.state_dict())",
                listed(hooks, separator=", "),
            )

    def specs(self) -> Sequence[TensorSpec]:
        """Return the whole model's specs; the same object until names, shapes or dtypes change."""
        self._live.refresh()
        return self._live.specs

    def regions(self) -> Regions:
        """Return this rank's tensors or shards; the same object until the module's tensors are replaced."""
        self._live.refresh(merge=True)
        return self._live.regions()

    @property
    def num_gathers(self) -> int:
        """Number of gathers in `complete`; 0 without adapters in sharded layers."""
        return 0 if self._live.merging is None else self._live.merging.num_gathers

    def complete(self, gather: Gather) -> None:
        """Merge the adapters of sharded layers into the memory of `regions`. See `CollectiveSource`."""
        if self._live.merging is not None:
            self._live.merging.complete(gather)
