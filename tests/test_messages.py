"""The protocol's records: each comes back as it went, is frozen, and is told apart by its tag."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from golden.objects import MESSAGES

from weightcast.format import messages
from weightcast.format.manifest import MAX_VERSION, decode, encode
from weightcast.format.messages import LinkMessage, UpdateInfo, WeightInfo

RECORDS = [v for v in vars(messages).values() if isinstance(v, type) and issubclass(v, msgspec.Struct)]
OURS = [r for r in RECORDS if r.__module__ == messages.__name__ and r is not messages.WithSecret]


@pytest.mark.parametrize("name", MESSAGES)
def test_there_and_back(name: str) -> None:
    message, kind = MESSAGES[name]
    assert decode(encode(message), kind) == message
    assert encode(decode(encode(message), kind)) == encode(message)


def test_every_record_has_golden_bytes() -> None:
    assert {type(message) for message, _ in MESSAGES.values()} >= set(OURS)


@pytest.mark.parametrize("record", OURS, ids=lambda r: r.__name__)
def test_records_are_frozen_and_documented(record: Any) -> None:
    assert record.__struct_config__.frozen
    assert record.__doc__
    assert not record.__struct_config__.array_like


@pytest.mark.parametrize("union", [UpdateInfo, LinkMessage], ids=["update", "link"])
def test_the_tags_of_a_union_differ(union: Any) -> None:
    tags = [record.__struct_config__.tag for record in get_args(union)]
    assert len(set(tags)) == len(tags)
    assert all(record.__struct_config__.tag_field == "kind" for record in get_args(union))


@pytest.mark.parametrize(
    ("label", "version"),
    [
        ("0", 0),
        (str(MAX_VERSION), MAX_VERSION),
        *(
            (label, None)
            for label in ("default", "", "-1", "1.0", "step-7", "\u0663", str(MAX_VERSION + 1), "9" * 5000)
        ),
    ],
)
def test_an_engines_label_is_a_number_or_none(label: str, version: int | None) -> None:
    assert WeightInfo(label).version == version
