"""weightcast moves a trainer's weights into running inference engines: fast, verified, and as a transaction.

Every public name is imported when it is first asked for, so that `import weightcast` costs next to nothing and a
trainer never loads a server, nor an engine a publisher.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weightcast.control.client import HttpEngine as HttpEngine
    from weightcast.control.local import LocalEngine as LocalEngine
    from weightcast.control.server.app import EngineServer as EngineServer
    from weightcast.engines.gate import Gate as Gate
    from weightcast.engines.module import ModuleEngine as ModuleEngine
    from weightcast.engines.tensors import TensorSink as TensorSink
    from weightcast.engines.transformers import TextGenerator as TextGenerator
    from weightcast.errors import EngineResult as EngineResult
    from weightcast.errors import InstallError as InstallError
    from weightcast.errors import IntegrityError as IntegrityError
    from weightcast.errors import PeerError as PeerError
    from weightcast.errors import PublishError as PublishError
    from weightcast.errors import PublishReport as PublishReport
    from weightcast.errors import RefusedError as RefusedError
    from weightcast.errors import WeightcastError as WeightcastError
    from weightcast.format.geometry import Region as Region
    from weightcast.format.manifest import Manifest as Manifest
    from weightcast.format.manifest import TensorSpec as TensorSpec
    from weightcast.format.manifest import WeightVersion as WeightVersion
    from weightcast.serving.follower import Followed as Followed
    from weightcast.serving.follower import Follower as Follower
    from weightcast.serving.follower import follow as follow
    from weightcast.sources.joined import JoinedSource as JoinedSource
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
    "PublishHandle": "weightcast.trainer.background",
    "EngineResult": "weightcast.errors",
    "HttpEngine": "weightcast.control.client",
    "LocalEngine": "weightcast.control.local",
    "ModuleSource": "weightcast.sources.module",
    "MegatronSource": "weightcast.sources.megatron.source",
    "SafetensorsSource": "weightcast.sources.safetensors",
    "StoreSource": "weightcast.sources.store",
    "TensorSource": "weightcast.sources.tensors",
    "IteratorSource": "weightcast.sources.stream",
    "JoinedSource": "weightcast.sources.joined",
    "rollback": "weightcast.trainer.rollback",
    # the engine's side
    "EngineServer": "weightcast.control.server.app",
    "ModuleEngine": "weightcast.engines.module",
    "TensorSink": "weightcast.engines.tensors",
    "TextGenerator": "weightcast.engines.transformers",
    "Gate": "weightcast.engines.gate",
    "follow": "weightcast.serving.follower",
    "Follower": "weightcast.serving.follower",
    "Followed": "weightcast.serving.follower",
    # what travels
    "Manifest": "weightcast.format.manifest",
    "TensorSpec": "weightcast.format.manifest",
    "Region": "weightcast.format.geometry",
    "WeightVersion": "weightcast.format.manifest",
    # errors; the whole tree is in `weightcast.errors`
    "WeightcastError": "weightcast.errors",
    "PublishError": "weightcast.errors",
    "RefusedError": "weightcast.errors",
    "PeerError": "weightcast.errors",
    "InstallError": "weightcast.errors",
    "IntegrityError": "weightcast.errors",
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
