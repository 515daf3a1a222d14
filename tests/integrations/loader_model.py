"""A model as serving engines have them: sharded, fused, padded, with a loader of its own; and an engine of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.dry_run import DryRunOutcome, dry_run, present
from weightcast.integrations.plugin.model import LoaderEngine

HIDDEN, HEADS, EXPERTS, VOCAB = 16, 4, 4, 10
FUSED = ("latent.q_a", "latent.kv_a")


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv = parameter(3 * HIDDEN // size, HIDDEN)
        self.out = parameter(HIDDEN, HIDDEN // size)


class Experts(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w13 = parameter(EXPERTS, 2 * HIDDEN // size, HIDDEN, dtype=torch.bfloat16)
        self.w2 = parameter(EXPERTS, HIDDEN, HIDDEN // size, dtype=torch.bfloat16)


class Embedding(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = parameter(12 // size, HIDDEN)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(HIDDEN)


class Mixer(nn.Module):
    """What is not copied as it comes: `A` is computed, `turned` lies transposed, `router` is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.A = parameter(HIDDEN)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN, 2 * HIDDEN).t(), requires_grad=False)
        self.router = parameter(EXPERTS, HIDDEN, dtype=torch.float32)


class Latent(nn.Module):
    """`absorbed` and `bound` are made from `kv` after every load, as MLA's are: in vLLM anew, in SGLang in place.

    `fused` is made of two tensors once both have come, if they come in one call, as in SGLang.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv = parameter(HIDDEN, HIDDEN)
        self.fused = parameter(2 * HIDDEN, HIDDEN)
        self.absorbed = torch.zeros(HIDDEN, HIDDEN)
        self.bound = torch.zeros(HIDDEN, HIDDEN)


class Model(nn.Module):
    """Rank `rank` of `size`. `num_loads` counts the tensors that its loader was given."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.num_loads = 0
        self.embed, self.attention, self.experts = Embedding(size), Attention(size), Experts(size)
        self.norm, self.mixer, self.turned, self.latent = Norm(), Mixer(), Turned(), Latent()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        halves: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            self.num_loads += 1
            if name not in FUSED:
                self._load(name, tensor)
                continue
            halves[name] = tensor
            if len(halves) == len(FUSED):
                self.latent.fused.data.copy_(torch.cat([halves[each] for each in FUSED]))
        self.latent.absorbed = self.latent.kv.data.t().contiguous()
        self.latent.bound.copy_(self.latent.kv.data.t())

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        part, _, leaf = name.partition(".")
        if part == "embed":
            rows = len(self.embed.table)
            mine = tensor[self.rank * rows : (self.rank + 1) * rows]
            self.embed.table.data[: len(mine)].copy_(mine)
            self.embed.table.data[len(mine) :].fill_(0)
        elif part == "attention" and leaf == "out":
            columns = HIDDEN // self.size
            self.attention.out.data.copy_(tensor.narrow(1, self.rank * columns, columns))
        elif part == "attention":
            rows = HIDDEN // self.size
            target = self.attention.qkv.data.narrow(0, "qkv".index(leaf) * rows, rows)
            target.copy_(tensor.narrow(0, self.rank * rows, rows))
        elif part == "experts":
            number, _, which = leaf.partition(".")
            length = HIDDEN // self.size
            if which == "w2":
                self.experts.w2.data[int(number)].copy_(tensor.narrow(1, self.rank * length, length))
            else:
                target = self.experts.w13.data[int(number)].narrow(0, (which == "w3") * length, length)
                target.copy_(tensor.narrow(0, self.rank * length, length))
        elif name == "mixer.A":
            self.mixer.A.data.copy_(-torch.exp(tensor.float()))
        elif name == "turned.router":
            self.turned.router.data.copy_(tensor.to(torch.float32))
        else:
            module, _, leaf = name.rpartition(".")
            getattr(self.get_submodule(module), leaf).data.copy_(tensor)

    def live(self) -> dict[str, torch.Tensor]:
        """All that it computes with."""
        made = {"absorbed": self.latent.absorbed, "bound": self.latent.bound}
        return {name: value.detach().clone() for name, value in (*self.named_parameters(), *made.items())}


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of all names."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {"embed.table": values(VOCAB, HIDDEN), "norm.weight": values(HIDDEN), "mixer.A": values(HIDDEN)}
    tensors |= {f"attention.{name}": values(HIDDEN, HIDDEN) for name in ("q", "k", "v", "out")}
    for number in range(EXPERTS):
        for which in ("w1", "w3", "w2"):
            tensors[f"experts.{number}.{which}"] = values(HIDDEN, HIDDEN, dtype=torch.bfloat16)
    tensors["turned.weight"] = values(2 * HIDDEN, HIDDEN)
    tensors["turned.router"] = values(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    tensors["latent.kv"] = values(HIDDEN, HIDDEN)
    return {FUSED[0]: values(HIDDEN, HIDDEN)} | tensors | {FUSED[1]: values(HIDDEN, HIDDEN)}


def specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def without_memory(layer: nn.Module, _: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The form of a dry run."""

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return torch.Tensor._make_subclass(type(tensor), empty, False)

    parameters, buffers = (
        {n: twin(t) for n, t in present(held).items()} for held in (layer._parameters, layer._buffers)
    )
    return parameters, buffers


class ModelEngine(LoaderEngine):
    """Installs into a `Model`. `packed_copies`: as in `RecordedMap`."""

    host = "test"

    def __init__(
        self,
        model: Model,
        *,
        reference: Mapping[str, torch.Tensor] | None = None,
        packed_copies: Mapping[str, Callable[[], str]] = {},
    ) -> None:
        self.device = torch.device("cpu")
        self.model = model
        self.fail_in_copy = False
        self.after_copy: Callable[[Model], None] = lambda model: None

        self._started_from = specs(reference or checkpoint(0))
        self._packed_copies = packed_copies
        super().__init__(model, (), is_alone=model.size == 1)
        model.num_loads = 0

    def _header(self) -> Sequence[TensorSpec]:
        return self._started_from

    def _dry_run(self, model: nn.Module, specs: Sequence[TensorSpec]) -> DryRunOutcome:
        return dataclasses.replace(dry_run(model, without_memory, specs), packed_copies=self._packed_copies)

    def _begin_load(self, calls: Mapping[str, int]) -> None:
        pass

    def _finish_load(self) -> list[str]:
        self.after_copy(self.model)
        if self.fail_in_copy:
            raise RuntimeError("this copy was told to fail")
        return []
