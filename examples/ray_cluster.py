"""Trainer actors and engine actors on a Ray cluster; engines are lost, come back, are added and removed meanwhile.

    python examples/ray_cluster.py                                   # a cluster of its own, on this machine
    python examples/ray_cluster.py --address auto --trainers 2 --engines 2 --kill-engine-at 3 --scale 6:4 --scale 12:1

The trainers shard a model with FSDP2 and publish it after every step. With `--kill-engine-at` an engine actor is
killed before that step: the others get their versions as before, Ray restarts the lost one, maybe on another node and
on another port, and it is brought to the version that the others serve. `--scale STEP:NUM` has NUM engines from that
step on. Needs `pip install "PATH_TO_WEIGHTCAST[serve,ray]"`; weightcast itself knows nothing of Ray. The page on Ray in
the documentation goes through it part by part.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

PATIENCE_SECONDS = 0.5
"""For an engine that is being restarted; then the step is made without it."""
DEADLINE_SECONDS = 60.0


def make_model(seed: int) -> Any:
    """Any nn.Module. Trainers and engines must have the same names, shapes and dtypes."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(128, 64), *blocks, nn.Linear(64, 128))


@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class EngineActor:
    """A model behind weightcast's routes, on this actor's node. Ray restarts it with the same arguments."""

    def __init__(self, index: int, token: str) -> None:
        import weightcast

        host = ray.util.get_node_ip_address()
        engine = weightcast.ModuleEngine(make_model(seed=100 + index))
        self._server = weightcast.EngineServer(engine, host=host, token=token).start()

    def place(self) -> dict[str, Any]:
        """Where it is now: another port, and maybe another node, after a restart."""
        return {"url": self._server.url, "node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}


@ray.remote(num_cpus=1)
class TrainerActor:
    """One trainer rank: its shards of the model, and its side of the publisher."""

    def __init__(self, trainer_rank: int, num_trainers: int) -> None:
        self._trainer_rank, self._num_trainers = trainer_rank, num_trainers
        self._host = ray.util.get_node_ip_address()

    def place(self) -> dict[str, Any]:
        return {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}

    def listen(self) -> tuple[str, int]:
        """Rank 0: where the other ranks find it. On one address only; the store by itself would take all."""
        import socket

        from torch.distributed import TCPStore

        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return self._host, port

    def join(self, host: str, port: int, token: str) -> None:
        """All ranks: make the group, shard the model, make the publisher."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        import weightcast

        torch.set_num_threads(1)
        store = self._store if self._trainer_rank == 0 else dist.TCPStore(host, port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self._trainer_rank, world_size=self._num_trainers)
        self._model = make_model(seed=0)
        fully_shard(self._model, mesh=init_device_mesh("cpu", (self._num_trainers,)))
        torch.manual_seed(1 + self._trainer_rank)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._publisher = weightcast.Publisher(
            weightcast.ModuleSource(self._model),
            transport=f"gloo://{host}:0",
            token=token,
            options=weightcast.PublishOptions(on_failure="report"),
        )
        self._engines: set[str] = set()
        self._current: set[str] = set()

    def step(self, engines: Sequence[str]) -> dict[str, Any]:
        """All ranks at the same time: one step, one publish to the engines that there are now."""
        self._train()
        self._use(engines)
        report = self._publisher.publish()
        self._current = {url for url, result in report.engines.items() if result.ok}
        return {
            "version": report.version,
            "seconds": report.seconds.total,
            "engines": {url: result.ok for url, result in report.engines.items()},
        }

    def catch_up(self, engines: Sequence[str]) -> dict[str, bool]:
        """All ranks at the same time, between steps: bring those that lack the last version to it."""
        self._use(engines)
        found = {}
        for url in sorted(set(engines) - self._current):
            report = self._publisher.sync(url)
            found[url] = report.ok
        self._current |= {url for url, ok in found.items() if ok}
        return found

    def _use(self, engines: Sequence[str]) -> None:
        for url in self._engines - set(engines):
            self._publisher.remove_engine(url)
        for url in set(engines) - self._engines:
            self._publisher.add_engine(url)
        self._engines = set(engines)
        self._current &= self._engines

    def _train(self) -> None:
        import torch
        from torch.nn.functional import cross_entropy

        tokens = torch.randint(128, (8, 32))
        cross_entropy(self._model(tokens).flatten(0, 1), tokens.flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, directory: Path) -> None:
        """All ranks: rank 0 writes the whole model, on its node."""
        from safetensors.torch import save_file
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self._model, options=options)
        if self._trainer_rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(weights, directory / "model.safetensors")

    def close(self) -> None:
        """All ranks: let the engines go."""
        import torch.distributed as dist

        self._publisher.close()
        dist.destroy_process_group()


@dataclasses.dataclass(eq=False)
class Engine:
    """An engine actor, and where it was when it last answered; None before it was started. `asked`: to be answered."""

    actor: Any
    place: dict[str, Any] | None = None
    asked: Any = None


class Job:
    """The driver's side: all actors, spread over the cluster's nodes."""

    def __init__(self, num_trainers: int, num_engines: int) -> None:
        self.token = secrets.token_urlsafe()
        self._lock = threading.Lock()
        self._num_started = 0
        self._engines: list[Engine] = []
        self._leaving: list[Engine] = []
        self.scale_engines(num_engines)
        trainer = TrainerActor.options(scheduling_strategy="SPREAD")
        self.trainers = [trainer.remote(rank, num_trainers) for rank in range(num_trainers)]
        host, port = self._get([self.trainers[0].listen.remote()])[0]
        self._get([trainer.join.remote(host, port, self.token) for trainer in self.trainers])
        self._look_for_engines(DEADLINE_SECONDS)

    @property
    def places(self) -> list[dict[str, Any]]:
        """Where the engines are that have been started."""
        with self._lock:
            return [engine.place for engine in self._engines if engine.place is not None]

    def scale_engines(self, num_engines: int) -> None:
        """Have so many engines from the next step on. From any thread, also during a step, which is not disturbed.

        New ones take part as soon as Ray has found a place for them, maybe on a node that its autoscaler has added;
        the last ones leave when the next step has been published to the others.
        """
        with self._lock:
            self._leaving += self._engines[num_engines:]
            del self._engines[num_engines:]
            for _ in range(num_engines - len(self._engines)):
                actor = EngineActor.options(scheduling_strategy="SPREAD").remote(self._num_started, self.token)
                self._engines.append(Engine(actor))
                self._num_started += 1

    def step(self) -> dict[str, Any]:
        """One training step, published to every engine where it is now. The publish's report, of rank 0."""
        with self._lock:
            leaving, self._leaving = self._leaving, []
        self._look_for_engines(PATIENCE_SECONDS)
        urls = [place["url"] for place in self.places]
        report = self._get([trainer.step.remote(urls) for trainer in self.trainers])[0]
        for engine in leaving:
            ray.kill(engine.actor)  # no publish uses it any more
        return dict(report)

    def catch_up(self) -> dict[str, bool]:
        """Between steps: bring engines that are new or were restarted to the last version; whether each has it.

        Without it the next step does.
        """
        self._look_for_engines(PATIENCE_SECONDS)
        urls = [place["url"] for place in self.places]
        return dict(self._get([trainer.catch_up.remote(urls) for trainer in self.trainers])[0])

    def kill_engine(self, index: int) -> None:
        """As if its node had failed; Ray restarts it."""
        ray.kill(self._engines[index].actor, no_restart=False)

    def save(self, directory: Path) -> None:
        self._get([trainer.save.remote(directory) for trainer in self.trainers])

    def close(self) -> None:
        self._get([trainer.close.remote() for trainer in self.trainers])
        for actor in [*self.trainers, *(engine.actor for engine in self._engines + self._leaving)]:
            ray.kill(actor)

    def _look_for_engines(self, patience_seconds: float) -> None:
        """Ask each where it is; one that is being restarted keeps the place that it had."""
        with self._lock:
            for engine in self._engines:
                engine.asked = engine.asked or engine.actor.place.remote()
            asked = {engine.asked: engine for engine in self._engines}
        if asked:
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=patience_seconds)
            for reference in answered:
                engine = asked[reference]
                engine.place, engine.asked = ray.get(reference), None

    def _get(self, references: list[Any]) -> list[Any]:
        return list(ray.get(references, timeout=DEADLINE_SECONDS))


