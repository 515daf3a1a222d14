"""The contract of transports that keep versions over a real server of an object store."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from store.object_server import BUCKET, ObjectServer, environment, warm_up

from weightcast.testing import VersionedTransportContract

_numbers = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with environment(), contextlib.closing(ObjectServer()) as server:
        url = f"http://127.0.0.1:{server.port}"
        warm_up(url)
        yield url


class TestS3(VersionedTransportContract):
    @pytest.fixture(autouse=True)
    def _prefix(self, endpoint: str) -> None:
        self.url = f"s3://{BUCKET}/run-{next(_numbers)}?endpoint={endpoint}"
