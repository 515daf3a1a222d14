"""A program that ends without closing what has threads in torch ends with its own exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weightcast import EngineServer, ModuleEngine, ModuleSource, Publisher, PublishOptions
from weightcast.errors import PublishError

ENGINE = """
import sys
import threading

import torch
import weightcast

torch.set_num_threads(1)
began, matrix = threading.Event(), torch.ones(64, 64)


class Busy(weightcast.ModuleEngine):
    def begin(self, copied):
        began.set()
        # Each of these gives the GIL up within C++, and takes it again there.
        for _ in range(3_000):
            torch.mm(matrix, matrix)
        super().begin(copied)


server = weightcast.EngineServer(Busy(torch.nn.Linear(8, 8))).start()
print(server.url, flush=True)
assert began.wait(60)
sys.exit(7)
"""


def test_an_engine_process_that_ends_while_a_version_streams_in() -> None:
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            options = PublishOptions(install="streaming")
            source = ModuleSource(torch.nn.Linear(8, 8))
            with Publisher(source, transport="ipc://", engines=[url], options=options) as publisher:
                with pytest.raises(PublishError):
                    publisher.publish()
                assert process.wait(60) == 7
        finally:
            process.kill()


TRAINER = """
import sys

import torch
import weightcast

torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(20)]).requires_grad_(False)
publisher = weightcast.Publisher(weightcast.ModuleSource(model), engines=[sys.argv[1]])
handle = publisher.start()
print(handle.version, flush=True)
sys.exit(7)
"""


def test_a_trainer_that_ends_while_its_version_is_installed() -> None:
    """The interpreter waits for the publish; the engine has all of it, or nothing."""
    serving = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(20)]).requires_grad_(False)
    with EngineServer(ModuleEngine(serving)) as server:
        done = subprocess.run(
            [sys.executable, "-c", TRAINER, server.url], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (7, "0\n"), done.stderr
        assert "Traceback" not in done.stderr
        with server.step() as version:
            assert version is None or version.number == 0
