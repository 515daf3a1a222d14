"""What `weightcast plan` counts is what a publish takes, to the byte."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import msgspec
import pytest
import torch
from publishing.model import build_model

from weightcast import LocalEngine, ModuleEngine, ModuleSource, Publisher, PublishOptions
from weightcast.cli.planned_bytes import Deployment, equal, estimate, gloo_tree
from weightcast.engines.tensors import TensorSink
from weightcast.format.bucket import HEADER_BYTES, Layout, pages
from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import MAX_ORIGINS, TensorSpec
from weightcast.serving.install import Install
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


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("transport", ["ipc", "gloo", "file"])
def test_a_publish_takes_what_was_counted(transport: str, install: str, tmp_path: Path) -> None:
    bucket_size_bytes = 20_000
    it = Deployment(
        transport=transport,
        install=install,  # type: ignore[arg-type]
        num_engines=2,
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
    of_engines = [counted.engine_host.buckets // 2] * 2 if counted.engine_host.buckets else []
    assert sizes == sorted([counted.trainer_host.buckets, *of_engines])


def _memories() -> list[KeptMemory | OwnedArena]:
    """Of buckets, in this process: those that senders and receivers keep."""
    return [one for one in gc.get_objects() if issubclass(type(one), (KeptMemory, OwnedArena))]


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp", "tp", "pp"])
@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_origins_are_those_that_trainer_ranks_agree_on(sharding: str, num_hosts: int, ranks_per_host: int) -> None:
    it = Deployment(
        transport="gloo",
        sharding="whole" if sharding in ("hsdp", "tp") else sharding,
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
    assert counted.straddling_bytes == Install(Layout(manifest), "", engine, SPECS).straddling_bytes


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
    specs = equal(1 << 20, 4, "bfloat16")
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
    specs = equal(1 << 20, 4, "bfloat16")
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


def test_a_links_seconds_are_of_the_direction_that_has_more() -> None:
    specs = equal(1 << 20, 4, "bfloat16")
    it = Deployment(transport="gloo", num_engines=3, engine_hosts=3, colocated=False, link_gbit=0.008)
    counted = estimate(specs, it)
    assert counted.trainer_host.link_seconds == pytest.approx(counted.trainer_host.sent / 1e6)
    assert counted.engine_host.link_seconds == pytest.approx(counted.engine_host.received / 1e6)
    unknown = estimate(specs, msgspec.structs.replace(it, link_gbit=None))
    assert (unknown.trainer_host.link_seconds, unknown.engine_host.link_seconds) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer_hosts": 2, "sharding": "fsdp"}, "ipc needs trainer and engines on one host"),
        ({"transport": "gloo", "num_engines": 2, "engine_hosts": 2}, "2 engine hosts can't be among 1 trainer hosts"),
        (
            {"transport": "gloo", "num_engines": 3, "engine_hosts": 2, "colocated": False},
            "3 workers can't be distributed evenly",
        ),
        ({"transport": "file", "trainer_hosts": MAX_ORIGINS + 1}, "at most .* can send"),
    ],
)
def test_what_can_not_be_planned(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Deployment(**changes)  # type: ignore[arg-type]
