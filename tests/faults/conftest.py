from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from faults.actors import EngineProcess, PublisherProcess, expected_digests


class Stage:
    """The actors of one test, ended whatever happens; what survives is checked against the version's own weights."""

    def __init__(self) -> None:
        self._actors: list[EngineProcess | PublisherProcess] = []

    def engine(self, port: int = 0, **options: object) -> EngineProcess:
        actor = EngineProcess(port, **options)
        self._actors.append(actor)
        return actor

    def publisher(self, *engines: EngineProcess, **options: object) -> PublisherProcess:
        actor = PublisherProcess([engine.url for engine in engines], **options)
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        for actor in reversed(self._actors):
            if actor.process.is_alive():
                actor.close()


def served(engine: EngineProcess) -> tuple[str, dict[str, str]]:
    """The version an engine says it serves and the digests of what it really holds."""
    reply = httpx.get(f"{engine.url}/weight_digests", timeout=20, trust_env=False)
    reply.raise_for_status()
    return reply.json()["weight_version"], reply.json()["digests"]


def weight_info(engine: EngineProcess) -> dict[str, object]:
    return httpx.get(f"{engine.url}/weight_info", timeout=20, trust_env=False).json()  # type: ignore[no-any-return]


def assert_serves(engine: EngineProcess, version: str, content: int) -> None:
    """The engine serves exactly the weights of `content` under the label `version`, and is not paused or torn."""
    found, digests = served(engine)
    assert found == version
    assert digests == expected_digests(content)
    info = weight_info(engine)
    assert not info["paused"], info
    assert not info["torn"], info


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
