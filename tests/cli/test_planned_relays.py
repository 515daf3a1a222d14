"""Relays that `weightcast plan` picks: each engine has one, bytes that leave arrive, and real relays take as many."""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import math
import re
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from core.direct import DirectEngine
from hypothesis import given
from hypothesis import strategies as st
from store.object_server import Request
from store.remote_kit import StoreThread, Wire

from weightcast import Publisher, PublishOptions, TensorSource, cli
from weightcast.cli import exits
from weightcast.cli.planned_bytes import Deployment, Relays, equal, estimate, gloo_tree
from weightcast.cli.planned_relays import TOLERANCE, plan_relays
from weightcast.cli.simulated_links import broadcast_seconds, bucket_ends
from weightcast.engines.tensors import TensorSink
from weightcast.format.bucket import HEADER_BYTES, TORCH_DTYPES, pages
from weightcast.serving.follower import Follower
from weightcast.trainer.relay import Relay
from weightcast.transports.kept_memory import KeptMemory
from weightcast.transports.sending import OwnedArena

SPECS = equal(1 << 22, 16, "bfloat16")
VERSION_BYTES = (8 << 20) + 8 * HEADER_BYTES
"""In buckets of 1 MiB, as it is stored and sent."""
HOST = 1e9 / 8
"""Bytes per second of a link of 1 Gbit/s."""


def deployment(num_hosts: int, **changes: object) -> Deployment:
    """A fleet with one engine on each host, and links of 1 Gbit/s."""
    it = Deployment(transport="gloo", num_engines=num_hosts, engine_hosts=num_hosts, colocated=False, link_gbit=1)
    return msgspec.structs.replace(it, **changes)


def planned(it: Deployment, num_relays: int | None = None) -> Relays:
    return plan_relays(SPECS, it, estimate(SPECS, it), num_relays=num_relays)


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    """Several engines on a host, or several hosts for an engine, or neither."""
    hosts, workers, per_host = draw(st.integers(1, 40)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    hosts *= math.lcm(workers, per_host) // per_host
    rates = st.sampled_from((0.1, 1.0, 10.0))
    return Deployment(
        transport=draw(st.sampled_from(("gloo", "file"))),
        install=draw(st.sampled_from(("staged", "streaming"))),
        num_engines=hosts * per_host // workers,
        workers_per_engine=workers,
        engine_hosts=hosts,
        colocated=False,
        link_gbit=draw(rates),
        trainer_gbit=draw(rates),
        store_gbit=draw(st.none() | rates),
    )


def most_relays(it: Deployment) -> int:
    """The number of parts of the fleet that are whole engines on hosts of their own."""
    return it.num_workers // math.lcm(it.num_workers // it.engine_hosts, it.workers_per_engine)


@given(deployments(), st.none() | st.integers(1, 12))
def test_each_engine_has_one_relay_and_each_relay_a_store_to_read(it: Deployment, num_relays: int | None) -> None:
    num_relays = None if num_relays is None else min(num_relays, most_relays(it))
    found = planned(it, num_relays)
    num = found.levels[-1]
    assert num_relays in (None, num)
    assert len(found.engines) == len(found.hosts) == num
    assert (sum(found.engines), sum(found.hosts)) == (it.num_engines, it.engine_hosts)
    assert max(found.engines) == found.engines[0] >= found.engines[-1] == min(found.engines) > 0

    served, reads, engines = ["STORE_URL"] if it.store_gbit else [], collections.Counter[str](), list[str]()
    for each in found.commands:
        _, job, *_ = each.command.split()
        if job == "serve-store":
            served.append(each.host)
            continue
        source = re.search(r"store\+http://([^:]+):", each.command)
        read = source[1] if source else "STORE_URL"
        assert read in served
        assert read != each.host or job == "follow"
        reads[read] += 1
        engines += re.findall(r"http://(engine-\d+):8000", each.command.partition("--engine")[2])
    assert len(served) == len(set(served)) == len(reads)
    assert len(engines) == len(set(engines)) == it.num_engines
    # What is read leaves the trainer's store, or a host that has read it.
    assert reads[served[0]] == found.levels[0]
    assert sum(reads.values()) == sum(found.levels)
    for level, former, seconds in zip(found.levels[1:], found.levels[:-1], found.read_seconds[1:], strict=True):
        assert seconds == pytest.approx(math.ceil(level / former) * found.read_bytes / (it.link_gbit or 0) / HOST)
    assert found.seconds == pytest.approx(found.write_seconds + sum(found.read_seconds) + found.send_seconds)


@given(deployments(), st.integers(1, 240))
def test_no_number_of_relays_is_much_faster_than_the_chosen_one(it: Deployment, num_relays: int) -> None:
    other = planned(it, min(num_relays, most_relays(it)))
    assert planned(it).seconds <= TOLERANCE * other.seconds + 1e-9


@given(deployments(), st.integers(1, 12), st.sampled_from(("link_gbit", "trainer_gbit", "store_gbit")))
def test_a_faster_link_or_fewer_bytes_never_take_longer(it: Deployment, num_relays: int, link: str) -> None:
    num_relays, rate = min(num_relays, most_relays(it)), getattr(it, link)
    found = planned(it, num_relays)
    faster = planned(msgspec.structs.replace(it, **{link: rate and 2 * rate}), num_relays)
    assert faster.seconds <= found.seconds + 1e-9
    assert faster.seconds_without <= found.seconds_without + 1e-9
    half = equal(1 << 21, 16, "bfloat16")
    smaller = plan_relays(half, it, estimate(half, it), num_relays=num_relays)
    assert smaller.seconds < found.seconds


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 30))
def test_a_broadcast_takes_at_least_its_busiest_link_and_at_most_all_after_another(
    hosts: list[int], num_buckets: int
) -> None:
    hosts = [0, *hosts]
    edges = [edge for edge in gloo_tree(len(hosts)) if hosts[edge[0]] != hosts[edge[1]]]
    sent = collections.Counter(hosts[member] for member, _ in edges)
    seconds = broadcast_seconds(hosts, dict.fromkeys(hosts, HOST), num_buckets << 20, 1 << 20)
    one = (1 << 20) / HOST
    assert seconds <= (len(edges) * num_buckets + 1e-6) * one
    assert seconds >= (max(sent.values(), default=0) * num_buckets - 1e-6) * one
    faster = broadcast_seconds(hosts, dict.fromkeys(hosts, 2 * HOST), num_buckets << 20, 1 << 20)
    assert faster == pytest.approx(seconds / 2)


