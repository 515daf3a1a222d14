"""TorchRL's scheme by name, constructor and methods, over a store: see `docs/torchrl.md`."""

from __future__ import annotations

from typing import Any, Literal

from torchrl.weight_update.utils import _resolve_model
from torchrl.weight_update.weight_sync_schemes import WeightStrategy, WeightSyncScheme

from weightcast.integrations.torchrl.receiver import VLLMDoubleBufferWeightReceiver
from weightcast.integrations.torchrl.sender import VLLMDoubleBufferWeightSender
from weightcast.integrations.torchrl.transport import VLLMDoubleBufferTransport

_RUNTIME = ("_sender", "_receiver", "_extracting")


class VLLMDoubleBufferSyncScheme(WeightSyncScheme):  # type: ignore[misc]
    """Takes the place of TorchRL's class of this name: versions in a directory, each whole, once per receiver.

    `remote_addr`: the directory that the trainer writes; `local_addr`: where engines see it (default: the same).
    `num_threads`: files per version, written and read at once. `strategy`: how TorchRL extracts a model's weights,
    "tensordict" or "state_dict"; another one is a ValueError where it is used first. Can be pickled, without what was
    initialised.
    """

    def __init__(
        self,
        remote_addr: str,
        local_addr: str | None = None,
        num_threads: int = 1,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
    ) -> None:
        super().__init__()
        self.remote_addr = remote_addr
        self.local_addr = remote_addr if local_addr is None else local_addr
        self.num_threads = num_threads
        self.strategy_name = self.strategy_str = strategy
        self._extracting: WeightStrategy | None = None
        self._sender: VLLMDoubleBufferWeightSender | None = None
        self._receiver: VLLMDoubleBufferWeightReceiver | None = None

    @property
    def strategy(self) -> WeightStrategy:
        """Raises ValueError for an unknown name."""
        if self._extracting is None:
            self._extracting = WeightStrategy(extract_as=self.strategy_name)
        return self._extracting

    # --- the parts ---

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> VLLMDoubleBufferTransport:
        """A transport of these directories. The arguments are TorchRL's, and not needed."""
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, self.num_threads)

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        """For the trainer. One at a time writes a directory: see `VLLMDoubleBufferWeightSender.close`."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(
        self, vllm_engine: Any, *, transport: str = "ipc://", undo: bool = True
    ) -> VLLMDoubleBufferWeightReceiver:
        """For the process that has the engine; see `VLLMDoubleBufferWeightReceiver`."""
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine, transport=transport, undo=undo)

    # --- initialised on one side ---

    def _init_on_sender_impl(
        self, model_id: str | None = None, context: Any = None, *, model: Any = None, **kwargs: Any
    ) -> None:
        """Make the sender. `model`, or what `model_id` names in `context`, is registered; other arguments are unused.

        Raises AttributeError if the context has no such model.
        """
        model = self._named(model_id, context) if model is None else model
        sender = self.create_sender()
        sender._connect()
        if model is not None:
            sender.register_model(model)
        self._model_id, self.context, self._sender = model_id, context, sender

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """The former name of `init_on_receiver`."""
        self.init_on_receiver(model_id, context, **kwargs)

    def init_on_receiver(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver for `engine` (or `vllm_engine`, `model`), or for what `model_id` names in `context`.

        `transport` and `undo` as of `create_receiver`. What was initialised as a sender stays so. Raises ValueError if
        no engine is named, TypeError if it is none.
        """
        given = (kwargs.get(name) for name in ("engine", "vllm_engine", "model"))
        engine = next((engine for engine in given if engine is not None), None)
        engine = self._named(model_id, context) if engine is None else engine
        if engine is None:
            raise ValueError("there is no engine to receive for: pass engine=, or a context in which model_id names it")
        options = {name: kwargs[name] for name in ("transport", "undo") if name in kwargs}
        self._receiver = self.create_receiver(engine, **options)
        self._model_id, self.context, self._initialized_on_receiver = model_id, context, True

    def _named(self, model_id: str | None, context: Any) -> Any:
        return None if context is None or model_id is None else _resolve_model(context, model_id)

    def get_sender(self) -> VLLMDoubleBufferWeightSender:
        """Raises RuntimeError before `init_on_sender`."""
        if self._sender is None:
            raise RuntimeError("Must call init_on_sender() before get_sender()")
        return self._sender

    def get_receiver(self) -> VLLMDoubleBufferWeightReceiver:
        """Raises RuntimeError before `init_on_worker` or `init_on_receiver`."""
        if self._receiver is None:
            raise RuntimeError("Must call init_on_worker() or init_on_receiver() before get_receiver()")
        return self._receiver

    # --- at work ---

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: WeightStrategy | None = None, context: Any = None
    ) -> Any:
        """As TorchRL's; `strategy` is this scheme's by default."""
        return super().prepare_weights(weights, model_id, self.strategy if strategy is None else strategy, context)

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Write a version, by default of the registered model. It is there for all who read, and none is waited for.

        Raises RuntimeError before `init_on_sender`, ValueError for `worker_ids`; else as `update_weights`.
        """
        if worker_ids is not None:
            raise ValueError(f"worker_ids is {worker_ids}: whoever reads the directory takes what is in it")
        self.get_sender().update_weights(weights)

    def receive(self, timeout: float | None = None) -> bool:
        """Take a new version into the engine; see `poll_and_apply`. `timeout=None`: one look."""
        return self.get_receiver().poll_and_apply(timeout or 0.0)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Load these weights into the engine, past the store."""
        self.get_receiver().apply_weights(weights, inplace)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        """`connect`: write a first version, if there is anything to write."""
        sender = self.get_sender()
        if weights is not None or sender._has_model:
            sender.update_weights(weights)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        """`connect`: take what is there."""
        self.receive()

    def shutdown(self) -> None:
        """Let the directory go on both sides. Idempotent; `init_on_...` begins anew."""
        for part in (getattr(self, "_sender", None), getattr(self, "_receiver", None)):
            if part is not None:
                part.close()
        self._sender = self._receiver = None
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | dict.fromkeys(_RUNTIME)
