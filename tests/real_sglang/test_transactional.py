"""What a user relies on with weightcast beside SGLang: what is published is served, whole, labelled, nothing stale."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from real_engines.setups import on
from real_vllm.models import make_model
from real_vllm.oracle import PROMPT, Answer, joined
from real_vllm.test_acceptance import LONG_PROMPT, NUM_BEFORE_PAUSE, NUM_STREAMED, NUM_TRIES, Stream
from real_vllm.trainer import GLOO, IPC, trainer

from real_sglang.faults import Break
from real_sglang.oracle import assert_drops_caches, assert_is_of, assert_serves, assert_went_on
from real_sglang.servers import ONE, TWO, Server, Setup, Span
from weightcast import HttpEngine, ModuleSource, Publisher, cli
from weightcast.cli import exits
from weightcast.errors import PublishError

FAMILIES = [
    Setup(family, dtype, tp)
    for family, dtype, tp in (
        ("qwen2", torch.float32, 1),
        ("llama-tied", torch.float32, 2),
        ("qwen3-moe", torch.float32, 1),
        ("qwen3", torch.bfloat16, 2),
        ("ernie-moe", torch.float32, 1),
    )
]
GATED = Setup(token="its", max_behind="1")
HALF = Setup(dtype=torch.bfloat16)
ROUTER_BIAS = Setup("glm4-moe")
"""Router and experts have one bias for both."""
LATENT = Setup("deepseek-v2")
"""SGLang makes MLA's absorbed weights in place at each load. It can't generate with MLA without its kernels."""


@on(ONE, TWO)
@pytest.mark.parametrize("transport", [IPC, GLOO, "file"], ids=["ipc", "gloo", "file"])
def test_alternating_publishes_serve_what_was_published(server: Server, transport: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}" if transport == "file" else transport
    with trainer(server.setup, server.url, transport=url) as it:
        for seed in (1, 0, 1):
            report = it.publish(seed)
            assert report.ok
            assert server.version() == str(report.version)
            assert_serves(server, seed)
        (result,) = report.engines.values()
        num_ranks = server.setup.tp
        assert len(result.read_bytes) == len(result.installed_bytes) == num_ranks
        assert max(result.read_bytes) <= (0.56 if transport != GLOO and num_ranks == 2 else 1.01) * report.num_bytes
        # From the second version on by copies: of what other ranks hold nothing.
        assert max(result.installed_bytes) <= (0.56 if num_ranks == 2 else 1.01) * report.num_bytes


@on(ONE, TWO)
@pytest.mark.parametrize("transport", [GLOO, IPC], ids=["gloo", "ipc"])
def test_deltas_give_what_a_full_update_gives(server: Server, transport: str) -> None:
    with trainer(server.setup, server.url, transport=transport, delta="always", verify="installed") as it:
        it.publish(1)
        for seed in (1, 0):
            it.publish(seed)
            near = it.publish_near(seed)
            report = it.publish(seed)
            for each in (near, report):
                assert each.delta is not None
                assert each.delta.num_engines == 1
                assert each.delta.num_bytes < each.num_bytes / 4
            assert server.version() == str(report.version)
            assert_serves(server, seed)


@on(ONE, TWO)
def test_what_is_installed_is_proven_in_the_engine(server: Server) -> None:
    """On every rank; and one bit of one rank's memory that is another is found, by name, rank and block."""
    with trainer(server.setup, server.url, verify="installed", on_failure="report") as it:
        for seed in (1, 0, 1):
            report = it.publish(seed)
            assert report.ok, report
            (result,) = report.engines.values()
            assert not result.unproven
            assert_serves(server, seed)
        rank = server.setup.tp - 1
        with server.failing(Break(rank=rank, corrupt="model.layers.1.mlp.gate_up_proj.weight")):
            report = it.publish(0)
        (result,) = report.engines.values()
        assert result.error is not None
        assert "'model.layers.1.mlp.gate_proj.weight' on rank " + str(rank) in result.error.message
        assert result.error.message.count("'model.") == 1
        assert server.generate(PROMPT, 4).status_code == 503
        assert it.publish(1).ok
        assert_serves(server, 1)
        verify = ["verify", str(server.folder), "--engine", server.url]
        assert cli.main(verify) == exits.NEGATIVE
        assert it.publish(0).ok
        assert cli.main(verify) == exits.OK


@on(TWO)
def test_an_install_is_one_line_of_the_servers_log(server: Server) -> None:
    """Whatever the number of ranks."""
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        report = it.publish(0)
    lines = server.log_lines(f"installed version {report.version} of run {report.run[:8]} in ")
    assert len(lines) == 1, lines


