"""A trainer of vLLM's own API on ranks of torch.distributed: `torchrun trainer_ranks.py URL KIND VERSION`.

It publishes the model of seed 1 by the backend "weightcast". KIND is where from: "own", vLLM's ModuleSource of a model
that is sharded with FSDP2; "pieces" or "stages", sources of the shape of vLLM 0.33. VERSION is vLLM's, of this process.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import vllm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, base
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from real_vllm.models import make_model
from real_vllm.programs import end_rank
from weightcast.integrations.vllm import WeightcastTrainerInitInfo

_IS_0_33 = hasattr(base, "Placement")


@dataclasses.dataclass(frozen=True)
class _ParamMeta:
    """As 0.33's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    placements: tuple[Placement, ...] | None = dataclasses.field(default=None, kw_only=True)


ParamMeta: Any = base.ParamMeta if _IS_0_33 else _ParamMeta


def placements_of(placements: Sequence[Placement]) -> tuple[Any, ...]:
    """Return torch's placements as `ParamMeta` takes them: 0.33 has classes of its own."""
    if not _IS_0_33:
        return tuple(placements)
    return tuple(base.Shard(p.dim) if isinstance(p, Shard) else base.Replicate() for p in placements)


class Source(base.WeightSource if _IS_0_33 else object):  # type: ignore[misc]
    """0.33's `WeightSource` over tensors by name; DTensors are yielded as pieces, with their owners and places.

    `owners`: of tensors that some ranks have, whole; `rank`: whose source it is.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, owners: Mapping[str, tuple[int, ...]] | None = None, rank: int = 0
    ) -> None:
        self._tensors, self._owners, self._rank = tensors, owners or {}, rank
        self._is_local = any(isinstance(tensor, DTensor) for tensor in tensors.values())
        self.num_ended = 0
        """How often it was iterated to its end."""

    @functools.cached_property
    def metadata(self) -> list[Any]:
        found = []
        for name, tensor in self._tensors.items():
            meta = ParamMeta(name, tensor.dtype, tuple(tensor.shape), owners=self._owners.get(name))
            if isinstance(tensor, DTensor):
                grid = tensor.device_mesh.mesh
                owners = tuple(grid.flatten().tolist())
                placements = placements_of(tensor.placements)
                meta = dataclasses.replace(meta, owners=owners, mesh_shape=tuple(grid.shape), placements=placements)
            found.append(meta)
        return found

    def owned_names(self, rank: int) -> list[str]:
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_full(self) -> bool:
        return not self._is_local

    def implements_iter_local(self) -> bool:
        return self._is_local

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert not self._is_local
        return self._iterate()

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._is_local
        return self._iterate()

    def _iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.owned_names(self._rank):
            tensor = self._tensors[name]
            yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor.clone()
        self.num_ended += 1


def source_of(kind: str, rank: int, num_ranks: int) -> Any:
    model = make_model(seed=1)
    if kind == "own":
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (num_ranks,)))
        return base.ModuleSource(model)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if kind == "pieces":
        mesh = init_device_mesh("cpu", (num_ranks,))
        return Source({name: distribute_tensor(p, mesh, [Shard(0)]) for name, p in parameters.items()}, rank=rank)
    assert kind == "stages"
    # The first rank has the first names, as a stage of a pipeline; what lies on the border is both ranks'.
    names, border = list(parameters), len(parameters) // 2
    owners = {name: (0,) if number < border else (1,) for number, name in enumerate(names)} | {names[border]: (0, 1)}
    return Source(parameters, owners=owners, rank=rank)


def main() -> None:
    torch.set_num_threads(1)
    url, kind, version = sys.argv[1:]
    assert vllm.__version__.startswith(version), f"{vllm.__version__} at {vllm.__file__}"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    source = source_of(kind, rank, dist.get_world_size())
    info = WeightcastTrainerInitInfo(rank=rank)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)
    try:
        trainer.send_weights()
    finally:
        trainer.shutdown()
    end_rank()


if __name__ == "__main__":
    main()
