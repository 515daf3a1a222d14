"""c. Every byte: what is packed, digested, checked and loaded on the GPU is what a CPU makes of it, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from pretended import LazyGpu
from torch import nn

from _gpu.section import GIB, MIB, Here
from weightcast import ModuleEngine, TensorSource
from weightcast.errors import IntegrityError
from weightcast.format.bucket import (
    DTYPE_NAMES,
    HEADER_BYTES,
    TORCH_DTYPES,
    BucketBuffer,
    Layout,
    check_bucket,
    narrow,
    payload_digest,
)
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.host.copy import copy_all
from weightcast.trainer.packer import Packer, pack, tiling

VERSION = WeightVersion("5e" * 16, 7)
Place = Callable[[torch.Tensor], torch.Tensor]
"""Copies a tensor from host memory to the device."""


def run(here: Here) -> None:
    with contextlib.ExitStack() as stack:
        if here.dry:
            gpu = stack.enter_context(LazyGpu())
            here.device, place = gpu.device, gpu.tensor
        else:

            def place(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(here.device)

        with here.part("every dtype and layout"):
            _every_layout(here, place)
        with here.part("one source dtype, several target dtypes"):
            _mixed_targets(here, place)
        with here.part("digests on the device and on a CPU"):
            _digests(here, place)
        with here.part("a flipped bit"):
            _flipped(here, place)
        with here.part("a tensor of over 2^31 bytes, and of over 2^31 elements"):
            if here.dry:
                here.fact("large tensors", "left out in a dry run: they need 25 GB")
            elif here.needs("tensors of over 2^31 bytes and elements", device_gib=22):
                _large(here)


def _bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Return a tensor of random bits; for bool, of random True and False."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool().view(shape)
    data = torch.randint(0, 256, (max(numel, 1) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)[:numel].view(shape)


def _host_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _packed(tensors: dict[str, torch.Tensor], specs: list[TensorSpec], size: int, device: torch.device) -> Any:
    """Return the manifest, the layout and the packed buckets of `tensors`, in the device's memory."""
    manifest = plan(specs, size)
    layout, buffers = Layout(manifest), []
    packer = Packer(layout, tiling(layout.manifest.tensors, TensorSource(tensors).regions()))
    for index, num_bytes in enumerate(manifest.buckets):
        # Full of other bytes, as a slot is that is used again.
        memory = torch.empty(HEADER_BYTES + num_bytes, dtype=torch.uint8, device=device)
        memory.fill_(0xA5)
        buffers.append(BucketBuffer.of(memory))
        pack(packer, manifest, VERSION, index, buffers[-1])
    return manifest, layout, buffers


def _every_layout(here: Here, place: Place) -> None:
    errors, num_buckets, num_tensors = {}, 0, 0
    for dtype_name, dtype in TORCH_DTYPES.items():
        try:
            buckets, tensors, problems = _layouts_of(here, place, dtype)
            num_buckets, num_tensors = num_buckets + buckets, num_tensors + tensors
        except Exception as exc:
            problems = [f"{type(exc).__name__}: {exc}"]
        if problems:
            errors[dtype_name] = problems
    here.check(f"{num_tensors} tensors in {num_buckets} buckets are what a CPU packs", not errors, errors)
    here.fact("dtypes", ", ".join(TORCH_DTYPES))


def _layouts_of(here: Here, place: Place, dtype: torch.dtype) -> tuple[int, int, list[str]]:
    """Return the number of buckets and of tensors of one dtype, and the differences found."""
    bases: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
        "matrix": ((37, 24), lambda base: base),
        "scalar": ((), lambda base: base),
        "empty": ((0, 3), lambda base: base),
        "thin": ((1, 5, 1), lambda base: base),
        "transposed": ((48, 16), lambda base: base.t()),
        "sliced": ((40, 40), lambda base: base[3:29:2, 5:38]),
    }
    sources, on_device = {}, {}
    for number, (name, (shape, view)) in enumerate(bases.items()):
        base = _bits(shape, dtype, number)
        sources[name], on_device[name] = view(base), view(place(base))
    specs = [TensorSpec(name, DTYPE_NAMES[dtype], tuple(tensor.shape)) for name, tensor in sources.items()]
    problems, num_buckets = [], 0
    for size in (768, 1 << 20):  # tensors that are cut over buckets, and one bucket for all
        manifest, layout, buffers = _packed(on_device, specs, size, here.device)
        num_buckets += len(buffers)
        _, _, on_host = _packed(sources, specs, size, torch.device("cpu"))
        for index, num_bytes in enumerate(manifest.buckets):
            check_bucket(buffers[index], num_bytes, VERSION, index)
            if _host_bytes(buffers[index].payload) != _host_bytes(on_host[index].payload):
                problems.append(f"bucket {index} of {size} bytes differs from a CPU's")
            views = layout.views(index, buffers[index].payload)
            for entry, view in zip(layout.entries[index], views, strict=True):
                source = narrow(sources[entry.record.name], entry.piece.region)
                if _host_bytes(view) != _host_bytes(source):
                    problems.append(f"{entry.record.name} has other bits in bucket {index} of {size} bytes")
    return num_buckets, 2 * len(specs), problems


