"""The cost model: what it counts is what a publish takes, to the byte; what it calculates follows its parts."""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path

import msgspec
import pytest
import torch

from weightcast import LocalEngine, ModuleEngine, ModuleSource, Publisher, PublishOptions, TensorSink
from weightcast.bench import parts as bench_parts
from weightcast.bench import shapes
from weightcast.bench.cost import _pipeline, _Work, estimate, gloo_tree
from weightcast.bench.deployment import Deployment
from weightcast.bench.model import build_model
from weightcast.bench.parts import STAGES, Parts, PerByte, StageCosts, measure_parts, read_parts
from weightcast.format.bucket import HEADER_BYTES, Layout, pages
from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import TensorSpec
from weightcast.serving.load_plan import LoadPlan
from weightcast.trainer.group.assignment import assign_all
from weightcast.trainer.packer import HeldRegion
from weightcast.transports.kept_memory import KeptMemory
from weightcast.transports.sending import OwnedArena

SPECS = (
    TensorSpec("embed", "bfloat16", (500, 96)),
    *(TensorSpec(f"layers.{n}.weight", "float32", (64, 33)) for n in range(6)),
    *(TensorSpec(f"layers.{n}.bias", "bfloat16", (33,)) for n in range(6)),
    TensorSpec("scale", "float32", ()),
)
NONE = StageCosts(0.0, 0.0, 0.0, 0.0)


def parts(**changes: object) -> Parts:
    """Parts that cost nothing, but for what a test says."""
    free = PerByte(0.0, 0.0)
    rates = dict.fromkeys(("copy", "pack", "check", "install", "write", "read", "send_cpu", "receive_cpu"), free)
    names = [f"{transport} {install}" for transport in ("ipc", "gloo", "file") for install in ("staged", "streaming")]
    found = {
        "machine": "of a test",
        "num_cores": 4,
        "num_threads": 1,
        "torch_version": "",
        "directory": "",
        "raw": 0.0,
        "stages": {name: dict.fromkeys(STAGES, NONE) for name in names},
        "rank": dict.fromkeys(STAGES, NONE),
    }
    return Parts(**(found | rates | changes))  # type: ignore[arg-type]


