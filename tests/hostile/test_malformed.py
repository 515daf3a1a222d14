"""Each malformed manifest or message is refused with its own fault and a text that says what was found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hostile.cases import (
    ABORT,
    FAILED,
    HELLO,
    INIT,
    INITS,
    INSTALLED,
    LINKS,
    MANIFESTS,
    OFFER,
    RECEIVED,
    SEAL,
    UPDATES,
    VALID_BYTES,
    Case,
)

from weightcast.errors import ManifestError
from weightcast.format import geometry as geometry_module
from weightcast.format import manifest as manifest_module
from weightcast.format.manifest import Manifest, decode
from weightcast.format.messages import InitInfo, LinkMessage, UpdateInfo
from weightcast.links.link import Frames

ROOT = Path(__file__).parents[2]


def assert_refused(caught: pytest.ExceptionInfo[ManifestError], fault: str, text: str) -> None:
    message = str(caught.value)
    assert caught.value.fault == fault, message
    assert re.search(text, message), message
    assert message.endswith(f"[{fault}]")
    assert len(message) < 5000
    assert message.isprintable()


def rows(cases: dict[str, Case]) -> list[object]:
    return [pytest.param(*case, id=name) for name, case in cases.items()]


def test_what_the_cases_start_from_is_valid() -> None:
    Manifest.decode(VALID_BYTES)
    for message in (OFFER, SEAL, ABORT):
        decode(json.dumps(message).encode(), UpdateInfo)
    for message in (HELLO, RECEIVED, INSTALLED, FAILED):
        decode(json.dumps(message).encode(), LinkMessage)
    decode(json.dumps(INIT).encode(), InitInfo)


@pytest.mark.parametrize(("data", "fault", "text"), rows(MANIFESTS))
def test_manifest(data: bytes, fault: str, text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.decode(data)
    assert_refused(caught, fault, text)


@pytest.mark.parametrize(("data", "fault", "text"), rows(UPDATES))
def test_update(data: bytes, fault: str, text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(data, UpdateInfo)
    assert_refused(caught, fault, text)


@pytest.mark.parametrize(("data", "fault", "text"), rows(INITS))
def test_init(data: bytes, fault: str, text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(data, InitInfo)
    assert_refused(caught, fault, text)


@pytest.mark.parametrize(("data", "fault", "text"), rows(LINKS))
def test_link(data: bytes, fault: str, text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        list(Frames().feed(len(data).to_bytes(4, "big") + data))
    assert_refused(caught, fault, text)


def test_a_frame_that_claims_four_gigabytes_is_refused_before_it_comes() -> None:
    with pytest.raises(ManifestError) as caught:
        list(Frames().feed(b"\xff\xff\xff\xff"))
    assert_refused(caught, "too_large", "4294967295 bytes was announced, expected at most 1048576")


def test_a_message_larger_than_its_limit_is_not_parsed() -> None:
    with pytest.raises(ManifestError) as caught:
        decode(b'"' + b"x" * 100, str, max_bytes=100)
    assert_refused(caught, "too_large", "a message of 101 bytes; the limit is 100")


def test_unknown_fields_are_ignored_everywhere() -> None:
    document = json.loads(VALID_BYTES)
    document["future"] = {"nested": [1, 2]}
    document["forms"][0]["future"] = None
    document["pieces"]["embed.weight"][0]["region"]["future"] = 1.5
    assert Manifest.decode(json.dumps(document).encode()) == Manifest.decode(VALID_BYTES)


def test_the_list_of_faults_is_closed_and_every_one_of_them_occurs_here() -> None:
    documented = (ROOT / "docs" / "wire-format.md").read_text().split("## Faults")[1]
    words = set(re.findall(r"`([a-z_]+)`", documented)) - {"fault"}
    tables = (MANIFESTS, UPDATES, INITS, LINKS)
    tested = {fault for cases in tables for _, fault, _ in cases.values()} | {"too_large"}
    sources = "".join(Path(module.__file__).read_text() for module in (manifest_module, geometry_module))
    raised = set(re.findall(r'malformed\(\s*"([a-z_]+)"', sources))
    assert words == tested == raised
