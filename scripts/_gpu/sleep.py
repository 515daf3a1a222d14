"""i. Weights in virtual memory whose pages are unmapped and mapped again at one address, as in engines that sleep."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from _gpu import section
from _gpu.peers import Peer
from _gpu.section import MIB, Here
from weightcast import EngineServer, ModuleEngine
from weightcast.errors import ClosedError
from weightcast.format.manifest import TensorSpec

PINNED, ON_DEVICE, READ_AND_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""


def run(here: Here) -> None:
    num_tensors, tensor_bytes = 16, here.size(16 * MIB, 64 << 10)
    memory: Any = HostPages(num_tensors * tensor_bytes) if here.dry else DevicePages(num_tensors * tensor_bytes)
    shapes = section.even(num_tensors, tensor_bytes)
    weights, flat = nn.Module(), memory.tensor()
    for number, (name, shape) in enumerate(shapes):
        part = flat[number * tensor_bytes : (number + 1) * tensor_bytes].view(torch.bfloat16).view(shape)
        weights.register_parameter(name, nn.Parameter(part, requires_grad=False))
    engine = Sleeper(weights)
    with Peer(here, "trainer", shapes) as trainer, EngineServer(engine) as server:
        trainer.ready()
        version = 0
        for install in ("streaming", "staged"):
            with here.part(f"asleep between two versions, {install}"):
                trainer.ask("open", engines=[server.url], install=install)
                for _ in range(3):
                    version += 1
                    trainer.ask("publish", version=version)
                    found = section.wrong(weights, version)
                    here.check(f"version {version} is right", not found, found)
                    used = section.used_bytes(here.device)
                    with server.gate.exclusive():
                        section.synchronize(here.device)
                        memory.unmap()
                        freed = used - section.used_bytes(here.device)
                        memory.map()
                    if not here.dry:
                        here.check("the pages were given back", freed >= num_tensors * tensor_bytes, freed)
                    lost = section.wrong(weights, version)
                    here.check("what was there is lost, at the same addresses", len(lost) == num_tensors, lost)
                with server.gate.exclusive():
                    section.synchronize(here.device)
                    memory.unmap()
                    engine.is_asleep = True
                refused = functools.partial(trainer.ask, "publish", version=version + 1)
                here.raises(f"a publish while asleep is refused, {install}", RuntimeError, refused, "asleep")
                with server.gate.exclusive():
                    memory.map()
                    engine.is_asleep = False
                version += 2
                trainer.ask("publish", version=version)
                found = section.wrong(weights, version)
                here.check(f"awake again it takes version {version}", not found, found)
                trainer.ask("close_publisher")


class Sleeper(ModuleEngine):
    """Refuses offers while its weights' pages are unmapped, as vLLM's and SGLang's engines do."""

    is_asleep = False

    def specs(self) -> Sequence[TensorSpec]:
        if self.is_asleep:
            raise ClosedError("the weights' memory is asleep: wake it before an update")
        return super().specs()


class HostPages:
    """`DevicePages` on a CPU: anonymous pages that read as zeros once they are mapped again."""

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def unmap(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def map(self) -> None:
        """Do nothing: pages appear when they are touched."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class DevicePages:
    """Pages of the CUDA driver's "Virtual Memory Management" API, used as vLLM's CuMemAllocator does."""

    def __init__(self, num_bytes: int) -> None:
        torch.ones(1, device="cuda")  # makes the context that the driver's calls need
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._properties = Properties(type=PINNED, location=Location(ON_DEVICE, 0))
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), ctypes.c_int(0)
        )
        self._used_bytes = num_bytes
        self._size = ctypes.c_size_t(-(-num_bytes // granularity.value) * granularity.value)
        self._address, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._size, ctypes.c_size_t(0), zero, zero)
        self.map()
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
            "strides": None,
        }

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device="cuda:0")

    def map(self) -> None:
        handle, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(self._properties), zero)
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, zero)
        access = Access(Location(ON_DEVICE, 0), READ_AND_WRITE)
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        # The mapping keeps it.
        self._call("cuMemRelease", handle)

    def unmap(self) -> None:
        self._call("cuMemUnmap", self._address, self._size)

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._driver, name)(*args)
        if status:
            raise RuntimeError(f"{name} answered error {status}")
