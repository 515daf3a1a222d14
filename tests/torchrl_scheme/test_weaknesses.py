"""W1 to W24: what TorchRL's schemes were seen to do, and what must not happen with this one. W14, W15: test_workers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl_scheme.scheme_kit import (
    Copies,
    LoadingModule,
    sender_of,
    trainer_command,
    version_in,
    vllm_shape,
    weights,
)

from weightcast.errors import (
    EngineBusyError,
    InstallError,
    InsufficientMemoryError,
    IntegrityError,
    PeerTimeoutError,
    WeightcastError,
)
from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme as Scheme
from weightcast.integrations.torchrl import VLLMDoubleBufferTransport
from weightcast.store.address import DirectoryAddress
from weightcast.store.reading import pinned


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> None:
    """Nothing is left open."""


def slot_of_newest(directory: Path) -> Path:
    with pinned(DirectoryAddress(directory)) as found:
        return directory / "slots" / str(found.stored.slot)


@pytest.fixture
def trainers() -> Any:
    with contextlib.ExitStack() as stack:

        def start(directory: Path, num_threads: int, seconds: float) -> subprocess.Popen[str]:
            command = trainer_command(directory, num_threads, seconds)
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.wait, 20)
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize("num_threads", [1, pytest.param(4, marks=pytest.mark.cluster)])
def test_w01_no_read_is_torn_or_mixed(tmp_path: Path, trainers: Any, num_threads: int) -> None:
    process = trainers(tmp_path / "w", num_threads, 2.0)
    taken = Copies()
    receiver = Scheme(str(tmp_path / "w"), None, num_threads).create_receiver(taken.engine)
    found = []
    while process.poll() is None or not found:
        if receiver.poll_and_apply(timeout=0.2):
            found.append(version_in(taken.calls.pop()))
    receiver.close()
    assert len(found) > 2
    assert found == sorted(set(found))


@pytest.mark.parametrize("delay", [0.004, pytest.param(0.0, marks=pytest.mark.cluster)])
def test_w02_a_writer_that_dies_leaves_the_version_before(tmp_path: Path, trainers: Any, delay: float) -> None:
    process = trainers(tmp_path, 1, 60.0)
    for _ in range(2):
        said = float(process.stdout.readline())
    threading.Event().wait(delay)
    process.send_signal(signal.SIGKILL)
    said = max([said, *map(float, process.stdout)])
    taken = Copies()
    receiver = Scheme(str(tmp_path)).create_receiver(taken.engine)
    assert receiver.poll_and_apply(timeout=0)
    assert version_in(taken.held) in (said, said + 1)


def test_w03_names_and_dtypes_never_belong_to_other_data(tmp_path: Path) -> None:
    scheme = Scheme(str(tmp_path))
    sender = sender_of(scheme)
    sender.update_weights({"a": torch.ones(4, dtype=torch.float32)})
    old = (slot_of_newest(tmp_path) / "manifest.json").read_bytes()
    sender.update_weights({"a": torch.ones(4, dtype=torch.bfloat16)})
    (slot_of_newest(tmp_path) / "manifest.json").write_bytes(old)
    taken = Copies()
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    assert not taken.calls


def test_w04_a_truncated_file_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    scheme = Scheme(str(tmp_path))
    sender_of(scheme).update_weights(weights(1))
    data = slot_of_newest(tmp_path) / "data.0"
    os.truncate(data, 4096)
    taken = Copies()
    with pytest.raises(IntegrityError, match="truncated"):
        scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    assert (data.stat().st_size, taken.calls) == (4096, [])


def test_w05_a_missing_file_is_an_error(tmp_path: Path) -> None:
    scheme = Scheme(str(tmp_path))
    sender_of(scheme).update_weights(weights(1))
    (slot_of_newest(tmp_path) / "data.0").unlink()
    taken = Copies()
    with pytest.raises(IntegrityError, match="is missing"):
        scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    assert not taken.calls


def test_w06_dropped_and_shrunk_tensors_leave_nothing(tmp_path: Path) -> None:
    scheme, taken = Scheme(str(tmp_path)), Copies()
    sender, receiver = sender_of(scheme), scheme.create_receiver(taken.engine)
    for names in (("a", "b", "c"), ("a",), ("a", "d"), ("a",)):
        sender.update_weights({name: torch.ones(1000 // len(names)) for name in names})
        assert receiver.poll_and_apply(timeout=0)
        assert {name: tensor.numel() for name, tensor in taken.held.items()} == dict.fromkeys(names, 1000 // len(names))
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"current.json", "writer.json", "writer.lock", "seal.json", "manifest.json", "pins", "data.0"}


@pytest.mark.parametrize(
    "keep", [list, dict, lambda w: [t.view(-1)[1:] for _, t in w], lambda w: [t.numpy() for _, t in w]]
)
def test_w07_what_an_engine_keeps_never_changes(tmp_path: Path, keep: Any) -> None:
    scheme, kept = Scheme(str(tmp_path)), []
    sender = sender_of(scheme)
    keeper = scheme.create_receiver(vllm_shape(lambda w: kept.append(keep(w))))
    taken = Copies()
    other = scheme.create_receiver(taken.engine)
    for number in (1, 2, 3):
        sender.update_weights(weights(number, numel=500))
        assert keeper.poll_and_apply(timeout=0)
        for old, values in enumerate(kept, start=1):
            for value in dict(values).values() if keep in (list, dict) else values:
                assert {float(v) for v in value} == {old}
        if keep is dict:
            kept[-1]["t0"].mul_(1.0)
    kept.append(None)
    assert other.poll_and_apply(timeout=0)
    assert version_in(taken.held) == 3


def test_w07_what_an_engine_writes_into_its_tensors_reaches_nobody(tmp_path: Path) -> None:
    def scribble(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            tensor.mul_(100)

    scheme, taken = Scheme(str(tmp_path)), Copies()
    sender_of(scheme).update_weights(weights(1))
    assert scheme.create_receiver(vllm_shape(scribble)).poll_and_apply(timeout=0)
    assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    assert version_in(taken.held) == 1


def test_w08_two_writers_never_mix(tmp_path: Path) -> None:
    first, second = sender_of(Scheme(str(tmp_path))), sender_of(Scheme(str(tmp_path)))
    first.update_weights(weights(1))
    with pytest.raises(EngineBusyError, match=rf"pid {os.getpid()}"):
        second.update_weights(weights(2))
    first.close()
    second.update_weights(weights(3))
    with pytest.raises(EngineBusyError):
        first.update_weights(weights(4))


def test_w09_the_pointer_is_renamed_over_after_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = sender_of(Scheme(str(tmp_path)))
    sender.update_weights(weights(1))
    steps: list[str] = []
    write, replace = os.pwrite, os.replace

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append(name.split(".")[0] if name.startswith("data") else "record")
        return write(descriptor, data, offset)

    def replaced(source: Any, target: Any) -> None:
        steps.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "replace", replaced)
    sender.update_weights(weights(2))
    order = [step for step in steps if step in ("data", "seal.json", "current.json")]
    assert list(dict.fromkeys(order)) == ["data", "seal.json", "current.json"]
    assert order[-1] == "current.json"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small filesystem needs root")
@pytest.mark.parametrize("num_threads", [1, 4])
def test_w10_a_full_disk_is_an_error_and_the_trainer_lives(tmp_path: Path, num_threads: int) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        scheme, taken = Scheme(str(place / "w"), None, num_threads), Copies()
        sender, receiver = sender_of(scheme), scheme.create_receiver(taken.engine)
        sender.update_weights(weights(1, numel=50_000))
        with pytest.raises(InsufficientMemoryError, match="no room"):
            sender.update_weights(weights(2, numel=150_000))
        assert receiver.poll_and_apply(timeout=0)
        assert version_in(taken.held) == 1
        sender.update_weights(weights(3, numel=50_000))
        assert receiver.poll_and_apply(timeout=0)
        receiver.close()
        sender.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_w11_errors_of_writing_threads_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, taken = Scheme(str(tmp_path), None, 4), Copies()
    sender, receiver = sender_of(scheme), scheme.create_receiver(taken.engine)
    sender.update_weights(weights(1))

    def refuse(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(WeightcastError, match="Input/output"):
            sender.update_weights(weights(2))
    assert receiver.poll_and_apply(timeout=0)
    assert version_in(taken.held) == 1
    sender.close()
    receiver.close()


def test_w12_an_update_is_taken_once_and_none_is_false(tmp_path: Path) -> None:
    scheme, taken = Scheme(str(tmp_path / "later")), Copies()
    receiver = scheme.create_receiver(taken.engine)
    start = time.monotonic()
    assert receiver.poll_and_apply(timeout=0.2) is False
    assert time.monotonic() - start >= 0.2
    sender_of(scheme).update_weights(weights(1))
    assert [receiver.poll_and_apply(timeout=0) for _ in range(3)] == [True, False, False]
    assert len(taken.calls) == 1


def test_w13_a_load_that_fails_leaves_the_weights_before(tmp_path: Path) -> None:
    scheme, module = Scheme(str(tmp_path)), LoadingModule()
    sender, receiver = sender_of(scheme), scheme.create_receiver(vllm_shape(module.load_weights, module))
    for number in (1, 2):
        sender.update_weights({"a": torch.full((8,), float(number)), "b": torch.full((8,), float(number))})
        module.fail_at = 1 if number == 2 else -1
        with pytest.raises(InstallError, match="the test's fault") if number == 2 else contextlib.nullcontext():
            assert receiver.poll_and_apply(timeout=0)
        assert version_in(dict(module.named_parameters())) == 1
    module.fail_at = 1
    with pytest.raises(RuntimeError, match="the test's fault"):
        receiver.apply_weights({"a": torch.full((8,), 9.0), "b": torch.full((8,), 9.0)})
    assert version_in(dict(module.named_parameters())) == 1
    module.fail_at = -1
    assert receiver.poll_and_apply(timeout=0)
    assert version_in(dict(module.named_parameters())) == 2


def test_w16_fp8_comes_back(tmp_path: Path) -> None:
    scheme, taken = Scheme(str(tmp_path)), Copies()
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.uint16, torch.bool)
    given = {
        str(kind): torch.arange(64, dtype=torch.uint8).view(torch.uint8).to(torch.float32).to(kind) for kind in kinds
    }
    sender_of(scheme).update_weights(given)
    assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    for name, tensor in given.items():
        assert taken.held[name].dtype == tensor.dtype
        assert torch.equal(taken.held[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_w17_names_are_only_names(tmp_path: Path) -> None:
    names = ("shape", "device", "_type", "../../x", "a/b", "..", "x" * 300, "current.json", "ünïcode", "a.b.c")
    scheme, taken = Scheme(str(tmp_path / "deep" / "w")), Copies()
    sender_of(scheme).update_weights({name: torch.full((3,), float(i)) for i, name in enumerate(names)})
    assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    assert [float(taken.held[name][0]) for name in names] == list(map(float, range(len(names))))
    assert os.listdir(tmp_path) == ["deep"]


@pytest.mark.filterwarnings("ignore:state_dict strategy:UserWarning")
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_w18_tied_parameters_travel_once_under_both_names(tmp_path: Path, strategy: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000, bias=False))
    model[1].weight = model[0].weight
    scheme, taken = Scheme(str(tmp_path), strategy=strategy), Copies()
    sender, receiver = sender_of(scheme, model), scheme.create_receiver(taken.engine)
    sender.update_weights()
    assert receiver.poll_and_apply(timeout=0)
    assert set(taken.held) == {"0.weight", "1.weight"}
    assert receiver.last is not None
    assert receiver.last.num_bytes == 256_000


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("saved", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"mean": torch.ones(1)}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("not asked for")


@pytest.mark.filterwarnings("ignore:state_dict strategy:UserWarning")
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_w19_both_strategies_send_what_a_state_dict_has(tmp_path: Path, strategy: Any) -> None:
    model, taken = torch.nn.Sequential(Odd(), torch.nn.BatchNorm1d(3)), Copies()
    lone = Odd()
    for number, module in enumerate((model, lone)):
        scheme = Scheme(str(tmp_path / str(number)), strategy=strategy)
        sender_of(scheme, module).update_weights()
        assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
        expected = {n: t for n, t in module.state_dict().items() if not n.endswith("_extra_state")}
        assert taken.held.keys() == expected.keys()
        assert all(torch.equal(taken.held[name], tensor) for name, tensor in expected.items())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:state_dict strategy:UserWarning")
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_w19_weights_that_are_no_parameters_or_computed_from_some_are_refused(tmp_path: Path, strategy: Any) -> None:
    quantised = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(8, 8)), {torch.nn.Linear})
    with pytest.raises(ValueError, match=r"0\._packed_params\.dtype; .*they would be left out"):
        sender_of(Scheme(str(tmp_path), strategy=strategy), quantised).update_weights()
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="weight: computed from other parameters"):
        sender_of(Scheme(str(tmp_path), strategy=strategy), normed).update_weights()


def test_w19_neither_numbers_nor_lists_become_tensors(tmp_path: Path) -> None:
    sender = sender_of(Scheme(str(tmp_path / "w")))
    for value in (3, 2.5, True, [1, 2], torch.ones(2).numpy(), {"deeper": {"still": 1}}):
        with pytest.raises(TypeError, match=r"'a\.note(\.deeper\.still)?' is a .*, not a tensor"):
            sender.update_weights({"w": torch.ones(2), "a": {"note": value}})
    for weights_ in ({"w": torch.ones(2), 5: torch.ones(2)}, {"w": {"x": torch.ones(2), 5: torch.ones(2)}}):
        with pytest.raises(TypeError, match=r"5 in .* is not the name of a tensor"):
            sender.update_weights(weights_)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    "value", ["x", b"x", None, object(), ["a", "b"], {"deeper": "x"}], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("as_tensordict", [False, True])
def test_w19_what_is_no_tensor_is_refused_by_name(tmp_path: Path, value: Any, as_tensordict: bool) -> None:
    """It would be lost on the way, and nobody told."""
    given: Any = {"w": torch.ones(2), "note": value}
    sender = sender_of(Scheme(str(tmp_path / "w")))
    with pytest.raises(TypeError, match=r"'note(\.deeper)?' is a .*, not a tensor"):
        sender.update_weights(TensorDict(given, batch_size=[]) if as_tensordict else given)
    assert not (tmp_path / "w").exists()


def test_w20_nothing_is_cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = sender_of(Scheme(str(tmp_path)))
    given = TensorDict(weights(1), batch_size=[])
    copies: list[str] = []
    for kind, name in ((TensorDict, "clone"), (torch.Tensor, "clone"), (torch.Tensor, "contiguous")):
        monkeypatch.setattr(kind, name, lambda *args, name=name, **options: copies.append(name))
    sender.update_weights(given)
    assert not copies


class Sharded(torch.Tensor):
    """As a DTensor: its values are gathered when they are asked for."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_w20_what_is_gathered_is_gathered_for_each_version(tmp_path: Path) -> None:
    scheme, taken = Scheme(str(tmp_path)), Copies()
    sender, receiver = sender_of(scheme), scheme.create_receiver(taken.engine)
    shards = {"plain": torch.ones(2), "w": torch.ones(3).as_subclass(Sharded)}
    for value in (1.0, 2.0):
        shards["w"].fill_(value)
        sender.update_weights(shards)
        assert receiver.poll_and_apply(timeout=0)
        assert taken.held["w"].tolist() == [value] * 3


