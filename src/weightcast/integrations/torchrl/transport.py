"""TorchRL's double-buffer transport, with the same name and methods: a store's writer and reader."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from weightcast.engines.tensors import TensorSink
from weightcast.integrations.handed import HandedPublisher
from weightcast.integrations.torchrl.weights import extract, plain
from weightcast.serving.follower import Follower
from weightcast.sources.tensors import TensorSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

THREADED_BUCKET_BYTES = 64 << 20
"""Larger than most tensors, since with several threads a tensor cut over buckets must be joined for vLLM's loader."""


def store_url(directory: str | os.PathLike[str], num_threads: int) -> str:
    """Return the URL of the store in a directory, which may be relative, with this number of threads."""
    return f"{Path(directory).absolute().as_uri()}?num_threads={num_threads}"


class VLLMDoubleBufferTransport:
    """Writes versions to `remote_addr`, reads them from `local_addr` (default: the same directory).

    From the first `send_weights` until `close` or garbage collection no other writer can use the directory. Host
    memory: see the two methods.
    """

    def __init__(
        self, remote_addr: str, local_addr: str | None = None, num_threads: int = 1, deadline_seconds: float = 60.0
    ) -> None:
        self.remote_addr = remote_addr
        self.local_addr = remote_addr if local_addr is None else local_addr
        self.num_threads = num_threads
        self.deadline_seconds = deadline_seconds
        source = TensorSource()
        options = PublishOptions(
            bucket_size_bytes=None if num_threads == 1 else THREADED_BUCKET_BYTES, deadline_seconds=deadline_seconds
        )
        url = store_url(remote_addr, num_threads)
        make_publisher = functools.partial(Publisher, source, transport=url, trainer_group=None, options=options)
        self._handed = HandedPublisher(source, make_publisher)
        self._follower: Follower | None = None
        self._sink = TensorSink()
        self._lock = threading.Lock()
        self._exits = contextlib.ExitStack()
        weakref.finalize(self, self._handed.close)
        weakref.finalize(self, self._exits.close)

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Write a version, which readers get once this returns. `weights`: a TensorDict or a dict of tensors.

        Memory: one bucket; with several threads one more for each, at most eight, of up to 64 MiB each. Raises
        EngineBusyError that names another writer; InsufficientMemoryError for a full disk; PeerTimeoutError that names
        the readers that have pinned every slot until the deadline; ValueError or TypeError for unsupported tensors.
        After an error the former version stays.
        """
        del model_id  # a directory holds one model
        self.write(extract(weights))

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a version of extracted weights, tensors under dotted names; see `send_weights`."""
        with self._lock:
            self._handed.publish((name, plain(name, tensor)) for name, tensor in tensors.items())

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> TensorDict | None:
        """Return the newest version under dotted names; None if no new one has come since the last call.

        Its memory is not changed later. Extra memory while it reads: one version. `timeout`: in seconds; None: check
        once. The other arguments are TorchRL's, and not used. Raises IntegrityError.
        """
        with self._lock:
            if self._follower is None:
                url = store_url(self.local_addr, self.num_threads)
                self._follower = self._exits.enter_context(Follower(url, self._sink, label="torchrl transport"))
            followed = self._follower.wait(timeout or 0.0)
            tensors, self._sink.held = self._sink.held, {}
            return None if followed is None else TensorDict(tensors, batch_size=[])

    def check_connection(self) -> bool:
        """Return whether the writer's directory exists or can be created."""
        path = Path(self.remote_addr).absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK)

    def close(self) -> None:
        """Release the directory. Idempotent; the next call opens it again."""
        with self._lock:
            self._handed.close()
            self._exits.close()
            self._follower = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, without open files."""
        return type(self), (self.remote_addr, self.local_addr, self.num_threads, self.deadline_seconds)