@pytest.mark.parametrize(
    ("num_members", "each", "last"),
    [
        (1, 1, 1),
        (2, 2, 2),
        # The sender's two copies; member 1 passes on one of them meanwhile.
        (3, 2, 3),
        (4, 3, 4),
        (8, 4, 7),
        # Two buckets are on the way at most, each for 5 + 3 + 2 + 1 copies.
        (16, 5.5, 10.5),
        (1000, 27, 37),
    ],
)
def test_the_time_of_a_broadcast(num_members: int, each: float, last: float) -> None:
    """`each`: copies whose time each bucket takes; `last`: those of the last bucket."""
    hosts = range(num_members + 1)
    seconds = broadcast_seconds(hosts, dict.fromkeys(hosts, HOST), 16 << 20, 1 << 20)
    assert seconds * HOST / (1 << 20) == pytest.approx(15 * each + last)
    more = broadcast_seconds(hosts, dict.fromkeys(hosts, HOST), 1 << 40, 1 << 20)
    assert more * HOST / (1 << 40) == pytest.approx(each, rel=1e-3)


@given(st.integers(1, 70), st.integers(1, 8), st.booleans())
def test_buckets_that_are_not_simulated_take_as_long_as_the_others(
    num_hosts: int, num_joined: int, is_relay: bool
) -> None:
    members = [number for number in range(num_hosts) for _ in range(num_joined)]
    hosts = [num_hosts - 1 if is_relay else -1, *members]
    ends = bucket_ends(hosts, dict.fromkeys(hosts, 1.0), 40)
    assert broadcast_seconds(hosts, dict.fromkeys(hosts, 1.0), 40, 1) == pytest.approx(ends[-1], rel=0.05, abs=1e-6)


