"""SGLang's stock weight routes in a process of its own: a stand-in for the wire format alone, for tests without SGLang.

What it plays: one scheduler, which does one call after another and stands still in a broadcast; `num_ranks` ranks that
each hold all tensors; sessions without owners, labels, checksums; 400 for a refusal, and its end for what SGLang does
not survive. `Fault`s happen once, at the given bucket (counted from the fault's setting).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import forking
import httpx
import torch
from ports import free_port
from safetensors.torch import load_file
from stopping import send_signal
from torch.distributed import PrefixStore

START_SECONDS = 120.0
_context = forking.preloaded("torch", "fastapi", "uvicorn", "safetensors.torch", "weightcast.process_group")


class StockSglang:
    """The test's handle on a server process. `folder` has the checkpoint that it starts from."""

    def __init__(self, folder: Path, *, num_ranks: int = 1, key: str = "", overrides: dict[str, Any] | None = None):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = (self.port, folder, num_ranks, key, overrides or {})
        self._process = _context.Process(target=main, args=arguments, daemon=True)
        self._process.start()
        self._pid = self._process.pid or 0
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, timeout=30, headers=headers, trust_env=False)

    def __enter__(self) -> StockSglang:
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/model_info").status_code in (200, 401):
                    return self
            if self._process.exitcode is not None or time.monotonic() > end:
                code = self._process.exitcode
                self.close()
                raise AssertionError(f"the stand-in ended with {code}, or did not start")
            self._process.join(0.05)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()
        self.signal(signal.SIGCONT)
        self.kill()
        self._process.close()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            send_signal(self._pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def has_ended(self, seconds: float = 5.0) -> bool:
        """Whether it ends within that time."""
        self._process.join(seconds)
        return not self._process.is_alive()

    def fault(self, kind: str, bucket: int = 0) -> None:
        self.http.post("/_fault", json={"kind": kind, "bucket": bucket}).raise_for_status()

    def state(self) -> Any:
        """What it holds: `values` of each tensor's first element and rank, `label`, `is_paused`, `log` and so on."""
        return self.http.get("/_state").raise_for_status().json()

    def values(self) -> set[float]:
        return set(self.state()["values"])


# --- the server's process ---


class Refused(Exception):
    """Answered with 400."""


class Scheduler:
    def __init__(self, folder: Path, num_ranks: int, overrides: dict[str, Any]) -> None:
        self.lock = threading.Lock()
        self.folder = folder
        self.overrides = overrides
        self.ranks = [load_file(folder / "model.safetensors") for _ in range(num_ranks)]
        self.label = "default"
        self.is_paused = False
        self.has_session = False
        self.groups: dict[str, list[Any]] = {}
        self.log: list[str] = []
        self.fault: dict[str, Any] = {}
        self.num_flushed = 0
        self.bytes_on_wire = 0

    def take_fault(self, *kinds: str) -> str:
        """The fault that is due now, once."""
        if self.fault.get("kind") not in kinds:
            return ""
        if self.fault["bucket"] > 0:
            self.fault["bucket"] -= 1
            return ""
        return str(self.fault.pop("kind"))

    def each_rank(self, call: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                call(rank)
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def load(self, rank: int, flat: torch.Tensor, places: list[tuple[str, torch.dtype, list[int], int]]) -> None:
        for name, dtype, shape, start in places:
            size = torch.Size(shape).numel() * dtype.itemsize
            assert start % dtype.itemsize == 0, f"Unaligned received tensor {name}"
            if name in self.ranks[rank]:
                self.ranks[rank][name].copy_(flat[start : start + size].view(dtype).view(shape))

    # --- the routes' bodies ---

    def begin_weight_update(self, body: Any) -> None:
        if self.has_session:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.has_session = True

    def end_weight_update(self, body: Any) -> None:
        if not self.has_session:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        self.has_session = False

    def init_weights_update_group(self, body: Any) -> None:
        from weightcast.process_group import ProcessGroup, join_store

        if self.take_fault("refuse to join"):
            raise Refused("Failed to initialize custom process group: no.")
        if self.take_fault("die joining"):
            os._exit(1)
        name, groups = body["group_name"], [None] * len(self.ranks)

        def join(rank: int) -> None:
            store = PrefixStore(name, join_store(body["master_address"], body["master_port"], 600))
            store = PrefixStore("cpu/", PrefixStore(f"{name}/", store))
            number = body["rank_offset"] + rank
            groups[rank] = ProcessGroup("gloo", store, rank=number, size=body["world_size"], timeout_seconds=600)

        try:
            self.each_rank(join)
        except Exception as exc:
            raise Refused(f"Failed to initialize custom process group: {exc}.") from exc
        self.groups[name] = groups

    def destroy_weights_update_group(self, body: Any) -> None:
        if body["group_name"] not in self.groups:
            raise Refused("The group to be destroyed does not exist.")
        for group in self.groups.pop(body["group_name"]):
            group.close()

    def update_weights_from_distributed(self, body: Any) -> None:
        from weightcast.process_group import wait

        self.require_session()
        if self.take_fault("die at a bucket"):
            os._exit(1)
        if self.take_fault("die after its request"):
            threading.Timer(0.2, lambda: os._exit(1)).start()
            time.sleep(10)
        if self.take_fault("refuse without receiving"):
            raise Refused("this server has no time")
        if body["group_name"] not in self.groups:
            raise Refused(f"Failed to receive weights: Group {body['group_name']} not in {list(self.groups)}.")
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(body["shapes"], dtypes, strict=True)]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        places = list(zip(body["names"], dtypes, body["shapes"], starts, strict=True))
        skipped = len(self.ranks) - 1 if self.take_fault("one rank does not load") else -1

        def receive(rank: int) -> None:
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            wait(self.groups[body["group_name"]][rank].broadcast(flat, root=0))
            if rank != skipped:
                self.load(rank, flat, places)

        try:
            self.each_rank(receive)
        except Exception as exc:
            raise Refused(f"Failed to receive weights: {exc}") from exc
        self.bytes_on_wire += sum(sizes)
        if self.take_fault("refuse after loading"):
            raise Refused("Failed to update parameter online: no. Please discard the whole weights.")
        self.flush(body)

    def update_weights_from_tensor(self, body: Any) -> None:
        self.require_session()
        for rank, data in enumerate(body["serialized_named_tensors"]):
            bucket = pickle.loads(base64.b64decode(data))
            places = [(m.name, m.dtype, list(m.shape), m.start_idx) for m in bucket["metadata"]]
            self.load(rank, bucket["flattened_tensor"], places)
        self.flush(body)

    def update_weights_from_disk(self, body: Any) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            tensors |= load_file(file)
        if not tensors:
            raise Refused("Failed to get weights iterator: there is nothing.")
        for held in self.ranks:
            for name, tensor in held.items():
                tensor.copy_(tensors[name])
        self.flush(body)

    def require_session(self) -> None:
        if not self.has_session:
            raise Refused("must run between begin_weight_update() and end_weight_update()")

    def flush(self, body: Any) -> None:
        self.num_flushed += bool(body.get("flush_cache", True))

    def update_weight_version(self, body: Any) -> None:
        self.label = body["new_version"]

    def pause_generation(self, body: Any) -> None:
        self.is_paused = True

    def continue_generation(self, body: Any) -> None:
        self.is_paused = False

    def checksums(self) -> dict[str, Any]:
        ranks = [{"checksums": {name: _checksum(t) for name, t in held.items()}} for held in self.ranks]
        whole = hashlib.sha256(json.dumps(ranks).encode()).hexdigest()
        return {"success": True, "message": "", "ranks": ranks, "per_engine_checksum": whole}

    def state(self) -> dict[str, Any]:
        return {
            "values": [float(t.flatten()[0]) for held in self.ranks for t in held.values() if t.numel()],
            "digest": self.checksums()["per_engine_checksum"],
            "label": self.label,
            "is_paused": self.is_paused,
            "has_session": self.has_session,
            "groups": list(self.groups),
            "log": self.log,
            "num_flushed": self.num_flushed,
            "bytes_on_wire": self.bytes_on_wire,
        }


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


_PREFIXES = ("begin_", "end_", "init_", "destroy_", "update_", "pause_")
POSTS = [
    name for name in vars(Scheduler) if name.startswith(("begin_", "end_", "init_", "destroy_", "update_", "pause_"))
]


def app(scheduler: Scheduler, key: str) -> Any:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    made = FastAPI()

    @made.middleware("http")
    async def check_key(request: Request, call_next: Any) -> Any:
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": {"message": "Unauthorized"}}, 401)
        return await call_next(request)

    @made.get("/model_info")
    def model_info() -> Any:
        return {"model_path": str(scheduler.folder), "weight_version": scheduler.label, "is_generation": True}

    @made.get("/server_info")
    def server_info() -> Any:
        held = {"tp_size": len(scheduler.ranks), "dp_size": 1, "pp_size": 1, "quantization": None, "dtype": "float32"}
        return held | {"version": "0.5.23", "host": "127.0.0.1"} | scheduler.overrides

    @made.post("/weights_checker")
    def weights_checker() -> Any:
        with scheduler.lock:
            return scheduler.checksums()

    @made.get("/_state")
    def state() -> Any:
        return scheduler.state()

    @made.post("/_fault")
    def fault(body: dict[str, Any]) -> Any:
        scheduler.fault = body
        return {}

    def route(name: str) -> Any:
        def call(body: dict[str, Any]) -> Any:
            with scheduler.lock:
                scheduler.log.append(name)
                try:
                    getattr(scheduler, name)(body)
                except Refused as exc:
                    return JSONResponse({"success": False, "message": str(exc)}, 400)
                return {"success": True, "message": "done"}

        return call

    for name in [*POSTS, "continue_generation"]:
        made.post(f"/{name}")(route(name))
    return made


def main(port: int, folder: Path, num_ranks: int, key: str, overrides: dict[str, Any]) -> None:
    import uvicorn

    torch.set_num_threads(1)
    uvicorn.run(app(Scheduler(folder, num_ranks, overrides), key), host="127.0.0.1", port=port, log_level="error")
