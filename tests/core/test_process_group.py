"""A process group beside the trainer's own: what it leaves as it was."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import types

import pytest
import torch.distributed as dist

from weightcast import process_group


def test_what_nccl_is_made_with_does_not_stay_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where making the group fails; what is so already is not touched."""
    wait, warning = process_group._NCCL_ENVIRONMENT
    monkeypatch.setenv(wait, "0")
    monkeypatch.delenv(warning, raising=False)
    before = dict(os.environ)
    with contextlib.suppress(ZeroDivisionError), process_group._environment(process_group._NCCL_ENVIRONMENT):
        assert os.environ.items() >= process_group._NCCL_ENVIRONMENT.items()
        raise ZeroDivisionError
    assert dict(os.environ) == before
    monkeypatch.setenv(wait, process_group._NCCL_ENVIRONMENT[wait])
    written: list[str] = []
    monkeypatch.setattr(type(os.environ), "__setitem__", lambda self, name, value: written.append(name))
    with process_group._environment(process_group._NCCL_ENVIRONMENT):
        assert written == [warning]


@pytest.mark.parametrize("max_ctas", [8, None])
def test_no_thread_of_torchs_watches_our_groups(monkeypatch: pytest.MonkeyPatch, max_ctas: int | None) -> None:
    """Its ProcessGroupNCCL starts one unless this is in the environment when it is made."""
    found: list[tuple[str | None, object]] = []

    class Group:
        @staticmethod
        def Options() -> types.SimpleNamespace:
            return types.SimpleNamespace(config=types.SimpleNamespace())

        def __init__(self, store: object, rank: int, size: int, options: types.SimpleNamespace) -> None:
            found.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), getattr(options.config, "max_ctas", None)))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    process_group.make_nccl(None, 0, 1, datetime.timedelta(seconds=1), None, max_ctas)
    assert found == [("1", max_ctas)]


_FEW_DESCRIPTORS = """
import os, resource
from weightcast.errors import PeerError
from weightcast.process_group import ProcessGroup, serve_store

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

def make_with_few(make):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for _ in range(9):
        try:
            make()
        except PeerError as exc:
            assert "no file descriptor left (limit 256): raise the limit" in str(exc), exc
        else:
            raise AssertionError("made with too few descriptors")
        os.close(held.pop())
    for descriptor in held:
        os.close(descriptor)
    return make()

store, _ = make_with_few(lambda: serve_store("127.0.0.1", 20.0))
options = {"rank": 0, "size": 1, "timeout_seconds": 20.0, "host": "127.0.0.1"}
make_with_few(lambda: ProcessGroup("gloo", store, **options)).close()
print("made")
"""


def test_too_few_descriptors_are_named_before_torch_uses_the_last_ones() -> None:
    """libuv, which serves torch's store, ends the process without a descriptor for its first loop."""
    program = [sys.executable, "-c", _FEW_DESCRIPTORS]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "made\n"), ended.stderr
