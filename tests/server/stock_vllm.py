"""vLLM's stock routes: a stand-in for the wire format alone, for tests that need no vLLM.

What it plays, and nothing else: one JSON object per route, a label and a pause in the front end, the replies of the
first data-parallel engine only, errors wrapped in a 500. Each engine is a module.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from safetensors.torch import load_file

from weightcast.engines.module import ModuleEngine


class FragileEngine(ModuleEngine):
    """Fails in the install while `is_broken`, after it has written."""

    is_broken = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load(tensors)
        if self.is_broken:
            raise RuntimeError("the loader broke")


class StockVllm:
    """A server of `num_engines` data-parallel engines. `log` has every POST's path and query, and each reload."""

    def __init__(self, num_engines: int = 1, *, backend: str | None = None, is_dev: bool = True) -> None:
        self.modules = [torch.nn.Linear(8, 8) for _ in range(num_engines)]
        self.backend = backend
        self.is_dev = is_dev
        self.label = "default"
        self.is_paused = False
        self.log: list[str] = []
        self.headers: list[str] = []
        self.device = "cuda"
        self.model = "/nowhere"
        self.num_ranks = num_engines
        self.num_failing_reloads = 0
        self.url = ""
        self.lora: dict[str, Any] | None = None
        self.parallel: dict[str, Any] = {}
        self.adapters: dict[str, str] = {}
        self.fails_to_load = False
        self.loading: list[dict[str, str]] | None = None
        """Loads that go on, although a proxy before this server has given up waiting; None without such a proxy."""
        self.metrics = "# HELP vllm:lora_requests_info Running stats on lora requests.\n"
        self.resumed = threading.Event()

    @contextlib.contextmanager
    def serve(self) -> Iterator[StockVllm]:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self._app(), log_config=None, access_log=False, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(30)
            listener.close()

    def values(self) -> list[float]:
        """What each engine's weights are filled with."""
        return [float(module.weight.detach().flatten()[0]) for module in self.modules]

    def load_adapter(self, body: dict[str, str]) -> None:
        """Read an adapter and name it: the end of a load."""
        load_file(Path(body["lora_path"], "adapter_model.safetensors"))
        self.adapters[body["lora_name"]] = body["lora_path"]

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def note(request: Request, go_on: Any) -> Any:
            if request.method == "POST" and request.url.path != "/collective_rpc":
                query = f"?{request.url.query}" if request.url.query else ""
                self.log.append(request.url.path + query)
            self.headers.append(request.headers.get("authorization", ""))
            return await go_on(request)

        @app.get("/version")
        def version() -> Any:
            return {"version": "0.32.0"}

        if not self.is_dev:
            return app

        @app.get("/weight_info")
        def weight_info() -> Any:
            return {"weight_version": self.label}

        @app.get("/is_paused")
        def is_paused() -> Any:
            return {"is_paused": self.is_paused}

        @app.get("/get_world_size")
        def get_world_size() -> Any:
            return {"world_size": self.num_ranks}

        @app.get("/server_info")
        def server_info() -> Any:
            transfer = None if self.backend is None else {"backend": self.backend}
            config = {
                "weight_transfer_config": transfer,
                "model_config": {"model": self.model, "dtype": "torch.float32", "revision": None},
                "load_config": {"download_dir": None},
                "device_config": {"device": self.device},
                "lora_config": self.lora,
                "parallel_config": self.parallel,
                "more": 1,
            }
            return {"vllm_config": config, "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": self.lora is not None}}

        @app.get("/v1/models")
        def models() -> Any:
            cards = [{"id": "tiny", "root": self.model, "parent": None}]
            return {"data": cards + [{"id": n, "root": root, "parent": "tiny"} for n, root in self.adapters.items()]}

        @app.get("/metrics")
        def metrics() -> Any:
            return PlainTextResponse(self.metrics)

        @app.post("/v1/load_lora_adapter")
        def load_lora_adapter(body: dict[str, str]) -> Any:
            if self.fails_to_load:
                return _failed("no room")
            if body["lora_name"] in self.adapters:
                return _failed(f"The lora adapter {body['lora_name']!r} has already been loaded.")
            if self.loading is not None:
                self.loading.append(body)
                return PlainTextResponse("Gateway Time-out", 504)
            if not Path(body["lora_path"], "adapter_config.json").is_file():
                return _failed(f"The lora adapter {body['lora_name']!r} cannot be found.")
            self.load_adapter(body)
            return PlainTextResponse("Success")

        @app.post("/v1/unload_lora_adapter")
        def unload_lora_adapter(body: dict[str, str]) -> Any:
            if self.adapters.pop(body["lora_name"], None) is None:
                return _failed(f"The lora adapter {body['lora_name']!r} cannot be found.")
            return PlainTextResponse("Success")

        @app.post("/pause")
        def pause(mode: str = "abort", clear_cache: bool = True) -> Any:
            self.is_paused = True
            return {"status": "paused"}

        @app.post("/wake_up")
        def wake_up() -> Any:
            self.is_paused = False
            self.resumed.set()
            return {"status": "awake", "tags": ["scheduling"]}

        @app.post("/update_weight_version")
        def update_weight_version(body: dict[str, str]) -> Any:
            self.label = body["new_version"]
            return {"success": True, "new_version": self.label}

        @app.post("/collective_rpc")
        def collective_rpc(body: dict[str, Any]) -> Any:
            return self._call(body)

        return app

    def _call(self, body: dict[str, Any]) -> Any:
        if body["method"] == "reload_weights":
            return self._reload(**body["kwargs"])
        return _failed(f"'Method {body['method']!r} is not implemented.'")

    def _reload(self, weights_path: str, is_checkpoint_format: bool) -> Any:
        assert is_checkpoint_format
        assert self.is_paused
        tensors = load_file(Path(weights_path) / "model.safetensors")
        self.log.append(f"reload of {len(tensors)} tensors")
        if tensors and self.num_failing_reloads:
            self.num_failing_reloads -= 1
            return _failed("the loader broke")
        for module in self.modules if tensors else ():
            module.load_state_dict(tensors)
        return {"results": [None] * self.num_ranks}


def _failed(text: str) -> JSONResponse:
    message = f"Call to collective_rpc method failed: Worker failed with error {text}, please check the stack trace"
    return JSONResponse({"error": {"message": message, "type": "InternalServerError", "code": 500}}, 500)
