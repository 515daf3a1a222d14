"""weightcast moves a trainer's weights into running inference engines: fast, verified, and as a transaction.

Every public name is imported at its first use, so that `import weightcast` is fast and a trainer never imports a
server, nor an engine a publisher.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weightcast.control.client import HttpEngine as HttpEngine
    from weightcast.control.local import LocalEngine as LocalEngine
    from weightcast.control.server.app import EngineServer as EngineServer
    from weightcast.engines.module import ModuleEngine as ModuleEngine
    from weightcast.errors import ErrorRecord as ErrorRecord
    from weightcast.errors import PublishError as PublishError
    from weightcast.errors import PublishReport as PublishReport
    from weightcast.errors import StageSeconds as StageSeconds
    from weightcast.errors import WeightcastError as WeightcastError
    from weightcast.format.geometry import Region as Region
    from weightcast.format.manifest import TensorSpec as TensorSpec
    from weightcast.seams.client import EngineClient as EngineClient
    from weightcast.seams.engine import Engine as Engine
    from weightcast.seams.source import Source as Source
    from weightcast.seams.source import StreamSource as StreamSource
    from weightcast.seams.transport import Receiver as Receiver
    from weightcast.seams.transport import Sender as Sender
    from weightcast.seams.transport import Transport as Transport
    from weightcast.serving.follower import follow as follow
    from weightcast.sources.megatron.source import MegatronSource as MegatronSource
    from weightcast.sources.module import ModuleSource as ModuleSource
    from weightcast.sources.safetensors import SafetensorsSource as SafetensorsSource
    from weightcast.sources.store import StoreSource as StoreSource
    from weightcast.sources.stream import IteratorSource as IteratorSource
    from weightcast.sources.tensors import TensorSource as TensorSource
    from weightcast.trainer.background import PublishHandle as PublishHandle
    from weightcast.trainer.options import PublishOptions as PublishOptions
    from weightcast.trainer.publisher import Publisher as Publisher
    from weightcast.trainer.rollback import rollback as rollback

_HOMES = {
    # the trainer's side
    "Publisher": "weightcast.trainer.publisher",
    "PublishOptions": "weightcast.trainer.options",
    "PublishReport": "weightcast.errors",
    "StageSeconds": "weightcast.errors",
    "PublishHandle": "weightcast.trainer.background",
    "HttpEngine": "weightcast.control.client",
    "LocalEngine": "weightcast.control.local",
    "ModuleSource": "weightcast.sources.module",
    "MegatronSource": "weightcast.sources.megatron.source",
    "SafetensorsSource": "weightcast.sources.safetensors",
    "StoreSource": "weightcast.sources.store",
    "TensorSource": "weightcast.sources.tensors",
    "IteratorSource": "weightcast.sources.stream",
    "rollback": "weightcast.trainer.rollback",
    # the engine's side
    "EngineServer": "weightcast.control.server.app",
    "ModuleEngine": "weightcast.engines.module",
    "follow": "weightcast.serving.follower",
    # what you may implement
    "Source": "weightcast.seams.source",
    "StreamSource": "weightcast.seams.source",
    "Engine": "weightcast.seams.engine",
    "EngineClient": "weightcast.seams.client",
    "Sender": "weightcast.seams.transport",
    "Receiver": "weightcast.seams.transport",
    "Transport": "weightcast.seams.transport",
    # what travels
    "TensorSpec": "weightcast.format.manifest",
    "Region": "weightcast.format.geometry",
    # errors; the whole tree is in `weightcast.errors`
    "WeightcastError": "weightcast.errors",
    "ErrorRecord": "weightcast.errors",
    "PublishError": "weightcast.errors",
}
__all__ = [*_HOMES, "errors", "__version__"]


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("weightcast.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'weightcast' has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as exc:
        from weightcast.errors import with_extra

        raise with_extra(exc) from exc
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
