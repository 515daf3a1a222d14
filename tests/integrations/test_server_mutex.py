"""API servers share turns: among real processes, also when one of them is killed in its turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcast.errors import ControlError, PeerTimeoutError
from weightcast.integrations.plugin.server_mutex import ServerMutex

OTHER = """
import asyncio, sys
from weightcast.integrations.plugin.server_mutex import ServerMutex

async def main():
    turns = ServerMutex.of_several(2, launcher=int(sys.argv[1]), folder=sys.argv[2])
    async with turns.turn(10.0):
        turns.in_doubt = True
        print("mine", flush=True)
        input()
    print("given back", flush=True)
    input()

asyncio.run(main())
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has the turn until it is sent a line."""
    command = [sys.executable, "-c", OTHER, str(os.getpid()), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        yield process
        process.kill()


async def granted(turns: ServerMutex, deadline_seconds: float) -> bool:
    try:
        async with turns.turn(deadline_seconds):
            return True
    except PeerTimeoutError:
        return False


@pytest.mark.parametrize("is_killed", [False, True], ids=["given back", "killed"])
def test_a_turn_is_had_by_one_process_at_a_time(other: subprocess.Popen[str], tmp_path: Path, is_killed: bool) -> None:
    with contextlib.closing(ServerMutex.of_several(2, launcher=os.getpid(), folder=str(tmp_path))) as turns:
        assert list(tmp_path.iterdir()) == [], "the last to come removes the name"
        assert turns.in_doubt
        assert not asyncio.run(granted(turns, 0.1))
        if is_killed:
            other.kill()
        else:
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()
        assert asyncio.run(granted(turns, 10.0))
        assert turns.in_doubt, "only who asked the ranks may say otherwise"


def test_requests_of_one_server_have_turns_too() -> None:
    async def main() -> None:
        turns = ServerMutex.of_one()
        async with turns.turn(1.0):
            assert not await granted(turns, 0.05)
        assert await granted(turns, 1.0)
        assert not turns.in_doubt
        turns.close()
        turns.close()

    asyncio.run(main())


def test_two_servers_of_other_launchers_do_not_meet(tmp_path: Path) -> None:
    async def main() -> None:
        one = ServerMutex.of_several(2, launcher=os.getpid(), folder=str(tmp_path))
        two = ServerMutex.of_several(2, launcher=os.getppid(), folder=str(tmp_path))
        async with one.turn(1.0):
            assert await granted(two, 0.5)
        one.close()
        two.close()

    asyncio.run(main())


def test_a_place_that_is_not_theirs_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(ServerMutex.of_several(2, launcher=os.getpid(), folder=str(tmp_path))):
        (path,) = tmp_path.iterdir()
        path.unlink()
        path.symlink_to("/dev/null")
        with pytest.raises(ControlError, match="can't share"):
            ServerMutex.of_several(2, launcher=os.getpid(), folder=str(tmp_path))
