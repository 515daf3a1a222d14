"""The contract of transports that keep versions over a real server of an object store."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from store.object_server import BUCKET, ObjectServer, environment, warm_up

from weightcast.testing import VersionedTransportContract
from weightcast.testing.payloads import PAYLOADS, Payload

_numbers = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with environment(), contextlib.closing(ObjectServer()) as server:
        url = f"http://127.0.0.1:{server.port}"
        warm_up(url)
        yield url


class TestS3(VersionedTransportContract):
    @pytest.fixture(
        params=[each for each in PAYLOADS if each.name in ("plain", "empty_tensors", "every_dtype")], ids=str
    )
    def payload(self, request: pytest.FixtureRequest) -> Payload:
        """Transports do not look into buckets: the other payloads are left to the store in a directory."""
        payload: Payload = request.param
        return payload

    @pytest.fixture(autouse=True)
    def _prefix(self, endpoint: str) -> None:
        self.url = f"s3://{BUCKET}/run-{next(_numbers)}?endpoint={endpoint}"
