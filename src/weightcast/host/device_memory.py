"""Memory of a GPU that processes share: the driver's virtual memory, passed on as a file descriptor.

Invariants: the driver counts who has it (a descriptor, a handle, a mapping) and frees it with the last of them, so that
a process that is killed leaves nothing behind; a tensor keeps its mapping, so that nothing is ever unmapped under a
view; torch's allocator, its settings and its version have no part in it. A process that was forked has no mapping.

Source: "Virtual Memory Management" of the CUDA driver API.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from typing import Any

import torch

from weightcast.errors import InsufficientMemoryError, UnsupportedError
from weightcast.host import device as host_device
from weightcast.host.closing import close_in_child

_OUT_OF_MEMORY = 2
_HAS_VIRTUAL_MEMORY, _HAS_DESCRIPTORS = 102, 103
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, _HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""
_PINNED, _DESCRIPTOR, _ON_DEVICE, _READ, _READ_AND_WRITE = 1, 1, 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
CU_MEM_ACCESS_FLAGS_PROT_READ and _PROT_READWRITE."""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DeviceMemory:
    """Mapped in this process, until nothing refers to it and to tensors of it.

    `descriptor`: what another process opens it by; None where it was opened, and after `close`.
    """

    def __init__(self, handle: ctypes.c_ulonglong, size_bytes: int, device: torch.device, *, writes: bool) -> None:
        """Map an allocation of that many bytes for that device, which may be another one than it lies on.

        `writes`: else only readable, where the driver can do that.
        """
        self.size_bytes = size_bytes
        self.device = device
        self.descriptor: int | None = None
        driver, address, size = host_device.driver(), ctypes.c_ulonglong(), ctypes.c_size_t(size_bytes)
        zero = ctypes.c_ulonglong(0)
        with contextlib.ExitStack() as undo:
            _call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
            undo.callback(_call, "cuMemAddressFree", address, size)
            _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
            undo.callback(_call, "cuMemUnmap", address, size)
            access = _Access(_Location(_ON_DEVICE, device.index), _READ_AND_WRITE if writes else _READ)
            try:
                _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
            except UnsupportedError:
                if writes:
                    raise
                access.flags = _READ_AND_WRITE
                _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
            undo.pop_all()
        self.address = address.value
        weakref.finalize(self, _unmap, driver, address, size, device, os.getpid()).atexit = False

    @classmethod
    def allocate(cls, size_bytes: int, device: torch.device, what: str) -> DeviceMemory:
        """At least that many bytes, in whole pages of the driver's, with a descriptor.

        `what` needs them, for an error's text. Raises InsufficientMemoryError; UnsupportedError where the driver has
        no such memory.
        """
        host_device.synchronize_stream(device)  # which makes the device's context the thread's
        found = ctypes.c_int()
        for attribute in (_HAS_VIRTUAL_MEMORY, _HAS_DESCRIPTORS):
            _call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(attribute), ctypes.c_int(device.index))
            if not found.value:
                raise UnsupportedError(f"the driver shares no virtual memory of {device} (attribute {attribute} is 0)")
        properties = _Properties(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, device.index))
        page, handle = ctypes.c_size_t(), ctypes.c_ulonglong()
        _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), ctypes.c_int(0))
        size_bytes = -(-size_bytes // page.value) * page.value
        create = ctypes.byref(handle), ctypes.c_size_t(size_bytes), ctypes.byref(properties), ctypes.c_ulonglong(0)
        try:
            _call("cuMemCreate", *create)
        except InsufficientMemoryError:
            # torch keeps what it has freed, and gives that back for its own allocations only.
            host_device.empty_cache(device)
            try:
                _call("cuMemCreate", *create)
            except InsufficientMemoryError as exc:
                raise host_device.out_of_memory(size_bytes, device, what, "use smaller buckets") from exc
        try:
            memory = cls(handle, size_bytes, device, writes=True)
            descriptor = ctypes.c_int()
            kind = ctypes.c_int(_DESCRIPTOR)
            _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, kind, ctypes.c_ulonglong(0))
        finally:
            # The mapping and the descriptor have it from here on.
            _call("cuMemRelease", handle)
        memory.descriptor = descriptor.value
        # Else a program that another thread starts would keep the memory.
        os.set_inheritable(memory.descriptor, False)
        return close_in_child(memory)

    @classmethod
    def opened(cls, descriptor: int, size_bytes: int, device: torch.device) -> DeviceMemory:
        """Map memory of exactly that many bytes that another process has allocated; the descriptor stays the caller's.

        `device` is the GPU that reads it, and the only one on which this process needs a context; the memory may lie on
        another one that it `can_access`. Read-only, where the driver can do that. Raises UnsupportedError.
        """
        host_device.synchronize_stream(device)
        handle, kind = ctypes.c_ulonglong(), ctypes.c_int(_DESCRIPTOR)
        # The descriptor itself stands where the driver takes a pointer to other kinds of handles.
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), kind)
        try:
            return cls(handle, size_bytes, device, writes=False)
        finally:
            _call("cuMemRelease", handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # torch takes nothing that is declared read-only; what writes there all the same is an error of the GPU.
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """All of it as a flat uint8 tensor, which keeps it mapped. Not a copy."""
        return host_device.tensor_of(self)

    def close(self) -> None:
        """Close the descriptor: from here on it goes with the last mapping. Idempotent."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _unmap(driver: Any, address: ctypes.c_ulonglong, size: ctypes.c_size_t, device: torch.device, process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(RuntimeError):  # an error of the GPU, which is not of this memory
            host_device.synchronize(device)  # what is queued may still read it
        driver.cuMemUnmap(address, size)
        driver.cuMemAddressFree(address, size)


def _call(name: str, *arguments: Any) -> None:
    """Call the driver. Raises InsufficientMemoryError if it says so, UnsupportedError for everything else."""
    try:
        code = getattr(host_device.driver(), name)(*arguments)
    except (OSError, AttributeError) as exc:
        raise UnsupportedError(f"this host's CUDA driver has no {name}: {exc}") from exc
    if code == _OUT_OF_MEMORY:
        raise InsufficientMemoryError(f"{name}: the GPU has not that much memory left")
    if code:
        raise UnsupportedError(f"{name} of the CUDA driver failed with error {code}")
