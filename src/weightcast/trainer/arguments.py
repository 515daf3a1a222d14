"""Checks of a publisher's arguments: a TypeError or ValueError says what was found and what to pass instead."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch.distributed as dist
from torch import nn

from weightcast.seams.directory import EngineDirectory
from weightcast.seams.source import CollectiveSource

_ADDRESS = re.compile(r"\[?([^\s/\[\]]+?)\]?:(\d{1,5})")


def integer(name: str, value: Any) -> int:
    """Return `value` as an int. Accepts numpy integers and tensors of one integer; raises TypeError for other types."""
    kind = str(getattr(value, "dtype", type(value).__name__))
    if "bool" not in kind and not getattr(value, "is_meta", False):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise TypeError(f"{name} is {shown(value)}; it must be a whole number")


def metrics_address(text: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT. Raises ValueError for anything else."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[2]) > 65535:
        raise ValueError(f"metrics={text!r} is not an address: pass HOST:PORT, such as '127.0.0.1:9464', or a registry")
    return found[1], int(found[2])


def require_source(source: object) -> None:
    """Raise TypeError unless `source` is a `Source` or a `StreamSource`."""
    if _has(source, "specs", "regions") or _has(source, "specs", "stream"):
        return
    remedy = "pass an object with specs() and regions(), such as ModuleSource(model)"
    if isinstance(source, type):
        remedy = f"pass an instance, {source.__name__}(...)"
    elif isinstance(source, nn.Module):
        remedy = "pass ModuleSource(model)"
    elif isinstance(source, Mapping):
        remedy = "pass ModuleSource(model), or TensorSource(state_dict) for tensors by name"
    elif isinstance(source, (str, os.PathLike)):
        remedy = "pass SafetensorsSource(directory) for a checkpoint, or StoreSource('file:///directory') for a store"
    raise TypeError(f"source is {shown(source)}, not a source of weights: {remedy}")


def require_target(source: object, has_target: bool) -> None:
    """Raise ValueError unless the source is of an adapter if, and only if, the target is one."""
    # By the class: isinstance would read the property.
    is_adapter = hasattr(type(source), "lora_config")
    if has_target and not is_adapter:
        raise ValueError(
            f"the target is an adapter, and {type(source).__name__} is a source of whole models: pass "
            "PeftAdapterSource(model)"
        )
    if is_adapter and not has_target:
        raise ValueError(
            f"{type(source).__name__} has only an adapter: pass options=PublishOptions(target=Adapter('policy')), or "
            "publish the merged model with ModuleSource(model)"
        )


def require_tensors(specs: Sized) -> None:
    """Raise ValueError for a source without tensors: a store or checkpoint would keep it as an empty model."""
    if not len(specs):
        raise ValueError(
            "the source has no tensors; pass a source with weights. A state dict that FSDP gathers is empty on all "
            "ranks but the first: publish it there with trainer_group=None, or publish ModuleSource(model) on every "
            "rank"
        )


def require_alone(source: object) -> None:
    """Raise ValueError if some of the source's tensors can only be computed by several trainer ranks together."""
    if isinstance(source, CollectiveSource) and source.num_gathers:
        raise ValueError(
            "the model has PEFT adapters in layers that are sharded over ranks, and one rank can't merge them alone: "
            "call publish on every rank, with trainer_group='auto' or their group"
        )


def require_engines(engines: object) -> None:
    """Raise TypeError unless `engines` is a sequence or an `EngineDirectory`. Items are checked by `require_client`."""
    if isinstance(engines, EngineDirectory) and not isinstance(engines, type):
        return
    if isinstance(engines, (str, Mapping, nn.Module)) or not isinstance(engines, Iterable):
        example = f"engines=[{engines!r}]" if isinstance(engines, str) else "engines=['http://127.0.0.1:8000']"
        raise TypeError(f"engines is {shown(engines)}; it must be a list of URLs or engine clients: {example}")


def require_client(engine: object) -> None:
    """Raise TypeError unless `engine` is an `EngineClient`."""
    if _has(engine, "name", "connect", "info", "init", "update", "finish", "close"):
        return
    remedy = "pass its URL, such as 'http://127.0.0.1:8000', or a client, such as LocalEngine(engine)"
    if isinstance(engine, type):
        remedy = f"pass an instance, {engine.__name__}(...)"
    elif isinstance(engine, int):
        remedy = f"pass the engine's URL, such as 'http://127.0.0.1:{engine}'"
    elif isinstance(engine, nn.Module):
        remedy = "pass the URL of the server that serves it, or LocalEngine(ModuleEngine(model)) for this process"
    elif _has(engine, "specs", "load", "commit", "discard"):
        remedy = "pass LocalEngine(engine) for this process, or the URL of the server that serves it"
    elif isinstance(getattr(type(engine), "url", None), property):
        remedy = "pass the server's URL, its `url` attribute"
    elif hasattr(engine, "collective_rpc"):
        remedy = "pass a client for it, such as LLMEngine(llm) of weightcast.integrations.vllm"
    raise TypeError(f"{shown(engine)} is not the URL or the client of an engine: {remedy}")


def require_trainer_group(group: object) -> None:
    """Raise TypeError or ValueError unless `group` is "auto", None or a process group of torch.distributed."""
    if group is None or (isinstance(group, str) and group == "auto"):
        return
    if dist.is_available():
        # `new_group` returns this value on a rank outside the new group; `Publisher` raises for it at the first
        # publish.
        is_outside = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
        if is_outside or isinstance(group, dist.ProcessGroup):
            return
    remedy = "it must be 'auto', None, or a process group of torch.distributed"
    if hasattr(group, "get_group"):
        remedy += ": pass mesh.get_group()"
    raise (ValueError if isinstance(group, str) else TypeError)(f"trainer_group is {shown(group)}; {remedy}")


def _has(value: object, *names: str) -> bool:
    """Return whether `value` is an instance (not a class) that has, or wraps an object that has, these attributes."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def shown(value: object) -> str:
    """Return a value's type for a message, with the value itself if that is short."""
    if value is None:
        return "None"
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    kind = f"the class {name}" if isinstance(value, type) else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    is_short = isinstance(value, (str, int, float, os.PathLike)) or getattr(value, "shape", None) == ()
    return f"{repr(value)[:80]} ({kind})" if is_short else kind
