"""`mapped://HOST:PORT`: buckets lie in a file that receivers on the same host map."""

import mmap
import os
import tempfile

import msgspec
import torch

from weightcast.format.bucket import Buffers
from weightcast.format.messages import Count, ShortText
from weightcast.host import memory as host_memory
from weightcast.seams.transport import Transport
from weightcast.transports.receiving import ArenaReceiver, MappedArena
from weightcast.transports.records import Size
from weightcast.transports.sending import ArenaSender, OwnedArena


class ArenaFile(msgspec.Struct, frozen=True, tag="arena_file", tag_field="kind"):
    """Sender to receiver: buckets of this generation lie in this file."""

    generation: Count
    path: ShortText
    size_bytes: Size


class OwnedFile(OwnedArena):
    """The sender's end. The name of the file goes with it, its memory with the last mapping."""

    def __init__(self, generation, size_bytes):
        host_memory.require(size_bytes, "sending this update", host_memory.LESS_AT_ONCE)
        descriptor, self.path = tempfile.mkstemp(prefix="weightcast-")
        os.ftruncate(descriptor, size_bytes)
        self._mapping = mmap.mmap(descriptor, size_bytes)
        os.close(descriptor)
        super().__init__(generation, torch.frombuffer(self._mapping, dtype=torch.uint8), torch.device("cpu"))

    def announcement(self):
        return ArenaFile(self.generation, self.path, self.size_bytes), None

    def close(self, *, free):
        os.unlink(self.path)
        del self._mapping
        super().close(free=free)


class MappedFile(MappedArena):
    """A receiver's end: what is written into it stays in this process."""

    def __init__(self, record):
        self.generation, self.size_bytes = record.generation, record.size_bytes
        with open(record.path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), record.size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.buffers = Buffers(torch.frombuffer(mapping, dtype=torch.uint8))


class MappedSender(ArenaSender[OwnedFile]):
    """Implements `Sender`. Buckets are in host memory, whatever the device of the weights."""

    def __init__(self, url, *, device, **options):
        super().__init__(url, **options)

    def _make_arena(self, generation, size_bytes, device):
        return OwnedFile(generation, size_bytes)


class MappedReceiver(ArenaReceiver):
    """Implements `Receiver`."""

    announcements = ArenaFile

    def _map(self, record, descriptor):
        return MappedFile(record)


TRANSPORT = Transport(sender=MappedSender, receiver=MappedReceiver, same_host=False)
