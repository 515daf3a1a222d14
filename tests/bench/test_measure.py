"""A whole bench run, small: real engine processes, every figure there and consistent, nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from publishing import report
from publishing.__main__ import main
from publishing.measure import measure
from publishing.meters import ProcessMeter, children
from publishing.result import BenchResult, BenchSettings

from weightcast.cli import exits

pytestmark = [pytest.mark.usefixtures("leaves_nothing"), pytest.mark.cluster]

KEYS = {
    "transport",
    "shapes",
    "install",
    "num_engines",
    "num_tensors",
    "num_bytes",
    "memcpy_gb_per_s",
    "publish_seconds",
    "memcpy_ratio",
    "pause_seconds",
    "cpu_us_per_tensor",
    "extra_bytes",
    "per_tensor_seconds",
    "per_tensor_speedup",
}
"""What the JSON promises; more may come, none may go or change its meaning."""

T = TypeVar("T")
BENCH = Path(__file__).parents[2] / "bench"
MIB = 1 << 20
DEADLINE_SECONDS = 60


def small(**changes: object) -> BenchSettings:
    settings = {
        "shapes": "uniform",
        "num_tensors": 64,
        "num_bytes": 32 * MIB,
        "num_runs": 2,
        "bucket_size_bytes": 4 * MIB,
    }
    return BenchSettings(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result() -> BenchResult:
    return measure(small(install="streaming", num_engines=2))


def test_the_figures_agree_with_each_other(result: BenchResult) -> None:
    assert (result.num_tensors, result.num_bytes, result.num_buckets) == (64, 32 * MIB, 8)
    assert result.memcpy_ratio == pytest.approx(result.publish_seconds / result.memcpy_seconds)
    assert result.memcpy_gb_per_s == pytest.approx(result.num_bytes / result.memcpy_seconds / 1e9)
    assert result.per_tensor_seconds is not None
    assert result.per_tensor_speedup == pytest.approx(result.per_tensor_seconds / result.publish_seconds)
    cpu = result.cpu_seconds.publisher + result.cpu_seconds.engine
    assert result.cpu_us_per_tensor == pytest.approx(cpu / 64 * 1e6)
    assert 0 < result.pause_seconds <= max(run.publish_seconds for run in result.runs)
    assert len(result.runs) == 2


def test_the_engines_hold_what_was_sent(result: BenchResult) -> None:
    assert result.verified


def test_streaming_takes_two_buckets_at_each_end(result: BenchResult) -> None:
    for extra in (result.extra_bytes.publisher, result.extra_bytes.engine):
        assert 8 * MIB <= extra <= 8 * MIB + result.largest_tensor_bytes + 64 * MIB
    assert result.host_extra_bytes < result.extra_bytes.publisher + 2 * result.extra_bytes.engine


def test_the_json_has_the_promised_keys(result: BenchResult) -> None:
    data = json.loads(result.encode())
    assert data.keys() >= KEYS
    assert data["extra_bytes"].keys() == {"publisher", "engine"}


def test_a_plot(result: BenchResult, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    report.plot(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "says"), [("out.txt", ".svg"), ("out", ".svg"), ("none/out.png", "not a directory")])
def test_a_plot_that_can_not_be_drawn_is_refused_first(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("it was measured all the same")

    monkeypatch.setattr("publishing.measure.measure", measured)
    assert main(["--plot", str(tmp_path / name)]) == exits.USAGE
    assert says in capsys.readouterr().err


def test_slower_is_called_slower(result: BenchResult, capsys: pytest.CaptureFixture[str]) -> None:
    from weightcast.cli import output

    slow = msgspec.structs.replace(result, per_tensor_speedup=0.5)
    output.show(slow, False, report.view(slow))
    assert "publish is 2.0 x slower" in capsys.readouterr().out


def test_staged_in_one_process() -> None:
    result = measure(small(transport="memory", install="staged", per_tensor=False, bucket_size_bytes=None))
    assert (result.bucket_size_bytes, result.num_buckets) == (4 * MIB, 8)
    assert result.verified
    assert (result.cpu_seconds.engine, result.extra_bytes.engine) == (0, 0)
    assert result.per_tensor_seconds is None


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shapes = ["--shapes", "qwen3-0.6b", "--layers", "1", "--scale", "16"]
    options = ["--runs", "1", "--bucket-size-mib", "1", "--json", "--plot", str(tmp_path / "out.svg")]
    assert main([*shapes, *options]) == exits.OK
    data = json.loads(capsys.readouterr().out)
    assert (data["layers"], data["scale"], data["num_tensors"]) == (1, 16, 13)
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_the_table(result: BenchResult, capsys: pytest.CaptureFixture[str]) -> None:
    from weightcast.cli import output

    output.show(result, False, report.view(result))
    text = capsys.readouterr().out
    assert "uniform over ipc, streaming, 2 engines" in text
    assert "one round trip per tensor" in text


@pytest.mark.parametrize("wrong", [{"num_engines": 0}, {"num_runs": 0}, {"trainer_ranks": 0}])
def test_wrong_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        small(**wrong)


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="leave out --device"):
        small(trainer_ranks=2, device="cuda")
    with pytest.raises(ValueError, match="add --device cuda"):
        small(transport="nccl")


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "gloo://127.0.0.1:0"), ("::1", "gloo://[::1]:0")])
def test_the_url_of_a_collective_transport(host: str, url: str) -> None:
    assert small(transport="gloo", host=host).transport_url == url


def test_ctrl_c_ends_the_engines() -> None:
    shapes = ["--shapes", "uniform", "--num-tensors", "10", "--total-mib", "8", "--runs", "1000000"]
    command = [sys.executable, "-m", "publishing", *shapes]
    with subprocess.Popen(command, cwd=BENCH, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c) as bench:
        try:
            engine = ProcessMeter(wait_for(lambda: next(children(bench.pid), None)))
            wait_for(lambda: engine.status_bytes("RssShmem") > 0)  # it has the arena: a publish is under way
            bench.send_signal(signal.SIGINT)
            assert bench.wait(DEADLINE_SECONDS) == exits.INTERRUPTED
        finally:
            bench.kill()
        assert bench.stderr is not None
        assert bench.stderr.read().endswith("scripts/bench: interrupted\n")
    with pytest.raises(ProcessLookupError):
        engine.cpu_seconds()


def heed_ctrl_c() -> None:
    """In the child: a shell has its background jobs ignore SIGINT, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(look: Callable[[], T]) -> T:
    """Look until there is something, for at most a deadline."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not (found := look()):
        assert time.monotonic() < end, "it did not come"
        threading.Event().wait(0.02)
    return found
