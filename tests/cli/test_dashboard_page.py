"""The page of `weightcast dashboard` in a real Chromium, fed by a publisher's address with made engines and publishes.

It needs Debian's chromium and chromium-driver, and selenium.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from weightcast.cli.dashboard import page_server
from weightcast.cli.dashboard.feed import Feed
from weightcast.errors import EngineResult, ErrorRecord, PublishReport, StageSeconds
from weightcast.host.deadline import Deadline
from weightcast.trainer.fleet import EngineState
from weightcast.trainer.history import MAX_PUBLISHES, PublishHistory

webdriver = pytest.importorskip("selenium.webdriver", reason="the page's tests need selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs Debian's chromium and chromium-driver"),
    pytest.mark.timeout(600),
]
MOST_HEAP_BYTES = 100_000_000
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\"> & \"it\" 'failed'"
OBSERVER = """
    const rows = new Set();
    const all = {subtree: true, childList: true, characterData: true, attributes: true};
    new MutationObserver(found => found.forEach(each => {
        const nodes = [each.target, ...each.addedNodes, ...each.removedNodes];
        for (const node of nodes) {
            const row = (node.nodeType === 1 ? node : node.parentElement ?? each.target).closest("tr");
            if (row) rows.add(row.cells[0].firstChild.textContent);
        }
    })).observe(document.getElementById("others"), all);
    window.touched = rows;
"""


class MadePublisher(ThreadingHTTPServer):
    """Serves a publisher's history of engines that are not there."""

    daemon_threads = True

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.history = PublishHistory()
        self.versions: dict[str, int | None] = dict.fromkeys(names)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def publish(self, version: int, failing: dict[str, ErrorRecord]) -> None:
        results = {}
        for name in self.versions:
            error = failing.get(name)
            results[name] = EngineResult(error is None, error, pause_seconds=0.01, num_compared=3)
            if error is None:
                self.versions[name] = version
        seconds = StageSeconds(0.01, 0.02, 0.2, 0.3 + version % 7 / 50, 0.0, 0.02, 0.05, 0.7 + version % 7 / 50)
        report = PublishReport("0" * 32, version, 1 << 30, 300, 8, "staged", seconds, results)
        self.history.add(report, 1 << 30)

    @property
    def reply(self) -> bytes:
        return self.history.to_json(
            [EngineState(name, version, "connected", None) for name, version in self.versions.items()]
        )


class Handler(BaseHTTPRequestHandler):
    server: MadePublisher

    def do_GET(self) -> None:
        content = self.server.reply
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def shown(names: Sequence[str]) -> Iterator[tuple[MadePublisher, str]]:
    """A made publisher, and the URL of the page that shows it."""
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(MadePublisher(names))
        serving = threading.Thread(target=publisher.serve_forever)
        serving.start()
        stack.callback(serving.join)
        stack.callback(publisher.shutdown)
        feed = stack.enter_context(contextlib.closing(Feed([], publisher.url, every_seconds=0.05)))
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = page_server(feed, ["127.0.0.1"])
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        yield publisher, url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def until(is_so: Callable[[], Any]) -> None:
    for _ in Deadline(40.0).polls():
        if is_so():
            return
    raise AssertionError("not so within 40 s")


def text(browser: Any, selector: str) -> str:
    found: str = browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)
    return found


def num_rows(browser: Any, body: str) -> int:
    found: int = browser.execute_script("return document.getElementById(arguments[0]).rows.length", body)
    return found


def look(browser: Any, width: int, scheme: str = "light") -> None:
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_texts_of_engines_are_never_markup(browser: Any) -> None:
    names = [f"engine {HOSTILE}", "another"]
    with shown(names) as (publisher, url):
        publisher.publish(1, {})
        publisher.publish(2, {names[0]: ErrorRecord("InstallError", HOSTILE)})
        browser.get(url)
        until(lambda: num_rows(browser, "others") == 2 and num_rows(browser, "timeline") == 2)
        engine, why = browser.execute_script(
            "return [...document.querySelector('#others td').children].map(n => n.textContent)"
        )
        assert engine == names[0]
        assert why == f"version 2: InstallError: {HOSTILE}"
        assert f"InstallError: {HOSTILE}" in text(browser, "#timeline")
        assert browser.execute_script("return document.querySelectorAll('img, main script').length") == 0
        assert browser.title == "weightcast"
        assert browser.get_log("browser") == [], "nothing was refused either"


def test_only_rows_that_change_are_touched(browser: Any) -> None:
    names = [f"engine-{number:04}" for number in range(1000)]
    with shown(names) as (publisher, url):
        publisher.publish(1, {})
        browser.get(url)
        until(lambda: text(browser, "#serves") == "1,000 of 1,000")
        browser.execute_script(OBSERVER)
        late = names[500:503]
        publisher.versions |= dict.fromkeys(late, 0)
        until(lambda: text(browser, "#serves") == "997 of 1,000")
        assert browser.execute_script("return [...window.touched]") == late
        assert num_rows(browser, "others") == 1000
        for name in late:
            del publisher.versions[name]
        until(lambda: text(browser, "#serves") == "997 of 997")
        assert browser.execute_script("return [...window.touched]") == late, "rows that stay are not touched"


@pytest.mark.parametrize("num_publishes", [300, pytest.param(3600, marks=pytest.mark.full)])
def test_the_heap_stays_small(browser: Any, num_publishes: int) -> None:
    """All publishes of an hour, and all rows change with each."""
    names = [f"engine-{number:04}.rl.svc" for number in range(1000)]
    with shown(names) as (publisher, url):
        browser.get(url)
        error = ErrorRecord("PeerTimeoutError", "it gave no answer in time " * 20)
        for version in range(1, num_publishes + 1):
            publisher.publish(version, dict.fromkeys(names[version % 50 :: 50], error))
            if version % (MAX_PUBLISHES // 2) == 0:
                until(lambda version=version: text(browser, "#newest") == str(version))
        until(lambda: text(browser, "#serves") == "980 of 1,000")
        assert num_rows(browser, "timeline") == 12
        assert text(browser, "#num-publishes") == str(MAX_PUBLISHES)
        browser.execute_cdp_cmd("Performance.enable", {})
        browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        metrics = {m["name"]: m["value"] for m in browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
        print({name: metrics[name] for name in ("JSHeapUsedSize", "JSHeapTotalSize", "Nodes", "TaskDuration")})
        assert metrics["JSHeapTotalSize"] < MOST_HEAP_BYTES
        assert metrics["Nodes"] < 30 * 1000


@pytest.mark.parametrize("width", [420, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits(browser: Any, width: int, scheme: str, tmp_path: Path) -> None:
    """Nothing is wider than the window, and dark is dark."""
    names = [f"a-host-with-a-long-name-{number}.cluster.local:8000/and-a-long-path" for number in range(5)]
    with shown(names) as (publisher, url):
        look(browser, width, scheme)
        publisher.publish(10**15, {names[0]: ErrorRecord("InstallError", "x" * 500)})
        browser.get(url)
        until(lambda: num_rows(browser, "others") == 5 and num_rows(browser, "timeline") == 1)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (int(colour.removeprefix("rgb(").partition(",")[0]) < 128) == (scheme == "dark")
