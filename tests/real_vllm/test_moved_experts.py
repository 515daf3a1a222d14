"""Experts that vLLM's load balancer (EPLB) has moved between ranks, some of them in several places.

The oracle is a server that started cold from the published weights, and whose experts vLLM's own code has moved to the
same places: all its tensors and its answers are equal, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from real_vllm.conftest import Checkpoints
from real_vllm.oracle import NUM_TOKENS, PROMPT, Answer
from real_vllm.servers import BALANCED, BALANCED_REPLICAS, Server
from real_vllm.trainer import trainer
from weightcast.errors import InstallError

LOADS: Sequence[Sequence[Sequence[int]]] = (
    [[1, 9, 1, 5], [7, 1, 1, 1], [1, 1, 1, 8]],
    [[9, 1, 5, 1], [1, 7, 7, 1], [1, 8, 1, 1]],
    [[1, 1, 9, 9], [1, 1, 1, 7], [8, 8, 1, 1]],
)
"""Loads of the experts, by layer, for which vLLM chooses different places."""


class Servers:
    """`updated` started from seed 0, `cold` from seed 1, and takes no updates. Experts of both move together."""

    def __init__(self, updated: Server, cold: Server) -> None:
        self.updated, self.cold = updated, cold

    def rebalance(self, number: int) -> list[list[int]]:
        """Move experts; return the expert of each place, by layer."""
        found: list[list[list[int]]] = []
        for server in (self.updated, self.cold):
            # A data-parallel engine that steps would wait for another one that moves experts.
            has_to_pause = server.setup.dp > 1 and not server.is_paused()
            if has_to_pause:
                server.post("/pause?mode=keep").raise_for_status()
            found += server.call("test_rebalance", LOADS[number])
            if has_to_pause:
                server.post("/resume").raise_for_status()
        assert all(places == found[0] for places in found)
        return list(found[0])

    def assert_equal(self) -> None:
        """All tensors on all ranks, and what each engine answers."""
        assert self.updated.call("test_weights_digest") == self.cold.call("test_weights_digest")
        assert answers(self.updated) == answers(self.cold)


def answers(server: Server) -> list[Answer]:
    server.post("/reset_prefix_cache").raise_for_status()
    return [ask(PROMPT, NUM_TOKENS) for ask in server.asks()]


@pytest.fixture(scope="module", params=[BALANCED, pytest.param(BALANCED_REPLICAS, marks=pytest.mark.full)], ids=str)
def servers(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Iterator[Servers]:
    setup = request.param
    cold = Server(dataclasses.replace(setup, backend=None, endpoints=False), checkpoint(setup.family, 1, setup.dtype))
    updated = Server(setup, checkpoint(setup.family, 0, setup.dtype))
    updated.launch()
    with cold, updated:
        yield Servers(updated, cold)


def test_experts_are_loaded_where_they_are_now(servers: Servers) -> None:
    with trainer(servers.updated.setup, servers.updated.url, verify="installed") as it:
        it.publish(1)
        servers.assert_equal()
        for number in (0, 1):
            before = answers(servers.updated)
            places = servers.rebalance(number)
            # Moved, and each has a place.
            assert all(experts != [0, 1, 2, 3, 0, 1] and set(experts) == {0, 1, 2, 3} for experts in places)
            assert [answer.tokens for answer in answers(servers.updated)] == [answer.tokens for answer in before]
            servers.assert_equal()
            it.publish(0)
            with pytest.raises(AssertionError):
                servers.assert_equal()
            unproven = it.publish(1).engines[servers.updated.url].unproven
            servers.assert_equal()
            found = {name: why for name, why in unproven.items() if ".experts." in name}
            assert len(found) == 3 * 4 * 3
            assert all(why.startswith("vLLM moves the experts of") for why in found.values())


@pytest.mark.parametrize("delta", ["always", None], ids=["delta", "full"])
def test_experts_that_move_after_the_offer_are_loaded_where_they_are_then(servers: Servers, delta: str | None) -> None:
    def move(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            assert servers.rebalance(2) != places

    places = servers.rebalance(0)
    with trainer(servers.updated.setup, servers.updated.url, delta=delta) as it:
        it.publish(1)
        it.publish_near(1)
        report = it.publish(1, on_progress=move)
        assert (report.delta is not None) == (delta is not None)
    servers.assert_equal()


def test_a_failed_install_leaves_moved_experts_as_they_were(servers: Servers) -> None:
    servers.rebalance(1)
    with trainer(servers.updated.setup, servers.updated.url, undo=True) as it:
        version = it.publish(1).version
        servers.updated.call("test_fail_load", 17, 1)  # on one rank of two
        assert not it.failure(0).torn  # type: ignore[attr-defined]
        assert servers.updated.version() == str(version)
        servers.assert_equal()
        servers.rebalance(0)
        servers.assert_equal()


@pytest.mark.parametrize("undo", [True, False], ids=["undo", "no-undo"])
def test_experts_that_move_during_an_install_tear_the_engine(servers: Servers, undo: bool) -> None:
    """vLLM moves none while it is paused, in which state it is told to here."""
    moved: list[int] = []

    def move(done_bytes: int, total_bytes: int) -> None:
        if not moved:
            moved.append(done_bytes)
            assert servers.rebalance(2) != places

    places = servers.rebalance(1)
    with trainer(servers.updated.setup, servers.updated.url, install="streaming", undo=undo) as it:
        error = it.failure(0, on_progress=move)
        assert isinstance(error, InstallError)
        assert error.torn
        assert "has moved experts between ranks during the install" in str(error)
        assert servers.updated.complete(PROMPT, 4).status_code == 503
        it.publish(1)
    servers.assert_equal()


def test_vllms_own_reload_is_healed_by_the_next_publish(servers: Servers) -> None:
    """It loads experts to where they were at the start."""
    servers.rebalance(0)
    servers.updated.call("reload_weights")
    assert servers.updated.complete(PROMPT, 4).status_code == 503
    with trainer(servers.updated.setup, servers.updated.url) as it:
        it.publish(1)
    servers.assert_equal()
