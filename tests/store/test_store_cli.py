"""publish, inspect, verify, export and follow on a store; the last one to a real engine process's server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from store.remote_kit import StoreThread, Wire, damaged
from store.store_kit import RUN, can_mount, follow_command, model, number_in, small_filesystem, url, write

from weightcast import ModuleSource, Publisher, TensorSource, cli
from weightcast.cli import exits
from weightcast.control.server.app import EngineServer
from weightcast.engines.module import ModuleEngine
from weightcast.errors import IntegrityError, PublishError, UnsupportedError
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Source
from weightcast.serving.follower import Follower
from weightcast.sources.safetensors import SafetensorsSource
from weightcast.sources.store import StoreSource
from weightcast.store.address import DirectoryAddress
from weightcast.store.reading import pinned
from weightcast.trainer.export import export
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.relay import Relay


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, object]]]:
    """Run a command with --json; its status and its object."""

    def run(*argv: object) -> tuple[int, dict[str, object]]:
        status = cli.main([*map(str, argv), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_publish_into_a_store_and_export_from_it(tmp_path: Path, call: Callable[..., tuple[int, dict]]) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(64, 50).bfloat16() for i in range(40)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    store = url(tmp_path / "store")
    for number in (0, 1):
        status, report = call("publish", tmp_path / "in", "--transport", store)
        assert (status, report["version"], report["engines"]) == (exits.OK, number, {})
    status, exported = call("export", store, tmp_path / "out")
    assert (status, exported["files"]) == (exits.OK, ["model.safetensors"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert found.keys() == tensors.keys()
    status, error = call("export", store, tmp_path / "out")
    assert (status, error["error"]["kind"]) == (exits.NEGATIVE, "FileExistsError")


def test_rollback_of_a_store(
    tmp_path: Path, call: Callable[..., tuple[int, dict]], capsys: pytest.CaptureFixture[str]
) -> None:
    store = url(tmp_path / "store", "?num_slots=3")
    with Publisher(source := TensorSource({"a": torch.zeros(4)}), transport=store) as publisher:
        for number in range(3):
            source.regions()["a"][0][1].fill_(number)
            publisher.publish()
    status, report = call("rollback", store, "--version", 0)
    assert (status, report["version"]) == (exits.OK, 3)
    assert StoreSource(store).regions()["a"][0][1].tolist() == [0.0] * 4
    assert cli.main(["rollback", store]) == exits.OK
    line, *_ = capsys.readouterr().out.splitlines()
    assert line == f"the version before the newest is the newest of {store} again, as version 4"
    assert StoreSource(store).regions()["a"][0][1].tolist() == [2.0] * 4
    status, error = call("rollback", store, "--version", 1)
    assert (status, error["error"]["kind"]) == (exits.NEGATIVE, "VersionNotFoundError")


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1000,), i, dtype=torch.float32) for i in range(10)} | {"big": torch.ones(9000)}
    names = export(TensorSource(tensors), tmp_path / "out", max_shard_bytes=12_000)
    assert names[-1] == "model.safetensors.index.json"
    assert names[0] == "model-00001-of-00005.safetensors"
    index = json.loads((tmp_path / "out" / names[-1]).read_text())
    assert index["metadata"]["total_size"] == 76_000
    with SafetensorsSource(tmp_path / "out") as source:
        found = {name: held[0][1] for name, held in source.regions().items()}
        assert index["weight_map"].keys() == found.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_an_export_looks_at_each_of_many_tensors_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks, num_bytes = 0, TensorSpec.num_bytes.fget

    def look(spec: TensorSpec) -> int:
        nonlocal num_looks
        num_looks += 1
        return num_bytes(spec)

    monkeypatch.setattr(TensorSpec, "num_bytes", property(look))
    export(TensorSource({f"t{i}": torch.zeros(1) for i in range(500)}), tmp_path / "out", max_shard_bytes=1 << 30)
    assert num_looks < 10 * 500


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source = TensorSource({"fine": torch.ones(3), "not in the format": torch.ones(3, dtype=torch.complex128)})
    with pytest.raises(UnsupportedError, match="complex128"):
        export(source, tmp_path / "out", max_shard_bytes=1)
    with pytest.raises(UnsupportedError, match="__metadata__"):  # a file that no reader of safetensors takes
        export(TensorSource({"__metadata__": torch.ones(3)}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [TensorSource, lambda: ModuleSource(torch.nn.Identity())])
def test_no_version_and_no_checkpoint_is_made_of_nothing(tmp_path: Path, make: Callable[[], Source]) -> None:
    """Such as the state dict that FSDP gathers is on all ranks but the first."""
    publisher = Publisher(make(), transport=url(tmp_path / "store"))
    with publisher, pytest.raises(ValueError, match="the source has no tensors"):
        publisher.publish()
    with pytest.raises(ValueError, match="the source has no tensors"):
        export(make(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not can_mount(), reason="mounting a small filesystem needs root")
@pytest.mark.cluster
def test_an_export_onto_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", 64 << 10):
        with pytest.raises(OSError, match="No space left on device"):
            export(TensorSource({"large": torch.ones(1 << 16)}), tmp_path / "small" / "out", max_shard_bytes=1 << 30)
        assert list((tmp_path / "small").iterdir()) == []


def test_inspect_shows_versions_readers_and_tensors(tmp_path: Path, call: Callable[..., tuple[int, dict]]) -> None:
    write(tmp_path, 3, 4)
    with pinned(DirectoryAddress(tmp_path), label="engine-9"):
        status, found = call("inspect", url(tmp_path), "--filter", "t1*")
    assert status == exits.OK
    assert {spec["name"] for spec in found["tensors"]} == {"t1", "t10", "t11"}
    store = found["store"]
    assert (store["newest"]["number"], store["previous"]["number"]) == (4, 3)
    assert (store["newest"]["run"], store["is_written"]) == (RUN, False)
    assert [len(slot["readers"]) for slot in store["slots"]] == [0, 1]
    assert "engine-9" in store["slots"][1]["readers"][0]


def test_inspect_prints_a_store_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3, 4)
    assert cli.main(["inspect", url(tmp_path)]) == exits.OK
    text = capsys.readouterr().out
    assert f"version 4 of run {RUN[:8]}" in text
    assert f"before it version 3 of run {RUN[:8]}" in text
    assert "slot 1: " in text


def test_verify_finds_a_changed_bit(tmp_path: Path, call: Callable[..., tuple[int, dict]]) -> None:
    write(tmp_path, 3)
    status, verdict = call("verify", url(tmp_path))
    assert (status, verdict["ok"], verdict["num_tensors"]) == (exits.OK, True, 12)
    data = tmp_path / "slots" / "0" / "data.0"
    content = bytearray(data.read_bytes())
    content[150_000] ^= 1
    data.write_bytes(content)
    status, error = call("verify", url(tmp_path))
    assert (status, error["error"]["kind"]) == (exits.NEGATIVE, "IntegrityError")


def test_nothing_to_look_at(tmp_path: Path, call: Callable[..., tuple[int, dict]]) -> None:
    for command in ("inspect", "verify"):
        status, error = call(command, url(tmp_path / "nowhere"))
        assert (status, error["error"]["kind"]) == (exits.NEGATIVE, "VersionNotFoundError")
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path), "out"])


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, tensor in model(0).items():
            self.register_buffer(name, torch.zeros_like(tensor))


def test_follow_passes_versions_on_to_a_server_until_it_is_told_to_end(tmp_path: Path) -> None:
    module = Module()
    with EngineServer(ModuleEngine(module)) as server, follow_command(url(tmp_path), "--engine", server.url) as line:
        for number in (5, 6):
            write(tmp_path, number)
            followed = line()
            assert (followed["version"], followed["run"]) == (number, RUN)
            assert followed["lag_seconds"] >= 0
            assert server.gate.version is not None
            assert server.gate.version.number == number
            assert int(module.t3[0]) == number * 100 + 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("install", "transport"),
    [
        ("staged", "ipc://"),
        ("streaming", "ipc://"),
        ("staged", "gloo://127.0.0.1:0"),
        ("streaming", "gloo://127.0.0.1:0"),
    ],
)
def test_an_engine_that_is_away_is_sent_the_version_alone_when_it_is_back(
    tmp_path: Path, install: Any, transport: str
) -> None:
    """As of directories; the engine that was there is not sent it once more, and each version is read once."""
    modules = Module(), Module(), Module()
    with contextlib.ExitStack() as stack:
        server, other = (stack.enter_context(EngineServer(ModuleEngine(module))) for module in modules[:2])
        port = other.port
        options = PublishOptions(install=install)
        relay = Relay([server.url, other.url], transport=transport, options=options)
        stack.callback(relay.close)
        wire = Wire(stack.enter_context(contextlib.closing(StoreThread(tmp_path))))
        stack.callback(wire.close)
        follower = stack.enter_context(Follower(wire.url, relay))

        def num_read() -> int:
            return sum("/buckets/" in key for _, key in wire.proxy.requests)

        write(tmp_path, 5)
        assert follower.poll() is not None
        each = num_read()
        other.close()
        write(tmp_path, 6)
        for _ in range(3):
            with pytest.raises(PublishError, match=str(port)):
                follower.poll()
        assert num_read() == 2 * each
        served = server.gate.version
        assert served is not None
        assert served.number == 6
        again = stack.enter_context(EngineServer(ModuleEngine(modules[2]), port=port))
        followed = follower.poll()
        assert followed is not None
        assert followed.version == 6
        assert server.gate.version == served
        assert install == "streaming" or again.gate.version == served
        assert again.gate.version is not None
        assert again.gate.version.number == 6
        assert number_in(dict(modules[2].state_dict())) == 6
        assert follower.poll() is None
        assert num_read() == 2 * each
        write(tmp_path, 7)
        assert follower.poll() is not None
        assert num_read() == 3 * each
        assert server.gate.version == again.gate.version
        assert server.gate.version != served


def test_a_newer_version_takes_the_place_of_one_that_an_engine_lacks(tmp_path: Path) -> None:
    """Also of a damaged one nothing gets to an engine that lacks the version before."""
    modules = Module(), Module()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(EngineServer(ModuleEngine(modules[0])))
        other = EngineServer(ModuleEngine(Module())).start()
        relay = Relay([server.url, other.url], options=PublishOptions(install="streaming"))
        stack.callback(relay.close)
        wire = Wire(stack.enter_context(contextlib.closing(StoreThread(tmp_path))))
        stack.callback(wire.close)
        follower = stack.enter_context(Follower(wire.url, relay))
        port = other.port
        other.close()
        write(tmp_path, 6)
        with pytest.raises(PublishError, match=str(port)):
            follower.poll()
        again = stack.enter_context(EngineServer(ModuleEngine(modules[1]), port=port))
        write(tmp_path, 7)
        with wire.spoilt("GET", "/buckets/3", damaged):
            for _ in range(2):
                with pytest.raises(IntegrityError):
                    follower.poll()
        assert again.gate.version is None
        followed = follower.poll()
        assert followed is not None
        assert followed.version == 7
        assert all(number_in(dict(module.state_dict())) == 7 for module in modules)


def test_follow_once_and_verify_against_the_server(tmp_path: Path, call: Callable[..., tuple[int, dict]]) -> None:
    write(tmp_path, 5)
    with EngineServer(ModuleEngine(Module())) as server:
        status, followed = call("follow", url(tmp_path), "--engine", server.url, "--once")
        assert (status, followed["version"]) == (exits.OK, 5)
        status, verdict = call("verify", url(tmp_path), "--engine", server.url)
        assert (status, verdict["ok"]) == (exits.OK, True)
        write(tmp_path, 6)
        status, verdict = call("verify", url(tmp_path), "--engine", server.url)
        assert (status, verdict["ok"]) == (exits.NEGATIVE, False)
    assert StoreSource(url(tmp_path)).version.number == 6


def test_follow_once_says_why_an_engine_did_not_take_it(tmp_path: Path, call: Callable[..., tuple[int, dict]]) -> None:
    write(tmp_path, 5)
    with EngineServer(ModuleEngine(torch.nn.Linear(3, 3))) as server:
        status, error = call("follow", url(tmp_path), "--engine", server.url, "--once")
    assert status == exits.NEGATIVE
    assert "unknown tensor" in error["error"]["message"]
