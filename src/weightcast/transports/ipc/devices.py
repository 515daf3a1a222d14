"""One sender for each device of a host: how devices are named, and which sender a receiver reads.

An address is `ipc://@NAME`, that of the publishing rank's sender; or `ipc://@NAME?LABEL=@NAME&LABEL=@NAME`, where other
trainer ranks of the host have senders as well, each with the label of its device. A GPU's label is its UUID; on CPUs
the environment variable WEIGHTCAST_DEVICE_LABEL gives a process one. Implements `PerDevice`.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping

import torch

from weightcast.transports.ipc.channel import SCHEME
from weightcast.transports.ipc.cuda import uuid_of

LABEL_VARIABLE = "WEIGHTCAST_DEVICE_LABEL"
_MAX_DEVICES = 64


def label(device: torch.device) -> str:
    """The label of a device that this process sends from; empty if it has none."""
    return uuid_of(device) if device.type == "cuda" else os.environ.get(LABEL_VARIABLE, "")


def join(default: str, addresses: Mapping[str, str]) -> str:
    """The URL that stands for all these addresses of senders, by label."""
    names = {label: address.removeprefix(SCHEME) for label, address in addresses.items()}
    return f"{default}?{urllib.parse.urlencode(names, safe='@')}" if names else default


def choose(url: str) -> str:
    """The one address in a URL that this process should read from. Raises ValueError for what is no such URL."""
    default, separator, query = url.partition("?")
    if not separator:
        return default
    try:
        names = dict(urllib.parse.parse_qsl(query, strict_parsing=True, max_num_fields=_MAX_DEVICES))
    except ValueError as exc:
        raise ValueError(f"{url[:200]!r} is not the address of ipc senders, as in Sender.address: {exc}") from exc
    return next((SCHEME + names[label] for label in _own_labels() if label in names), default)


def _own_labels() -> list[str]:
    """The labels that fit this process, the best one first.

    A process may see all GPUs of a host and have its model on one; the current device is a thread's own matter, and
    receivers are made in the background. So GPUs count by the memory that torch has taken on them here.
    """
    labels = [own] if (own := os.environ.get(LABEL_VARIABLE, "")) else []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        used = [device for device in devices if torch.cuda.memory_allocated(device)]
        labels += [uuid_of(device) for device in sorted(used, key=torch.cuda.memory_allocated, reverse=True)]
    return labels
