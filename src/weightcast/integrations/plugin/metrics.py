"""An engine's metrics among those that its server shows: in prometheus-client's default registry.

If the environment has PROMETHEUS_MULTIPROC_DIR, prometheus-client puts the values into files of that directory, from
which the server sums them up over its processes. Servers set it as they start, so the metrics are created at first use.
"""

from __future__ import annotations

import functools

from prometheus_client import REGISTRY, Gauge

from weightcast.control.server.metrics import InstallMetrics
from weightcast.format.messages import WeightInfo


class EngineMetrics(InstallMetrics):
    """The metrics of the one engine behind a server, as its API servers know them. Named as the reference server's."""

    def __init__(self) -> None:
        super().__init__(REGISTRY)
        # Several API servers have an engine: the one that set the value last knows it best.
        self._torn = Gauge("weightcast_torn", "1 while the engine refuses to serve.", multiprocess_mode="mostrecent")
        self.paused = Gauge("weightcast_paused", "1 while generation is paused.", multiprocess_mode="mostrecent")

    @functools.cached_property
    def _version(self) -> Gauge:
        """The gauge, which is shown from its creation on: as 0, a version's number, until it is set."""
        return Gauge(
            "weightcast_engine_version",
            "Number of the version that serves; -1 before the first update.",
            multiprocess_mode="mostrecent",
        )

    def serves(self, info: WeightInfo) -> None:
        """Note what the engine's ranks say that they serve."""
        self._version.set(-1 if info.version is None else info.version)
        self._torn.set(bool(info.torn))


@functools.cache
def engine_metrics() -> EngineMetrics:
    """Return the metrics of this process, which are created once: a registry refuses a name twice."""
    return EngineMetrics()