@on(TWO)
def test_updates_are_in_the_servers_own_metrics(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        before, report = server.metrics(), it.publish(0)
    after = server.metrics()
    served = [each["weightcast_engine_version"] for each in (before, after)]
    assert served == [report.version - 1, report.version]
    assert after["weightcast_torn"] == 0
    stages = [f"weightcast_update_seconds_count {stage}" for stage in ("offer", "seal", "install")]
    for name in ("weightcast_pause_seconds_count", *stages):
        assert after[name] == before[name] + 1
    assert after["weightcast_paused"] == 0
    for path, paused in (("/pause", 1), ("/resume", 0)):
        assert server.post(path).status_code == 200
        assert server.metrics()["weightcast_paused"] == paused


@on(GATED)
def test_health_depends_on_the_version(server: Server) -> None:
    """That of routers. It needs no token, and SGLang answers it where weightcast doesn't refuse."""

    def health() -> set[tuple[int, str]]:
        assert httpx.get(f"{server.url}/ping", trust_env=False).status_code == 200, "it lives"
        paths = ("/health", "/health_generate", "/ready")
        replies = [httpx.get(f"{server.url}{path}", trust_env=False, timeout=60) for path in paths]
        return {(reply.status_code, reply.json()["error"]["message"] if reply.content else "") for reply in replies}

    assert health() == {(503, "no publisher's version was installed yet")}
    with trainer(server.setup, server.url) as it:
        version = it.publish(1).version
        assert health() == {(200, "")}
        for behind in (1, 2):
            with server.failing(Break(exchange="model.layers.1.input_layernorm")):
                it.failure(0)
            stale = f"version {version} is served, 2 behind {version + 2}; at most 1 is allowed"
            assert health() == {(200, "") if behind == 1 else (503, stale)}
        it.publish(0)
        assert health() == {(200, "")}
        it.publisher.remove_engine(server.url)
        ((status, reason),) = health()
        assert status == 503
        assert "goes on without this engine" in reason
        assert server.generate(PROMPT, 4).status_code == 200


@on(HALF)
def test_each_tensor_is_cast_to_what_the_engine_has(server: Server) -> None:
    """A trainer in float32, asked for no dtype of its own."""
    source = ModuleSource(make_model(server.setup.family, 1, server.setup.dtype).float(), dtype="engine")
    engine = HttpEngine(server.url)
    with contextlib.closing(engine), Publisher(source, engines=[engine]) as publisher:
        assert set((engine.dtypes(source.specs()) or {}).values()) == {"bfloat16"}
        report = publisher.publish()
        assert report.num_bytes * 2 == sum(spec.num_bytes for spec in source.specs())
        assert_serves(server, 1)


@on(ROUTER_BIAS, full=FAMILIES)
def test_families(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        for seed in (1, 0, 1):
            report = it.publish(seed)
            assert server.version() == str(report.version)
            assert_serves(server, seed)


@on(ONE, TWO, LATENT)
def test_an_install_leaves_the_very_weights_that_a_load_from_disk_leaves(server: Server, tmp_path: Path) -> None:
    make_model(server.setup.family, 1, server.setup.dtype).save_pretrained(tmp_path)
    reply = server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert reply.status_code == 200, reply.text
    from_disk = server.checksum()
    for install in ("staged", "streaming"):
        with trainer(server.setup, server.url, install=install) as it:
            it.publish(0)
            assert server.checksum() != from_disk
            it.publish(1)
            assert server.checksum() == from_disk


@on(ONE, full=[TWO])
def test_weights_that_sglang_changes_by_itself_are_of_no_version(server: Server) -> None:
    """By whichever of its routes, and also where one of them fails, which may have written some."""
    strangers: list[tuple[str, dict[str, Any], str]] = [
        ("/update_weights_from_disk", {"model_path": str(server.folder)}, "default"),
        ("/update_weights_from_disk", {"model_path": str(server.folder), "weight_version": "theirs"}, "theirs"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "default"),
        ("/begin_weight_update", {}, "default"),
        ("/weights_checker", {"action": "reset_tensors"}, "default"),
    ]
    with trainer(server.setup, server.url) as it:
        version = str(it.publish(1).version)
        for path, body, label in strangers:
            assert (server.version(), server.get("/weight_info")["run"]) == (version, it.publisher.run)
            server.post(path, body)
            assert server.answer(PROMPT, 4).spans == [(label, 0, 4)], path
            info = server.get("/weight_info")
            assert (info["weight_version"], info["run"], info["torn"]) == (label, "", ""), path
            assert httpx.get(f"{server.url}/weight_ready", trust_env=False).status_code == 503, path
            if path == "/begin_weight_update":
                assert server.post("/end_weight_update").status_code == 200
            assert it.publisher.sync(server.url).ok
            assert server.get("/weight_ready")["weight_version"] == version
            assert_serves(server, 1)
        it.publish(0)
        assert_serves(server, 0)


@on(ONE, TWO)
@pytest.mark.parametrize("layer", ["input_layernorm", "self_attn.o_proj"])
def test_a_layer_that_took_anothers_place_is_refused_at_the_offer(server: Server, layer: str) -> None:
    """SGLang computes with the former norm, whatever is loaded into the one in its place."""
    layer = f"model.layers.1.{layer}"
    with trainer(server.setup, server.url) as it:
        it.publish(1)
    with server.failing(Break(exchange=layer)), trainer(server.setup, server.url) as it:
        with pytest.raises(PublishError, match=f"{layer} took another layer's place"):
            it.publish(0)
        assert_serves(server, 1)
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        assert_serves(server, 0)


@on(ONE, TWO)
def test_an_install_does_not_collect_garbage(server: Server) -> None:
    """It takes longer than the install does; on a GPU SGLang would give back the device's memory in its place."""
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        before = server.num_collections()
        it.publish(1)
        assert server.num_collections() == before
    assert server.post("/flush_cache").status_code == 200
    assert server.num_collections() > before, "what is counted is not what SGLang does"


@on(ONE, TWO)
def test_an_answer_says_which_version_it_is_of(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        first, second = it.publish(0).version, it.publish(1).version
        assert second > first
        assert server.answer(PROMPT, 12).spans == [(str(second), 0, 12)]


@on(ONE, TWO)
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_no_cache_of_the_old_version_is_used(server: Server, mode: Any) -> None:
    engine = HttpEngine(server.url, pause=mode)
    with contextlib.closing(engine), trainer(server.setup, engine) as it:
        assert_drops_caches(server, it.publish, LONG_PROMPT)


@on(ONE, TWO)
def test_a_running_request_goes_on_under_the_new_version_and_says_where(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        for _ in range(NUM_TRIES):
            first = it.publish(0).version
            stream = Stream(server.stream(PROMPT, NUM_STREAMED))
            second = it.publish(1, on_progress=stream).version
            parts = stream.awaited()
            if len(parts[-1].spans) > 1:
                break
        answer = joined(part.answer for part in parts)
        assert len(answer.tokens) == NUM_STREAMED
        cut = _cut(parts[-1].spans, first, second)
        assert NUM_BEFORE_PAUSE <= cut < NUM_STREAMED
        assert_is_of(server, 0, PROMPT, Answer(answer.tokens[:cut], answer.logprobs[:cut]))
        assert_went_on(server, 1, PROMPT, answer, cut)


def _cut(spans: Sequence[Span], first: int, second: int) -> int:
    """Where the second version begins; the spans must be of the two, in order and without a gap."""
    (old, start, cut), (new, next_start, _end) = spans
    assert (old, start, new, next_start) == (str(first), 0, str(second), cut)
    return cut


@on(ONE)
@pytest.mark.parametrize(("mode", "is_whole"), [("wait", True), ("abort", False)])
def test_pause_wait_lets_requests_end_and_abort_ends_them(server: Server, mode: Any, is_whole: bool) -> None:
    engine = HttpEngine(server.url, pause=mode)
    with contextlib.closing(engine), trainer(server.setup, engine) as it:
        for _ in range(NUM_TRIES):
            it.publish(0)
            stream = Stream(server.stream(PROMPT, NUM_STREAMED))
            it.publish(1, on_progress=stream)
            answer = joined(part.answer for part in stream.awaited())
            if is_whole or len(answer.tokens) < NUM_STREAMED:
                break
        assert (len(answer.tokens) == NUM_STREAMED) is is_whole
        assert_is_of(server, 0, PROMPT, answer)
        assert_serves(server, 1)


_WITHOUT_SGLANG = """
import sys
sys.modules["sglang"] = None  # whoever imports it now gets an ImportError
sys.path.insert(0, sys.argv[2])
from real_vllm.models import make_model
from weightcast import ModuleSource, Publisher
with Publisher(ModuleSource(make_model("qwen2", 1)), engines=[sys.argv[1]]) as publisher:
    try:
        publisher.publish()
    except Exception as error:
        print(error)
"""


@on(ONE)
def test_the_trainer_needs_no_sglang(server: Server) -> None:
    """And another model than the server's is refused by name."""
    command = [sys.executable, "-c", _WITHOUT_SGLANG, server.url, str(Path(__file__).parents[1])]
    path = str(Path(__file__).parent / "stand_ins")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=_environment(PYTHONPATH=path)
    )
    assert done.returncode == 0, done.stderr
    assert "not fit this engine" in done.stdout
    assert "self_attn.q_proj.bias" in done.stdout


def _environment(**more: str) -> dict[str, str]:
    import os

    return os.environ | more
