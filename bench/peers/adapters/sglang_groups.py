"""SGLang's `/update_weights_from_distributed`, over gloo, with its own process group and buckets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import httpx
import torch.distributed as dist
from real_engines.process import free_port

from peers.adapters.sglang import Post, buckets, updated_by
from peers.ends import DEADLINE_SECONDS, End, Update


@contextlib.contextmanager
def distributed(end: End, bucket_mib: int = 0) -> Iterator[Update]:
    """By gloo: a broadcast for each tensor, or one for each flattened bucket of so many MiB."""
    from sglang.srt.utils.common import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    port, name = free_port(), "bench_peers"
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    joining = threading.Thread(
        target=lambda: httpx.post(
            f"{end.server}/init_weights_update_group",
            json=body | {"group_name": name, "backend": "gloo"},
            timeout=DEADLINE_SECONDS,
        ).raise_for_status()
    )
    joining.start()
    group = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=name)
    joining.join()

    def change(post: Post) -> None:
        for pairs in buckets(end, bucket_mib << 20) if bucket_mib else [list(end.tensors.items())]:
            body = {
                "names": [name for name, _ in pairs],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in pairs],
                "shapes": [list(tensor.shape) for _, tensor in pairs],
                "load_format": "flattened_bucket" if bucket_mib else None,
            }
            asking = threading.Thread(
                target=post, args=("/update_weights_from_distributed",), kwargs=body | {"group_name": name}
            )
            asking.start()
            if bucket_mib:
                dist.broadcast(FlattenedTensorBucket(named_tensors=pairs).get_flattened_tensor(), 0, group=group)
            else:
                for work in [dist.broadcast(tensor, 0, group=group, async_op=True) for _, tensor in pairs]:
                    work.wait()
            asking.join()

    with updated_by(end, change) as update:
        yield update
