"""A model of your own, in a process of its own, that takes new weights while it works.

Run it: `python examples/module_engine.py`. It starts the engine as a child process, trains a copy of the model here and
publishes it after every step; the engine goes on computing meanwhile. Needs `pip install "PATH_TO_WEIGHTCAST[serve]"`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time

import torch
from torch import nn

import weightcast


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def serve() -> None:
    """The engine's side: wrap the model, start the server, and use the model inside `server.step()` only."""
    model = make_model().eval()
    probe = torch.ones(1, 16)
    server = weightcast.EngineServer(weightcast.ModuleEngine(model)).start()
    closing = threading.Thread(target=lambda: (sys.stdin.read(), server.close()))
    closing.start()
    print(server.url, flush=True)
    seen: object = None
    with contextlib.suppress(weightcast.errors.ClosedError):  # `step` raises it once the server is closed
        while True:
            # Waits while an update is installed; after one that failed half-way, until the next has healed the engine.
            with server.step() as version, torch.inference_mode():
                answer = model(probe).item()
            if version is not None and version != seen:
                print(json.dumps({"version": version.number, "answer": answer}), flush=True)
                seen = version
            time.sleep(0.001)
    closing.join()


def train(num_steps: int = 5) -> None:
    """The trainer's side: a Publisher over the same module, one `publish` per step."""
    child = [sys.executable, __file__, "serve"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        url = engine.stdout.readline().strip()
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with weightcast.Publisher(weightcast.ModuleSource(model), transport="ipc://", engines=[url]) as publisher:
            for _ in range(num_steps):
                loss = (model(torch.ones(1, 16)) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report = publisher.publish()
                served = json.loads(engine.stdout.readline())
                expected = model(torch.ones(1, 16)).item()
                print(
                    f"version {report.version}: loss {loss.item():.4f}, the engine answers {served['answer']:.4f}, "
                    f"the trainer {expected:.4f}, {1e3 * report.seconds.total:.1f} ms"
                )
                assert served["version"] == report.version
                assert abs(served["answer"] - expected) < 1e-5
        engine.communicate("")  # The end of its input is the engine's signal to stop.
    if engine.returncode != 0:
        raise SystemExit(f"the engine ended with {engine.returncode}")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else train()
