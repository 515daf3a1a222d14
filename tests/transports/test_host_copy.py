"""`copy_all` copies what `torch._foreach_copy_` copies, bit by bit, whichever way it takes."""

from __future__ import annotations

import pytest
import torch
from pretended import LazyGpu

from weightcast.host import copy as host_copy
from weightcast.host.copy import PreparedCopies, copy_all
from weightcast.native.tables import CopyTable

LARGE = 64 << 10


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
    assert all(_same(t, s) for t, s in zip(targets, sources, strict=True))


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (3, 3), (16, 4)])
def test_a_copy_is_shared_out_to_threads(num_cores: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cores)))
    sources = [_random((LARGE,)) for _ in range(9)]
    targets = [torch.zeros_like(source) for source in sources]
    copies, asked = PreparedCopies(targets, sources), list[int]()
    run = copies._table.run
    monkeypatch.setattr(copies._table, "run", lambda *, threads: (asked.append(threads), run(threads=threads)))
    copies.run(bytes_per_thread=LARGE)
    copies.run()
    assert asked == [num_threads, 1]
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
def test_what_is_not_plain(target: torch.Tensor, source: torch.Tensor) -> None:
    copy_all([target], [source])
    assert torch.equal(target, source.to(target.dtype).expand_as(target))


def test_parameters_are_written_in_place() -> None:
    target, source = torch.nn.Parameter(torch.zeros(LARGE)), torch.nn.Parameter(torch.ones(LARGE))
    place = target.data_ptr()
    with torch.inference_mode():
        copy_all([target], [source])
    assert target.data_ptr() == place
    assert torch.equal(target, source)


def test_a_source_may_be_an_address_in_a_payload() -> None:
    """Also where torch has to copy: a target of many strided dims, or of complex numbers."""
    payloads = [_random((1 << 16,), torch.uint8) for _ in range(3)]
    many = torch.zeros(2, 4, 2, 4, 2, 4, 2, 4)[:, ::2, :, ::2, :, ::2, :, ::2]
    targets = [torch.zeros(3, 5), torch.zeros(8, 16)[:, 4:12], many, torch.zeros(7, dtype=torch.complex64)]
    expected, addresses = list[torch.Tensor](), list[int]()
    for number, target in enumerate(targets):
        payload, start = payloads[number % 3], 256 * (number + 1)
        addresses.append(payload.data_ptr() + start)
        expected.append(payload[start : start + target.nbytes].view(target.dtype).view(target.shape))
    copies = PreparedCopies(targets, addresses, payloads)
    assert copies._table.others == [2, 3]
    copies.run()
    assert all(_same(t, e) for t, e in zip(targets, expected, strict=True))
    view = payloads[1][512:516].view(torch.float32)
    PreparedCopies([targets[0][0, :1], targets[0][1]], [view, addresses[0]], payloads).run()
    assert _same(targets[0][0, :1], view)
    assert _same(targets[0][1], expected[0].flatten()[:5])


@pytest.mark.parametrize("start", [-1, 61, 1 << 40])
def test_an_address_outside_of_all_payloads_is_refused(start: int) -> None:
    payloads = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    last = max(payload.data_ptr() for payload in payloads)
    if start < 0:
        last = min(payload.data_ptr() for payload in payloads)
    with pytest.raises(ValueError, match=r"a copy of 4 bytes at .* reaches outside of the payload, which has 64"):
        PreparedCopies([torch.zeros(1)], [last + start], payloads)


def test_nothing_to_copy_and_unequal_lists() -> None:
    copy_all([], [])
    with pytest.raises((ValueError, RuntimeError)):
        copy_all([torch.zeros(3)], [])
    with pytest.raises((ValueError, RuntimeError)):
        copy_all([torch.zeros(LARGE)], [torch.zeros(LARGE), torch.zeros(3)])


@pytest.mark.parametrize("to_host", [True, False], ids=["to the host", "to the GPU"])
def test_slots_of_pinned_memory_are_copied_by_threads(to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are a 64th of the real ones."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    for name in ("_SLOT_BYTES_PER_THREAD", "_PINNED_SLOT_BYTES"):
        monkeypatch.setattr(host_copy, name, getattr(host_copy, name) >> 6)
    asked, run = list[int](), CopyTable.run

    def noted(table: CopyTable, *, threads: int) -> None:
        asked.append(threads)
        run(table, threads=threads)

    monkeypatch.setattr(CopyTable, "run", noted)
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
    assert max(asked) == 4
