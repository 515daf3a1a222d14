"""Meters: what the kernel counts is what the test did, in this process and in another."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from publishing.meters import ProcessMeter, children

from weightcast.transports.ipc.arena import OwnedSharedArena

MIB = 1 << 20
SLACK_BYTES = 8 * MIB


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Evaluates each line of its stdin and answers with a line."""
    code = "import sys, time\nfor line in sys.stdin:\n    exec(line)\n    print('done', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"


def test_cpu_seconds_of_another_process(child: subprocess.Popen[str]) -> None:
    meter = ProcessMeter(child.pid)
    tell(child, "pass")
    before = meter.cpu_seconds()
    tell(child, "end = time.process_time() + 0.2; list(iter(lambda: time.process_time() < end, False))")
    assert 0.19 < meter.cpu_seconds() - before < 0.4


def test_cpu_seconds_are_those_of_all_threads() -> None:
    meter = ProcessMeter(os.getpid())
    assert abs(meter.cpu_seconds() - time.process_time()) < 0.05


def test_extra_bytes_keep_the_peak(child: subprocess.Popen[str]) -> None:
    meter = ProcessMeter(child.pid)
    tell(child, f"x = b'1' * {128 * MIB}; del x")
    meter.begin()
    assert meter.extra_bytes() < SLACK_BYTES, "the peak from before must not count"
    tell(child, f"x = b'1' * {64 * MIB}; del x")
    assert abs(meter.extra_bytes() - 64 * MIB) < SLACK_BYTES


def test_shared_memory_counts_where_it_is_mapped() -> None:
    meter = ProcessMeter(os.getpid())
    meter.begin()
    before = meter.status_bytes("RssShmem")
    shared = OwnedSharedArena(0, 32 * MIB)
    shared.buffers.get(0, 0, 0, 32 * MIB).payload.fill_(1)
    assert meter.status_bytes("RssShmem") - before == 32 * MIB
    assert 32 * MIB <= meter.extra_bytes() < 32 * MIB + SLACK_BYTES
    shared.close(free=True)


def test_private_memory_is_not_shared() -> None:
    meter = ProcessMeter(os.getpid())
    before = meter.status_bytes("RssAnon")
    # New pages from the kernel: an allocator may hand out memory that earlier tests gave back to it.
    kept = torch.frombuffer(mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8).fill_(1)
    assert meter.status_bytes("RssAnon") - before >= 31 * MIB
    del kept


def test_an_ended_process_is_an_error(child: subprocess.Popen[str]) -> None:
    meter = ProcessMeter(child.pid)
    child.communicate(timeout=60)
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        meter.cpu_seconds()
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        meter.extra_bytes()


def test_children(child: subprocess.Popen[str]) -> None:
    assert child.pid in set(children(os.getpid()))
    child.communicate(timeout=60)
    assert child.pid not in set(children(os.getpid()))
