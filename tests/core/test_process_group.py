"""A process group beside the trainer's own: what it leaves as it was."""

from __future__ import annotations

import contextlib
import datetime
import os
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