def step_and_number(text: str) -> tuple[int, int]:
    step, colon, number = text.partition(":")
    if not (colon and step.isdecimal() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not STEP:NUM, as 6:4")
    return int(step), int(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a running cluster, `auto` for this machine's (default: start one)")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-engine-at", type=int, default=3, metavar="STEP", help="0: never (default: %(default)s)")
    parser.add_argument(
        "--scale",
        type=step_and_number,
        action="append",
        default=[],
        metavar="STEP:NUM",
        help="have NUM engines from that step on; repeat it for more",
    )
    args = parser.parse_args()

    options = {} if args.address else {"num_cpus": args.trainers + args.engines, "include_dashboard": False}
    ray.init(address=args.address or "local", **options)
    job = Job(args.trainers, args.engines)
    for number in range(1, args.steps + 1):
        if number == args.kill_engine_at:
            job.kill_engine(0)
        for step, num_engines in args.scale:
            if step == number:
                job.scale_engines(num_engines)
        report = job.step()
        for url, ok in job.catch_up().items():
            print(f"{url} {'has caught up' if ok else 'is still behind'}", flush=True)
        engines = ", ".join(f"{url} {'ok' if ok else 'failed'}" for url, ok in report["engines"].items())
        print(f"version {report['version']} in {1e3 * report['seconds']:.0f} ms: {engines}", flush=True)
    job.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
