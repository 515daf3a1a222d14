"""SGLang's own ways into `sglang.launch_server`, with its own client classes: by handles of shared memory, from disk.

Each update is a session (`begin_weight_update` to `end_weight_update`) between a pause and its end, as SGLang asks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from peers.ends import DEADLINE_SECONDS, End, Update

Post = Callable[..., None]


@contextlib.contextmanager
def updated_by(end: End, change: Callable[[Post], None], *, in_session: bool = True) -> Iterator[Update]:
    with httpx.Client(base_url=end.server, timeout=DEADLINE_SECONDS, trust_env=False) as http:

        def post(path: str, **body: Any) -> None:
            reply = http.post(path, json=body)
            assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}"

        def update(step: int) -> float:
            start = time.perf_counter()
            post("/pause_generation", mode="retract")
            if in_session:
                post("/begin_weight_update")
            change(post)
            if in_session:
                post("/end_weight_update")
            post("/continue_generation")
            return time.perf_counter() - start

        yield update


@contextlib.contextmanager
def tensors(end: End, bucket_mib: int = 0) -> Iterator[Update]:
    """By handles of shared memory: one for each tensor, or one for each flattened bucket of so many MiB."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    # A server opens them by name; it is no child of this process.
    torch.multiprocessing.set_sharing_strategy("file_system")

    def send(post: Post, content: Any, load_format: str | None) -> None:
        handles = MultiprocessingSerializer.serialize(content, output_str=True)
        post("/update_weights_from_tensor", serialized_named_tensors=[handles], load_format=load_format)

    def change(post: Post) -> None:
        if not bucket_mib:
            # A copy, as a trainer's export is: its own parameters must not become shared memory.
            send(post, [(name, tensor.clone()) for name, tensor in end.tensors.items()], None)
            return
        for pairs in buckets(end, bucket_mib << 20):
            bucket = FlattenedTensorBucket(named_tensors=pairs)
            content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            send(post, content, "flattened_bucket")

    with updated_by(end, change) as update:
        yield update


@contextlib.contextmanager
def disk(end: End) -> Iterator[Update]:
    """The trainer writes safetensors to tmpfs; the server reads them."""

    def change(post: Post) -> None:
        post("/update_weights_from_disk", model_path=str(end.folder))

    with updated_by(end, change, in_session=False) as update:

        def write_and_update(step: int) -> float | None:
            save_file(dict(end.tensors), end.folder / "model.safetensors")
            return update(step)

        yield write_and_update


def buckets(end: End, num_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """As slime cuts them: a tensor that does not fit begins the next bucket."""
    bucket, filled = list[tuple[str, torch.Tensor]](), 0
    for name, tensor in end.tensors.items():
        if bucket and filled + tensor.nbytes > num_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    yield bucket
