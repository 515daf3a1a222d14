"""An offline `LLM` whose loads by TorchRL's scheme fail on some of its ranks, as a program.

Run as `torchrl_failing_llm.py FOLDER DIRECTORY EXPECTED`. FOLDER has a checkpoint of seed 0, DIRECTORY is the scheme's.
Fails unless the LLM, after each failure, answers with the version before bit for bit, or, without an undo, refuses to
answer until a whole version heals it.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from real_vllm.models import make_model, model_of
from real_vllm.offline_llm import Asked, from_argument, start
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.servers import Setup

RANKS = (1, 0, -1)
"""-1: all of them."""


def main(folder: str, directory: str, expected: str) -> None:
    from weightcast.errors import EngineTornError, InstallError
    from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme

    llm, model = start(folder, Setup(tp=2)), make_model()
    ask, answers = Asked(llm), from_argument(expected)
    assert answers[0] != answers[1]
    scheme = VLLMDoubleBufferSyncScheme(directory)
    scheme.init_on_sender(model_id="policy", model=model)
    sender = scheme.get_sender()

    def fail(receiver: Any, rank: int, *, torn: bool) -> None:
        llm.collective_rpc("test_fail_load", args=(3, rank))
        with pytest.raises(InstallError, match="the test's fault") as caught:
            receiver.poll_and_apply(timeout=60)
        assert caught.value.torn == torn

    def write(seed: int) -> None:
        model.load_state_dict(model_of(seed=seed).state_dict())
        sender.update_weights()

    receiver = scheme.create_receiver(llm)
    for seed in (1, 0):  # the first one fails on the weights of the start
        before = llm.collective_rpc("test_weights_digest")
        write(seed)
        for rank in RANKS:
            fail(receiver, rank, torn=False)
            assert llm.collective_rpc("test_weights_digest") == before
            assert ask(PROMPT, NUM_TOKENS) == answers[1 - seed], rank
        assert receiver.poll_and_apply(timeout=60)
        assert ask(PROMPT, NUM_TOKENS) == answers[seed]
    receiver.close()

    receiver = scheme.create_receiver(llm, undo=False)
    assert receiver.poll_and_apply(timeout=60)
    write(1)
    for rank in RANKS:
        fail(receiver, rank, torn=True)
        for _ in range(2):
            with pytest.raises(EngineTornError, match="the test's fault"):
                ask(PROMPT, NUM_TOKENS)
    assert receiver.poll_and_apply(timeout=60)
    assert ask(PROMPT, NUM_TOKENS) == answers[1]
    receiver.close()
    sender.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
