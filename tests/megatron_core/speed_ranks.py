"""Four trainer ranks (TP 2, PP 2, EP 2) of Moonlight-16B-A3B's layers with narrow matrices, and an engine process.

They publish in turn as we do, and as frameworks did: one gather for each parameter, its tensors put together on the
first rank, then one round trip to the engine for each of these. The old way is made as lean as it can be: no objects
are gathered, nothing goes to ranks that don't need it, and its round trip is a packet through a local socket.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core.direct import DirectEngine
from publishers import publisher_of
from publishing.baselines import TensorSlot
from publishing.meters import ProcessMeter
from publishing.model import build_model
from publishing.result import BenchSettings
from publishing.workers import BenchEngine, started_engines

from megatron_core import models, shards
from weightcast.engines.module import ModuleEngine
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Regions
from weightcast.sources.megatron.families import FAMILIES
from weightcast.sources.megatron.layouts import Axis
from weightcast.sources.megatron.mapping import Parallel, read_config
from weightcast.sources.megatron.mapping import TensorMapping as ModelMapping

NUM_RANKS = 4
DEADLINE_SECONDS = 500.0
SCALE = 16
BUCKET_BYTES = 8 << 20
JOB = shards.Job(tp=2, stages=(tuple(range(14)), tuple(range(14, 27))), ep=2)
_WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip

_context = multiprocessing.get_context("spawn")


def moonlight(scale: int) -> Any:
    model_type, fields = models.PUBLISHED["Moonlight-16B-A3B"]
    return models.config(model_type, **{k: v // scale if k in _WIDTHS else v for k, v in fields.items()})


class Shard:
    """A `Source` of what one rank of such a model holds."""

    def __init__(self, hf_config: Any, rank: shards.Rank, tensors: Mapping[str, torch.Tensor]) -> None:
        place = Parallel(Axis(rank.tp, JOB.tp), Axis(rank.ep, JOB.ep), Axis(rank.etp, JOB.etp))
        mapping = ModelMapping(FAMILIES["deepseek_v3"], read_config(hf_config), place, dtype="bfloat16")
        self._specs, self._regions = mapping.specs, dict[str, list[Any]]()
        for each in mapping.parameter_regions(tensors.items(), JOB.stages[rank.stage], is_first=rank.stage == 0):
            self._regions.setdefault(each.name, []).append(each.held)

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


_REPLICATED = ("norm.weight", "norm_weight", "kv_down_proj.weight", "router.weight", "expert_bias")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}

Named = list[tuple[str, torch.Tensor]]


class PerParameter:
    """The old way: `gather` gives the checkpoint's tensors, parameter by parameter, on rank 0; nothing elsewhere."""

    def __init__(self, shapes: Sequence[shards.Tensors], tensors: shards.Tensors) -> None:
        """`shapes`: of every rank's tensors, without data."""
        self._shapes, self._tensors = shapes, tensors
        self._rank = dist.get_rank()
        self._stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def gather(self) -> Iterator[Named]:
        for stage in range(2):
            for name, shape in self._shapes[2 * stage].items():
                parts = self._parts(name, stage)
                if stage and self._rank == 2:
                    for part in parts:
                        dist.send(part, 0)
                if self._rank == 0:
                    if stage:
                        num_parts = 1 if name.endswith(_REPLICATED) else 2
                        parts = [torch.empty(shape.shape, dtype=_dtype(name)) for _ in range(num_parts)]
                        for part in parts:
                            dist.recv(part, 2)
                    yield list(_converted(name, stage, parts))

    def _parts(self, name: str, stage: int) -> list[torch.Tensor]:
        """A parameter's shards, on every rank of its stage."""
        if self._rank // 2 != stage:
            return []
        own = self._tensors[name]
        if name.endswith(_REPLICATED):
            return [own]
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own, group=self._stages[stage])
        return parts


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("expert_bias") else torch.bfloat16


