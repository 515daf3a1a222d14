"""`copy_all` copies what `torch._foreach_copy_` copies, bit by bit, whichever way it takes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import pytest
import torch

from weightcast.host import copy as host_copy
from weightcast.host.copy import PLAIN_BYTES, CopyTeam, copy_all, is_plain
from weightcast.testing import LazyGpu
from weightcast.testing.transport_kit import PATIENCE_SECONDS

LARGE = PLAIN_BYTES


def _random(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype).view(shape)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8])
def test_large_and_small_tensors_in_one_call(dtype: torch.dtype) -> None:
    sources = [_random((LARGE,), dtype), _random((3, 5), dtype), _random((7, LARGE), dtype), _random((0,), dtype)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_all(targets, sources)
    assert [is_plain(t, s) for t, s in zip(targets, sources, strict=True)] == [True, False, True, False]
    assert all(_same(t, s) for t, s in zip(targets, sources, strict=True))


def test_a_copy_is_shared_out_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_BYTES_PER_THREAD", LARGE)
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", LARGE // 3)
    sources = [_random((LARGE,)) for _ in range(9)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_all(targets, sources)
    assert all(_same(t, s) for t, s in zip(targets, sources, strict=True))


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(LARGE, 4)[:, :2], torch.ones(LARGE, 2)),
        (torch.zeros(LARGE, 2), torch.ones(2, LARGE).t()),
        (torch.zeros(LARGE), torch.ones(LARGE, dtype=torch.bfloat16)),
        (torch.zeros(LARGE, dtype=torch.complex64), torch.ones(LARGE, dtype=torch.complex64).conj()),
        (torch.zeros(4, LARGE), torch.ones(LARGE)),
    ],
    ids=["strided target", "strided source", "cast", "conjugate", "broadcast"],
)
def test_what_is_not_plain_is_torchs_work(target: torch.Tensor, source: torch.Tensor) -> None:
    assert not is_plain(target, source)
    copy_all([target], [source])
    assert torch.equal(target, source.to(target.dtype).expand_as(target))


def test_parameters_are_written_in_place() -> None:
    target, source = torch.nn.Parameter(torch.zeros(LARGE)), torch.nn.Parameter(torch.ones(LARGE))
    place = target.data_ptr()
    with torch.inference_mode():
        copy_all([target], [source])
    assert target.data_ptr() == place
    assert torch.equal(target, source)


def test_nothing_to_copy_and_unequal_lists() -> None:
    copy_all([], [])
    with pytest.raises((ValueError, RuntimeError)):
        copy_all([torch.zeros(3)], [])
    with pytest.raises((ValueError, RuntimeError)):
        copy_all([torch.zeros(LARGE)], [torch.zeros(LARGE), torch.zeros(3)])


@pytest.mark.parametrize("to_host", [True, False], ids=["to the host", "to the GPU"])
def test_slots_of_pinned_memory_are_copied_by_four_threads_of_one_team(
    to_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are a 64th of the real ones. Every four pieces wait for each other, which one thread could not do."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    for name in ("_BYTES_PER_THREAD", "_SLOT_BYTES_PER_THREAD", "_PINNED_SLOT_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(host_copy, name, getattr(host_copy, name) >> 6)
    all_four, move, threads = threading.Barrier(4), host_copy._move, set[threading.Thread]()

    def move_together(parts: list[tuple[int, int, int]]) -> None:
        threads.add(threading.current_thread())
        all_four.wait(PATIENCE_SECONDS)
        move(parts)

    monkeypatch.setattr(host_copy, "_move", move_together)
    with LazyGpu() as gpu:
        values = [_random((host_copy._PINNED_SLOT_BYTES // 2,)) for _ in range(4)]
        on_device = [gpu.tensor(value if to_host else torch.zeros_like(value)) for value in values]
        if to_host:
            copies = [torch.zeros_like(value) for value in values]
            copy_all(copies, on_device)
        else:
            copy_all(on_device, values)
            gpu.synchronize(gpu.device)
            copies = [gpu.read(tensor) for tensor in on_device]
    assert all(map(_same, copies, values))
    assert len(threads) == 4
    assert [thread for thread in threads if thread.is_alive()] == [threading.current_thread()]


def test_an_error_of_a_helper_is_the_callers_and_the_team_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    both, caller, numbers = threading.Barrier(2), threading.current_thread(), [torch.ones(3)]

    def fail_beside(number: torch.Tensor) -> None:
        both.wait(PATIENCE_SECONDS)
        if threading.current_thread() is not caller:
            raise RuntimeError("an error of a helper")

    with CopyTeam(2) as team:
        with pytest.raises(RuntimeError, match="an error of a helper") as caught:
            team.run([lambda number=numbers[0]: fail_beside(number)] * 2)  # type: ignore[misc]
        seen = weakref.ref(numbers.pop())
        del caught
        done = list[int]()
        team.run([lambda: done.append(1), lambda: done.append(2)])
        assert sorted(done) == [1, 2]
        assert seen() is None, "what failed is kept"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weightcast-copy")]


def test_what_torch_copies_is_shared_out_by_bytes_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padded targets are no plain copies: one call for all of them would keep the other threads waiting."""
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 4 * LARGE)
    sizes: list[tuple[int, int]] = []
    copy_batch = host_copy._copy_batch

    def noted(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        sizes.append((len(targets), sum(target.nbytes for target in targets)))
        copy_batch(targets, sources)

    monkeypatch.setattr(host_copy, "_copy_batch", noted)
    sources = [_random((LARGE // 64, 32)) for _ in range(21)]
    targets = [torch.zeros(LARGE // 64, 40, dtype=torch.bfloat16)[:, :32] for _ in sources]
    copy_all(targets, sources)
    assert all(_same(t, s) for t, s in zip(targets, sources, strict=True))
    assert sorted(sizes, reverse=True) == [(4, 4 * LARGE)] * 5 + [(1, LARGE)]
    sizes.clear()
    monkeypatch.setattr(host_copy, "_BATCH_TENSORS", 2)
    copy_all(targets, sources)
    assert sorted(sizes, reverse=True) == [(2, 2 * LARGE)] * 10 + [(1, LARGE)]
