"""Processes that tests end at any moment.

`write DIR OPTIONS RUN FIRST SECONDS`, `follow DIR OPTIONS`, `hold DIR LABEL`,
and `writers DIR OPTIONS`, which forks a writer for each line `RUN FIRST`, says its pid, and says when it has gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from store.store_kit import Holder, manifest_of, model, number_in, send, url

from weightcast.format.manifest import WeightVersion
from weightcast.serving.follower import Follower
from weightcast.store.address import DirectoryAddress
from weightcast.store.reading import pinned
from weightcast.transports.store import StoreSender


def write(directory: str, options: str, run: str, first: str, seconds: str) -> None:
    """Versions from `first` on, as fast as it goes; says which were committed."""
    sender = StoreSender(url(Path(directory), options), run=run, deadline_seconds=30.0)
    manifest = manifest_of(model(0))
    print("ready", flush=True)
    end, number = time.monotonic() + float(seconds), int(first)
    while time.monotonic() < end:
        send(sender, manifest, WeightVersion(run, number), model(number))
        print(number, flush=True)
        number += 1
    sender.close()


def follow(directory: str, options: str) -> None:
    """Take versions and check each by its content, until a line comes; says which."""
    engine, stop = Holder(), threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    last = -1
    with Follower(url(Path(directory), options), engine) as follower:
        print("ready", flush=True)
        while not stop.is_set():
            followed = follower.wait(0.2, stop=stop)
            if followed is not None:
                found = number_in(engine.held)
                assert found == followed.version, f"version {found} in {followed.version}"
                assert found > last, f"version {found} after {last}"
                last = found
                print(found, flush=True)


def hold(directory: str, label: str) -> None:
    """Pin the newest version until the process ends, or a line comes."""
    with pinned(DirectoryAddress(Path(directory)), label=label):
        print("ready", flush=True)
        sys.stdin.readline()


def writers(directory: str, options: str) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        run, first = line.split()
        pid = os.fork()
        if pid == 0:
            print("pid", os.getpid(), flush=True)
            write(directory, options, run, first, "60")
            os._exit(0)
        os.waitpid(pid, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    {"write": write, "follow": follow, "hold": hold, "writers": writers}[sys.argv[1]](*sys.argv[2:])
