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
    """The label of a device of this process; empty if it has none."""
    return uuid_of(device) if device.type == "cuda" else os.environ.get(LABEL_VARIABLE, "")


def join(default: str, addresses: Mapping[str, str]) -> str:
    """The URL that stands for all these addresses of senders, by label."""
    names = {label: address.removeprefix(SCHEME) for label, address in addresses.items()}
    return f"{default}?{urllib.parse.urlencode(names, safe='@')}" if names else default


def choose(url: str, device: torch.device) -> str:
    """The one address in a URL that a receiver of this device should read from. Raises ValueError for no such URL."""
    default, separator, query = url.partition("?")
    if not separator:
        return default
    try:
        names = dict(urllib.parse.parse_qsl(query, strict_parsing=True, max_num_fields=_MAX_DEVICES))
    except ValueError as exc:
        raise ValueError(f"{url[:200]!r} is not the address of ipc senders, as in Sender.address: {exc}") from exc
    name = names.get(label(device))
    return default if name is None else SCHEME + name
