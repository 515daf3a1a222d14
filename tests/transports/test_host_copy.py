"""`copy_all` copies what `torch._foreach_copy_` copies, bit by bit, whichever way it takes."""

from __future__ import annotations

import pytest
import torch

from weightcast.host import copy as host_copy
from weightcast.host.copy import PLAIN_BYTES, copy_all, is_plain

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
