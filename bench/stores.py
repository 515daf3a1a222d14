"""A store against TorchRL's double buffer and safetensors files: one update written and read, in CPU and wall seconds.

`python bench/stores.py [--rounds N] [--case small|large]`, in an environment with weightcast[torchrl]. Each round runs
every method once, in an order that changes from round to round; medians are printed. An update is written by one object
and read by another into an engine that copies into tensors of its own; its values are checked after each. One torch
thread. A method's first update, which allocates, is not counted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torchrl.weight_update.llm import VLLMDoubleBufferSyncScheme as TorchrlScheme

from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme as WeightcastScheme

CASES = {"small": (5000, (64, 64)), "large": (16, (64, 512, 1024))}
"""Tensors of bf16: 5,000 of 8 KiB; 16 of 64 MiB, 1 GiB in all."""

BARS = {
    ("small", "shm", "torchrl dict"): 15.0,
    ("small", "shm", "torchrl td"): 15.0,
    ("large", "shm", "torchrl dict"): 1.3,
    ("large", "shm", "torchrl td"): 2.2,
    ("large", "disk", "safetensors"): 4.0,
}
"""By how much another method's CPU time must be larger than that of weightcast with the same input (any, for files)."""

Update = Callable[[], None]


class Engine:
    """vLLM's shape, whose model copies what it is given into tensors of its own."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.held = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.model_executor = SimpleNamespace(driver_worker=worker)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.held[name].copy_(tensor)


def methods(tensors: dict[str, torch.Tensor], engine: Engine, folder: Path) -> Iterator[tuple[str, Update]]:
    """Every method by name: what one update of it is."""
    target = [engine.held[name] for name in tensors]
    yield "memcpy", lambda: torch._foreach_copy_(target, list(tensors.values()))
    for kind, scheme in (("weightcast", WeightcastScheme), ("torchrl", TorchrlScheme)):
        # One directory and one pair of ends for both, or the large case needs twice the memory.
        update = _scheme_update(scheme, engine, folder / kind)
        for name, weights in (("dict", tensors), ("td", TensorDict(tensors, batch_size=[]))):
            yield f"{kind} {name}", functools.partial(update, weights)
    yield "safetensors", _file_update(tensors, engine, folder / "model.safetensors")


def _scheme_update(scheme: Any, engine: Engine, folder: Path) -> Callable[[Any], None]:
    made = scheme(str(folder))
    sender, receiver, model = made.create_sender(), made.create_receiver(engine), torch.nn.Linear(1, 1)
    sender.register_model(model)

    def update(weights: Any, model: Any = model) -> None:  # which the sender holds weakly
        sender.update_weights(weights)
        assert receiver.poll_and_apply(timeout=0)

    return update


def _file_update(tensors: dict[str, torch.Tensor], engine: Engine, path: Path) -> Update:
    def update() -> None:
        save_file(tensors, path)
        engine.load_weights(load_file(path).items())

    return update


def measure(case: str, folder: Path, num_rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of CPU and wall seconds of an update, by method."""
    num_tensors, shape = CASES[case]
    tensors = {f"model.layers.{i}.weight": torch.empty(shape, dtype=torch.bfloat16) for i in range(num_tensors)}
    engine = Engine(tensors)
    updates = list(methods(tensors, engine, folder))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in updates}
    for number in range(num_rounds + 1):
        for position in range(len(updates)):
            name, update = updates[(position + number) % len(updates)]
            for i, tensor in enumerate(tensors.values()):
                tensor.fill_((number * 31 + position * 7 + i) % 128)
            gc.collect()
            cpu, wall = time.process_time(), time.perf_counter()
            update()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            assert all(torch.equal(engine.held[key], tensor) for key, tensor in tensors.items()), name
            if number:
                seconds[name].append(spent)
    return {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in seconds.items()}  # type: ignore[misc]


def idle_microseconds(folder: Path) -> float:
    """Median wall time of a `poll_and_apply` that finds nothing new."""
    tensors = {"a": torch.zeros(8)}
    scheme = WeightcastScheme(str(folder))
    sender, receiver, model = scheme.create_sender(), scheme.create_receiver(Engine(tensors)), torch.nn.Linear(1, 1)
    sender.register_model(model)
    sender.update_weights(tensors)
    receiver.poll_and_apply(timeout=0)
    found = []
    for _ in range(2000):
        start = time.perf_counter()
        assert not receiver.poll_and_apply(timeout=0)
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found)


def report(case: str, place: str, found: dict[str, tuple[float, float]]) -> list[str]:
    """Print a table; the bars that were missed."""
    missed = []
    print(f"\n{case} on {place}\n{'method':18}{'CPU ms':>10}{'wall ms':>10}{'x CPU of weightcast':>22}")
    for name, (cpu, wall) in found.items():
        own = found["weightcast td" if name.endswith("td") else "weightcast dict"][0]
        bar = BARS.get((case, place, name))
        said = "" if bar is None else f"  bar {bar:g}: {'reached' if cpu / own >= bar else 'MISSED'}"
        print(f"{name:18}{cpu * 1e3:10.1f}{wall * 1e3:10.1f}{cpu / own:22.2f}{said}")
        if "MISSED" in said:
            missed.append(f"{case}, {place}, {name}: {cpu / own:.2f} of {bar:g}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder on tmpfs")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    missed = []
    for place, parent in (("shm", options.memory), ("disk", options.disk)):
        for case in options.case or CASES:
            folder = Path(tempfile.mkdtemp(prefix=f"store-bench-{os.getpid()}-", dir=parent))
            try:
                missed += report(case, place, measure(case, folder, options.rounds))
                print(f"a poll that finds nothing new: {idle_microseconds(folder / 'idle'):.0f} us")
            finally:
                shutil.rmtree(folder)
    print(f"\nmissed: {'; '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
