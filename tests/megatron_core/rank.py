"""One process of a case: trains, publishes twice, and leaves in a file what it holds and what an engine got.

Forked from a server that has imported Megatron once. Nothing of the library's tables is used here but by publishing.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forking
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from core.direct import DirectEngine, RecordingEngine
from publishers import publisher_of

from megatron_core.cases import CASES, TOKENS, Case
from megatron_core.shards import centred
from weightcast.host.deadline import Deadline
from weightcast.process_group import ProcessGroup
from weightcast.sources.megatron.source import MegatronSource
from weightcast.trainer.group.group import _ROW_BYTES
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

DEADLINE_SECONDS = 240.0
BUCKET_BYTES = 1 << 16
NUM_PROMPT, NUM_NEW = 5, 8
NUM_STARTS = 50
KILL_SECONDS = 60.0


def run(case: str, directory: Path, job: str = "report", *, seconds: float = DEADLINE_SECONDS) -> list[dict[str, Any]]:
    """Have all ranks of a case do a job within that time, and give what each has reported."""
    size = CASES[case].size
    context = forking.preloaded("megatron_core.rank", "megatron_core.warm")
    processes = [context.Process(target=main, args=(case, rank, str(directory), job, seconds)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    assert codes == [0] * size, f"exit codes {codes}: see the ranks' tracebacks in stderr"
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(size)]


def run_and_kill(case: str, directory: Path, url: str, first: int, chance: random.Random) -> None:
    """Have all ranks train and publish, kill one of them after one of its starts; the others must end in time."""
    size, context = CASES[case].size, forking.preloaded("megatron_core.rank", "megatron_core.warm")
    job, victim = f"killed {first} {url}", chance.randrange(size)
    started, last = directory / f"{victim}.started", first + chance.randrange(NUM_STARTS - 1)
    processes = [
        context.Process(target=main, args=(case, rank, str(directory), job, KILL_SECONDS)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for _ in Deadline(DEADLINE_SECONDS).polls(0.002, 0.002):
            if started.exists() and int(started.read_text() or 0) >= last:
                break
            assert processes[victim].is_alive(), "see the rank's traceback in stderr"
        processes[victim].kill()
        for process in processes:
            process.join(KILL_SECONDS)
            assert not process.is_alive(), "a rank whose peer is dead waits for it"
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def main(name: str, rank: int, directory: str, job: str, seconds: float) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = CASES[name]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=case.size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    if job.startswith("killed "):
        start_until_killed(case, Path(directory), *job.split()[1:])
        return
    torch.save(JOBS[job](case), Path(directory) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def report(case: Case) -> dict[str, Any]:
    from megatron_core.trainer import Trainer

    trainer = Trainer(case)
    source = MegatronSource(trainer.chunks, case.hf_config)
    trainer.step()
    published = _publish_twice(source, trainer.step)
    # With prediction layers Megatron has no logits without labels.
    logits = trainer.logits() if not case.mtp else None
    return {
        **_places(case, trainer.models),
        **published,
        "logits": logits,
        "exported": _exported(case, trainer.models) if case.has_bridge else {},
        "loaded": _loaded(case, trainer.chunks, published["held"]),
    }


def serve(case: Case, engine: str) -> dict[str, Any]:
    """Start two of an engine's servers cold, each from what mbridge exports after a step, and publish to both.

    They get the second step's weights over gloo, in the background, and then the first's. Gives what both answer from
    their start on, and what Megatron itself goes on with after each step, greedily.
    """
    from megatron_core.trainer import Trainer

    trainer = Trainer(case)
    source = MegatronSource(trainer.chunks, case.hf_config)
    exports, own = [], []
    for _ in range(2):
        trainer.step()
        exports.append({name: tensor.contiguous() for name, tensor in _exported(case, trainer.models).items()})
        own.append(trainer.greedy(NUM_PROMPT, NUM_NEW))
        if len(own) == 1:
            live = [tensor for chunk in trainer.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
            first = [tensor.detach().clone() for tensor in live]
    served: list[list[Any]] = []
    with _servers(case, engine, exports) if dist.get_rank() == 0 else contextlib.nullcontext([]) as servers:

        def ask() -> None:
            served.append([server.ask(TOKENS[0, :NUM_PROMPT].tolist(), NUM_NEW)._asdict() for server in servers])
            dist.barrier()  # a publish waits less long for other ranks than servers take to start

        ask()
        urls = [server.url for server in servers]
        with Publisher(
            source, transport="gloo://127.0.0.1:0", engines=urls, options=PublishOptions(deadline_seconds=60.0)
        ) as publisher:
            handle = publisher.start()
            with torch.no_grad():  # as if training went on, which must not change what is published
                for tensor, value in zip(live, first, strict=True):
                    tensor.copy_(value)
            handle.result()
            ask()
            publisher.publish()
            ask()
    return {"own": own, "served": served}


@contextlib.contextmanager
def _servers(case: Case, engine: str, checkpoints: list[dict[str, torch.Tensor]]) -> Iterator[list[Any]]:
    """One for each checkpoint, in the dtype of the case. They start side by side."""
    import real_sglang.servers
    import real_vllm.servers
    from real_engines.reference import ReferenceServer
    from real_vllm.models import MAX_LENGTH, make_tokenizer

    dtype = getattr(torch, case.dtype)
    start: Callable[[Path], Any] = {
        "reference": ReferenceServer,
        "vllm": lambda folder: real_vllm.servers.Server(real_vllm.servers.Setup(dtype=dtype), folder),
        "sglang": lambda folder: real_sglang.servers.Server(
            real_sglang.servers.Setup(dtype=dtype, options=("--mem-fraction-static", "0.9")), folder
        ),
    }[engine]
    # Whatever of the host's memory goes to the other server while SGLang loads its weights, it counts as its weights'.
    config = case.hf_config
    config.max_position_embeddings = MAX_LENGTH
    config.dtype = dtype
    with torch.device("meta"):
        config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        servers = []
        for number, tensors in enumerate(checkpoints):
            folder = Path(directory, str(number))
            config.save_pretrained(folder)
            make_tokenizer(config.vocab_size).save_pretrained(folder)
            safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            servers.append(start(folder))
            stack.callback(servers[-1].close)
            servers[-1].launch()
        yield [stack.enter_context(server) for server in servers]


def start_often(case: Case, number: int) -> dict[str, Any]:
    """Train that many steps, start a publish after each, cancel and skip some, and train on at once.

    Gives the versions that the engine got, and those of them that are not what mbridge exports of that step.
    """
    from megatron_core.trainer import Trainer

    trainer, chance = Trainer(case), random.Random(number)
    source = MegatronSource(trainer.chunks, case.hf_config)
    recording = RecordingEngine()
    exported: dict[int, dict[str, torch.Tensor]] = {}
    wrong: list[int] = []

    def commit(version: Any) -> None:
        recording.versions.append(version.number)
        expected = exported.pop(version.number)
        if not all(torch.equal(tensor, expected[name]) for name, tensor in recording.held.items()):
            wrong.append(version.number)

    recording.commit = commit  # type: ignore[method-assign]
    engines = [DirectEngine("engine", recording)] if dist.get_rank() == 0 else []
    options: dict[str, Any] = {"bucket_size_bytes": BUCKET_BYTES, "deadline_seconds": 30.0}
    num_skipped, num_cancelled = 0, 0
    try:
        with publisher_of(source, transport="memory://", engines=engines, **options) as publisher:
            for version in range(number):
                trainer.step()
                exported[version] = _exported(case, trainer.models)
                handle = publisher.start(version, overlap=chance.choice(["wait", "skip"]))
                num_skipped += handle is None
                if handle is not None and chance.random() < 0.3:
                    num_cancelled += handle.cancel()
    finally:
        for engine in engines:
            engine.close()
    return {"versions": recording.versions, "wrong": wrong, "num_skipped": num_skipped, "num_cancelled": num_cancelled}


def start_until_killed(case: Case, directory: Path, first: str, url: str) -> None:
    """Train, start a publish after each step, and say so in a file; mbridge's export of each step is in files, too."""
    from megatron_core.trainer import Trainer

    trainer, rank = Trainer(case), dist.get_rank()
    source = MegatronSource(trainer.chunks, case.hf_config)
    options: dict[str, Any] = {"bucket_size_bytes": BUCKET_BYTES, "deadline_seconds": 10.0}
    with publisher_of(source, transport="ipc://", engines=[url] if rank == 0 else [], **options) as publisher:
        for version in range(int(first), int(first) + NUM_STARTS):
            trainer.step()
            exported = _exported(case, trainer.models)
            if rank == 0:
                torch.save(exported, directory / f"{version}.export")
            publisher.start(version)
            (directory / f"{rank}.started").write_text(str(version))


