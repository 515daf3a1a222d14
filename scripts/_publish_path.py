"""How far it is from `Publisher.publish` to `Engine.commit`: frames and files of weightcast, both sides together.

One trainer rank publishes one Linear three times to a reference server over ipc. Printed are the calls that lead to the
first commit, on the publisher's side down to the request that installs and on the engine's side from its route on; how
many files the first publish goes through; and how many Python calls of ours, in how many functions and files, the third
one makes, in every thread of both sides. Exits with 1 above the limits of docs/architecture.md.
"""

from __future__ import annotations

import collections
import concurrent.futures
import sys
import threading
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import weightcast
from weightcast.control.client import HttpConnection
from weightcast.format.manifest import WeightVersion

PACKAGE = Path(weightcast.__file__).parent
MAX_FRAMES, MAX_FILES = 14, 39
MAX_THIRD = {"calls": 400, "functions": 230, "files": 28}
"""What the third publish makes varies by a few: how often something is looked at, and by which function, depends on who
is late."""


class Recorder:
    """Counts the calls of the package's functions while it is on, comprehensions and generators among them."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls = collections.Counter[CodeType]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.calls[frame.f_code] += 1

    @property
    def files(self) -> list[str]:
        return sorted({str(Path(code.co_filename).relative_to(PACKAGE)) for code in self.calls})


def ours() -> list[str]:
    """The package's frames of the calling thread, outermost first, without the caller's own."""
    found = []
    for frame in traceback.extract_stack()[:-2]:
        if frame.filename.startswith(str(PACKAGE)):
            found.append(f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.name}")
    return found


def main() -> None:
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    publisher_side: list[str] = []
    route: list[str] = []
    thread: list[str] = []

    class Engine(weightcast.ModuleEngine):
        def commit(self, version: WeightVersion) -> None:
            thread.extend([*ours(), "engines/module.py:commit"])
            super().commit(version)

    request = HttpConnection.request

    def recording(connection: HttpConnection, method: str, target: str, *others: Any) -> tuple[int, bytes]:
        if "/finish_weight_update" in target:
            publisher_side.extend(ours())
        return request(connection, method, target, *others)

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *args: object, **options: object) -> object:  # type: ignore[override]
            # The last call from a route before the commit is that of the install.
            if not thread and any(frame.startswith("control/") for frame in ours()):
                route[:] = [frame for frame in ours() if not frame.startswith("control/server/")]
            return super().submit(*args, **options)  # type: ignore[arg-type]

    HttpConnection.request = recording  # type: ignore[method-assign]
    # The server makes its pool of threads by this name.
    concurrent.futures.ThreadPoolExecutor = Pool  # type: ignore[misc]
    model = torch.nn.Linear(4, 4)
    with (
        weightcast.EngineServer(Engine(torch.nn.Linear(4, 4))) as server,
        weightcast.Publisher(weightcast.ModuleSource(model), engines=[server.url]) as publisher,
    ):
        recorder.is_on = True
        publisher.publish()
        recorder.is_on = False
        frames, files = publisher_side + route + thread, recorder.files
        publisher.publish()
        recorder.calls.clear()
        recorder.is_on = True
        publisher.publish()
        recorder.is_on = False
    third = {"calls": recorder.calls.total(), "functions": len(recorder.calls), "files": len(recorder.files)}
    print("\n".join(f"  {frame}" for frame in frames))
    print(f"{len(frames)} frames from publish() to Engine.commit")
    print(f"first publish: {len(files)} files: {' '.join(files)}")
    print(f"third publish: {', '.join(f'{number} {what}' for what, number in third.items())}")
    if len(frames) > MAX_FRAMES or len(files) > MAX_FILES:
        sys.exit(f"the limits are {MAX_FRAMES} frames and {MAX_FILES} files")
    if any(third[what] > most for what, most in MAX_THIRD.items()):
        sys.exit(
            f"the limits of the third publish are {', '.join(f'{most} {what}' for what, most in MAX_THIRD.items())}"
        )


if __name__ == "__main__":
    main()
