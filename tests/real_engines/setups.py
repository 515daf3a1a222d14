"""Which servers a test of a real engine runs against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def on(*setups: Any, full: Iterable[Any] = ()) -> pytest.MarkDecorator:
    """Parametrises a test with the servers that it runs against, one after another; each is started once.

    `full`: those that only `--full` runs besides.
    """
    always = [pytest.param(setup, id=str(setup)) for setup in setups]
    besides = [pytest.param(setup, id=str(setup), marks=pytest.mark.full) for setup in full]
    return pytest.mark.parametrize("server", [*always, *besides], indirect=True, scope="session")