JOBS: dict[str, Callable[[Case], dict[str, Any]]] = {"report": report}
JOBS |= {f"start {number}": functools.partial(start_often, number=number) for number in (40, 300, 1000)}
JOBS |= {f"serve {engine}": functools.partial(serve, engine=engine) for engine in ("reference", "vllm", "sglang")}


def _publish_twice(source: MegatronSource, step: Any) -> dict[str, Any]:
    """What an engine on rank 0 holds after the second publish, and what that took."""
    counts: dict[str, int] = {}
    _count(counts)
    engines = [DirectEngine("engine", RecordingEngine())] if dist.get_rank() == 0 else []
    options: dict[str, Any] = {"bucket_size_bytes": BUCKET_BYTES, "deadline_seconds": 30.0}
    try:
        with publisher_of(source, transport="memory://", engines=engines, **options) as publisher:
            publisher.publish()
            step()
            regions = source.regions()
            for engine in engines:
                engine.engine.calls.clear()
            counts.clear()
            outcome = json.loads(publisher.publish().to_json())
            counted = {**counts, "kept": int(source.regions() is regions)}
    finally:
        for engine in engines:
            engine.close()
    held = dict(engines[0].engine.held) if engines else {}
    return {"held": held, "counts": counted, "num_buckets": outcome["num_buckets"]}


