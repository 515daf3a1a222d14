"""The backend "weightcast" of vLLM's trainer-side API.

Importing this module registers it with `WeightTransferTrainerFactory`, as vLLM's plugins do. It needs vLLM on the
trainer, from whose base classes it derives, and supports the sources of vLLM 0.32 and 0.33, whose methods differ.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import vllm
from torch.distributed.tensor import Replicate, Shard
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from weightcast.checkpoint.sharding import runs
from weightcast.errors import PublishReport, warn_if_untested
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.handed import HandedPublisher, exhaust
from weightcast.integrations.vllm.clients import RayEngine
from weightcast.integrations.vllm.plugin import BACKEND, register_trainer
from weightcast.seams.client import EngineClient
from weightcast.seams.source import Held, Regions
from weightcast.sources.stream import IteratorSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

logger = logging.getLogger(__name__)

TESTED_WITH = ("0.32", "0.33")
"""0.33 was tested only on the trainer, with engines of 0.32, since there is no vLLM 0.33 for CPUs."""


@dataclasses.dataclass
class WeightcastTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Argument of `WeightTransferTrainerFactory.trainer_init` for this backend; `rank` is this trainer process's.

    `engines`: URLs or EngineClient objects; by default the engines of vLLM's `client`. `transport`, `token`, `options`:
    see `Publisher`. Only rank 0 uses these.
    """

    backend: ClassVar[str] = BACKEND

    engines: Sequence[str | EngineClient] | None = None
    transport: str = "ipc://"
    token: str | None = None
    options: PublishOptions | None = None


