"""TorchRL's `VLLMDoubleBufferSyncScheme`: a directory of memory-mapped files, one for each tensor, on tmpfs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

from torchrl.weight_update.llm import VLLMDoubleBufferSyncScheme

from peers.ends import End, Update


@contextlib.contextmanager
def double_buffer(end: End) -> Iterator[Update]:
    scheme = VLLMDoubleBufferSyncScheme(str(end.folder / "buffer"))
    if end.is_trainer:
        sender = scheme.create_sender()
        sender.register_model(end.model)
        weights = dict(end.tensors)

        def send(step: int) -> None:
            sender.update_weights(weights)
            end.send()

        yield send
        return
    # The shape of vLLM's engine in which the receiver finds the model's loader.
    model = SimpleNamespace(load_weights=end.load)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    receiver = scheme.create_receiver(SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))

    def apply(step: int) -> None:
        end.receive()
        assert receiver.poll_and_apply()

    yield apply
