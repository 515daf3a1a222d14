"""l. Under MPS trainer and engine run at once: whole and late publishes again.

The section starts and ends the daemon.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from _gpu import section
from _gpu.peers import Peer
from _gpu.section import MIB, Here

DAEMON = "nvidia-cuda-mps-control"


def run(here: Here) -> None:
    if here.dry:
        # The same publishes, without a daemon.
        _publishes(here, {})
        return
    if shutil.which(DAEMON) is None:
        here.skip(f"MPS ({DAEMON} is not installed)")
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in paths.values():
            Path(path).mkdir()
        environment = os.environ | paths
        daemon = subprocess.Popen([DAEMON, "-f"], env=environment, stdout=subprocess.DEVNULL)
        try:
            if not section.within(10.0, lambda: Path(folder, "pipe", "control").exists() or daemon.poll() is not None):
                here.skip("MPS (its daemon did not begin)")
                return
            if daemon.poll() is not None:
                here.skip(f"MPS (its daemon ended with status {daemon.poll()})")
                return
            _publishes(here, paths)
            servers = subprocess.run(
                [DAEMON], input="get_server_list\n", capture_output=True, text=True, env=environment, timeout=10.0
            )
            used = bool(servers.stdout.strip())
            here.check("trainer and engine were clients of MPS", used, servers.stdout + servers.stderr)
        finally:
            subprocess.run([DAEMON], input="quit\n", text=True, env=environment, timeout=20.0, capture_output=True)
            daemon.terminate()
            daemon.wait(10.0)


def _publishes(here: Here, environment: dict[str, str]) -> None:
    shapes = section.even(64, here.size(16 * MIB, 64 << 10))
    with Peer(here, "trainer", shapes, environment) as trainer, Peer(here, "engine", shapes, environment) as engine:
        trainer.ready()
        engine.ready()
        version = 0
        for install, late_ms in (("streaming", 0.0), ("staged", 0.0), ("streaming", 20.0), ("staged", 20.0)):
            what = f"1 GB {install}, streams {late_ms:g} ms late"
            with here.part(what):
                for peer in (trainer, engine):
                    peer.ask("slow", milliseconds=late_ms)
                trainer.ask("open", engines=[engine.url], install=install, undo=bool(late_ms))
                seconds = []
                for _ in range(here.size(10 if install == "streaming" else 3, 2)):
                    version += 1
                    seconds.append(trainer.ask("publish", version=version)["report"]["seconds"]["total"])
                    found = engine.wrong(version)
                    here.check(f"version {version} is right", not found, found)
                trainer.ask("close_publisher")
                here.fact(f"{what}: ms", round(statistics.median(seconds) * 1e3, 1))
