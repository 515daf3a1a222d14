"""Has this process, a trainer, die at a certain moment of the making of a group with a stock SGLang server."""

from __future__ import annotations

import os
import signal
from typing import Any, Literal, get_args

from weightcast.integrations.sglang.stock import group as stock_group
from weightcast.integrations.sglang.stock.group import StockGroup

Moment = Literal["when ranks wait for ours", "after the join"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
"""Those that end for the server with the trainer; docs/sglang.md names the others."""


def die_in_join(moment: Moment) -> None:
    """Patch this process, which kills itself then."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    match moment:
        case "when ranks wait for ours":

            def wait_for_them_and_die(backend: str, store: Any, *, size: int, **options: Any) -> None:
                store.wait([f"0/{rank}" for rank in range(1, size)])
                die()

            stock_group.ProcessGroup = wait_for_them_and_die  # type: ignore[misc,assign]
        case "after the join":
            connect = StockGroup.connect

            def connect_and_die(group: StockGroup) -> None:
                connect(group)
                die()

            StockGroup.connect = connect_and_die  # type: ignore[method-assign]
