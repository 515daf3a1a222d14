"""What `num_threads` costs: buckets in memory and threads, as many as there is work for, on both sides."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl_scheme.scheme_kit import sender_of, vllm_shape

from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme as Scheme
from weightcast.integrations.torchrl.transport import THREADED_BUCKET_BYTES
from weightcast.store.address import MAX_BUFFERS

MIB = 1 << 20
SMALL = 40 * MIB
"""The model of TorchRL's own test with 128 threads."""


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> None:
    """Nothing is left open."""


class Allocated(TorchDispatchMode):
    """Counts the bytes that torch sets aside in this thread, and those of anonymous mappings. Nothing is taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Any:
        real = mmap.mmap

        def counted(fileno: int, length: int, **options: Any) -> mmap.mmap:
            self.num_bytes += length
            return real(fileno, length, **options)

        self._patch.setattr(mmap, "mmap", counted)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self._patch.undo()
        super().__exit__(*args)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and function._schema.name in ("aten::zeros", "aten::empty", "aten::clone"):
            self.num_bytes += found.untyped_storage().nbytes()
        return found


def store_threads() -> int:
    return sum(thread.name.startswith("weightcast-store") for thread in threading.enumerate())


def model_of(num_bytes: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((MIB,), i, dtype=torch.uint8) for i in range(num_bytes // MIB)}


class Taken:
    """An engine whose loader compares what comes, in place, with what is expected."""

    def __init__(self, expected: dict[str, torch.Tensor]) -> None:
        self.expected = expected
        self.num_whole = 0
        self.engine = vllm_shape(self._load)

    def _load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = dict(pairs)
        assert found.keys() == self.expected.keys()
        self.num_whole += all(torch.equal(found[name], tensor) for name, tensor in self.expected.items())


def as_tensordict(tensors: dict[str, torch.Tensor]) -> TensorDict:
    return TensorDict(tensors, batch_size=[])


def as_module(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


@pytest.mark.parametrize(
    ("given", "strategy"),
    [(dict, "tensordict"), (as_tensordict, "tensordict"), (as_module, "tensordict"), (as_module, "state_dict")],
)
@pytest.mark.parametrize("num_threads", [1, 4, 128])
@pytest.mark.filterwarnings("ignore:state_dict strategy:UserWarning")
def test_a_small_model_takes_the_memory_of_its_own_buckets(
    tmp_path: Path, num_threads: int, given: Callable[[Any], Any], strategy: Any
) -> None:
    tensors = model_of(SMALL)
    scheme = Scheme(str(tmp_path), num_threads=num_threads, strategy=strategy)
    sender, weights, taken = sender_of(scheme), given(tensors), Taken(tensors)
    with Allocated() as written:
        sender.update_weights(weights)
    assert written.num_bytes <= SMALL + MIB
    receiver = scheme.create_receiver(taken.engine)
    with Allocated() as read:
        assert receiver.poll_and_apply(timeout=0)
    assert taken.num_whole == 1
    assert read.num_bytes <= 2 * SMALL + MIB, "the version, and the loader's copies"
    assert store_threads() == 0, "there is one bucket"
    receiver.close()
    sender.close()


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> int:
    """A model of many buckets, without the memory for many large ones."""
    size = 256 << 10
    monkeypatch.setattr("weightcast.integrations.torchrl.transport.THREADED_BUCKET_BYTES", size)
    return size


@pytest.mark.parametrize("num_threads", [1, 4, 128])
def test_a_large_model_takes_a_few_buckets_to_be_written(tmp_path: Path, small_buckets: int, num_threads: int) -> None:
    """And one version to be read, whatever the number of threads."""
    num_bytes, num_buckets = 48 * MIB, 192
    tensors = model_of(num_bytes)
    scheme = Scheme(str(tmp_path), num_threads=num_threads)
    sender, taken = sender_of(scheme), Taken(tensors)
    with Allocated() as written:
        sender.update_weights(tensors)
    bucket = small_buckets if num_threads > 1 else num_bytes // 8
    num_buffers = min(num_threads + 1, MAX_BUFFERS) if num_threads > 1 else 1
    assert written.num_bytes <= num_buffers * (bucket + 4096) + MIB
    num_writing = store_threads()
    assert num_writing <= (num_buffers if num_threads > 1 else 0)
    receiver = scheme.create_receiver(taken.engine)
    with Allocated() as read:
        assert receiver.poll_and_apply(timeout=0)
    assert taken.num_whole == 1
    # The version, the loader's copies, and, with several threads, tensors that are cut once more, put together.
    assert read.num_bytes <= (2 + (num_threads > 1)) * num_bytes + num_buckets * 4096 + MIB
    assert store_threads() - num_writing <= (num_threads if num_threads > 1 else 0)
    receiver.close()
    sender.close()


def test_memory_is_bounded_over_models_of_different_sizes(tmp_path: Path) -> None:
    """One that grows from a bucket to several, and shrinks again, is never more than the largest needs."""
    scheme, taken = Scheme(str(tmp_path), num_threads=128), Taken({})
    sender, receiver = sender_of(scheme), scheme.create_receiver(taken.engine)
    for num_bytes in (2 * MIB, 66 * MIB, 2 * MIB, 130 * MIB, MIB):
        taken.expected = model_of(num_bytes)
        sender.update_weights(taken.expected)
        assert receiver.poll_and_apply(timeout=0)
    assert taken.num_whole == 5
    ring = sender._transport._handed._publisher._connections.sender._ring  # type: ignore[union-attr]
    assert ring.size_bytes <= 3 * (THREADED_BUCKET_BYTES + 4096)
    receiver.close()
    sender.close()
