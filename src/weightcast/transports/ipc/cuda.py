"""Device memory that a sender shares with receivers on the same GPU, by CUDA IPC.

Invariants: a handle travels as plain fields, once to each receiver, and is opened once; no stream of one process waits
for another process, which may be killed: a bucket is announced when it was packed, and released when it was read. The
handles are those of torch's `_share_cuda_`, which keeps the memory until every receiver has let go of it.
"""

from __future__ import annotations

import torch

from weightcast.errors import UnsupportedError
from weightcast.format.bucket import Buffers
from weightcast.host import device as host_device
from weightcast.transports.ipc.records import CudaArena
from weightcast.transports.receiving import MappedArena
from weightcast.transports.sending import OwnedArena

_REMEDY = (
    "Trainer and engine must be two processes of one container, and the trainer must not use expandable_segments or "
    'cudaMallocAsync (PYTORCH_CUDA_ALLOC_CONF). Or publish with install="staged"; in one process use memory://'
)


class OwnedCudaArena(OwnedArena):
    """The sender's end. Costs `size_bytes` of device memory at once."""

    def __init__(self, generation: int, size_bytes: int, device: torch.device) -> None:
        """Raises InsufficientMemoryError if the device hasn't that much left."""
        self._whole = host_device.empty(size_bytes, device, "the arena of this update", "use smaller buckets")
        super().__init__(generation, self._whole, device)

    def announcement(self) -> tuple[CudaArena, None]:
        """A record for one receiver: every call counts one more reader of the memory. Raises UnsupportedError."""
        try:
            shared = self._whole.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as exc:
            what = f"the arena of this update on {self.device} can't be shared with engines: {exc}"
            raise UnsupportedError(f"{what}. {_REMEDY}") from exc
        _, handle, size, offset, counter_handle, counter_offset, event, sync = shared
        record = CudaArena(
            generation=self.generation,
            size_bytes=self.size_bytes,
            device=uuid_of(self.device),
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
        host_device.synchronize(self.device)
        del self._whole
        super().close(free=free)


class MappedCudaArena(MappedArena):
    """The receiver's end."""

    def __init__(self, record: CudaArena) -> None:
        """Raises UnsupportedError if this process does not see the GPU, or may not open the memory."""
        self.generation = record.generation
        self.size_bytes = record.size_bytes
        self.device = _find_device(record.device)
        try:
            with torch.cuda.device(self.device):
                storage = torch.UntypedStorage._new_shared_cuda(
                    self.device.index,
                    record.handle,
                    record.storage_size_bytes,
                    record.storage_offset_bytes,
                    record.ref_counter_handle,
                    record.ref_counter_offset,
                    record.event_handle,
                    record.event_sync_required,
                )
        except RuntimeError as exc:
            what = f"the publisher's arena on {self.device} can't be opened here: {exc}"
            raise UnsupportedError(f"{what}. {_REMEDY}") from exc
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.buffers = Buffers(whole.set_(storage, 0, (record.size_bytes,), (1,)))

    def reset(self) -> None:
        """Wait until nothing on this device reads it: an update that was given up may have been loading."""
        host_device.synchronize(self.device)


def _find_device(uuid: str) -> torch.device:
    """This process's device of that UUID: indices differ between processes, by CUDA_VISIBLE_DEVICES."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        if uuid_of(device) == uuid:
            return device
    raise UnsupportedError(
        f"the publisher's arena is on GPU {uuid}, this process sees {[uuid_of(d) for d in devices] or 'no GPU'}: make "
        'that GPU visible here, or publish with install="staged", which goes by host memory'
    )


def uuid_of(device: torch.device) -> str:
    """What names a GPU in every process, whatever its index there."""
    return str(torch.cuda.get_device_properties(device).uuid)
