"""Publishes an earlier version of a store once more, as a new version of a new run."""

from __future__ import annotations

from weightcast.errors import PublishReport
from weightcast.sources.store import StoreSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher


def rollback(url: str, *, version: int | None = None, deadline_seconds: float = 60.0) -> PublishReport:
    """Make an earlier version the newest again, under a number one above; followers take it as any other.

    `version`: the number of one that the store still holds; by default the one before the newest. With `num_slots=2`
    that is the only one, and it is there until a publisher begins the next version; each slot more keeps one more. It
    is read whole first: host memory of one version. While a publisher has the store, use `Publisher.rollback`. Raises
    VersionNotFoundError if it is gone, EngineBusyError if a publisher has the store.
    """
    source = StoreSource(url, previous=version is None, version=version)
    with Publisher(
        source, transport=url, trainer_group=None, options=PublishOptions(deadline_seconds=deadline_seconds)
    ) as publisher:
        return publisher.publish()
