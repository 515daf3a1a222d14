"""Publishes of deltas over a link of a given rate, beside full ones.

Run it with `PYTHONPATH=bench:src:tests python bench/delta_publishes.py`.

Trainer and engine are processes in network namespaces of their own, whose links `tc` shapes: it needs root and
iproute2. The bfloat16 tensors have the shapes of Qwen3-0.6B, 1.2 GB; before each publish so many percent of them change
by one unit in the last place. The seconds are from the call until the engine serves the version: the median of the
publishes after the second. A memcpy of all tensors is measured in between, as a measure of this machine at that moment.
With `--trainer-hosts 2` two trainer ranks in namespaces of their own have all tensors, and each sends half of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed
from network.namespaces import enter, network

from weightcast import EngineServer, ModuleEngine, Publisher, PublishOptions, TensorSource

TOKEN = "secret"
LAYER = {
    "q": (2048, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 2048),
    "gate": (3072, 1024), "up": (3072, 1024), "down": (1024, 3072), "norm": (1024,),
}  # fmt: skip


def tensors(num_layers: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {f"{layer}.{name}": shape for layer in range(num_layers) for name, shape in LAYER.items()}
    shapes["embedding"] = (151936, 1024)
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def serve(namespace: str, host: str, num_layers: int) -> None:
    enter(namespace)
    module = torch.nn.Module()
    for name, tensor in tensors(num_layers).items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor.zero_(), requires_grad=False))
    names = {name.replace(".", "_"): name for name in tensors(num_layers)}
    with EngineServer(ModuleEngine(module, names=names.__getitem__), host=host, token=TOKEN) as server:
        print(server.url, flush=True)
        sys.stdin.read()


def join(hosts: list[str], rank: int) -> None:
    """Make torch's default group of the trainer ranks on these hosts."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = torch.distributed.TCPStore(hosts[0], 29500, len(hosts), rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=len(hosts))


def train(
    namespace: str, hosts: list[str], rank: int, num_layers: int, engine: str, delta: str, percent: float, runs: int
) -> None:
    enter(namespace)
    if len(hosts) > 1:
        join(hosts, rank)
    weights = tensors(num_layers)
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    options = PublishOptions(delta="always" if delta == "always" else None, deadline_seconds=300)
    source = TensorSource(weights)
    seconds, memcpys, pauses, report = [], [], [], None
    url, engines = f"gloo://{hosts[0]}:0", [engine]
    with Publisher(source, transport=url, engines=engines, token=TOKEN, options=options) as publisher:
        for _ in range(2 + runs):
            for tensor in weights.values():
                tensor.view(torch.int16).add_(torch.rand(tensor.shape) < percent / 100)
            start = time.perf_counter()
            for name, tensor in weights.items():
                copies[name].copy_(tensor)
            memcpys.append(time.perf_counter() - start)
            start = time.perf_counter()
            report = publisher.publish()
            seconds.append(time.perf_counter() - start)
            pauses.append(report.seconds.pause)
    assert report is not None
    sent = report.num_bytes if report.delta is None else report.delta.num_bytes
    figures = {
        "seconds": statistics.median(seconds[2:]),
        "pause": statistics.median(pauses[2:]),
        "memcpy": statistics.median(memcpys),
        "bytes": sent,
        "model": report.num_bytes,
        "encode": 0.0 if report.delta is None else report.delta.encode_seconds,
    }
    if rank == 0:
        print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 400], help="rates of the link")
    parser.add_argument("--percent", type=float, default=1.0)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trainer-hosts", type=int, default=1)
    parser.add_argument("role", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        role, namespace, host, *rest = args.role
        if role == "serve":
            serve(namespace, host, args.layers)
        else:
            rank, *rest = rest
            train(namespace, host.split(","), int(rank), args.layers, *rest, args.percent, args.runs)
        return
    common = [f"--layers={args.layers}", f"--percent={args.percent}", f"--runs={args.runs}"]
    trainers = [f"trainer-{rank}" for rank in range(args.trainer_hosts)]
    with network(*trainers, "engine") as net:
        for rate in args.mbit:
            for host in (*trainers, "engine"):
                net.limit(host, rate)
            found = {}
            for delta in ("full", "always"):
                roles = [["serve", net.namespace("engine"), net.address("engine")]]
                command = [sys.executable, __file__, *common, *roles[0]]
                with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
                    assert engine.stdout is not None
                    url = engine.stdout.readline().strip()
                    hosts = ",".join(map(net.address, trainers))
                    ranks = [
                        subprocess.Popen(
                            [
                                sys.executable,
                                __file__,
                                *common,
                                "train",
                                net.namespace(name),
                                hosts,
                                str(rank),
                                url,
                                delta,
                            ],
                            stdout=subprocess.PIPE,
                            text=True,
                        )
                        for rank, name in enumerate(trainers)
                    ]
                    outputs = [rank.communicate()[0] for rank in ranks]
                    engine.kill()
                found[delta] = json.loads(outputs[0])
                print(f"{rate} Mbit/s, {delta}: {found[delta]}", flush=True)
            ratio = found["full"]["seconds"] / found["always"]["seconds"]
            print(f"{rate} Mbit/s: deltas are {ratio:.1f} times faster", flush=True)


if __name__ == "__main__":
    main()