def test_w21_a_stalled_reader_is_named_and_everything_can_be_closed(tmp_path: Path) -> None:
    transport = VLLMDoubleBufferTransport(str(tmp_path), deadline_seconds=0.2)
    with contextlib.ExitStack() as stack:
        for number in range(4):
            transport.send_weights("model", weights(number))
            stack.enter_context(pinned(DirectoryAddress(tmp_path), label=f"stalled-{number}"))
        with pytest.raises(PeerTimeoutError, match=r"stalled-0 .*stalled-1 "):
            transport.send_weights("model", weights(5))
    transport.send_weights("model", weights(6))
    transport.close()
    transport.close()
    shutil.rmtree(tmp_path)
    assert transport.check_connection()


def test_w22_w23_a_change_in_place_is_seen_by_nobody_before_it_is_sent(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    scheme, kept = Scheme(str(tmp_path)), []
    sender, receiver = sender_of(scheme, model), scheme.create_receiver(vllm_shape(lambda w: kept.append(dict(w))))
    for number in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(number)
        assert not kept or version_in(kept[-1]) == number - 1
        assert not receiver.poll_and_apply(timeout=0)
        sender.update_weights()
        assert not kept or version_in(kept[-1]) == number - 1
        assert receiver.poll_and_apply(timeout=0)
        assert version_in(kept[-1]) == number


def test_w22_w23_another_view_in_the_same_tensor_object_is_read_as_it_is(tmp_path: Path) -> None:
    scheme, taken = Scheme(str(tmp_path)), Copies()
    sender, receiver = sender_of(scheme), scheme.create_receiver(taken.engine)
    tensor = torch.arange(32.0).reshape(4, 8)[:, ::2]
    for strides in ((8, 2), (1, 8), (2, 4)):
        tensor.as_strided_((4, 4), strides)
        sender.update_weights({"a": tensor})
        assert receiver.poll_and_apply(timeout=0)
        assert torch.equal(taken.held["a"], tensor)


def test_w24_a_send_waits_for_no_receiver(tmp_path: Path, trainers: Any) -> None:
    """Neither for one that never reads nor for one whose load failed."""

    def fail(pairs: object) -> None:
        raise RuntimeError("wrong shape")

    scheme = Scheme(str(tmp_path))
    sender, receiver = sender_of(scheme), scheme.create_receiver(vllm_shape(fail))
    with warnings.catch_warnings():
        start = time.monotonic()
        for number in range(3):
            sender.update_weights(weights(number))
            with pytest.raises(InstallError, match="wrong shape"):
                receiver.poll_and_apply(timeout=0)
    assert time.monotonic() - start < 60
