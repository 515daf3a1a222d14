"""Device memory that a sender shares with receivers on the same host.

Invariants: each receiver opens the memory once and maps it for its own GPU, so that no process has a context on another
process's GPU; no stream of one process waits for another process, which may be killed: a bucket is announced only when
it is packed, and released only when it is read. The memory is allocated with the driver's virtual memory API
(`host.device_memory`) and freed with the last process that has it open. Handles of memory of `cuMemAlloc`
(`cuIpcGetMemHandle`) are not reference-counted: freeing that memory while a receiver has it open is undefined
(`cuIpcOpenMemHandle` in the driver API's reference).
"""

from __future__ import annotations

import torch

from weightcast.errors import UnsupportedError
from weightcast.format.bucket import Buffers
from weightcast.host import device as host_device
from weightcast.host.device_memory import DeviceMemory
from weightcast.transports.ipc.records import CudaArena
from weightcast.transports.receiving import MappedArena
from weightcast.transports.sending import OwnedArena

_WHAT = "the arena of this update"
_STAGED = 'publish with install="staged", which uses host memory'


class OwnedCudaArena(OwnedArena):
    """The sender's end: device memory that is freed with the last process that has it open."""

    def __init__(self, generation: int, size_bytes: int, device: torch.device) -> None:
        """Allocate `size_bytes` of device memory.

        Raises InsufficientMemoryError if the device has less than that available, UnsupportedError if the driver can't
        share such memory (WSL2, some sandboxes).
        """
        try:
            self._memory = DeviceMemory.allocate(size_bytes, device, _WHAT)
        except UnsupportedError as exc:
            raise UnsupportedError(f"{exc}: {_STAGED}") from exc
        super().__init__(generation, self._memory.tensor(), device)

    def announcement(self) -> tuple[CudaArena, int | None]:
        record = CudaArena(self.generation, self.size_bytes, host_device.uuid_of(self.device))
        return record, self._memory.descriptor

    def close(self, *, free: bool) -> None:
        """Close the descriptor; the memory is freed with the last view here and the last mapping in a receiver."""
        self._memory.close()
        del self._memory
        super().close(free=free)


class MappedCudaArena(MappedArena):
    """The receiver's end: mapped read-only if the driver supports that."""

    def __init__(self, record: CudaArena, descriptor: int | None, device: torch.device | None) -> None:
        """Map the memory for `device`, the engine's own GPU; for None or a CPU, for the GPU that the memory is on.

        Raises UnsupportedError if this process does not see the memory's GPU, or `device` can't read its memory.
        """
        self.generation = record.generation
        self.size_bytes = record.size_bytes
        owner = host_device.of_uuid(record.device)
        if owner is None:
            raise UnsupportedError(
                f"the publisher's arena is on GPU {record.device}, which this process does not see (it sees "
                f"{host_device.cuda.device_count()} other GPUs): make that GPU visible here (CUDA_VISIBLE_DEVICES), or "
                f"{_STAGED}"
            )
        if device is None or device.type != "cuda":
            device = owner
        elif device == torch.device("cuda"):
            device = torch.device("cuda", host_device.cuda.current_device())
        self.device = device
        if device != owner and not host_device.can_access(device, owner):
            raise UnsupportedError(
                f"the publisher's arena is on {owner}, which the engine's {device} can't read (there is no NVLink or "
                f"PCIe peer access, or the driver has no virtual memory API): {_STAGED}, or publish over nccl://"
            )
        if descriptor is None:
            raise UnsupportedError(f"the publisher's arena on {owner} arrived without a file descriptor: {_STAGED}")
        try:
            whole = DeviceMemory.opened(descriptor, record.size_bytes, device).tensor()
        except UnsupportedError as exc:
            raise UnsupportedError(
                f"can't map the publisher's arena on {owner} for {device}: {exc}; {_STAGED}, or publish over nccl://"
            ) from exc
        self.buffers = Buffers(whole)

    def reset(self) -> None:
        """Wait until nothing on this device reads the arena: an aborted update may have queued reads."""
        host_device.synchronize(self.device)
