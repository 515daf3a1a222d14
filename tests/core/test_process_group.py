"""A process group beside the trainer's own: what it leaves as it was."""

from __future__ import annotations

import os

import pytest

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
