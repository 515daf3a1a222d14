"""Rollback of a store: an earlier version is published once more, as a new version of a new run."""

from __future__ import annotations

from weightcast.errors import PublishReport
from weightcast.sources.store import StoreSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher


def rollback(url: str, *, version: int | None = None, deadline_seconds: float = 60.0) -> PublishReport:
    """Publish an earlier version of a store again, numbered one above the newest; followers install it as any other.

    `version`: number of the earlier version, by default the one before the newest. With `num_slots=2` the store has
    only that one, until a publisher begins the next version; each additional slot keeps one more. The version is first
    read into host memory, one model. While a publisher has the store open, use `Publisher.rollback`. Raises
    VersionNotFoundError if the store no longer has the version, EngineBusyError if a publisher has the store open.
    """
    source = StoreSource(url, previous=version is None, version=version)
    with Publisher(
        source, transport=url, trainer_group=None, options=PublishOptions(deadline_seconds=deadline_seconds)
    ) as publisher:
        return publisher.publish()
