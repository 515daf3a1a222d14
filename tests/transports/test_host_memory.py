"""`host_memory` on made-up hosts: plain, in containers with cgroup v1 and v2, nested, unreadable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightcast.errors import InsufficientMemoryError
from weightcast.host import memory
from weightcast.host.memory import available_bytes
from weightcast.transports import kept_memory

GIB = 1 << 30


class Host:
    """A tree that looks like /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def meminfo(self, available_bytes: int) -> None:
        self.write(self.proc / "meminfo", f"MemTotal: 999 kB\nMemAvailable:   {available_bytes // 1024} kB\n")

    def membership(self, text: str) -> None:
        self.write(self.proc / "self/cgroup", text)

    def v2(self, path: str, limit: int | str, usage: int, inactive: int = 0) -> None:
        group = self.cgroups / path
        self.write(group / "memory.max", f"{limit}\n")
        self.write(group / "memory.current", f"{usage}\n")
        self.write(group / "memory.stat", f"anon 5\ninactive_file {inactive}\n")

    def v1(self, path: str, limit: int, usage: int, inactive: int = 0) -> None:
        group = self.cgroups / "memory" / path
        self.write(group / "memory.limit_in_bytes", f"{limit}\n")
        self.write(group / "memory.usage_in_bytes", f"{usage}\n")
        self.write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")

    def available(self) -> int:
        return available_bytes(self.proc, self.cgroups)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.meminfo(10 * GIB)
    return host


def test_without_cgroups_the_host_is_the_limit(host: Host) -> None:
    assert host.available() == 10 * GIB


def test_a_v2_limit_counts_less_its_usage_and_what_can_be_reclaimed(host: Host) -> None:
    host.membership("0::/job\n")
    host.v2("job", 4 * GIB, 3 * GIB, inactive=GIB // 2)
    assert host.available() == GIB + GIB // 2


def test_the_narrowest_ancestor_counts(host: Host) -> None:
    host.membership("0::/pod/job/step\n")
    host.v2("pod", 3 * GIB, 2 * GIB)
    host.v2("pod/job", "max", 2 * GIB)
    host.v2("pod/job/step", 8 * GIB, 1 * GIB)
    assert host.available() == GIB


def test_a_limit_of_max_is_none(host: Host) -> None:
    host.membership("0::/job\n")
    host.v2("job", "max", 3 * GIB)
    assert host.available() == 10 * GIB


@pytest.mark.parametrize("path", ["/", "/docker/4f0c/that/is/not/visible", "/../../../etc"])
def test_in_a_container_the_mount_is_its_own_group(host: Host, path: str) -> None:
    host.membership(f"0::{path}\n")
    host.v2("", 2 * GIB, GIB)
    assert host.available() == GIB


def test_a_v1_limit_counts_also_among_named_hierarchies(host: Host) -> None:
    host.membership("9:name=systemd:/x\n4:cpu,memory:/job\n1:cpu:/\n0::/\n")
    host.v1("job", 6 * GIB, 5 * GIB, inactive=GIB // 4)
    host.v1("", 1 << 63, 9 * GIB)
    assert host.available() == GIB + GIB // 4


def test_a_hybrid_hierarchy_is_found_under_unified(host: Host) -> None:
    host.membership("0::/job\n")
    host.v2("unified/job", 2 * GIB, GIB)
    assert host.available() == GIB


def test_never_negative(host: Host) -> None:
    host.membership("0::/job\n")
    host.v2("job", GIB, 2 * GIB)
    assert host.available() == 0


def test_what_cannot_be_read_sets_no_limit(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.available() > 1 << 60
    host.membership("0::/job\ngarbage\n")
    host.write(host.cgroups / "job/memory.max", "lots\n")
    assert host.available() > 1 << 60


def test_this_host_has_something_left() -> None:
    assert 0 < available_bytes() < 1 << 60


def test_memory_that_the_kernel_refuses_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the process's address space is in no file that can be asked before."""
    monkeypatch.setattr(memory, "require", lambda num_bytes, what, remedy: None)
    with pytest.raises(
        InsufficientMemoryError, match=r"the test needs \d+ bytes, which this process can't map .*: ask for less"
    ):
        kept_memory.allocate(1 << 60, torch.device("cpu"), "the test", "ask for less")
