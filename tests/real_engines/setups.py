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


def mark_off_diagonal(item: pytest.Item) -> None:
    """All cases of a test run on a server of one rank. Of those, only the first runs on one of several as well.

    `--full` runs the others. Two ranks wait for each other with all of both cores, and each case takes many times as
    long. What runs on several ranks alone is about them, and is left as it is.
    """
    callspec = getattr(item, "callspec", None)
    if callspec is None or _num_ranks(callspec.params.get("server")) == 1:
        return
    cases = {mark.args[0]: list(mark.args[1]) for mark in item.iter_markers("parametrize")}
    if all(_num_ranks(setup.values[0]) > 1 for setup in cases.pop("server")):
        return
    for names, of_names in cases.items():
        always = (case for case in of_names if all(mark.name != "full" for mark in getattr(case, "marks", ())))
        first = next(always, None)
        found = callspec.params[names if isinstance(names, str) else names[0]]
        if found not in (first, *getattr(first, "values", ())):
            item.add_marker(pytest.mark.full)


def _num_ranks(setup: Any) -> int:
    return getattr(setup, "tp", 1) * getattr(setup, "dp", 1) * getattr(setup, "pp", 1)