class WeightcastTrainerEngine(TrainerWeightTransferEngine[WeightcastTrainerInitInfo]):  # type: ignore[misc]
    """Publishes a `WeightSource`: each `send_weights` is one version, all or nothing on every engine.

    vLLM's `client` is used only for the engines' addresses. A source whose ranks have different parts (0.33:
    `iter_local`, or owners without rank 0; 0.32: `held_names`) is published by all ranks of torch.distributed's default
    group together. From any other source rank 0 publishes the tensors one after another, as the source gathers them.

    Memory: the transport's; for parts also the source's tensors, until the version is sent.
    """

    init_info_cls = WeightcastTrainerInitInfo

    def __init__(self, init_info: WeightcastTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self.report: PublishReport | None = None
        """Report of the last successful `send_weights`, on a publishing rank."""
        warn_if_untested(logger, "vLLM", vllm.__version__, *TESTED_WITH, symptom="send_weights fails")
        self._weights = _RankParts(source, self.rank)
        self._publisher: Publisher | HandedPublisher | None = None
        make = functools.partial(
            Publisher, transport=init_info.transport, token=init_info.token, options=init_info.options
        )
        engines: Sequence[str | EngineClient] = ()
        if self.is_sender:
            engines = _engines_of(client) if init_info.engines is None else init_info.engines
        if self._weights.are_published_together:
            self._publisher = make(self._weights, engines=engines)
        elif self.is_sender:
            stream = IteratorSource(self._weights.specs())
            self._publisher = HandedPublisher(
                stream, functools.partial(make, stream, engines=engines, trainer_group=None)
            )
            self._publisher.open()

    @classmethod
    def trainer_init(cls, init_info: WeightcastTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Create the backend; call it on every trainer rank. Connects nothing.

        Raises ValueError or TypeError for a wrong source, rank or engines.
        """
        if not hasattr(source, "metadata"):
            raise ValueError(f"source is a {type(source).__name__}; pass a WeightSource, such as vLLM's ModuleSource")
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Publish the source's weights as the next version: call it on every trainer rank.

        Blocks until each engine has installed the version or has failed. Raises what `Publisher.publish` raises: on all
        ranks if they publish together, otherwise only on rank 0, after the source was iterated to its end, since its
        ranks gather each tensor together.
        """
        if self._publisher is None:
            exhaust(self._weights.iterate())
        elif isinstance(self._publisher, HandedPublisher):
            self.report = self._publisher.publish(self._weights.iterate())
        else:
            with self._weights:
                self.report = self._publisher.publish()

    def shutdown(self) -> None:
        """Disconnect the engines, which go on serving. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()


class _RankParts:
    """A `Source` of a rank's `WeightSource`. Use it in a `with` block, whose beginning iterates over the source.

    `are_published_together`: ranks have different parts, so one rank can't publish alone.
    """

    def __init__(self, source: Any, rank: int) -> None:
        """Raise ValueError for an unsupported dtype, or a rank that differs from torch.distributed's."""
        self._source, self._rank = source, rank
        # `metadata` is a method in vLLM 0.32, a property from 0.33 on.
        self._is_0_32 = callable(source.metadata)
        self._is_local = not self._is_0_32 and source.implements_iter_local()
        metadata = source.metadata() if self._is_0_32 else source.metadata
        unknown = [f"{meta.name!r} is {meta.dtype}" for meta in metadata if meta.dtype not in DTYPE_NAMES]
        if unknown:
            raise ValueError(f"unsupported dtypes: {', '.join(unknown)}; supported: {', '.join(DTYPE_NAMES.values())}")
        self._metadata = {meta.name: (number, meta) for number, meta in enumerate(metadata)}
        self._specs = tuple(TensorSpec(meta.name, DTYPE_NAMES[meta.dtype], tuple(meta.shape)) for meta in metadata)
        self._regions: Regions = {}
        if self._is_0_32:
            self.are_published_together = source.held_names() is not None
        else:
            lacks_some = any(meta.owners is not None and 0 not in meta.owners for meta in metadata)
            self.are_published_together = self._is_local or lacks_some
        if self.are_published_together and dist.is_available() and dist.is_initialized() and dist.get_rank() != rank:
            raise ValueError(
                f"rank is {rank}, and this process is rank {dist.get_rank()} of torch.distributed's default group, "
                "whose ranks publish together: pass rank=torch.distributed.get_rank()"
            )

    def iterate(self) -> Iterator[tuple[str, Any]]:
        """Iterate over the source, which may gather each tensor with other ranks. In 0.32 a tensor may be None."""
        source = self._source
        return iter(source if self._is_0_32 else source.iter_local() if self._is_local else source.iter_full())

    def __enter__(self) -> None:
        held: dict[str, Sequence[Held]] = {}
        for name, tensor in self.iterate():
            region = self._region(name)
            if region is not None and tensor is not None and tensor.numel():
                held[name] = ((region, tensor.detach()),)
        self._regions = held

    def __exit__(self, *_: object) -> None:
        self._regions = {}

    def _region(self, name: str) -> Region | None:
        """Return the region of a tensor that this rank publishes; None if another rank publishes all of it.

        Ranks that have the same whole tensors publish some each, so that no rank has to keep all gathered ones.
        """
        number, meta = self._metadata[name]
        if self._is_0_32:
            return whole(tuple(meta.shape))
        if self._is_local and meta.placements is not None:
            return region_of(meta, self._rank)
        owners = meta.owners or (0,)
        return whole(tuple(meta.shape)) if owners[number % len(owners)] == self._rank else None

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def region_of(meta: Any, rank: int) -> Region:
    """Return the region of a rank's piece of `iter_local`: 0.33's `ParamMeta`, split by `torch.chunk`, axis by axis."""
    coordinate = [int(i) for i in torch.unravel_index(torch.tensor(meta.owners.index(rank)), meta.mesh_shape)]
    placements = [Shard(each.dim) if hasattr(each, "dim") else Replicate() for each in meta.placements]
    dims = [dim[0] if dim else (0, 0) for dim in runs(meta.shape, meta.mesh_shape, coordinate, placements)]
    return Region(tuple(start for start, _ in dims), tuple(size for _, size in dims))


def _engines_of(client: Any) -> list[str | EngineClient]:
    """Return the engines of one of vLLM's own clients. Raises ValueError for a client of another kind."""
    if hasattr(client, "base_url"):
        return [client.base_url]
    if hasattr(client, "handles"):
        return [RayEngine(handle) for handle in client.handles]
    name = type(client).__name__
    raise ValueError(f"{name} does not say where its engines are: pass WeightcastTrainerInitInfo(engines=[...])")


register_trainer()
