"""Versions of a store, and checkpoint directories, passed on to a running vLLM by `weightcast follow`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.models import make_model
from real_vllm.servers import ONE, Server
from real_vllm.trainer import FILE, trainer

FOLLOW_SECONDS = 120


@on(ONE)
def test_what_comes_into_a_store_is_served(server: Server, tmp_path: Path) -> None:
    store = FILE.format(tmp_path)
    command = [sys.executable, "-m", "weightcast.cli", "follow", store, "--engine", server.url, "--json"]
    with (
        trainer(server.setup, transport=store) as it,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower,
        _ended(follower),
    ):
        assert follower.stdout is not None
        # Above every version that the server has had: a relay keeps the store's numbers.
        first = 1 + int("".join(filter(str.isdigit, server.version())) or 0)
        for version, seed in ((first, 1), (first + 1, 0), (first + 2, 1)):
            it.publish(seed, version=version)
            followed = json.loads(follower.stdout.readline())
            assert followed["version"] == version
            assert server.version() == str(version)
            assert_serves(server, seed)
        follower.terminate()
        assert follower.wait(FOLLOW_SECONDS) == 0


@on(ONE)
def test_directories_that_a_loop_writes_are_served(server: Server, tmp_path: Path) -> None:
    """As transformers' trainer writes them, with a marker. The follower's second life sends the newest once more."""
    command = [sys.executable, "-m", "weightcast.cli", "follow", str(tmp_path), "--marker", "DONE"]
    command += ["--engine", server.url, "--json"]
    first = 1 + int("".join(filter(str.isdigit, server.version())) or 0)
    for seeds in ((1, 0), (1,)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower, _ended(follower):
            assert follower.stdout is not None
            if len(seeds) == 1:
                assert json.loads(follower.stdout.readline())["version"] == first - 1
            for seed in seeds:
                model = make_model(server.setup.family, seed, server.setup.dtype)
                model.save_pretrained(tmp_path / f"checkpoint-{first}")
                (tmp_path / f"checkpoint-{first}" / "DONE").touch()
                assert json.loads(follower.stdout.readline())["version"] == first
                assert server.version() == str(first)
                assert_serves(server, seed)
                first += 1
            follower.terminate()
            assert follower.wait(FOLLOW_SECONDS) == 0


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