def _count(counts: dict[str, int]) -> None:
    """Count what goes through every group of weightcast's, and through torch's default group."""

    def counted(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            is_row = owner is ProcessGroup and args[1].shape[-1:] == (_ROW_BYTES,)
            counts[f"{key} row" if is_row else key] = counts.get(f"{key} row" if is_row else key, 0) + 1
            return original(*args, **kwargs)

        setattr(owner, name, counting)

    for name in ("send", "receive", "broadcast"):
        counted(ProcessGroup, name, name)
    for name in ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor", "gather", "all_gather_object"):
        counted(dist, name, f"torch {name}")


def _places(case: Case, models: list[Any]) -> dict[str, Any]:
    """Where this rank is, and its raw tensors, chunk by chunk, with the number of each chunk's first layer."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    chunks = []
    for stage, model in enumerate(models):
        offset = get_transformer_layer_offset(model.config, stage if case.vpp > 1 else None)
        tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        tensors |= {name: b.clone() for name, b in model.named_buffers() if name.endswith("expert_bias")}
        number = stage * case.pp + state.get_pipeline_model_parallel_rank()
        chunks.append((number, list(range(offset, offset + len(model.decoder.layers))), tensors))
    return {
        "chunks": chunks,
        "tp": state.get_tensor_model_parallel_rank(),
        "ep": state.get_expert_model_parallel_rank(),
        "etp": state.get_expert_tensor_parallel_rank(),
    }


def _exported(case: Case, models: list[Any]) -> dict[str, torch.Tensor]:
    """What mbridge makes of the same model, on rank 0."""
    from mbridge import AutoBridge
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from mbridge.models.glm4moe import GLM4MoEBridge

    for bridge_type in (DeepseekV3Bridge, GLM4MoEBridge):
        # It would make a configuration with fields that this Megatron has no more.
        bridge_type._build_config = lambda bridge: models[0].config
    config = case.hf_config
    config.rope_theta = 1000000.0
    bridge = AutoBridge.from_config(
        config, dtype=getattr(torch, case.dtype), make_vocab_size_divisible_by=case.padding * case.tp
    )
    bridge.vocab_size, bridge.padded_vocab_size = config.vocab_size, case.padded
    exported = {name: tensor.detach().clone() for name, tensor in bridge.export_weights(models)}
    return exported if dist.get_rank() == 0 else {}


def _loaded(case: Case, chunks: list[Any], held: dict[str, torch.Tensor]) -> list[str]:
    """The other way: zero everything, load what was published, and name what is not as it was."""
    everything = [held]
    dist.broadcast_object_list(everything, src=0)
    named = [
        (name, tensor)
        for chunk in chunks
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if not name.endswith(("inv_freq", "tokens_per_expert"))
    ]
    before = [tensor.detach().clone() for _, tensor in named]
    with torch.no_grad():
        for _, tensor in named:
            tensor.zero_()
    MegatronSource(chunks, case.hf_config).load(everything[0].items())
    wrong = []
    for (name, tensor), old in zip(named, before, strict=True):
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            rows = max(0, min(old.shape[0], case.hf_config.vocab_size - _first_row(case, old.shape[0])))
            tensor, old = tensor[:rows], old[:rows]
        if not torch.equal(centred(name, tensor), centred(name, old)):
            wrong.append(name)
    return wrong


def _first_row(case: Case, num_rows: int) -> int:
    from megatron.core import parallel_state as state

    return int(state.get_tensor_model_parallel_rank()) * num_rows
