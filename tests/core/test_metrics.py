"""A publisher's Prometheus metrics: read as a scraper does, from the address or the registry they were asked for."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import socket
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from publishers import publisher_of

from core.direct import DirectEngine, ReadableEngine, RecordingEngine
from weightcast import Publisher, PublishError, TensorSource
from weightcast.testing.transport_kit import PATIENCE_SECONDS
from weightcast.trainer import metrics

pytestmark = pytest.mark.usefixtures("leaves_nothing")
TENSORS = {f"t{i}": torch.arange(40.0) + i for i in range(4)}


@pytest.fixture
def engines() -> Iterator[list[DirectEngine]]:
    engines = [DirectEngine(name, ReadableEngine()) for name in ("first", "second")]
    yield engines
    for engine in engines:
        engine.close()


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Each sample without its buckets, by its name and labels."""
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_what_publishes_took_and_what_engines_serve(engines: list[DirectEngine]) -> None:
    registry = CollectorRegistry()
    with publisher_of(TensorSource(TENSORS), transport="memory://", engines=engines, metrics=registry) as publisher:
        assert values(registry) == {}, "not before the first publish"
        report = publisher.publish(4)
        found = values(registry)
        for engine in engines:
            assert found[f"weightcast_engine_version {engine.name}"] == 4
            assert found[f"weightcast_engine_behind_versions {engine.name}"] == 0
            pause = found[f"weightcast_pause_seconds_sum {engine.name}"]
            assert pause == report.engines[engine.name].pause_seconds
        for stage in ("gather", "offer", "pack", "send", "seal", "total"):
            assert found[f"weightcast_publish_seconds_sum {stage}"] == getattr(report.seconds, stage)
        assert found["weightcast_trainer_stall_seconds_sum"] == report.seconds.stall
        assert found["weightcast_bytes_total memory sent"] == report.num_bytes == 4 * 40 * 4
        received = sum(sum(result.read_bytes) for result in report.engines.values())
        assert found["weightcast_bytes_total memory received"] == received > 0
        succeeded_at = found["weightcast_last_success_timestamp_seconds"]
        assert succeeded_at > 0

        engines[1].engine.fail_after = 0
        with pytest.raises(PublishError) as caught:
            publisher.publish(7)
        found = values(registry)
        assert found["weightcast_engine_behind_versions first"] == 0
        assert found["weightcast_engine_behind_versions second"] == 3
        assert found[f"weightcast_failures_total {type(caught.value.failures['second']).__name__}"] == 1
        assert found["weightcast_last_success_timestamp_seconds"] == succeeded_at
        assert found["weightcast_publish_seconds_count total"] == 2

        with pytest.raises(ValueError, match="not above 7"):
            publisher.publish(7)
        assert values(registry)["weightcast_failures_total ValueError"] == 1
        publisher.remove_engine(engines[1])
        publisher.publish()
        found = values(registry)
        assert not [name for name in found if name.endswith(" second")]
        assert found["weightcast_last_success_timestamp_seconds"] > succeeded_at
    assert values(registry) == {}, "closed"


def test_an_engine_without_a_version_is_behind_by_all_of_them(engines: list[DirectEngine]) -> None:
    registry = CollectorRegistry()
    engines[1].engine.fail_after = 0
    options: dict[str, Any] = {"on_failure": "report", "transport": "memory://"}
    with publisher_of(TensorSource(TENSORS), engines=engines, metrics=registry, **options) as publisher:
        for version in (0, 1):
            publisher.publish(version)
            found = values(registry)
            assert found["weightcast_engine_version second"] == -1
            assert found["weightcast_engine_behind_versions second"] == version + 1
            assert found["weightcast_engine_behind_versions first"] == 0


def test_the_page_has_all_of_them(engines: list[DirectEngine]) -> None:
    registry = CollectorRegistry()
    with publisher_of(TensorSource(TENSORS), transport="memory://", engines=engines, metrics=registry) as publisher:
        publisher.publish()
        names = {metric.name + "_total" * (metric.type == "counter") for metric in registry.collect()}
    page = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
    assert set(re.findall(r"^\| `(weightcast_\w+)", page, re.MULTILINE)) == names


def test_an_engine_whose_memory_differs_is_a_mismatch(engines: list[DirectEngine]) -> None:
    registry = CollectorRegistry()
    options: dict[str, Any] = {"verify": "installed", "on_failure": "report", "transport": "memory://"}
    with publisher_of(TensorSource(TENSORS), engines=engines, metrics=registry, **options) as publisher:
        assert publisher.publish().ok
        assert values(registry)["weightcast_verify_mismatch_total"] == 0
        engines[0].engine.spoilt = "t2"
        report = publisher.publish()
        assert [result.differs for result in report.engines.values()] == [True, False]
        assert values(registry)["weightcast_verify_mismatch_total"] == 1
        assert values(registry)["weightcast_failures_total IntegrityError"] == 1


