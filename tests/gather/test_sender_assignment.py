"""Which trainer ranks have an arena. No processes and no communication."""

from __future__ import annotations

from typing import cast

import pytest


from weightcast.trainer.group.exchange import TrainerRanks


def seats(*words: str, host: str = "here") -> list[SenderLocation]:
    """A rank on a CPU for each word, its label."""
    return [SenderLocation(host, "cpu", word) for word in words]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (seats("a", "b"), (0, 1)),
        (seats("a", "b", "a", "b"), (0, 1)),
        (seats("a", "a", "b", "c", "b"), (0, 2, 3)),
        (seats("", "b"), (0, 1)),
        (seats("a", "a"), ()),
        (seats("", ""), ()),
        (seats("a", ""), ()),
        (seats("a") + seats("b", host="there"), ()),
        (seats("a") + [SenderLocation("here", "cuda", "b")], ()),
        (seats("a") + seats("b", "c", host="there") + seats("c"), (0, 3)),
    ],
)
def test_the_first_rank_on_every_device_of_the_publishing_ranks_host(
    held: list[SenderLocation], expected: tuple[int, ...]
) -> None:
    arenas = DeviceArenas(cast(TrainerRanks, None), None)
    assert arenas.assignment(held).group_ranks == expected


def test_every_group_of_arenas_has_a_number_of_its_own() -> None:
    arenas = DeviceArenas(cast(TrainerRanks, None), None)
    assert [arenas.assignment(seats("a", "b")).number for _ in range(3)] == [1, 2, 3]
