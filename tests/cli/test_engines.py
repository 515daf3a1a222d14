"""serve, publish, inspect and verify together: a real engine process, two small checkpoints on disk."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import torch
from ports import free_port
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from weightcast import EngineServer, ModuleEngine, Publisher, TensorSource, cli
from weightcast.cli import exits, verify
from weightcast.errors import ControlError, PeerError

pytestmark = pytest.mark.cluster

END_SECONDS = 90
TOKEN = "s3cret-token"


@contextlib.contextmanager
def serving(
    model: Path, *options: str, end: signal.Signals | None = None, stderr: IO[str] | None = None
) -> Iterator[str]:
    """The URL of a `weightcast serve` process, which ends cleanly with the context: by `end`, or with its stdin."""
    command = [sys.executable, "-m", "weightcast.cli", "serve", str(model), "--port", "0", "--exit-with-parent"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
    with subprocess.Popen([*command, *options], **pipes, text=True) as process:  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith(f"weightcast: serving {model.name} at http://127.0.0.1:"), line
            if "0.0.0.0" in options:
                assert "listening on all addresses" in process.stdout.readline()
            yield line.split()[-1]
            if end is None:
                process.stdin.close()
            else:
                process.send_signal(end)
            assert process.wait(END_SECONDS) == exits.OK
        finally:
            process.kill()


def save_checkpoint(directory: Path, seed: int, dtype: torch.dtype = torch.bfloat16, **changes: int) -> Path:
    settings = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64} | changes
    config = Qwen3Config(
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, **settings
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "old": save_checkpoint(root / "old", 1),
        "new": save_checkpoint(root / "new", 2),
        "float": save_checkpoint(root / "float", 2, torch.float32),
        "wide": save_checkpoint(root / "wide", 3, hidden_size=48),
    }


@pytest.fixture(scope="module")
def url(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(checkpoints["old"], "--threads", "1") as url:
        yield url


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, object]]]:
    """Run a command with --json; its status and its object."""

    def run(*argv: object) -> tuple[int, dict[str, object]]:
        status = cli.main([*map(str, argv), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


Call = Callable[..., tuple[int, dict[str, object]]]


def test_publish_then_verify(url: str, checkpoints: dict[str, Path], call: Call) -> None:
    """A fresh engine holds its directory; after a publish it holds the other, as the version that the report names."""
    status, report = call("publish", checkpoints["new"], "--engine", url)
    assert status == exits.OK
    assert report["engines"][url]["ok"]  # type: ignore[index]
    status, verdict = call("verify", checkpoints["new"], "--engine", url)
    assert (status, verdict["ok"]) == (exits.OK, True)
    assert verdict["engines"][0]["weight_version"] == str(report["version"])  # type: ignore[index]

    status, verdict = call("verify", checkpoints["old"], "--engine", url)
    assert (status, verdict["ok"]) == (exits.NEGATIVE, False)
    differences = verdict["engines"][0]["differences"]  # type: ignore[index]
    assert {d["what"] for d in differences} == {"differs"}
    assert "model.layers.1.mlp.up_proj.weight" in {d["name"] for d in differences}


def test_publish_with_a_version_and_options(url: str, checkpoints: dict[str, Path], call: Call) -> None:
    options = ["--version", "41", "--install", "streaming", "--bucket-size-mib", "1", "--undo", "--takeover"]
    status, report = call("publish", checkpoints["old"], "--engine", url, *options)
    assert (status, report["version"]) == (exits.OK, 41)
    assert call("verify", checkpoints["old"], "--engine", url)[0] == exits.OK
    assert httpx.get(f"{url}/weight_info").json()["weight_version"] == "41"


def test_a_checkpoint_that_does_not_fit_is_refused(url: str, checkpoints: dict[str, Path], call: Call) -> None:
    before = httpx.get(f"{url}/weight_info").json()["weight_version"]
    status, report = call("publish", checkpoints["wide"], "--engine", url)
    assert status == exits.NEGATIVE
    assert report["engines"][url]["error"]["kind"] == "IncompatibleWeightsError"  # type: ignore[index]
    assert httpx.get(f"{url}/weight_info").json()["weight_version"] == before
    assert call("verify", checkpoints["wide"], "--engine", url)[0] == exits.NEGATIVE


def test_what_was_wrong_is_below_the_table_and_unwrapped(
    url: str, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["publish", str(checkpoints["wide"]), "--engine", url]) == exits.NEGATIVE
    out = capsys.readouterr().out
    assert "was not installed anywhere" in out
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    assert len(lines) >= 12, out
    for norm in ("model.layers.0.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"):
        assert out.count(f"'{norm}' has the shape [48], the engine has [32]") == 1, out
    assert cli.main(["verify", str(checkpoints["wide"]), "--engine", url]) == exits.NEGATIVE
    out = capsys.readouterr().out
    assert "does not hold this checkpoint: 20 differences in 24 tensors, 62.0 kB" in out
    name = "model.layers.1.post_attention_layernorm.weight"
    [line] = [line for line in out.splitlines() if name in line]
    assert line.startswith(f"  {name} differs: checkpoint bfloat16[48] "), "whole, and listed once"
    assert ", engine bfloat16[32] " in line


def test_publish_casts_to_the_dtype_of_the_engine(url: str, checkpoints: dict[str, Path], call: Call) -> None:
    status, report = call("publish", checkpoints["float"], "--engine", url)
    assert status == exits.NEGATIVE
    assert report["engines"][url]["error"]["kind"] == "IncompatibleWeightsError"  # type: ignore[index]
    assert call("publish", checkpoints["float"], "--engine", url, "--dtype", "bfloat16")[0] == exits.OK
    assert call("inspect", url)[1]["tensors"][0]["dtype"] == "bfloat16"  # type: ignore[index]


def test_one_of_two_engines_is_away(url: str, checkpoints: dict[str, Path], call: Call) -> None:
    gone = "http://127.0.0.1:9"
    status, report = call("publish", checkpoints["new"], "--engine", url, "--engine", gone)
    assert status == exits.NEGATIVE
    assert report["engines"][url]["ok"]  # type: ignore[index]
    assert report["engines"][gone]["error"]["kind"] == "PeerDiedError"  # type: ignore[index]
    assert call("verify", checkpoints["new"], "--engine", url)[0] == exits.OK


def test_inspect_an_engine_and_a_checkpoint(url: str, checkpoints: dict[str, Path], call: Call) -> None:
    status, engine = call("inspect", url)
    assert status == exits.OK
    assert engine["engine"]["weight_version"]  # type: ignore[index]
    status, directory = call("inspect", checkpoints["old"])
    assert (status, directory["engine"]) == (exits.OK, None)
    shapes = [{t["name"]: t["shape"] for t in found["tensors"]} for found in (engine, directory)]  # type: ignore[union-attr, index]
    assert shapes[0] == shapes[1]
    assert (engine["num_tensors"], engine["num_bytes"]) == (directory["num_tensors"], directory["num_bytes"])


def test_whole_names_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model." + ".".join(["a_long_name"] * 40)
    save_file({name: torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    assert cli.main(["inspect", str(tmp_path)]) == exits.OK
    out = capsys.readouterr().out
    assert name in out
    assert out.endswith("1 tensor, 4 bytes\n")


def test_inspect_with_a_filter(checkpoints: dict[str, Path], call: Call) -> None:
    _, found = call("inspect", checkpoints["old"], "--filter", "*.layers.1.*norm.weight")
    assert found["num_tensors"] == 4
    assert all(".layers.1." in tensor["name"] for tensor in found["tensors"])  # type: ignore[union-attr, index]


def test_a_filter_that_nothing_matches(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(checkpoints["old"]), "--filter", "nothing*"]) == exits.OK
    assert capsys.readouterr().out == "no tensor matches 'nothing*'\n"


def test_serve_refuses_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save_checkpoint(tmp_path, 1) / "model.safetensors"
    capsys.readouterr()
    file.write_bytes(file.read_bytes()[:-100])
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == exits.USAGE
    err = capsys.readouterr().err
    assert f"a safetensors file of {tmp_path} is damaged" in err
    assert err.count("\n") == 1
    file.unlink()
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == exits.USAGE
    assert "--random-weights" in capsys.readouterr().err


def test_serve_names_a_host_that_is_none(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(checkpoints["old"]), "--host", "256.0.0.1.", "--port", "0"]) == exits.USAGE
    assert "--host 256.0.0.1. is not an address" in capsys.readouterr().err


def test_only_what_was_compared_is_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of a large checkpoint take minutes, in which another version may come."""
    ours, tensors = (TensorSource({"weight": torch.full((4, 4), value)}) for value in (1.0, 2.0))
    with EngineServer(ModuleEngine(torch.nn.Linear(4, 4, bias=False))) as server:
        with Publisher(tensors, engines=[server.url]) as publisher:
            publisher.publish()
            ask = verify._ask

            def overtaken(*args: Any) -> Any:
                found = ask(*args)
                publisher.publish()
                return found

            with monkeypatch.context() as patch:
                patch.setattr(verify, "_ask", overtaken)
                with pytest.raises(ControlError, match="from version 0, which differs, to 1"):
                    verify.verify(ours, [server.url], None, quarantine=True)
        assert not server.gate.torn
        assert not verify.verify(ours, [server.url], None, quarantine=True).ok
        assert "'weight'" in server.gate.torn


