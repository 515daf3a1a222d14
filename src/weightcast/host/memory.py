"""How much more memory this process may take, and with whom it can share memory.

The room is the host's and that of every enclosing cgroup, whichever is less.

Sources: `MemAvailable` of proc(5); `memory.max`, `memory.current` and `inactive_file` of cgroup v2, and their v1
counterparts. What can't be read sets no limit. Nothing is cached: the answer is about now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from weightcast.errors import InsufficientMemoryError

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_UNKNOWN_BYTES = 1 << 62

LESS_AT_ONCE = 'publish with install="streaming" or smaller buckets, or free memory'
"""The remedy for a transport's buffers."""


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken now without swapping and without meeting a cgroup's limit; never negative.

    File pages that the kernel would give back first (`inactive_file`) count as available.
    """
    rooms: list[int] = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            rooms += [room for mount in (cgroups, cgroups / "unified") for room in _rooms_upwards(mount, path, _V2)]
        elif "memory" in controllers.split(","):
            rooms += _rooms_upwards(cgroups / "memory", path, _V1)
    host_kib = _fields(proc / "meminfo").get("MemAvailable:")
    if host_kib is not None:
        rooms.append(host_kib * 1024)
    return max(0, min(rooms, default=_UNKNOWN_BYTES))


def require(num_bytes: int, what: str, remedy: str) -> None:
    """Raises InsufficientMemoryError unless that much can be taken; `what` needs it, `remedy` says what to do."""
    available = available_bytes()
    if num_bytes > available:
        raise InsufficientMemoryError(
            f"{what} needs {num_bytes} bytes, this host or container has {available} left: {remedy}"
        )


def host_identity() -> str:
    """Equal for processes that can share memory: of one boot, one network namespace and one user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()}/{os.readlink(namespace)}/{os.geteuid()}"
    except OSError:
        return f"process {os.getpid()}"


def _rooms_upwards(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """The room in a cgroup and in each of its ancestors, up to the mount.

    In a container the path may be the host's, which is not visible there: the mount itself is the container's then.
    """
    group = mount / path.lstrip("/")
    if ".." in group.parts or not group.is_dir():
        group = mount
    limit_name, usage_name, reclaimable_name = names
    while True:
        limit, usage = _text(group / limit_name).strip(), _text(group / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            yield int(limit) - int(usage) + _fields(group / "memory.stat").get(reclaimable_name, 0)
        if group == mount:
            return
        group = group.parent


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