def _mixed_targets(here: Here, place: Place) -> None:
    """One call has targets of several dtypes, for which torch before 2.11 writes wrong values (pytorch#173383)."""
    floats = {f"t{number}": _bits((33, 64), torch.int16, number).to(torch.float32) for number in range(12)}
    names = ["bfloat16", "float32", "float16"]
    specs = [TensorSpec(name, names[number % 3], (33, 64)) for number, name in enumerate(floats)]
    _, layout, buffers = _packed({name: place(t) for name, t in floats.items()}, specs, 1 << 20, here.device)
    bad = []
    for entry, view in zip(layout.entries[0], layout.views(0, buffers[0].payload), strict=True):
        expected = floats[entry.record.name].to(TORCH_DTYPES[entry.record.dtype])
        if _host_bytes(view) != _host_bytes(expected):
            bad.append(entry.record.name)
    here.check("a packer's casts", not bad, bad)
    net = nn.Module()
    for number in range(12):
        target = torch.zeros(33, 64, dtype=TORCH_DTYPES[names[number % 3]])
        net.register_parameter(f"t{number}", nn.Parameter(place(target), requires_grad=False))
    engine, halves = ModuleEngine(net, cast=True), {name: tensor.bfloat16() for name, tensor in floats.items()}
    engine.load([(name, place(tensor)) for name, tensor in halves.items()])
    engine.commit(VERSION)
    bad = [
        name
        for name, parameter in net.named_parameters()
        if _host_bytes(parameter.data) != _host_bytes(halves[name].to(parameter.dtype))
    ]
    here.check("ModuleEngine's casts", not bad, bad)


def _digests(here: Here, place: Place) -> None:
    sizes = [8, 2048, 2056, 3 * 16384 - 8, 1 << 20, (1 << 20) + 24]
    for size in sizes if here.dry else [*sizes, 512 * MIB, 512 * MIB + 8]:
        payload = _bits((size,), torch.uint8, size % 1000)
        on_device, on_cpu = payload_digest(place(payload)), payload_digest(payload)
        here.check(f"nh-128 of {size} bytes is a CPU's", on_device == on_cpu, f"{on_device.hex()} {on_cpu.hex()}")


def _flipped(here: Here, place: Place) -> None:
    tensors = {"a": place(_bits((1000,), torch.bfloat16)), "b": place(_bits((77,), torch.uint8))}
    specs = [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    manifest, layout, buffers = _packed(tensors, specs, 1 << 20, here.device)
    buffer, (size,) = buffers[0], manifest.buckets
    end = max(entry.piece.offset_bytes + entry.num_bytes for entry in layout.entries[0])
    places = {
        "the payload": (buffer.payload, 500, "bytes were changed"),
        "the payload's last gap": (buffer.payload, end, "bytes were changed"),
        "the header's magic": (buffer.header, 0, "magic"),
        "the header's index": (buffer.header, 40, "header says"),
        "the header's digest": (buffer.header, 75, "bytes were changed"),
        "the header's reserve": (buffer.header, 200, "reserved"),
    }
    here.check("there is a gap behind the last tensor", end < size, f"{end} of {size}")
    check_bucket(buffer, size, VERSION, 0)
    for name, (memory, at, words) in places.items():
        former = memory[at : at + 1].cpu()
        memory[at : at + 1].copy_(former ^ 4)
        here.raises(
            f"one bit of {name}",
            IntegrityError,
            lambda: check_bucket(buffer, size, VERSION, 0),
            words,
        )
        memory[at : at + 1].copy_(former)
    check_bucket(buffer, size, VERSION, 0)


def _large(here: Here) -> None:
    """Tensors stay on the device; their ends, where a 32-bit index would wrap, are compared."""
    numel = (1 << 31) + 4096
    source = torch.arange(numel // 4, dtype=torch.int32, device=here.device).view(torch.uint8)
    packed = _packed({"large": source}, [TensorSpec("large", "uint8", (numel,))], 3 * GIB, here.device)
    manifest, layout, buffers = packed
    check_bucket(buffers[0], manifest.buckets[0], VERSION, 0)
    view = layout.views(0, buffers[0].payload)[0]
    here.check("a tensor of over 2^31 bytes in one bucket", bool(torch.equal(view, source)))
    del packed, manifest, layout, buffers, view, source
    torch.cuda.empty_cache()
    # Numbers only: no exponent of all ones.
    halves = (
        torch.arange(numel // 2, dtype=torch.int32, device=here.device).bitwise_and_(0x3F3F3F3F).view(torch.bfloat16)
    )
    target = torch.zeros(numel, dtype=torch.float32, device=here.device)
    copy_all([target], [halves])
    same = all(torch.equal(target[at : at + MIB], halves[at : at + MIB].float()) for at in (0, numel // 2, numel - MIB))
    here.check("a cast of over 2^31 elements", same)
