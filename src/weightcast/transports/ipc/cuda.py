"""Device memory that a sender shares with receivers of the same host.

Invariants: it is opened once by each receiver, and mapped for that receiver's own GPU, so that no process has a context
on a GPU that is not its own; no stream of one process waits for another process, which may be killed:
a bucket is announced when it was packed, and released when it was read. It is memory of the driver's own
(`host.device_memory`). Where the driver has none, the fallback is a block of torch's, whose handles are those of
torch's `_share_cuda_`: it stays until every receiver has let go of it. Handles of memory of our own (`cuMemAlloc`,
`cuIpcGetMemHandle`) count nobody: to free that while a receiver, which may stand still, has it open is undefined
(`cuIpcOpenMemHandle` in the driver API's reference).
"""

from __future__ import annotations

import contextlib
import logging

import torch

from weightcast.errors import UnsupportedError
from weightcast.format.bucket import Buffers
from weightcast.host import device as host_device
from weightcast.host.device_memory import DeviceMemory
from weightcast.transports.ipc.records import CudaArena, TorchArena
from weightcast.transports.receiving import MappedArena
from weightcast.transports.sending import OwnedArena

logger = logging.getLogger(__name__)

_WHAT = "the arena of this update"
_STAGED = 'publish with install="staged", which goes by host memory'
_REMEDY = (
    "Trainer and engine must be two processes of one container, and the trainer must not use expandable_segments or "
    f"cudaMallocAsync (PYTORCH_CUDA_ALLOC_CONF). Or {_STAGED}; in one process use memory://"
)


def owned_arena(generation: int, size_bytes: int, device: torch.device) -> OwnedCudaArena | OwnedTorchArena:
    """The sender's end. Costs `size_bytes` of device memory at once. Raises InsufficientMemoryError."""
    try:
        return OwnedCudaArena(generation, size_bytes, device)
    except UnsupportedError as exc:
        logger.info("buckets lie in memory of torch's, with its limits: %s", exc)
        return OwnedTorchArena(generation, size_bytes, device)


class OwnedCudaArena(OwnedArena):
    """The sender's end: the driver's memory, freed with the last process that has it."""

    def __init__(self, generation: int, size_bytes: int, device: torch.device) -> None:
        """Raises InsufficientMemoryError if the device hasn't that much left, UnsupportedError."""
        self._memory = DeviceMemory.allocate(size_bytes, device, _WHAT)
        super().__init__(generation, self._memory.tensor(), device)

    def announcement(self) -> tuple[CudaArena, int | None]:
        record = CudaArena(self.generation, self.size_bytes, host_device.uuid_of(self.device))
        return record, self._memory.descriptor

    def close(self, *, free: bool) -> None:
        """The memory goes with the last view here, and the last mapping in a receiver."""
        self._memory.close()
        del self._memory
        super().close(free=free)


class MappedCudaArena(MappedArena):
    """The receiver's end: read-only, where the driver can do that."""

    def __init__(self, record: CudaArena | TorchArena, descriptor: int | None, device: torch.device | None) -> None:
        """Open it for `device`, the engine's own GPU; None or a CPU: for the GPU that it lies on.

        Raises UnsupportedError if this process does not see that GPU, or `device` can't read its memory.
        """
        self.generation = record.generation
        self.size_bytes = record.size_bytes
        owner = host_device.of_uuid(record.device)
        if owner is None:
            raise UnsupportedError(
                f"the publisher's arena is on GPU {record.device}, which this process does not see (it sees "
                f"{host_device.cuda.device_count()} others): make that GPU visible here, or {_STAGED}"
            )
        if device is None or not host_device.has_streams(device):
            device = owner
        elif device == torch.device("cuda"):
            device = torch.device("cuda", host_device.cuda.current_device())
        self.device = device
        if device != owner and (isinstance(record, TorchArena) or not host_device.can_access(device, owner)):
            raise UnsupportedError(
                f"the publisher's arena is on {owner}, which the engine's {device} can't read (no NVLink or PCIe peer "
                f"access, or a driver without virtual memory): {_STAGED}, or over nccl://"
            )
        if isinstance(record, TorchArena):
            whole = _opened(record, device)
        elif descriptor is None:
            raise UnsupportedError(f"the publisher's arena on {owner} came without its descriptor: {_STAGED}")
        else:
            try:
                whole = DeviceMemory.opened(descriptor, record.size_bytes, device).tensor()
            except UnsupportedError as exc:
                raise UnsupportedError(
                    f"the publisher's arena on {owner} can't be opened for {device}: {exc}; {_STAGED}, or over nccl://"
                ) from exc
        self.buffers = Buffers(whole)

    def reset(self) -> None:
        """Wait until nothing on this device reads it: an update that was given up may have been loading."""
        host_device.synchronize(self.device)


# --- the fallback ---


class OwnedTorchArena(OwnedArena):
    """The sender's end: a block of torch's caching allocator."""

    def __init__(self, generation: int, size_bytes: int, device: torch.device) -> None:
        """Raises InsufficientMemoryError if the device hasn't that much left."""
        self._whole = host_device.empty(size_bytes, device, _WHAT, "use smaller buckets")
        super().__init__(generation, self._whole, device)

    def announcement(self) -> tuple[TorchArena, None]:
        """A record for one receiver: every call counts one more reader of the memory. Raises UnsupportedError."""
        try:
            shared = self._whole.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as exc:
            what = f"the arena of this update on {self.device} can't be shared with engines: {exc}"
            raise UnsupportedError(f"{what}. {_REMEDY}") from exc
        _, handle, size, offset, counter_handle, counter_offset, event, sync = shared
        record = TorchArena(
            generation=self.generation,
            size_bytes=self.size_bytes,
            device=host_device.uuid_of(self.device),
            handle=handle,
            storage_size_bytes=size,
            storage_offset_bytes=offset,
            ref_counter_handle=counter_handle,
            ref_counter_offset=counter_offset,
            event_handle=event,
            event_sync_required=sync,
        )
        return record, None

    def close(self, *, free: bool) -> None:
        """The memory is given back when every receiver has let go of it, too."""
        # A bucket that was given up may still be being packed, on a stream that the allocator does not know of.
        with contextlib.suppress(RuntimeError):  # an error of the GPU, which is not of this memory
            host_device.synchronize(self.device)
        del self._whole
        super().close(free=free)


def _opened(record: TorchArena, device: torch.device) -> torch.Tensor:
    try:
        with torch.cuda.device(device):
            storage = torch.UntypedStorage._new_shared_cuda(
                device.index,
                record.handle,
                record.storage_size_bytes,
                record.storage_offset_bytes,
                record.ref_counter_handle,
                record.ref_counter_offset,
                record.event_handle,
                record.event_sync_required,
            )
    except RuntimeError as exc:
        what = f"the publisher's arena on {device} can't be opened here: {exc}"
        raise UnsupportedError(f"{what}. {_REMEDY}") from exc
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (record.size_bytes,), (1,))
