"""What is measured: each way with its adapter, the weightcast that it takes turns with, and what it checks.

What a library checks was read in its source, at the version that its environment pins, and is said as a user would see
it: a check that only logs does not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Way:
    """`adapter`: `module:function` of the adapters, with its options. `against`: weightcast's ways, by name.

    `boundary`: "process", where a plain process copies into its parameters, or the real engine that serves.
    `environment`: of `scripts/bench-peers`, in which it runs. `packages`: whose versions the result says.
    `checked`: digest, completeness, version, rollback; what is not there is not checked.
    """

    name: str
    adapter: str
    boundary: str = "process"
    environment: str = "stock"
    options: Options = dataclasses.field(default_factory=dict)
    against: Sequence[str] = ()
    packages: Sequence[str] = ("torch",)
    checked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("weightcast")


_ALL = {
    "digest": "xxh3-128 of each bucket, before its use",
    "completeness": "every tensor, before the install",
    "version": "run and number on every message",
}
_STAGED = _ALL | {"rollback": "the old version until all has arrived"}
_STREAMING = _ALL | {"rollback": "refuses to serve until healed"}
_FILE = {"digest": "xxh3-128 of each bucket", **{key: _STAGED[key] for key in ("completeness", "version", "rollback")}}


def _ours(transport: str, install: str, checked: Mapping[str, str]) -> Way:
    name = f"weightcast {transport.partition(':')[0]}" + (", streaming" if install == "streaming" else "")
    return Way(name, "weightcast:publish", options={"transport": transport, "install": install}, checked=checked)


OURS = [
    _ours("ipc://", "staged", _STAGED),
    _ours("ipc://", "streaming", _STREAMING),
    _ours("gloo://127.0.0.1:0", "staged", _STAGED),
    _ours("gloo://127.0.0.1:0", "streaming", _STREAMING),
    _ours("file://{folder}/store", "staged", _FILE),
]
_IPC, _IPC_STREAMING, _GLOO, _GLOO_STREAMING, _FILES = (way.name for way in OURS)

PEERS = [
    Way(
        "verl BucketedWeightSender, 512 MiB",
        "verl:bucketed",
        environment="verl",
        options={"bucket_mib": 512},
        against=(_IPC, _IPC_STREAMING),
        packages=("verl", "torch"),
        note="its default bucket; shared memory made for each update",
    ),
    Way(
        "verl nccl engine over gloo",
        "verl:nccl",
        environment="verl",
        options={"bucket_mib": 128},
        against=(_GLOO, _GLOO_STREAMING),
        packages=("verl", "torch"),
        note="verl's class, gloo in the place of NCCL; buckets of 128 MiB",
    ),
    Way(
        "TorchRL double buffer",
        "torchrl:double_buffer",
        against=(_FILES, _IPC),
        packages=("torchrl", "tensordict", "torch"),
        note="a file for each tensor, on tmpfs",
    ),
    Way("safetensors file", "files:safetensors", against=(_FILES, _IPC), packages=("safetensors", "torch"), note="on tmpfs"),
    Way("torch.save", "files:torch_save", against=(_FILES, _IPC), note="on tmpfs, read by mmap"),
    Way("torch.distributed, a broadcast per tensor", "gloo:broadcast", against=(_GLOO, _GLOO_STREAMING), note="gloo"),
]

WAYS = {way.name: way for way in (*OURS, *PEERS)}
