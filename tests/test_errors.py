"""The error tree: drawn as it is, and every error survives the way to a peer as far as its record reaches."""

from __future__ import annotations

import inspect
import logging
import re

import msgspec
import pytest

from weightcast import errors
from weightcast.errors import (
    MAX_LISTED_PROBLEMS,
    ErrorRecord,
    InstallError,
    ManifestError,
    PeerError,
    PeersLostError,
    PublishError,
    PublishReport,
    RefusedError,
    StageSeconds,
    WeightcastError,
    from_record,
    to_record,
)
from weightcast.format.manifest import encode
from weightcast.format.messages import MAX_LINK_MESSAGE_BYTES, Failed

KINDS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, WeightcastError) and cls.__module__ == errors.__name__
]


def make(cls: type[WeightcastError]) -> WeightcastError:
    if issubclass(cls, PublishError):
        report = PublishReport("r", 1, 0, 0, 0, "staged", StageSeconds(), {})
        return cls("m", {"engine": PeerError("p", peer="engine")}, report)
    return cls("m")


def drawn() -> dict[str, str]:
    """Child -> parent, from the module's docstring."""
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = [(0, "WeightcastError")]
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([ │├└─]+)(\w+Error)\b", line)
        if not found or found[2] == "WeightcastError":
            continue
        depth = len(found[1])
        while path[-1][0] >= depth:
            path.pop()
        parents[found[2]] = path[-1][1]
        path.append((depth, found[2]))
    return parents


def test_the_tree_is_as_drawn() -> None:
    assert drawn() == {cls.__name__: cls.__mro__[1].__name__ for cls in KINDS if cls is not WeightcastError}


@pytest.mark.parametrize("cls", KINDS)
def test_every_error_has_a_docstring_of_its_own(cls: type[WeightcastError]) -> None:
    assert "__doc__" in vars(cls)
    assert len(cls.__doc__ or "") > 20


@pytest.mark.parametrize("cls", KINDS)
def test_every_error_comes_back_from_its_record(cls: type[WeightcastError]) -> None:
    error = make(cls)
    sent = msgspec.json.encode(to_record(error))
    back = from_record(msgspec.json.decode(sent, type=ErrorRecord))
    assert str(back) == "m"
    assert type(back) is (WeightcastError if cls is PublishError else cls)


def test_what_a_class_carries_besides_comes_back_too() -> None:
    refused = from_record(to_record(RefusedError("m", ["a", "b"])))
    assert isinstance(refused, RefusedError)
    assert refused.problems == ("a", "b")
    peer = from_record(to_record(PeerError("m", peer="http://x")))
    assert isinstance(peer, PeerError)
    assert peer.peer == "http://x"
    install = from_record(to_record(InstallError("m", torn=True)))
    assert isinstance(install, InstallError)
    assert install.torn
    fault = from_record(to_record(ManifestError("m [shape]", fault="shape")))
    assert isinstance(fault, ManifestError)
    assert fault.fault == "shape"
    assert "[shape]" in str(fault)
    lost = from_record(to_record(PeersLostError("m", ["a", "b"])))
    assert isinstance(lost, PeersLostError)
    assert lost.survivors == ("a", "b")


def test_a_foreign_error_keeps_the_name_of_its_type() -> None:
    back = from_record(to_record(KeyError("missing")))
    assert type(back) is WeightcastError
    assert str(back) == "KeyError: 'missing'"


@pytest.mark.parametrize("kind", ["", "Exception", "SystemExit", "ErrorRecord", "os.system", "FutureError"])
def test_an_unknown_kind_becomes_the_base_class_and_runs_nothing(kind: str) -> None:
    back = from_record(ErrorRecord(kind=kind, message="m"))
    assert type(back) is WeightcastError
    assert str(back) == "m"


def test_problems_of_a_foreign_error_are_not_trusted() -> None:
    """An attribute of the same name on somebody else's exception must not break the report of it."""
    error = OSError("disk")
    error.problems = None  # type: ignore[attr-defined]
    assert to_record(error).message == "OSError: disk"


def test_the_largest_record_fits_a_link_message() -> None:
    name = "layers." + "x" * 1000
    problems = [f"unknown tensor {name}.{i} bfloat16[1024, 1024]" for i in range(MAX_LISTED_PROBLEMS + 500)]
    record = to_record(RefusedError("; ".join(problems), problems))
    assert len(encode(Failed(version=1, error=record))) <= MAX_LINK_MESSAGE_BYTES
    assert len(record.problems) <= MAX_LISTED_PROBLEMS


@pytest.mark.parametrize(
    ("found", "is_named"),
    [
        ("0.32.0", False),
        ("0.32", False),
        ("0.32.1+cpu", False),
        ("0.33.0rc1", False),
        ("0.320.0", True),
        ("1.0.32", True),
        ("0.31.9", True),
        ("unknown", True),
    ],
)
def test_a_version_that_was_not_tested_is_named_with_its_remedy(
    found: str, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    errors.warn_if_untested(logging.getLogger("weightcast"), "vLLM", found, "0.32", "0.33")
    sentence = (
        f"weightcast was tested with vLLM 0.32 and 0.33, found vLLM {found}: if updates fail, install a tested "
        "version: pip install 'vllm==0.32.*'"
    )
    assert caplog.messages == ([sentence] if is_named else [])
