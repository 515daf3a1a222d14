"""Client of an engine in the publisher's own process: calls its worker directly, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from weightcast.engines.gate import Gate
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldWeights, InitInfo, PauseMode, UpdateInfo, WeightInfo
from weightcast.seams.client import EngineClient, ServesTraffic
from weightcast.seams.engine import Engine
from weightcast.serving.worker import Worker


class LocalEngine(EngineClient, ServesTraffic):
    """An `EngineClient` for an `Engine` object of this process: pass it to `Publisher(engines=[...])`.

    Run each step of generation under `gate.step()`, so that no install happens within a step. `gate.step()` waits while
    the engine is torn, until the next complete publish or `close`. `pause`: see `HttpEngine`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = "local",
        gate: Gate | None = None,
        pause: PauseMode = "keep",
        **options: Any,
    ) -> None:
        """`gate`: the one under which the engine's steps run. `options`: those of `Worker`."""
        if pause not in get_args(PauseMode):
            raise ValueError(f"pause is {pause!r}; it must be one of {', '.join(get_args(PauseMode))}")
        self.name = name
        self.engine = engine
        self.gate = Gate() if gate is None else gate
        self.worker = Worker(engine, gate=self.gate, **options)
        self._pause_mode: PauseMode = pause

    def info(self) -> WeightInfo:
        """Return the engine's state: version, run, state, abilities."""
        return self.worker.info()

    def init(self, info: InitInfo) -> None:
        """Begin a publisher's session. Raises EngineBusyError if another publisher has the engine."""
        self.worker.init(info)

    def update(self, info: UpdateInfo) -> None:
        """Offer, seal or abort a version. Raises IncompatibleWeightsError and other errors of the engine."""
        self.worker.update(info)

    def finish(self, version: int) -> None:
        self.worker.finish(version)

    def pause(self, run: str) -> None:
        """Pause generation for an install of `run`."""
        self.worker.pause(self._pause_mode, run)

    def resume(self, run: str) -> None:
        """End the pause of `run`."""
        self.gate.resume(owner=run)

    def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
        return self.worker.held(names) if "prove" in self.info().abilities else None

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str] | None:
        return self.worker.dtypes(specs)

    def quarantine(self, reason: str) -> None:
        self.gate.tear(reason)

    def close(self) -> None:
        """End the publisher's session; the engine keeps its version. Waiting steps raise ClosedError. Idempotent."""
        self.worker.close()