def test_an_engine_that_differs_is_quarantined_whatever_another_one_does() -> None:
    ours, tensors = (TensorSource({"weight": torch.full((4, 4), value)}) for value in (1.0, 2.0))
    with EngineServer(ModuleEngine(torch.nn.Linear(4, 4, bias=False))) as server:
        with Publisher(tensors, engines=[server.url]) as publisher:
            publisher.publish()
        dead = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(PeerError):
            verify.verify(ours, [dead, server.url], None, quarantine=True)
        assert "'weight'" in server.gate.torn


def test_tables_for_people(url: str, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["publish", str(checkpoints["new"]), "--engine", url]) == exits.OK
    assert f"serves {httpx.get(f'{url}/weight_info').json()['weight_version']}" in capsys.readouterr().out
    assert cli.main(["inspect", url]) == exits.OK
    assert "24 tensors" in capsys.readouterr().out
    assert cli.main(["verify", str(checkpoints["new"]), "--engine", url]) == exits.OK
    assert "holds exactly this checkpoint" in capsys.readouterr().out
    assert cli.main(["verify", str(checkpoints["old"]), "--engine", url]) == exits.NEGATIVE
    assert "differs" in capsys.readouterr().out


def test_the_engine_answers_completions(url: str) -> None:
    answer = httpx.post(
        f"{url}/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}, timeout=60
    )
    assert answer.status_code == 200
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "old"


