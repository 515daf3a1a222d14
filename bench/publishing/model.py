"""The bench's model, a plain nn.Module of given tensors, and what a trainer rank does with it, whole or sharded."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from publishing.channel import ANSWER_SECONDS
from publishing.result import BenchSettings
from weightcast.errors import PublishReport
from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.manifest import TensorSpec
from weightcast.format.tensor_digest import tensor_digest
from weightcast.process_group import Store
from weightcast.sources.module import ModuleSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

_INTERFACE = "GLOO_SOCKET_IFNAME"
_TILE_ELEMENTS = 65536


def build_model(specs: Iterable[TensorSpec], device: str = "cpu") -> nn.Module:
    """A module tree with one zeroed parameter for each spec; every page of it is resident when this returns."""
    root = nn.Module()
    for spec in specs:
        *path, leaf = spec.name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device).zero_()
        parent.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def local_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The memory of every parameter that is held here: all of it, or this rank's shard."""
    held = ((name, parameter.data) for name, parameter in model.named_parameters())
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in held}


def fill(model: nn.Module, seed: int) -> None:
    """Give every tensor that is held here values of its own, the same for the same seed."""
    tile = torch.randn(_TILE_ELEMENTS, generator=torch.Generator().manual_seed(seed))
    tiles: dict[torch.dtype, torch.Tensor] = {}
    for index, tensor in enumerate(local_tensors(model).values()):
        if tensor.dtype not in tiles:
            tiles[tensor.dtype] = torch.cat([tile, tile]).to(tensor.dtype)
        start = index * 7919 % _TILE_ELEMENTS
        for chunk in torch.split(tensor.view(-1), _TILE_ELEMENTS):
            chunk.copy_(tiles[tensor.dtype][start : start + chunk.numel()])


class TrainerRank:
    """Its methods are steps, which all ranks take at the same time."""

    def __init__(self, settings: BenchSettings, model: nn.Module) -> None:
        self.model = model
        self._settings = settings
        self._publisher: Publisher | None = None

    def open(self, *engines: str) -> None:
        """Make a publisher to these engines."""
        self._publisher = Publisher(
            ModuleSource(self.model),
            transport=self._settings.transport_url,
            engines=engines,
            options=PublishOptions(bucket_size_bytes=self._settings.bucket_size_bytes, install=self._settings.install),
        )

    def change(self) -> None:
        """Stand in for an optimizer step: every value becomes another one, in place."""
        torch._foreach_neg_(list(local_tensors(self.model).values()))

    def publish(self) -> PublishReport:
        assert self._publisher is not None
        return self._publisher.publish()

    def close(self) -> None:
        """Close the publisher. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()

    def gather_each(self) -> None:
        """Make every parameter whole, one after the other, and do nothing with it."""
        for _ in self._whole_tensors():
            pass

    def digests(self) -> dict[str, str]:
        """The digest of every parameter, whole."""
        return {name: tensor_digest(tensor) for name, tensor in self._whole_tensors()}

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            tensor = parameter.data
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def trainer_rank(
    settings: BenchSettings, specs: Sequence[TensorSpec], number: int = 0, store: Store = None
) -> Iterator[TrainerRank]:
    """One rank with its model, filled. Several ranks meet by `store` in torch's default group, as trainers do.

    A model of several ranks is sharded by FSDP2 as users do it (made without memory, sharded, then given memory), so
    that no rank ever holds all of it.
    """
    with contextlib.ExitStack() as stack:
        if settings.trainer_ranks == 1:
            model = build_model(specs, settings.device)
        else:
            if _INTERFACE not in os.environ:
                os.environ[_INTERFACE] = "lo"
                stack.callback(os.environ.pop, _INTERFACE)
            timeout, size = datetime.timedelta(seconds=ANSWER_SECONDS), settings.trainer_ranks
            dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=timeout)
            stack.callback(dist.destroy_process_group)
            model = build_model(specs, "meta")
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
            model.to_empty(device="cpu")
        fill(model, seed=number)
        if settings.trainer_ranks > 1:
            # Free memory goes back to the system, so that taking it again is seen as memory taken. glibc only.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        yield stack.enter_context(contextlib.closing(TrainerRank(settings, model)))
