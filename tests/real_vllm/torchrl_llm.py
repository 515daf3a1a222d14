"""An offline `LLM` that takes a model's weights by TorchRL's scheme, as a program: vLLM wants a main module of its own.

Run as `torchrl_llm.py FOLDER DIRECTORY STRATEGY TP EXPECTED`. FOLDER has a checkpoint of seed 0, DIRECTORY is the
scheme's. Fails unless the LLM answers each of three versions as expected, and a look without news is none.
"""

from __future__ import annotations

import sys
from typing import Any

from real_vllm.models import make_model, model_of
from real_vllm.offline_llm import Asked, from_argument, start
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.servers import Setup


def main(folder: str, directory: str, strategy: Any, tp: str, expected: str) -> None:
    from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme

    setup = Setup(tp=int(tp))
    llm, model = start(folder, setup), make_model()
    ask, answers = Asked(llm), from_argument(expected)
    scheme = VLLMDoubleBufferSyncScheme(directory, strategy=strategy)
    scheme.init_on_sender(model_id="policy", model=model)
    scheme.init_on_receiver(model_id="policy", engine=llm)
    sender, receiver = scheme.get_sender(), scheme.get_receiver()
    assert not receiver.poll_and_apply(timeout=0)
    assert ask(PROMPT, NUM_TOKENS) == answers[0] != answers[1]
    for seed in (1, 0, 1):
        model.load_state_dict(model_of(seed=seed).state_dict())
        sender.update_weights()
        assert receiver.poll_and_apply(timeout=60)
        print(receiver.last)
        assert ask(PROMPT, NUM_TOKENS) == answers[seed]
        assert not receiver.poll_and_apply(timeout=0)
    receiver.close()
    sender.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
