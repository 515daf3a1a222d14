"""The engine's side: takes each new version of the store into vLLM, once and whole."""

from __future__ import annotations

import secrets
import weakref
from typing import Any

from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from weightcast.errors import InstallError
from weightcast.format.manifest import WeightVersion
from weightcast.format.plan import plan
from weightcast.integrations.torchrl.engines import RemoteEngine, VllmUnderTorchRL, engine_for
from weightcast.integrations.torchrl.transport import THREADED_BUCKET_BYTES, SchemeOptions, store_url
from weightcast.integrations.torchrl.weights import WeightsSource, named_tensors
from weightcast.seams.engine import Undoable
from weightcast.serving.follower import Followed, Follower


class VLLMDoubleBufferWeightReceiver:
    """Made by a scheme. Calls come from one thread at a time.

    Host memory, kept between versions: one version, and another one of this host's workers behind `collective_rpc`;
    with `undo` during an install one copy of the live weights. `last` is the record of the last version that was taken.
    """

    # What is made by `__new__`, as TorchRL's tests do, applies weights to its engine.
    _engine: VllmUnderTorchRL | None = None
    _undo = True

    def __init__(
        self,
        scheme: SchemeOptions,
        vllm_engine: Any,
        *,
        transport: str = "ipc://",
        undo: bool = True,
    ) -> None:
        """`transport`: how weights get from here to workers behind `collective_rpc`; `gloo://HOST:PORT` to other hosts.

        `undo`: the engine keeps a copy of its live weights in host memory while it loads, and goes back to it if that
        fails anywhere. Without it, and for a model of this process that is no nn.Module, the engine then refuses to
        generate (EngineTornError), until a complete update heals it.

        Raises TypeError if it is no vLLM engine, ValueError for an unknown strategy.
        """
        self._scheme = scheme
        self._undo = undo
        self._strategy = WeightStrategy(extract_as=scheme.strategy_name)
        self._vllm_engine = vllm_engine
        self.last: Followed | None = None
        self._engine = engine_for(vllm_engine, transport=transport, undo=undo)
        self._follower = Follower(
            store_url(scheme.local_addr, scheme.num_threads),
            self._engine,
            undo=undo and isinstance(self._engine, Undoable),
            label=f"torchrl receiver of {type(vllm_engine).__name__}",
        )
        weakref.finalize(self, _close, self._follower, self._engine)

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Take the newest version into the engine, if it is not the last one taken; wait for one until the timeout.

        False: nothing new came (with `timeout=0` after one look). Raises IntegrityError if it is damaged, with nothing
        touched; InstallError if the engine did not take it, on all ranks: it is as before then, or `torn`. The next
        call tries again.
        """
        engine = self._engine
        assert engine is not None
        try:
            followed = self._follower.wait(timeout)
        except InstallError as exc:
            if isinstance(engine, RemoteEngine):
                exc.torn = engine.is_torn
            raise
        if followed is None:
            return False
        self.last = followed
        if engine.has_kept:
            self._follower.renew()
        return True

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Load these weights (a TensorDict or a dict of tensors) into the engine, past the store.

        Raises ValueError for `inplace=False`; PublishError, or what the engine's loader raises: it is undone then as
        in `poll_and_apply`.
        """
        if not inplace:
            raise ValueError("Cannot apply weights out of place for vLLM double-buffer")
        tensors = named_tensors(weights)
        if isinstance(self._engine, RemoteEngine):
            source = WeightsSource()
            source.use(tensors)
            self._engine.validate(plan(source.specs(), THREADED_BUCKET_BYTES))
            self._engine.load(tensors.items())
            self._engine.commit(WeightVersion(secrets.token_hex(16), self._engine.next_number))
            return
        engine = engine_for(self._vllm_engine)
        restore = engine.snapshot() if self._undo and isinstance(engine, Undoable) else None
        try:
            engine.load(tensors.items())
            engine.commit(WeightVersion(secrets.token_hex(16), 0))
        except BaseException:
            if restore is not None:
                restore()
            raise

    def close(self) -> None:
        """Let store and engine go; the engine keeps what it has. Idempotent."""
        _close(self._follower, self._engine)


def _close(follower: Follower, engine: Any) -> None:
    follower.close()
    engine.close()
