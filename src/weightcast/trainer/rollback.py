"""Publishes a store's version before the newest once more, as a new version of a new run."""

from __future__ import annotations

from weightcast.errors import PublishReport
from weightcast.sources.store import StoreSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher


def rollback(url: str, *, deadline_seconds: float = 60.0) -> PublishReport:
    """Make the version before the newest the newest again, under a number one above; followers take it as any other.

    It is there until a publisher begins the next version (with `num_slots=3`, the next but one). It is read whole
    first: host memory of one version. Raises VersionNotFoundError if it is gone, EngineBusyError if a publisher has
    the store.
    """
    source = StoreSource(url, previous=True)
    with Publisher(
        source, transport=url, trainer_group=None, options=PublishOptions(deadline_seconds=deadline_seconds)
    ) as publisher:
        return publisher.publish()