def test_relays_of_one_level() -> None:
    found = planned(deployment(8), 2)
    assert (found.levels, found.engines, found.hosts, found.transport) == ([2], [4, 4], [4, 4], "gloo")
    assert (found.read_bytes, found.write_seconds) == (VERSION_BYTES, 0)
    assert found.read_seconds == [pytest.approx(2 * VERSION_BYTES / HOST)]
    # Member 4 is on the relay's host, so that two copies leave it, and member 1 sends a third one.
    assert found.sent_bytes == 2 * VERSION_BYTES
    assert found.send_seconds == pytest.approx((2 * VERSION_BYTES + (1 << 20)) / HOST, rel=1e-3)
    assert [(each.host, each.command.split(" --engine ")[0]) for each in found.commands] == [
        ("trainer", "weightcast serve-store file:///STORE --host 0.0.0.0 --token-file TOKEN"),
        (
            "host-4",
            "weightcast follow 'store+http://trainer:8200?token_file=TOKEN' --transport gloo://host-4:0 "
            "--token-file TOKEN",
        ),
        (
            "host-8",
            "weightcast follow 'store+http://trainer:8200?token_file=TOKEN' --transport gloo://host-8:0 "
            "--token-file TOKEN",
        ),
    ]
    assert found.commands[1].command.split(" --engine ")[1:] == [f"http://engine-{n}:8000" for n in (1, 2, 3, 4)]


def test_a_slow_trainer_sends_to_one_host() -> None:
    found = planned(deployment(8, trainer_gbit=0.25), 2)
    assert found.levels == [1, 2]
    assert found.read_seconds == [
        pytest.approx(4 * VERSION_BYTES / HOST),
        pytest.approx(2 * VERSION_BYTES / HOST),
    ]
    assert [each.host for each in found.commands] == ["trainer", "host-1", "host-1", "host-4", "host-8"]
    assert "follow 'store+http://host-1:8200" in found.commands[-1].command
    assert found.seconds < found.seconds_without


def test_a_store_elsewhere_is_written_first() -> None:
    it = deployment(8, store_gbit=4.0, trainer_hosts=2, sharding="fsdp")
    found = planned(it, 8)
    assert (found.levels, found.transport, found.sent_bytes, found.send_seconds) == ([8], "ipc", 0, 0)
    # Each trainer host sends a half; a store of 4 Gbit/s sends 8 versions in the time of 2.
    assert found.write_seconds == pytest.approx(VERSION_BYTES / 2 / HOST, rel=1e-3)
    assert found.read_seconds == [pytest.approx(2 * VERSION_BYTES / HOST, rel=1e-3)]
    assert "STORE_URL" in found.commands[0].command
    read = msgspec.structs.replace(it, transport="file")
    assert planned(read, 8).seconds_without == pytest.approx(found.seconds)


def test_a_thousand_engines_of_a_model_of_a_trillion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--params", "1e12", "--tensors", "2000", "--transport", "gloo", "--apart", "--link-gbit", "400"]
    argv += ["--engines", "1000", "--workers", "8", "--engine-hosts", "1000", "--bucket-size-mib", "64", "--json"]
    assert cli.main([*argv, "--relays", "auto"]) == exits.OK
    found = json.loads(capsys.readouterr().out)
    relays = msgspec.convert(found["relays"], Relays)
    copy = 2e12 / (400 * HOST)
    assert relays.seconds_without == pytest.approx(27 * copy, rel=1e-3)
    assert relays.levels == [2, 6, 17]
    assert relays.read_seconds == [pytest.approx(number * copy, rel=1e-3) for number in (2, 3, 3)]
    assert relays.send_seconds == pytest.approx(10 * copy, rel=1e-3)
    assert (sum(relays.engines), max(relays.engines)) == (1000, 59)
    assert len([each for each in relays.commands if " follow " in each.command]) == 17


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_real_relays_take_what_was_counted(
    num_hosts: int, install: Literal["staged", "streaming"], tmp_path: Path
) -> None:
    """Two engines, on one host or on two, and a relay that reads the trainer's store over HTTP."""
    it = deployment(num_hosts, num_engines=2, install=install)
    found = planned(it, 1)
    assert found.transport == ("ipc" if num_hosts == 1 else "gloo")
    to = "ipc://" if num_hosts == 1 else "gloo://127.0.0.1:0"
    tensors = {spec.name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in SPECS}
    sinks = [TensorSink(SPECS) for _ in range(2)]
    read_bytes = 0

    def count(request: Request) -> bool:
        nonlocal read_bytes
        status, headers, body = request.forward()
        read_bytes += len(body)
        request.reply(status, headers, body)
        return True

    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(Publisher(TensorSource(tensors), transport=f"file://{tmp_path}/store"))
        publisher.publish()
        wire = Wire(stack.enter_context(contextlib.closing(StoreThread(tmp_path / "store"))))
        stack.callback(wire.close)
        stack.enter_context(wire.spoilt("GET", "/buckets/", count))
        gc.collect()
        before = set(map(id, _memories()))
        engines = [DirectEngine(f"engine-{number}", sink) for number, sink in enumerate(sinks)]
        for engine in engines:
            stack.callback(engine.close)
        relay = stack.enter_context(
            contextlib.closing(Relay(engines, transport=to, options=PublishOptions(install=install)))
        )
        follower = stack.enter_context(Follower(wire.url, relay))
        assert follower.poll() is not None
        kept = sorted(pages(one.size_bytes) for one in _memories() if id(one) not in before and one.size_bytes)
    assert read_bytes == found.read_bytes
    assert relay.report is not None
    payload = found.read_bytes - 8 * HEADER_BYTES
    assert [result.read_bytes for result in relay.report.engines.values()] == [[payload]] * 2
    # Over gloo each of these engines has buckets of its own.
    own = [] if num_hosts == 1 else [estimate(SPECS, it).engine_host.buckets] * 2
    assert sum(kept) == found.memory_bytes + sum(own)
    assert all(sink.version is not None for sink in sinks)