# --- what is counted ---


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("transport", ["memory", "ipc", "gloo", "file"])
def test_a_publish_takes_what_was_counted(transport: str, install: str, tmp_path: Path) -> None:
    bucket_size_bytes = 20_000
    it = Deployment(
        transport=transport,  # type: ignore[arg-type]
        install=install,  # type: ignore[arg-type]
        num_engines=2,
        takes_parts=True,
        bucket_size_bytes=bucket_size_bytes,
    )
    source = ModuleSource(build_model(SPECS))
    counted = estimate(source.specs(), it)
    gc.collect()
    before = set(map(id, _memories()))
    engines = [LocalEngine(ModuleEngine(build_model(SPECS)), name=f"engine-{number}") for number in range(2)]
    url = {"gloo": "gloo://127.0.0.1:0", "file": f"file://{tmp_path}/store"}.get(transport, f"{transport}://")
    options = PublishOptions(bucket_size_bytes=bucket_size_bytes, install=install)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
        publisher = Publisher(source, transport=url, engines=engines, options=options)
        report = stack.enter_context(contextlib.closing(publisher)).publish()
        sizes = sorted(pages(one.size_bytes) for one in _memories() if id(one) not in before and one.size_bytes)
    assert (report.num_tensors, report.num_bytes) == (counted.num_tensors, counted.num_bytes)
    assert report.num_buckets == counted.num_buckets
    payload = sum(counted.origins) - HEADER_BYTES * counted.num_buckets
    for result in report.engines.values():
        assert (result.read_bytes, result.installed_bytes) == ([payload], [counted.num_bytes])
    # The sender's, and where it is not the engines' too, each engine's.
    of_engines = [counted.engine_host.staged // 2] * 2 if counted.engine_host.staged else []
    assert sizes == sorted([counted.trainer_host.trainer, *of_engines])


def _memories() -> list[KeptMemory | OwnedArena]:
    """Of buckets, in this process: those that senders and receivers keep."""
    return [one for one in gc.get_objects() if issubclass(type(one), (KeptMemory, OwnedArena))]


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp", "tp", "pp"])
@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_origins_are_those_that_trainer_ranks_agree_on(sharding: str, num_hosts: int, ranks_per_host: int) -> None:
    it = Deployment(
        transport="gloo",
        sharding=sharding,  # type: ignore[arg-type]
        trainer_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        bucket_size_bytes=20_000,
        colocated=False,
    )
    counted = estimate(SPECS, it)
    num_ranks = num_hosts * ranks_per_host
    leading = [rank // ranks_per_host * ranks_per_host for rank in range(num_ranks)]
    held = _held_by_ranks(sharding, num_hosts, ranks_per_host)
    manifest = assign_all(SPECS, held, leading, 20_000).layout.manifest
    of_origins = [[manifest.buckets[index] for index in span] for span in manifest.spans]
    assert counted.origins == [sum(each) + HEADER_BYTES * len(each) for each in of_origins]
    assert counted.num_buckets == len(manifest.buckets)
    engine = TensorSink(SPECS)
    assert counted.straddling_bytes == LoadPlan(Layout(manifest), "", engine, SPECS).straddling_bytes
    parted = estimate(SPECS, msgspec.structs.replace(it, takes_parts=True))
    module = ModuleEngine(build_model(SPECS))
    assert parted.straddling_bytes == LoadPlan(Layout(manifest), "", module, module.specs()).straddling_bytes


def _held_by_ranks(sharding: str, num_hosts: int, ranks_per_host: int) -> list[list[HeldRegion]]:
    num_ranks = num_hosts * ranks_per_host
    held: list[list[HeldRegion]] = [[] for _ in range(num_ranks)]
    done, total = 0, sum(spec.num_bytes for spec in SPECS)
    for number, spec in enumerate(SPECS):
        everything = whole(spec.shape)
        shards, among = [everything], range(num_ranks)
        if sharding == "pp":
            # The ranks of one host have copies of the tensor.
            host = min(done * num_hosts // total, num_hosts - 1)
            among = range(host * ranks_per_host, (host + 1) * ranks_per_host)
            done += spec.num_bytes
        elif spec.shape:
            over = num_ranks if sharding == "fsdp" else ranks_per_host
            dim = len(spec.shape) - 1 if sharding == "tp" else 0
            shards, start = [], 0
            for chunk in torch.empty(spec.shape, device="meta").chunk(over, dim):
                offsets = tuple(start if d == dim else 0 for d in range(len(spec.shape)))
                shards.append(Region(offsets, tuple(chunk.shape)))
                start += chunk.shape[dim]
        for rank in among:
            if len(shards) == 1:
                held[rank].append(HeldRegion(number, shards[0]))
            elif (shard := rank % (num_ranks if sharding == "fsdp" else ranks_per_host)) < len(shards):
                held[rank].append(HeldRegion(number, shards[shard]))
    return held


@pytest.mark.parametrize("num_members", [*range(1, 20), 64, 65, 1001])
def test_gloos_tree_reaches_each_member_once_from_one_that_has_it(num_members: int) -> None:
    has = [0]
    for member, target in gloo_tree(num_members):
        assert member in has
        has.append(target)
    assert sorted(has) == list(range(num_members))
    sent_by_root = sum(member == 0 for member, _ in gloo_tree(num_members))
    assert sent_by_root == (num_members - 1).bit_length()


def test_links_of_hosts_that_are_apart() -> None:
    specs = shapes.equal(1 << 20, 4, "bfloat16")
    wire = (2 << 20) + 2 * HEADER_BYTES
    it = Deployment(transport="gloo", num_engines=3, engine_hosts=3, colocated=False, bucket_size_bytes=1 << 20)
    counted = estimate(specs, it)
    # The root sends to members 1 and 2, member 1 passes it on to member 3.
    assert (counted.members, counted.origins) == (4, [wire])
    assert (counted.trainer_host.sent, counted.trainer_host.received) == (2 * wire, 0)
    assert (counted.engine_host.sent, counted.engine_host.received) == (wire, wire)
    stored = estimate(specs, msgspec.structs.replace(it, transport="file"))
    assert (stored.trainer_host.sent, stored.engine_host.sent, stored.engine_host.received) == (wire, 0, wire)
    here = estimate(specs, msgspec.structs.replace(it, engine_hosts=1, colocated=True))
    assert (here.trainer_host.sent, here.engine_host.received) == (0, 0)


def test_an_engine_over_several_hosts_and_several_on_one() -> None:
    specs = shapes.equal(1 << 20, 4, "bfloat16")
    it = Deployment(transport="gloo", num_engines=4, workers_per_engine=2, engine_hosts=2, colocated=False, undo=True)
    # Two engines on each host, each with one worker that joins for both of its.
    counted = estimate(specs, it)
    assert counted.members == 5
    assert counted.engine_host.undo == 2 * counted.num_bytes
    spread = estimate(specs, msgspec.structs.replace(it, num_engines=1, engine_hosts=2))
    assert spread.members == 3
    assert spread.engine_host.undo == counted.num_bytes // 2
    streaming = estimate(specs, msgspec.structs.replace(it, install="streaming"))
    assert streaming.members == 9


# --- what is calculated ---


def test_a_pipeline_overlaps_as_its_slots_and_cores_allow() -> None:
    first, second = _Work("pack", 1.0, trainer_cores=1), _Work("check", 1.0, engine_cores=1)
    assert _pipeline([first, second], 4, 2, None) == pytest.approx(5.0)
    assert _pipeline([first, second], 4, 1, None) == pytest.approx(8.0)
    assert _pipeline([first, second], 4, 1, 1) == pytest.approx(5.0)
    one_slot = msgspec.structs.replace(first, ahead=1, behind="check")
    assert _pipeline([one_slot, second], 4, 2, None) == pytest.approx(8.0)
    slow = msgspec.structs.replace(second, seconds=3.0)
    assert _pipeline([first, slow], 4, 2, None) == pytest.approx(13.0)
    # Beyond what is simulated it goes on at the same pace.
    assert _pipeline([first, slow], 1000, 2, None) == pytest.approx(3001.0)


def test_seconds_follow_the_parts() -> None:
    specs = shapes.equal(1 << 20, 4, "bfloat16")
    one = Deployment(bucket_size_bytes=2 << 20, takes_parts=True)
    wire = (2 << 20) + HEADER_BYTES
    counted = estimate(specs, one, parts(pack=PerByte(2e-6, 2e-6), check=PerByte(1e-6, 1e-6)))
    assert counted.seconds["transfer"] == pytest.approx(wire * 3e-6)
    assert counted.bottleneck == "pack"
    installed = estimate(specs, one, parts(install=PerByte(1e-6, 1e-6)))
    assert installed.publish_seconds == installed.pause_seconds == pytest.approx(2.097152)
    assert installed.bottleneck == "install"
    streamed = estimate(specs, msgspec.structs.replace(one, install="streaming"), parts(copy=PerByte(1e-6, 1e-6)))
    assert streamed.pause_seconds == pytest.approx(2.097152)
    stages = parts().stages | {"ipc staged": dict.fromkeys(STAGES, StageCosts(1.0, 0.5, 0.25, 0.125))}
    fixed = estimate(specs, msgspec.structs.replace(one, num_engines=2), parts(stages=stages))
    assert fixed.seconds == dict.fromkeys(STAGES, pytest.approx(1.0 + 2 * 0.5 + 0.25 + 4 * 0.125))


def test_a_link_that_is_slower_than_the_hosts_is_the_bottleneck() -> None:
    specs = shapes.equal(1 << 20, 4, "bfloat16")
    it = Deployment(transport="gloo", colocated=False, link_gbit=0.008, bucket_size_bytes=2 << 20)
    counted = estimate(specs, it, parts())
    assert counted.bottleneck == "trainer's link, sent"
    assert counted.seconds["transfer"] == pytest.approx(counted.trainer_host.sent / 1e6)
    assert set(counted.parallel) >= {"trainer's link, sent", "engine's link, received"}
    store = estimate(specs, msgspec.structs.replace(it, transport="file"), parts())
    assert store.seconds["transfer"] == pytest.approx(2 * counted.trainer_host.sent / 1e6, rel=0.02)


def test_without_parts_there_are_no_seconds() -> None:
    counted = estimate(SPECS, Deployment())
    assert (counted.seconds, counted.parallel, counted.bottleneck, counted.publish_seconds) == ({}, {}, "", 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_engines": 0}, "num_engines is 0; it must be at least 1"),
        ({"trainer_hosts": 2, "sharding": "fsdp"}, "ipc needs trainer and engines on one host"),
        ({"ranks_per_host": 2}, "2 trainer ranks hold shards: say which"),
        ({"transport": "memory", "ranks_per_host": 2, "sharding": "fsdp"}, "memory is one process"),
        ({"transport": "gloo", "num_engines": 2, "engine_hosts": 2}, "2 engine hosts can't be among 1 trainer hosts"),
        ({"transport": "gloo", "num_engines": 3, "engine_hosts": 2, "colocated": False}, "3 workers can't be spread"),
        ({"link_gbit": 0.0}, "link_gbit is 0.0; it must be a finite number above 0"),
        ({"sharding": "zero"}, "sharding is 'zero'; it must be one of whole, fsdp"),
    ],
)
def test_what_can_not_be_planned(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Deployment(**changes)  # type: ignore[arg-type]


# --- the parts ---


@pytest.mark.cluster
def test_parts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small buffers and few rounds; the figures themselves are for quiet machines."""
    size = 4 << 20
    monkeypatch.setattr(bench_parts, "_BYTES", size)
    monkeypatch.setattr(bench_parts, "_BUCKET_BYTES", size // 4)
    monkeypatch.setattr(bench_parts, "_LARGE", shapes.named("uniform", num_tensors=4, num_bytes=size))
    monkeypatch.setattr(bench_parts, "_MANY", shapes.named("uniform", num_tensors=500, num_bytes=500 * 64))
    monkeypatch.setattr(bench_parts, "_NUM_ROUNDS", 2)
    found = measure_parts()
    path = tmp_path / "parts.json"
    path.write_bytes(found.encode())
    assert read_parts(path) == found
    rates = (
        "copy",
        "pack",
        "check",
        "cached_pack",
        "cached_load",
        "install",
        "write",
        "read",
        "send_cpu",
        "receive_cpu",
    )
    for name in rates:
        rate = getattr(found, name)
        assert 0 < rate.alone <= rate.crowded
    assert found.raw > 0
    assert set(found.stages) == set(parts().stages)
    for costs in (*found.stages.values(), found.rank):
        assert costs.keys() == set(STAGES)
        assert all(min(msgspec.structs.astuple(cost)) >= 0 for cost in costs.values())
    for transport in ("memory", "ipc", "gloo", "file"):
        assert estimate(SPECS, Deployment(transport=transport), found).publish_seconds > 0  # type: ignore[arg-type]


def test_a_file_that_has_no_parts(tmp_path: Path) -> None:
    path = tmp_path / "parts.json"
    path.write_text(json.dumps({"machine": "here"}))
    with pytest.raises(ValueError, match=r"no measured parts: .*write it with weightcast plan --measure"):
        read_parts(path)


def test_a_rate_is_between_alone_and_crowded() -> None:
    rate = PerByte(1.0, 2.0)
    assert [rate.at(busy, 5) for busy in (0, 1, 3, 5, 9)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert rate.at(3, 1) == 1.0