def _converted(name: str, stage: int, parts: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a converter makes of a parameter: the two ranks of a stage are both tensor- and expert-parallel."""
    prefix, rest = "", name
    if name.startswith("decoder.layers."):
        index, rest = name.removeprefix("decoder.layers.").split(".", 1)
        prefix = f"model.layers.{JOB.stages[stage][int(index)]}."
    if rest in _NAMES:
        dim = 1 if rest.endswith(_COLUMNS) else 0
        yield prefix + _NAMES[rest], parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return
    if ".experts." in rest:
        local = int(rest.rpartition("weight")[2])
        blocks = [(f"{prefix}mlp.experts.{32 * rank + local}.", [part]) for rank, part in enumerate(parts)]
    else:
        blocks = [(f"{prefix}mlp.{'shared_experts.' if 'shared' in rest else ''}", parts)]
    for folder, block in blocks:
        if "linear_fc2" in rest:
            yield folder + "down_proj.weight", torch.cat(block, 1)
            continue
        gate, up = (torch.cat(halves) for halves in zip(*(part.chunk(2) for part in block), strict=True))
        yield folder + "gate_proj.weight", gate
        yield folder + "up_proj.weight", up


def main(rank: int, directory: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=DEADLINE_SECONDS),
    )
    hf_config = moonlight(SCALE)
    meta = {s.name: torch.empty(s.shape, device="meta") for s in models.checkpoint_specs(hf_config)}
    sharder, places = shards.Sharder(meta, hf_config, JOB), list(shards.ranks(JOB))
    shapes = [sharder.tensors(place) for place in places]
    tensors = {
        name: torch.full(t.shape, places[rank].stage + 0.5, dtype=_dtype(name)) for name, t in shapes[rank].items()
    }
    source = Shard(hf_config, places[rank], tensors)
    extra_bytes = extra_memory(source)
    result = {"extra_bytes": extra_bytes, **measured(source, PerParameter(shapes, tensors))}
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def extra_memory(source: Shard) -> list[int]:
    """What a first publish to an engine beside takes at its peak, of every rank: bytes beyond what was resident."""
    meter, extra = ProcessMeter(os.getpid()), [0] * NUM_RANKS
    with (
        started_engines(source.specs(), BenchSettings()) if dist.get_rank() == 0 else contextlib.nullcontext() as beside
    ):
        engines = [engine.url for engine in beside or ()]
        # Staged has an arena of the model's size besides, for the engines of the host.
        options = {"install": "streaming", "bucket_size_bytes": BUCKET_BYTES, "deadline_seconds": 120.0}
        with publisher_of(source, engines=engines, **options) as publisher:
            meter.begin()
            publisher.publish()
            dist.all_gather_object(extra, meter.extra_bytes())
    return extra


def measured(source: Shard, old: PerParameter) -> dict[str, Any]:
    """Medians of seconds, each way in turn: until an engine has loaded everything, in this process or in one beside."""
    is_first, specs = dist.get_rank() == 0, source.specs()
    with contextlib.ExitStack() as stack:
        inside = [DirectEngine("inside", ModuleEngine(build_model(specs)))] if is_first else []
        for engine in inside:
            stack.callback(engine.close)
        beside = stack.enter_context(started_engines(specs, BenchSettings())) if is_first else []
        options: dict[str, Any] = {"deadline_seconds": 120.0}
        near = stack.enter_context(publisher_of(source, transport="memory://", engines=inside, **options))
        far = stack.enter_context(publisher_of(source, engines=[engine.url for engine in beside], **options))
        slot = stack.enter_context(contextlib.closing(TensorSlot(max(spec.num_bytes for spec in specs))))
        ways: dict[str, Callable[[], object]] = {
            "ours": near.publish,
            "old": lambda: _load(old, inside[0].engine if inside else None),
            "ours_beside": far.publish,
            "old_beside": lambda: _load_beside(old, beside, slot),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(4):
            for name, way in ways.items():
                dist.barrier()
                start = time.perf_counter()
                way()
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    return {**medians, "num_tensors": len(specs), "num_bytes": sum(spec.num_bytes for spec in specs)}


def _load(old: PerParameter, engine: Any) -> None:
    for named in old.gather():
        for each in named:
            engine.load([each])


def _load_beside(old: PerParameter, engines: list[BenchEngine], slot: TensorSlot) -> None:
    channels = [engine.channel for engine in engines]
    slot.lend(channels)
    for named in old.gather():
        slot.publish(dict(named), channels)
    slot.end(channels)


def run(directory: Path) -> dict[str, Any]:
    """All ranks' run; what rank 0 measured."""
    ranks = [_context.Process(target=main, args=(rank, str(directory))) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_SECONDS)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    assert codes == [0] * NUM_RANKS, f"exit codes {codes}: see the ranks' tracebacks in stderr"
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result
