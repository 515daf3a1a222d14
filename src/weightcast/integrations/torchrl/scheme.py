"""TorchRL's double-buffer scheme, with the same name, constructor and methods, over a store: see `docs/torchrl.md`."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import weakref
from typing import Any, Literal

import torchrl
from torchrl.weight_update.utils import _resolve_model
from torchrl.weight_update.weight_sync_schemes import WeightStrategy, WeightSyncScheme

from weightcast.checkpoint.adapters import Merging
from weightcast.errors import InstallError, warn_if_untested
from weightcast.format.manifest import WeightVersion
from weightcast.host.closing import on_failure
from weightcast.integrations.torchrl.engines import RemoteEngine, engine_for
from weightcast.integrations.torchrl.transport import VLLMDoubleBufferTransport, store_url
from weightcast.integrations.torchrl.weights import extract, named_tensors, plain
from weightcast.seams.engine import Undoable
from weightcast.serving.follower import Followed, Follower
from weightcast.sources.tensors import TensorSource

logger = logging.getLogger(__name__)

TESTED_WITH = "0.14"


class VLLMDoubleBufferSyncScheme(WeightSyncScheme):  # type: ignore[misc]
    """Replacement for TorchRL's class of this name: whole versions in a directory, each installed once per receiver.

    `remote_addr`: the directory to which the trainer writes. `local_addr`: its path for engines (default: the same).
    `num_threads`: files per version, written and read concurrently. `strategy`: TorchRL's way to extract a model's
    weights, "tensordict" or "state_dict"; another one raises ValueError at its first use. Can be pickled, without
    sender and receiver.
    """

    def __init__(
        self,
        remote_addr: str,
        local_addr: str | None = None,
        num_threads: int = 1,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
    ) -> None:
        super().__init__()
        warn_if_untested(logger, "TorchRL", torchrl.__version__, TESTED_WITH)
        self.remote_addr = remote_addr
        self.local_addr = remote_addr if local_addr is None else local_addr
        self.num_threads = num_threads
        self.strategy_name = self.strategy_str = strategy
        self._sender: VLLMDoubleBufferWeightSender | None = None
        self._receiver: VLLMDoubleBufferWeightReceiver | None = None

    @functools.cached_property
    def strategy(self) -> WeightStrategy:
        """TorchRL's strategy object. Raises ValueError for an unknown name."""
        return WeightStrategy(extract_as=self.strategy_name)

    # --- the parts ---

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> VLLMDoubleBufferTransport:
        """Return a transport for these directories. The arguments are TorchRL's, and not used."""
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, self.num_threads)

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        """Return a sender, for the trainer. A directory has one writer: see `VLLMDoubleBufferWeightSender.close`."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(
        self, vllm_engine: Any, *, transport: str = "ipc://", undo: bool = True
    ) -> VLLMDoubleBufferWeightReceiver:
        """Return a receiver, for the engine's process; see `VLLMDoubleBufferWeightReceiver`."""
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine, transport=transport, undo=undo)

    # --- initialised on one side ---

    def _init_on_sender_impl(
        self, model_id: str | None = None, context: Any = None, *, model: Any = None, **kwargs: Any
    ) -> None:
        """Make the sender, and register `model`, or the model `model_id` of `context`. Other arguments are not used.

        Raises AttributeError if the context has no such model.
        """
        model = self._named(model_id, context) if model is None else model
        sender = self.create_sender()
        sender._connect()
        if model is not None:
            sender.register_model(model)
        self._model_id, self.context, self._sender = model_id, context, sender

    def init_on_receiver(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver for `engine` (or `vllm_engine`, `model`), or for the model `model_id` of `context`.

        `transport`, `undo`: see `create_receiver`. A scheme that was initialised as a sender remains one.
        Raises ValueError if no engine is named, TypeError for an object of another kind.
        """
        given = (kwargs.get(name) for name in ("engine", "vllm_engine", "model"))
        engine = next((engine for engine in given if engine is not None), None)
        engine = self._named(model_id, context) if engine is None else engine
        if engine is None:
            raise ValueError("there is no engine to update: pass engine=, or a context in which model_id names it")
        options = {name: kwargs[name] for name in ("transport", "undo") if name in kwargs}
        self._receiver = self.create_receiver(engine, **options)
        self._model_id, self.context, self._initialized_on_receiver = model_id, context, True

    init_on_worker = init_on_receiver  # its former name

    def _named(self, model_id: str | None, context: Any) -> Any:
        return None if context is None or model_id is None else _resolve_model(context, model_id)

    def get_sender(self) -> VLLMDoubleBufferWeightSender:
        """Return the sender. Raises RuntimeError before `init_on_sender`."""
        if self._sender is None:
            raise RuntimeError("Must call init_on_sender() before get_sender()")
        return self._sender

    def get_receiver(self) -> VLLMDoubleBufferWeightReceiver:
        """Return the receiver. Raises RuntimeError before `init_on_worker` or `init_on_receiver`."""
        if self._receiver is None:
            raise RuntimeError("Must call init_on_worker() or init_on_receiver() before get_receiver()")
        return self._receiver

    # --- at work ---

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Write a version, by default of the registered model. Does not wait for readers.

        Raises RuntimeError before `init_on_sender`, ValueError for `worker_ids`, and what `update_weights` raises.
        """
        if worker_ids is not None:
            raise ValueError(
                f"worker_ids is {worker_ids}, but every reader of the directory gets each version: leave worker_ids out"
            )
        self.get_sender().update_weights(weights)

    def receive(self, timeout: float | None = None) -> bool:
        """Install a new version, if there is one; see `poll_and_apply`. `timeout=None`: check once."""
        return self.get_receiver().poll_and_apply(timeout or 0.0)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Load these weights into the engine directly, without the store."""
        self.get_receiver().apply_weights(weights, inplace)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        """Write a first version, if there are weights; TorchRL calls it in `connect`."""
        sender = self.get_sender()
        if weights is not None or sender._model_ref is not None:
            sender.update_weights(weights)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        """Install the newest version, if there is one; TorchRL calls it in `connect`."""
        self.receive()

    def shutdown(self) -> None:
        """Release the directory on both sides. Idempotent; `init_on_...` may be called again."""
        for part in (getattr(self, "_sender", None), getattr(self, "_receiver", None)):
            if part is not None:
                part.close()
        self._sender = self._receiver = None
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"_sender": None, "_receiver": None}


class VLLMDoubleBufferWeightSender:
    """The sender of a scheme. It keeps only a weak reference to the model."""

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        self._scheme, self._strategy = scheme, scheme.strategy
        self._model_ref: weakref.ref[Any] | None = None
        self._merging = Merging()
        self._transport: VLLMDoubleBufferTransport | None = None

    def register_model(self, model: Any) -> None:
        """Set the model whose weights `update_weights()` writes. Must be called before the first update."""
        self._model_ref = weakref.ref(model)
        self._connect()

    def update_weights(self, weights: Any | None = None) -> None:
        """Write a version: of the registered model, or of `weights` (a module, a TensorDict, a dict of tensors).

        Don't change the weights during the call. Copied are only the adapted layers of a model with PEFT adapters,
        which are merged; memory of their size is kept from then on. Raises RuntimeError before `register_model`, or if
        the model was garbage-collected, and what `VLLMDoubleBufferTransport.send_weights` raises.
        """
        if self._transport is None:
            raise RuntimeError("Transport not initialized. Call register_model first.")
        if weights is None:
            if self._model_ref is None:
                raise RuntimeError("No model is registered: call register_model, or pass the weights")
            weights = self._model_ref()
            if weights is None:
                raise RuntimeError("Model reference is dead")
        self._transport.write(extract(weights, self._strategy.extract_as, self._merging))

    def close(self) -> None:
        """Release the directory, so that another sender can write to it. Idempotent; the next update opens it again."""
        if self._transport is not None:
            self._transport.close()

    def _connect(self) -> None:
        if self._transport is None:
            self._transport = self._scheme.create_transport()


class VLLMDoubleBufferWeightReceiver:
    """The receiver of a scheme. Call it from one thread at a time.

    Host memory, kept between versions: one version, and one more for this host's workers behind `collective_rpc`.
    During an install: with `undo` a copy of the live weights, and for a model of this process the copies that it gets.
    `last`: the record of the last installed version.
    """

    def __init__(
        self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any, *, transport: str = "ipc://", undo: bool = True
    ) -> None:
        """`transport`: from this process to workers behind `collective_rpc`; `gloo://HOST:PORT` for other hosts.

        `undo`: the engine keeps a copy of its live weights in host memory while it loads, and rolls back to it if the
        load fails on any rank. Without it, and for a model of this process that is not an nn.Module, the engine then
        refuses to generate (EngineTornError) until a complete update.

        Raises TypeError for an object other than a vLLM engine.
        """
        self._undo = undo
        self.last: Followed | None = None
        self._engine = engine_for(vllm_engine, transport=transport, undo=undo)
        self._exits = contextlib.ExitStack()
        self._exits.callback(self._engine.close)
        follower = Follower(
            store_url(scheme.local_addr, scheme.num_threads),
            self._engine,
            undo=undo and isinstance(self._engine, Undoable),
            label=f"torchrl receiver of {type(vllm_engine).__name__}",
        )
        self._follower = self._exits.enter_context(follower)
        weakref.finalize(self, self._exits.close)

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Install the newest version, if it is not the last one; wait for one until the timeout.

        Returns False if no new version came (with `timeout=0` after one check). Raises IntegrityError if the version is
        damaged, with nothing changed; InstallError if the engine did not install it: all ranks have their former
        weights then, or are `torn`. The next call tries again.
        """
        try:
            followed = self._follower.wait(timeout)
        except InstallError as exc:
            if isinstance(self._engine, RemoteEngine):
                exc.torn = self._engine.is_torn
            raise
        if followed is None:
            return False
        self.last = followed
        return True

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Load these weights (a TensorDict or a dict of tensors) into the engine directly, without the store.

        Raises ValueError for `inplace=False`; PublishError, or what the engine's loader raises, after which the load is
        undone as in `poll_and_apply`.
        """
        if not inplace:
            raise ValueError("Cannot apply weights out of place for vLLM double-buffer")
        tensors = {name: plain(name, tensor) for name, tensor in named_tensors(weights).items()}
        engine = self._engine
        restore = engine.snapshot() if self._undo and isinstance(engine, Undoable) else lambda: None
        with on_failure(restore):
            if isinstance(engine, RemoteEngine):
                engine.given.describe(TensorSource(tensors).specs())
            engine.load(tensors.items())
            engine.commit(WeightVersion(secrets.token_hex(16), 0))

    def close(self) -> None:
        """Close the store and release the engine, which keeps its weights. Idempotent."""
        self._exits.close()
