"""TRL's own trainers and servers, with weightcast between them: the example, the recipe, ranks, engines that die.

The trainings run in processes of their own, as a user's do.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import trl
from ports import free_port
from real_engines.process import STOP_SECONDS
from real_engines.reference import ReferenceServer
from real_engines.setups import on
from torch.testing._internal.distributed.fake_pg import FakeStore

from real_vllm.conftest import Checkpoints
from real_vllm.oracle import NUM_TOKENS, PROMPT, assert_is_of, assert_other
from real_vllm.programs import PROGRAM_SECONDS, run
from real_vllm.servers import ONE, PLAIN, TESTS, Server, child_environment
from real_vllm.trainer import trainer
from weightcast import LocalEngine, PublishError, PublishOptions, cli
from weightcast.engines.tensors import TensorSink
from weightcast.integrations.trl import WeightcastTransfer

EXAMPLE = TESTS.parent / "examples" / "trl_async_grpo.py"
ENVIRONMENT = child_environment(ONE) | {
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONFAULTHANDLER": "1",
}
"""Of processes that train."""


def program(name: str) -> Path:
    return TESTS / "real_vllm" / name


@contextlib.contextmanager
def training(name: str, *arguments: str, num_ranks: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A program of this folder at work; what is left of it and its ranks is ended with this block."""
    launch = ["-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch = [*launch, "--nproc-per-node", str(num_ranks)] if num_ranks > 1 else []
    with subprocess.Popen(
        [sys.executable, *launch, str(program(name)), *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            # A launcher that is asked to end ends its ranks, which are in sessions of their own.
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            finally:
                process.kill()


@on(ONE)
def test_the_example_trains_a_policy_that_the_server_serves(
    server: Server, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    with trainer(server.setup, server.url) as it:
        before = it.publish(0).version
    arguments = [str(EXAMPLE), str(checkpoint()), server.url, str(tmp_path)]
    out = run(program("trl_on_cpus.py"), *arguments, environment=ENVIRONMENT)
    versions = [int(version) for version in re.findall(r"'weightcast/version_max': '(\d+)'", out)]
    assert versions == [before + 1 + update for update in range(6)], out
    assert server.version() == str(versions[-1])
    divergence = [float(value) for value in re.findall(r"'kl': '([^']+)'", out)]
    assert len(divergence) == 5, out
    assert abs(divergence[0]) < 1e-6, "the first step trains on answers of the very weights that it has"
    answer = server.ask(PROMPT, NUM_TOKENS)
    with Server(PLAIN, tmp_path) as cold:
        assert answer == cold.ask(PROMPT, NUM_TOKENS)
        assert_refused(cold.url)
    assert_is_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval(), PROMPT, answer)
    assert_other(it.of(0), PROMPT, answer)


def assert_refused(url: str) -> None:
    """An engine without weightcast ends the training by a sentence with the remedy, also where failures are skipped."""
    transfer = WeightcastTransfer([url], options=PublishOptions(on_failure="report"))
    with contextlib.ExitStack() as stack:
        stack.callback(transfer.destroy)
        with pytest.raises(PublishError, match="weight-transfer-config") as refused:
            transfer.send_weights(iter([("a", torch.ones(4))]))
    assert refused.value.__notes__ == [
        "on_failure='report' applies only after every engine has installed a first update"
    ]


@on(full=[ONE])
def test_the_recipe_for_server_mode_gives_each_step_answers_of_its_own_weights(
    server: Server, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    page = (TESTS.parent / "docs" / "trl.md").read_text()
    (recipe,) = [body for body in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "sync_weights" in body]
    (tmp_path / "recipe.py").write_text(recipe)
    arguments = [str(tmp_path / "recipe.py"), str(checkpoint()), server.url, str(tmp_path / "output")]
    with training("trl_server_mode.py", *arguments, num_ranks=2) as process:
        out, err = process.communicate(timeout=PROGRAM_SECONDS)
    assert process.returncode == 0, err[-4000:]
    differences = [float(value) for value in re.findall(r"'sampling/sampling_logp_difference/max': '([^']+)'", out)]
    assert len(differences) == 3, out
    assert max(differences) < 1e-3, "a step's answers are of other weights than the trainer's"


# --- several ranks, and engines that die ---


@pytest.fixture(scope="module")
def servers(checkpoint: Checkpoints) -> Iterator[list[ReferenceServer]]:
    servers = [ReferenceServer(checkpoint(), environment=ENVIRONMENT) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            server.launch()
        yield [stack.enter_context(server) for server in servers]


@pytest.fixture
def engines(servers: list[ReferenceServer]) -> list[ReferenceServer]:
    """Two that serve; the second one may be killed."""
    if servers[1].process.poll() is not None:
        servers[1].restart()
    return servers


def told(out: str) -> dict[str, Any]:
    """What the training printed last."""
    return json.loads(out.splitlines()[-1])


def logged(said: dict[str, Any], name: str) -> list[float]:
    return [log[f"weightcast/{name}"] for log in said["logs"] if f"weightcast/{name}" in log]


def assert_holds(engine: ReferenceServer, weights: Path) -> None:
    """The engine serves, and holds the saved weights, bit for bit."""
    assert cli.main(["verify", str(weights), "--engine", engine.url]) == 0
    assert engine.ask(PROMPT, NUM_TOKENS)


@contextlib.contextmanager
def losing(
    victim: ReferenceServer, model: Path, output: Path, *, num_ranks: int = 1, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A training whose engine `victim` is killed when the second step begins."""
    fields = {"model": str(model), "output": str(output), "victim": victim.url, "victim_pid": victim.process.pid}
    with training("trl_training.py", json.dumps(fields | options), num_ranks=num_ranks) as process:
        yield process


def test_sharded_ranks_train_on_without_an_engine_that_died_and_take_it_back(
    engines: list[ReferenceServer], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    engine, victim = engines
    options = {"urls": [engine.url, victim.url], "on_failure": "report", "num_steps": 5}
    with losing(victim, checkpoint(), tmp_path, num_ranks=2, **options) as process:
        assert victim.process_ended(PROGRAM_SECONDS)
        victim.restart()
        out, err = process.communicate(timeout=PROGRAM_SECONDS)
    assert process.returncode == 0, err[-8000:]
    said = told(out)
    assert said["parameters"] == ["DTensor"]
    # The first update is that at the start. The fourth step awaits the engine.
    assert logged(said, "failed_engines_total") == [0, 0, 1, 1, 0, 0]
    assert err.count("training goes on") == 2
    for each in engines:
        assert_holds(each, tmp_path)


def test_an_engine_that_died_ends_the_training_and_the_others_serve_its_last_weights(
    engines: list[ReferenceServer], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    engine, victim = engines
    urls = [engine.url, victim.url]
    with losing(victim, checkpoint(), tmp_path, urls=urls, kind="distillation") as process:
        out, err = process.communicate(timeout=PROGRAM_SECONDS)
    assert process.returncode == 1
    assert re.search(rf"PublishError: 1 of 2 engines did not take version \d+: {victim.url}[:/ ]", err), err
    assert logged(told(out), "failed_engines_total") == [0, 0], "of the update that failed nothing is logged"
    assert_holds(engine, tmp_path)


@pytest.mark.full
def test_no_rank_is_left_when_an_engine_ends_the_training(
    engines: list[ReferenceServer], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    engine, victim = engines
    with losing(victim, checkpoint(), tmp_path, urls=[engine.url, victim.url], num_ranks=2) as process:
        _, err = process.communicate(timeout=PROGRAM_SECONDS)
    assert process.returncode == 1
    assert re.search(rf"PublishError: 1 of 2 engines did not take version \d+: {victim.url}[:/ ]", err), err
    assert engine.ask(PROMPT, NUM_TOKENS)


# --- in one process ---


def test_each_update_is_of_the_tensors_as_they_are_then() -> None:
    """Cast on the way; the publisher plans once for tensors that stay where they are, and again where others come."""
    sink = TensorSink()
    weights = {"a": torch.randn(40, 8, dtype=torch.float64), "steps": torch.tensor(3)}
    transfer = WeightcastTransfer([LocalEngine(sink)], dtype=torch.bfloat16, transport="memory://")
    for version in range(4):
        if version == 2:
            weights["a"] = torch.randn(40, 8, dtype=torch.float64)  # in other memory
        if version == 3:
            weights["b"] = torch.ones(5)
        weights["a"].add_(1)
        transfer.send_weights((name, tensor.detach()) for name, tensor in weights.items())
        assert transfer.report.version == version
        expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in weights.items()}
        assert sink.held.keys() == expected.keys()
        assert all(torch.equal(sink.held[name], tensor) for name, tensor in expected.items())
    transfer.destroy()
    transfer.send_weights(iter(weights.items()))  # of a second `train`
    transfer.destroy()


def test_processes_gather_to_the_end_where_a_copy_fails() -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3, device="meta")
        yield "b", torch.ones(3, device="meta")
        ended.append(True)

    ended: list[bool] = []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        transfer = WeightcastTransfer([LocalEngine(TensorSink())], transport="memory://")
        with pytest.raises(NotImplementedError, match="meta"):
            transfer.send_weights(gathered())
        assert ended == [True]
        transfer.destroy()
    finally:
        dist.destroy_process_group()


# --- mistakes ---


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"transport": "smoke://"}, "smoke"),
        ({"engines": []}, "engines is empty: name every server"),
        ({"wait_ready_seconds": -1}, "wait_ready_seconds is -1; it must be positive"),
    ],
)
def test_a_wrong_argument_is_named_before_the_training(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WeightcastTransfer(**{"engines": ["http://127.0.0.1:8000"], **options})


@pytest.mark.parametrize(("version", "is_named"), [("1.15.0", True), ("1.16.3", False), ("2.0.0", True)])
def test_a_trl_that_was_not_tested_is_named_with_the_one_that_was(
    version: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trl, "__version__", version)
    WeightcastTransfer(["http://127.0.0.1:8000"]).destroy()
    assert (f"found TRL {version}" in caplog.text) is is_named
    assert ("pip install 'trl==1.16.*'" in caplog.text) is is_named
