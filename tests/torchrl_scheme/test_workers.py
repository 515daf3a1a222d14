"""Workers behind a `collective_rpc`, as AsyncVLLM has them: W14 and W15. Real ranks, links and arenas; no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tensordict import TensorDict
from torchrl_scheme.scheme_kit import TENSORS, Workers, sender_of

from weightcast.errors import InstallError
from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme as Scheme
from weightcast.testing.leftovers import nothing_left


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.ranks.close()


def test_w14_workers_agree_on_one_version(tmp_path: Path, workers: Workers) -> None:
    """Also where another version is written while they take one."""
    with nothing_left():
        _agree(tmp_path, workers)


def _agree(tmp_path: Path, workers: Workers) -> None:
    scheme = Scheme(str(tmp_path))
    sender, receiver = sender_of(scheme), scheme.create_receiver(workers)
    sender.update_weights(TENSORS)
    workers.in_a_call = lambda: sender.update_weights({name: tensor + 1 for name, tensor in TENSORS.items()})
    assert receiver.poll_and_apply(timeout=0)
    assert workers.ranks.holds(TENSORS)
    assert receiver.poll_and_apply(timeout=0)
    assert workers.ranks.holds({name: tensor + 1 for name, tensor in TENSORS.items()})
    workers.ranks.models[1].fail = "half-way"
    sender.update_weights(TENSORS)
    with pytest.raises(InstallError, match="half-way"):
        receiver.poll_and_apply(timeout=0)
    assert receiver.poll_and_apply(timeout=0), "the next call heals it"
    assert workers.ranks.holds(TENSORS)
    receiver.close()


def test_w15_workers_behind_a_collective_rpc_load(tmp_path: Path, workers: Workers) -> None:
    with nothing_left():
        _load(tmp_path, workers)


def _load(tmp_path: Path, workers: Workers) -> None:
    scheme = Scheme(str(tmp_path))
    sender, receiver = sender_of(scheme), scheme.create_receiver(workers)
    assert receiver.poll_and_apply(timeout=0) is False
    sender.update_weights(TensorDict(TENSORS, batch_size=[]))
    assert receiver.poll_and_apply(timeout=0) is True
    assert workers.ranks.holds(TENSORS)
    assert receiver.poll_and_apply(timeout=0) is False
    assert workers.num_resets >= 1
    other = {name: tensor * 2 for name, tensor in TENSORS.items()}
    receiver.apply_weights(TensorDict(other, batch_size=[]))
    assert workers.ranks.holds(other)
    receiver.close()