def test_they_are_served_at_an_address(engines: list[DirectEngine]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
    source = TensorSource(TENSORS)
    with Publisher(source, transport="memory://", engines=engines, metrics=where) as publisher:
        publisher.publish(2)
        with build_opener(ProxyHandler({})).open(f"http://{where}/metrics", timeout=PATIENCE_SECONDS) as reply:
            text = reply.read().decode()
        samples = [sample for metric in text_string_to_metric_families(text) for sample in metric.samples]
        versions = {s.labels["engine"]: s.value for s in samples if s.name == "weightcast_engine_version"}
        assert versions == {"first": 2, "second": 2}
        other = Publisher(source, transport="memory://", engines=engines, metrics=where)
        with other, pytest.raises(OSError, match="in use"):
            other.publish()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(where.rpartition(":")[2])))


def served(engines: list[DirectEngine]) -> tuple[Publisher, socket.socket]:
    """A publisher that serves its metrics, and the socket at which it listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    source = TensorSource(TENSORS)
    publisher = publisher_of(source, transport="memory://", engines=engines, metrics=f"127.0.0.1:{port}")
    publisher.publish(4)
    assert publisher._metrics is not None
    assert publisher._metrics._server is not None
    return publisher, publisher._metrics._server.socket


def test_a_connection_that_asks_nothing_is_closed(
    engines: list[DirectEngine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics._Request, "timeout", 0.05)
    publisher, listening = served(engines)
    with publisher, socket.create_connection(listening.getsockname(), timeout=PATIENCE_SECONDS) as silent:
        assert silent.recv(1) == b""
    assert "Traceback" not in capfd.readouterr().err


def test_a_forked_child_does_not_listen(engines: list[DirectEngine]) -> None:
    """It would keep the port from the trainer that is started next."""
    publisher, listening = served(engines)
    with publisher:
        descriptor = listening.fileno()
        if not (pid := os.fork()):
            try:
                os.fstat(descriptor)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("where", ["9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "http://127.0.0.1:9464"])
def test_what_is_no_address(engines: list[DirectEngine], where: str) -> None:
    with pytest.raises(ValueError, match="pass HOST:PORT"):
        Publisher(TensorSource(TENSORS), transport="memory://", engines=engines, metrics=where)


def test_what_is_neither_an_address_nor_a_registry() -> None:
    with pytest.raises(TypeError, match=r"metrics is .*9464.*; it must be 'HOST:PORT' or a CollectorRegistry"):
        Publisher(TensorSource(TENSORS), metrics=9464)  # type: ignore[arg-type]


def test_one_registry_has_one_publisher_at_a_time(engines: list[DirectEngine]) -> None:
    registry, source = CollectorRegistry(), TensorSource(TENSORS)
    with Publisher(source, transport="memory://", engines=engines[:1], metrics=registry) as publisher:
        publisher.publish()
        other = Publisher(source, transport="memory://", engines=engines[1:], metrics=registry)
        with other, pytest.raises(ValueError, match="Duplicated"):
            other.publish()
    with Publisher(source, transport="memory://", engines=engines[1:], metrics=registry) as other:
        other.publish()
        assert "weightcast_engine_version second" in values(registry)


def test_a_registry_does_not_keep_a_publisher_alive() -> None:
    registry = CollectorRegistry()
    engine = DirectEngine("engine", RecordingEngine())
    publisher = Publisher(TensorSource(TENSORS), transport="memory://", engines=[engine], metrics=registry)
    publisher.publish()
    engine.publisher = publisher  # type: ignore[attr-defined]
    gone = weakref.ref(publisher)
    del publisher, engine.publisher  # type: ignore[attr-defined]
    gc.collect()
    assert gone() is None
    assert values(registry) == {}
    engine.close()


# --- examples/monitoring ---

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")


def dashboard_expressions() -> list[str]:
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    return [expression.replace("$__rate_interval", "5m") for expression in expressions]


def promtool(*words: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_dashboard_and_the_alerts_use_metrics_that_there_are(engines: list[DirectEngine]) -> None:
    registry = CollectorRegistry()
    with publisher_of(TensorSource(TENSORS), transport="memory://", engines=engines, metrics=registry) as publisher:
        with pytest.raises(ValueError, match="from 0 to"):
            publisher.publish(-1)
        publisher.publish()
        samples = {sample.name for metric in registry.collect() for sample in metric.samples}
        families = {metric.name for metric in registry.collect()}
    alerts = re.findall(r"expr: (.*?)\n {8}\w", (MONITORING / "alerts.yml").read_text(), re.DOTALL)
    assert len(alerts) == 4
    named = set(re.findall(r"weightcast_\w+", " ".join((*dashboard_expressions(), *alerts))))
    assert named <= samples
    unnamed = {family for family in families if not any(name.startswith(family) for name in named)}
    assert unnamed == set(), "each is on the dashboard or in an alert"


@needs_promtool
def test_prometheus_parses_the_expressions(tmp_path: Path) -> None:
    assert "4 rules found" in promtool("check", "rules", str(MONITORING / "alerts.yml"))
    expressions = dashboard_expressions()
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions)]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    assert f"{len(expressions)} rules found" in promtool("check", "rules", str(file))


def scrape(registry: CollectorRegistry) -> dict[str, str]:
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rpartition(" ")[::2] for line in lines if line and not line.startswith("#"))


def check_alerts(
    folder: Path, series: list[dict[str, str]], raised: dict[str, dict[str, list[dict[str, str]]]]
) -> None:
    """`raised`: by time, the labels of all alerts that Prometheus must raise then, by name."""
    text = (MONITORING / "alerts.yml").read_text()
    tests = [
        {"eval_time": when, "alertname": name, "exp_alerts": [{"exp_labels": labels} for labels in found.get(name, [])]}
        for when, found in raised.items()
        for name in re.findall(r"alert: (\w+)", text)
    ]
    # Annotations are compared, too; what they say is no matter here.
    (folder / "alerts.yml").write_text(re.sub(r" {8}annotations:\n {10}summary: .*\n", "", text))
    group = {"interval": "1m", "input_series": series, "alert_rule_test": tests}
    (folder / "test.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [group]}))
    assert "SUCCESS" in promtool("test", "rules", str(folder / "test.yml"))


@needs_promtool
def test_prometheus_raises_the_alerts(engines: list[DirectEngine], tmp_path: Path) -> None:
    """Of a publisher's own text: for 20 minutes all is well, then engines have failed and differed."""
    registry = CollectorRegistry()
    options: dict[str, Any] = {"verify": "installed", "on_failure": "report", "transport": "memory://"}
    with publisher_of(TensorSource(TENSORS), engines=engines, metrics=registry, **options) as publisher:
        publisher.publish(1)
        well = scrape(registry)
        engines[0].engine.spoilt = "t2"
        engines[1].engine.fail_after = 0
        report = publisher.publish(5)
        ill = scrape(registry)
    failed = report.failures["second"].kind
    succeeded = "weightcast_last_success_timestamp_seconds"
    well[succeeded] = ill[succeeded] = "600"  # the time of Prometheus' test begins at 0
    series = [
        {"series": name, "values": f"{well[name]}x20 {value}x40" if name in well else f"_x20 {value}x40"}
        for name, value in ill.items()
    ]
    first = {"WeightcastPublishFails": [{"cause": "IntegrityError"}, {"cause": failed}], "WeightcastWrongWeights": [{}]}
    behind = {"WeightcastEngineBehind": [{"engine": "second"}]}
    raised: dict[str, dict[str, list[dict[str, str]]]] = {
        "19m": {},
        "22m": first,
        "28m": first | behind,
        "39m": behind | {"WeightcastWrongWeights": [{}]},
        "50m": behind | {"WeightcastWrongWeights": [{}], "WeightcastNoVersionForAll": [{}]},
    }
    check_alerts(tmp_path, series, raised)


@needs_promtool
def test_prometheus_raises_an_alert_of_an_engine_that_never_had_a_version(
    engines: list[DirectEngine], tmp_path: Path
) -> None:
    """Of a publisher's first version, and with engines that are scraped themselves."""
    registry = CollectorRegistry()
    engines[1].engine.fail_after = 0
    options: dict[str, Any] = {"on_failure": "report", "transport": "memory://"}
    with publisher_of(TensorSource(TENSORS), engines=engines, metrics=registry, **options) as publisher:
        publisher.publish(0)
        samples = scrape(registry) | {
            'weightcast_engine_version{instance="first"}': "0",
            'weightcast_engine_version{instance="second"}': "-1",
            "weightcast_last_success_timestamp_seconds": "600",
        }
    series = [{"series": name, "values": f"{value}x20"} for name, value in samples.items() if "failures" not in name]
    check_alerts(tmp_path, series, {"4m": {}, "6m": {"WeightcastEngineBehind": [{"engine": "second"}]}})