def test_an_export_with_configuration_can_be_served(checkpoints: dict[str, Path], call: Call, tmp_path: Path) -> None:
    """And each install is one line of the server's log."""
    store, exported, log = f"file://{tmp_path}/store", tmp_path / "exported", tmp_path / "log"
    assert call("publish", checkpoints["new"], "--transport", store)[0] == exits.OK
    status, found = call("export", store, exported, "--config-from", checkpoints["old"])
    assert status == exits.OK
    assert {"config.json", "model.safetensors"} <= set(found["files"])  # type: ignore[call-overload]
    with log.open("w") as stderr, serving(exported, stderr=stderr, end=signal.SIGTERM) as url:
        assert call("verify", checkpoints["new"], "--engine", url)[0] == exits.OK
        assert call("publish", checkpoints["old"], "--engine", url, "--version", "7")[0] == exits.OK
    [line] = [line for line in log.read_text().splitlines() if "installed" in line]
    assert re.search(r" INFO weightcast\..*: installed version 7 of run \w{8} in \d\.\d{3} s: 24 tensors, ", line)


def test_an_export_needs_a_model_directory_for_its_configuration(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, exported = f"file://{tmp_path}/store", tmp_path / "exported"
    assert cli.main(["publish", str(checkpoints["new"]), "--transport", store]) == exits.OK
    assert "tensors: 24" in capsys.readouterr().out
    assert cli.main(["export", store, str(exported), "--config-from", str(tmp_path)]) == exits.USAGE
    assert f"{tmp_path} has no config.json" in capsys.readouterr().err
    assert not exported.exists()


def test_ctrl_c_at_once_is_a_clean_end(checkpoints: dict[str, Path]) -> None:
    with serving(checkpoints["old"], "--random-weights", end=signal.SIGINT):
        pass


def test_a_token_guards_the_weight_routes(checkpoints: dict[str, Path], call: Call, tmp_path: Path) -> None:
    """And on all addresses, a second line says so. Its health needs none, and may follow the version."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    options = ("--random-weights", "7", "--token-file", str(file), "--host", "0.0.0.0", "--health-max-behind", "1")
    with serving(checkpoints["old"], *options, end=signal.SIGTERM) as url:
        assert call("inspect", url)[0] == exits.NEGATIVE
        assert call("inspect", url, "--token-file", file)[0] == exits.OK
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 503
        assert call("publish", checkpoints["new"], "--engine", url)[0] == exits.NEGATIVE
        assert call("verify", checkpoints["new"], "--engine", url, "--token-file", file)[0] == exits.NEGATIVE
        assert call("publish", checkpoints["new"], "--engine", url, "--token-file", file)[0] == exits.OK
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert call("verify", checkpoints["new"], "--engine", url, "--token-file", file)[0] == exits.OK


def test_another_host_needs_a_token(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(checkpoints["old"]), "--host", "0.0.0.0", "--port", "0"]) == exits.USAGE
    assert "--token-file" in capsys.readouterr().err
