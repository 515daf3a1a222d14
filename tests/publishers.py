"""A publisher made of flat keyword arguments, as tests vary them."""

from __future__ import annotations

from typing import Any

from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

_OWN = ("transport", "engines", "token", "trainer_group", "metrics")


def publisher_of(source: Any, **arguments: Any) -> Publisher:
    """A `Publisher` of arguments of its own and of `PublishOptions`, in one namespace."""
    own = {name: arguments.pop(name) for name in _OWN if name in arguments}
    return Publisher(source, options=PublishOptions(**arguments), **own)
