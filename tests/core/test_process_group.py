"""A process group beside the trainer's own: what it leaves as it was."""

from __future__ import annotations

import datetime
import os
import types

import pytest
import torch.distributed as dist

from weightcast import process_group


def test_what_nccl_is_made_with_does_not_stay_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    own, *absent = process_group._NCCL_ENVIRONMENT
    monkeypatch.setenv(own, "the user's")
    for name in absent:
        monkeypatch.delenv(name, raising=False)
    with process_group._environment(process_group._NCCL_ENVIRONMENT):
        assert os.environ[own] == process_group._NCCL_ENVIRONMENT[own]
    assert os.environ[own] == "the user's"
    assert not os.environ.keys() & set(absent)


def test_no_thread_of_torchs_ends_the_process_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which its ProcessGroupNCCL decides by what is in the environment when it is made."""
    found: dict[str, str] = {}

    class Group:
        @staticmethod
        def Options() -> types.SimpleNamespace:
            return types.SimpleNamespace(config=types.SimpleNamespace())

        def __init__(self, store: object, rank: int, size: int, options: object) -> None:
            found.update(os.environ)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    process_group.make_nccl(None, 0, 1, datetime.timedelta(seconds=1), None)
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "of a group"
    assert found["TORCH_NCCL_ENABLE_MONITORING"] == "0", "of the watchdog, if it stands still"
    assert found["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0", "of the GPU, which may not be the group's"
