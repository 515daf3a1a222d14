"""GPU memory that processes share: the driver's virtual memory, passed as a file descriptor.

Invariants: the driver frees the memory with its last descriptor, handle or mapping, so a killed process leaves nothing
behind; a tensor keeps its mapping, so memory is never unmapped while a view exists; torch's allocator is not involved.
A forked process has no mapping.

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
    """GPU memory that is mapped in this process as long as this object or a tensor of it exists.

    `descriptor`: with which another process opens it; None in the opening process, and after `close`.
    """

    def __init__(self, handle: ctypes.c_ulonglong, size_bytes: int, device: torch.device, *, writes: bool) -> None:
        """Map an allocation for a device, which may differ from the device that has the memory.

        `writes`: if False, map it read-only, if the driver supports that.
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
        """Allocate at least `size_bytes`, in whole pages of the driver, with a descriptor.

        `what`: the purpose, for errors. Raises InsufficientMemoryError; UnsupportedError if the driver does not support
        shared virtual memory.
        """
        host_device.synchronize_stream(device)  # makes the device's context current in this thread
        found = ctypes.c_int()
        for attribute in (_HAS_VIRTUAL_MEMORY, _HAS_DESCRIPTORS):
            _call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(attribute), ctypes.c_int(device.index))
            if not found.value:
                # The caller adds the remedy, which depends on the use of the memory.
                raise UnsupportedError(
                    f"the CUDA driver can't share virtual memory of {device} (attribute {attribute} is 0)"
                )
        properties = _Properties(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, device.index))
        page, handle = ctypes.c_size_t(), ctypes.c_ulonglong()
        _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), ctypes.c_int(0))
        size_bytes = -(-size_bytes // page.value) * page.value
        create = ctypes.byref(handle), ctypes.c_size_t(size_bytes), ctypes.byref(properties), ctypes.c_ulonglong(0)
        try:
            _call("cuMemCreate", *create)
        except InsufficientMemoryError:
            # torch caches freed memory, and releases it only for its own allocations.
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
            # From here on the mapping and the descriptor keep the memory.
            _call("cuMemRelease", handle)
        memory.descriptor = descriptor.value
        # Otherwise a program that another thread starts would inherit it and keep the memory.
        os.set_inheritable(memory.descriptor, False)
        return close_in_child(memory)

    @classmethod
    def opened(cls, descriptor: int, size_bytes: int, device: torch.device) -> DeviceMemory:
        """Map memory of exactly `size_bytes` that another process has allocated. The caller closes the descriptor.

        `device`: the GPU that reads it, the only one on which this process needs a context; the memory may be on
        another one that it `can_access`. The mapping is read-only, if the driver supports that. Raises
        UnsupportedError.
        """
        host_device.synchronize_stream(device)
        handle, kind = ctypes.c_ulonglong(), ctypes.c_int(_DESCRIPTOR)
        # The driver takes the descriptor's value in place of a pointer.
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), kind)
        try:
            return cls(handle, size_bytes, device, writes=False)
        finally:
            _call("cuMemRelease", handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # torch refuses read-only memory, so it is declared writable; a write to it is a GPU error.
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """Return the memory as a flat uint8 tensor, which keeps it mapped. Not a copy."""
        return host_device.tensor_of(self)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last mapping. Idempotent."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _unmap(driver: Any, address: ctypes.c_ulonglong, size: ctypes.c_size_t, device: torch.device, process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(RuntimeError):  # an unrelated error of the GPU
            host_device.synchronize(device)  # queued work may still read the memory
        driver.cuMemUnmap(address, size)
        driver.cuMemAddressFree(address, size)


def _call(name: str, *arguments: Any) -> None:
    """Call the driver. Raises InsufficientMemoryError if memory is short, UnsupportedError for any other error."""
    try:
        code = getattr(host_device.driver(), name)(*arguments)
    except (OSError, AttributeError) as exc:
        raise UnsupportedError(f"this host's CUDA driver has no {name} ({exc}): install a newer driver") from exc
    if code == _OUT_OF_MEMORY:
        raise InsufficientMemoryError(f"the GPU has not enough memory left for {name}: use smaller buckets")
    if code:
        raise UnsupportedError(f"{name} of the CUDA driver failed with error {code}")
