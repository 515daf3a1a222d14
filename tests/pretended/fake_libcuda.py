"""CUDA's driver library without a GPU: its virtual memory, over anonymous files and mappings of this process.

An allocation is a memfd, its exported descriptor a copy of the file's, a mapping an mmap of it: so descriptors travel
between real processes, the kernel counts who has the memory and frees it with the last, and what was mapped read-only
can't be written. Programs that a process starts inherit an exported descriptor. Functions are called by the C
convention, with the structures that `cuda.h` declares: an argument of a wrong width or a structure of a wrong layout is
an error here as there. Counted are handles, reservations, mappings.

Not found: what a driver refuses by its version or its container, and everything about speed. Source: cuda.h of CUDA 12.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

PAGE_BYTES = 2 << 20
_INVALID, _OUT_OF_MEMORY, _INVALID_CONTEXT, _NOT_SUPPORTED = 1, 2, 201, 801
_READ, _READ_AND_WRITE = 1, 3
_MAP_FIXED, _MAP_NORESERVE, _NO_ACCESS = 0x10, 0x4000, 0
_int, _size, _long, _pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_void_p
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuDeviceGetAttribute": (_pointer, _int, _int),
    "cuDeviceCanAccessPeer": (_pointer, _int, _int),
    "cuMemGetAllocationGranularity": (_pointer, _pointer, _int),
    "cuMemCreate": (_pointer, _size, _pointer, _long),
    "cuMemExportToShareableHandle": (_pointer, _long, _int, _long),
    "cuMemImportFromShareableHandle": (_pointer, _pointer, _int),
    "cuMemRelease": (_long,),
    "cuMemAddressReserve": (_pointer, _size, _size, _long, _long),
    "cuMemAddressFree": (_long, _size),
    "cuMemMap": (_long, _size, _size, _long, _long),
    "cuMemUnmap": (_long, _size),
    "cuMemSetAccess": (_long, _size, _pointer, _size),
    "cuThreadExchangeStreamCaptureMode": (_pointer,),
}
_RELAXED = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (_pointer, _size, _int, _int, _int, ctypes.c_long)
_libc.munmap.argtypes = (_pointer, _size)
_libc.mprotect.argtypes = (_pointer, _size, _int)


class _CFunction(ctypes._CFuncPtr):  # type: ignore[misc, name-defined]
    """A function as `ctypes.CDLL` gives it: of arguments it knows nothing."""

    _flags_ = ctypes._FUNCFLAG_CDECL  # type: ignore[attr-defined]
    _restype_ = ctypes.c_int


class FakeLibcuda:
    """What `ctypes.CDLL("libcuda.so.1")` would be, with `num_devices` GPUs.

    `accesses_peers`: a GPU can read another one's memory. `supports_descriptors`: else the driver shares no virtual
    memory. `supports_read_only`: else every mapping can be written. `free_bytes`: says how much memory there is for one
    allocation. `relaxed`: the names of threads that were allowed to allocate while a graph is captured; `is_relaxed`:
    whether this one is now. A thread has no context before `make_current`.
    """

    def __init__(self, free_bytes: Callable[[], int] = lambda: 1 << 40, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.accesses_peers = True
        self.supports_descriptors = True
        self.supports_read_only = True
        self.relaxed: list[str] = []
        self._threads = threading.local()
        self._owners: dict[int, int] = {}
        """The device on which the memory of each mapped range lies."""
        self.handles: dict[int, int] = {}
        """The file of each allocation, by its handle."""
        self.reserved: dict[int, int] = {}
        """Bytes of each reserved range, by address; `mapped`: of each range with memory."""
        self.mapped: dict[int, int] = {}
        self._free_bytes = free_bytes
        self._num_handles = 1 << 40
        self._callbacks = []
        """Kept, since C knows their addresses only."""
        for name, types in _PROTOTYPES.items():
            callback = ctypes.CFUNCTYPE(_int, *types)(self._guarded(getattr(self, f"_{name}")))
            self._callbacks.append(callback)
            setattr(self, name, _CFunction(ctypes.cast(callback, _pointer).value))

    @property
    def is_clean(self) -> bool:
        """Whether this process has nothing of the driver's any more."""
        return not (self.handles or self.reserved or self.mapped)

    @staticmethod
    def _guarded(function: Callable[..., int | None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            try:
                return function(*arguments) or 0
            except (OSError, KeyError, AssertionError):
                return _INVALID

        return call

    def _cuDeviceGetAttribute(self, value: int, attribute: int, device: int) -> None:
        assert attribute in (102, 103)
        assert 0 <= device < self.num_devices
        _write(value, _int, self.supports_descriptors)

    def _cuDeviceCanAccessPeer(self, value: int, device: int, peer: int) -> None:
        assert device != peer
        assert 0 <= min(device, peer) < max(device, peer) < self.num_devices
        _write(value, _int, self.accesses_peers)

    def _cuMemGetAllocationGranularity(self, size: int, properties: int, option: int) -> None:
        self._check(properties)
        _write(size, _size, PAGE_BYTES)

    def _cuMemCreate(self, handle: int, size: int, properties: int, flags: int) -> int | None:
        self._check(properties)
        device = (ctypes.c_int * 4).from_address(properties)[3]
        assert size
        assert size % PAGE_BYTES == 0
        assert flags == 0
        if size > self._free_bytes():
            return _OUT_OF_MEMORY
        descriptor = os.memfd_create(f"fake-libcuda-{device}")
        os.ftruncate(descriptor, size)
        self._give(handle, descriptor)
        return None

    def _check(self, properties: int) -> None:
        """CUmemAllocationProp: pinned, with a descriptor, on a device; no metadata, no flags."""
        *kind, device, metadata, more_metadata, flags, more_flags = (ctypes.c_int * 8).from_address(properties)
        assert kind == [1, 1, 1]
        assert 0 <= device < self.num_devices
        assert metadata == more_metadata == flags == more_flags == 0

    def _give(self, handle: int, descriptor: int) -> None:
        self._num_handles += 1
        self.handles[self._num_handles] = descriptor
        _write(handle, _long, self._num_handles)

    def _cuMemExportToShareableHandle(self, descriptor: int, handle: int, kind: int, flags: int) -> None:
        assert kind == 1
        assert flags == 0
        exported = os.dup(self.handles[handle])
        os.set_inheritable(exported, True)
        _write(descriptor, _int, exported)

    def _cuMemImportFromShareableHandle(self, handle: int, descriptor: int, kind: int) -> None:
        assert kind == 1
        assert "fake-libcuda" in os.readlink(f"/proc/self/fd/{descriptor}")
        self._give(handle, os.dup(descriptor))

    def _cuMemRelease(self, handle: int) -> None:
        os.close(self.handles.pop(handle))

    def _cuMemAddressReserve(self, address: int, size: int, alignment: int, wanted: int, flags: int) -> None:
        assert size
        assert size % PAGE_BYTES == 0
        assert wanted == flags == 0
        found = _mapping(None, size, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.reserved[found] = size
        _write(address, _long, found)

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        assert self.reserved[address] == size
        assert address not in self.mapped
        _libc.munmap(address, self.reserved.pop(address))

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert self.reserved[address] == size
        assert address not in self.mapped
        assert offset == flags == 0
        assert os.fstat(self.handles[handle]).st_size == size
        _mapping(address, size, self.handles[handle], mmap.MAP_SHARED | _MAP_FIXED)
        self.mapped[address] = size
        name = os.readlink(f"/proc/self/fd/{self.handles[handle]}").split()[0]
        self._owners[address] = int(name.rpartition("-")[2])

    def _cuMemUnmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size
        _mapping(address, size, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED)

    def _cuMemSetAccess(self, address: int, size: int, access: int, count: int) -> int | None:
        assert self.mapped[address] == size
        assert count == 1
        kind, device, flags = (ctypes.c_int * 3).from_address(access)
        assert kind == 1
        assert 0 <= device < self.num_devices
        if device != self._owners[address] and not self.accesses_peers:
            return _NOT_SUPPORTED
        assert flags in (_READ, _READ_AND_WRITE)
        if flags == _READ and not self.supports_read_only:
            return _NOT_SUPPORTED
        assert not _libc.mprotect(address, size, mmap.PROT_READ | (mmap.PROT_WRITE if flags != _READ else 0))
        return None

    def make_current(self) -> None:
        """The runtime gives this thread a context."""
        self._threads.has_context = True

    @property
    def is_relaxed(self) -> bool:
        return getattr(self._threads, "mode", 0) == _RELAXED

    def _cuThreadExchangeStreamCaptureMode(self, mode: int) -> int | None:
        if not getattr(self._threads, "has_context", False):
            return _INVALID_CONTEXT
        former, self._threads.mode = getattr(self._threads, "mode", 0), _int.from_address(mode).value
        _write(mode, _int, former)
        if self.is_relaxed:
            self.relaxed.append(threading.current_thread().name)
        return None


def _write(address: int, kind: Any, value: int) -> None:
    kind.from_address(address).value = value


def _mapping(address: int | None, size: int, descriptor: int, flags: int) -> int:
    """Without access, as the driver has it before cuMemSetAccess."""
    found: int = _libc.mmap(address, size, _NO_ACCESS, flags, descriptor, 0)
    if found == _pointer(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return found
