"""An offline `LLM` that takes a model's weights by TorchRL's scheme, as a program: vLLM wants a main module of its own.

Run as `torchrl_llm.py FOLDER DIRECTORY STRATEGY TP`. FOLDER has a checkpoint of seed 0, DIRECTORY is the scheme's.
Fails unless each of three versions is what the LLM then answers with, and a look without news is none.
"""

from __future__ import annotations

import sys
from typing import Any

from real_vllm.models import make_model, model_of
from real_vllm.offline_llm import Asked, start
from real_vllm.oracle import assert_serves
from real_vllm.servers import Setup


def main(folder: str, directory: str, strategy: Any, tp: str) -> None:
    from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme

    setup = Setup(tp=int(tp))
    llm, model = start(folder, setup), make_model()
    ask = Asked(llm)
    scheme = VLLMDoubleBufferSyncScheme(directory, strategy=strategy)
    scheme.init_on_sender(model_id="policy", model=model)
    scheme.init_on_receiver(model_id="policy", engine=llm)
    sender, receiver = scheme.get_sender(), scheme.get_receiver()
    assert not receiver.poll_and_apply(timeout=0)
    assert_serves(ask, model_of(seed=0), other=model_of(seed=1))
    for seed in (1, 0, 1):
        model.load_state_dict(model_of(seed=seed).state_dict())
        sender.update_weights()
        assert receiver.poll_and_apply(timeout=60)
        print(receiver.last, assert_serves(ask, model_of(seed=seed), other=model_of(seed=1 - seed)))
        assert not receiver.poll_and_apply(timeout=0)
    receiver.close()
    sender.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
