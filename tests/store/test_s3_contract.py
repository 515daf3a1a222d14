"""The contract of transports that keep versions over a real server of an object store."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from store.object_server import BUCKET, ObjectServer, environment

from weightcast.testing import VersionedTransportContract
from weightcast.testing.payloads import PAYLOADS, Payload

_numbers = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with environment(), contextlib.closing(ObjectServer()) as server:
        yield f"http://127.0.0.1:{server.port}"


class TestS3(VersionedTransportContract):
    """On the diagonal: installs in one mode, and two payloads, since a transport does not look into buckets."""

    @pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.full)], ids=["staged", "streaming"])
    def staged(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.param)

    @pytest.fixture(
        params=[pytest.param(each, marks=() if str(each) in ("every_dtype", "only_empty_tensors") else pytest.mark.full)
                for each in PAYLOADS],
        ids=str,
    )  # fmt: skip
    def payload(self, request: pytest.FixtureRequest) -> Payload:
        payload: Payload = request.param
        return payload

    @pytest.fixture(autouse=True)
    def _prefix(self, endpoint: str) -> None:
        self.url = f"s3://{BUCKET}/run-{next(_numbers)}?endpoint={endpoint}"