def _memories() -> list[KeptMemory | OwnedArena]:
    return [one for one in gc.get_objects() if issubclass(type(one), (KeptMemory, OwnedArena))]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--transport", "gloo"], "pass --link-gbit"),
        (["--link-gbit", "1"], "pass --apart"),
        (["--link-gbit", "1", "--transport", "nccl", "--apart"], "pass --transport gloo or file"),
        (["--link-gbit", "1", "--transport", "gloo", "--apart", "--trainer-hosts", "2"], "pass its --store-gbit"),
        (["--link-gbit", "1", "--transport", "gloo", "--apart", "--relays", "3"], "3 relays are too many: at most 2"),
    ],
)
def test_what_relays_do_not_fit(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["plan", "--params", "1e6", "--tensors", "10", "--engines", "2", "--relays", "auto"]
    hosts = ["--engine-hosts", "2"] if "--apart" in argv else []
    assert cli.main([*few, *hosts, *argv]) == exits.USAGE
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


PRINTED = """\
┏━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ relays                ┃    value ┃                                                 ┃
┡━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│ relays                │        2 │ each on a host of its 3 or 4 engines, over gloo │
│ trainer's store sends │  2.00 GB │ to 1 host                                       │
│ relay's host sends    │  4.00 GB │ to engines; of all relays the most              │
│ relay's memory        │  2.13 GB │ besides that of the engines on its host         │
│ read by 1 host        │ 16.003 s │ to copy the store, and serve the copy           │
│ read by 2 relays      │  3.201 s │                                                 │
│ sent to engines       │  3.254 s │ once a relay has all of the version             │
│ in all                │ 22.458 s │ without relays 48.164 s                         │
└───────────────────────┴──────────┴─────────────────────────────────────────────────┘
"""


def test_all_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--params", "1e9", "--transport", "gloo", "--apart", "--engines", "7", "--engine-hosts", "7"]
    assert cli.main([*argv, "--link-gbit", "10", "--trainer-gbit", "1", "--relays", "2"]) == exits.OK
    *_, table, commands = capsys.readouterr().out.split("\n\n")
    assert table + "\n" == PRINTED
    follow = "weightcast follow 'store+http://host-1:8200?token_file=TOKEN' --transport gloo://host-4:0"
    assert commands.splitlines() == [
        "the first host's commands for each job; --json has those of all:",
        "  trainer: weightcast serve-store file:///STORE --host 0.0.0.0 --token-file TOKEN",
        "  host-1: weightcast pull --follow 'store+http://trainer:8200?token_file=TOKEN' file:///STORE",
        f"  host-4: {follow} --token-file TOKEN --engine http://engine-1:8000 ... --engine http://engine-4:8000",
    ]
