"""An engine process is killed, stopped or cut off while `sync` brings it up to date; the other one serves on."""

from __future__ import annotations

import signal
import threading

import pytest

import weightcast
from faults.actors import DEADLINE_SECONDS, build_model, digests, expected_digests, fill
from faults.engine_actor import EngineProcess
from weightcast.errors import PublishError


@pytest.mark.parametrize("transport", ["ipc://", "gloo://127.0.0.1:0"])
@pytest.mark.parametrize("fault", ["kill", "stop", "link", "kill at load"])
def test_a_fault_of_the_late_engine_is_its_own_and_the_next_one_succeeds(transport: str, fault: str) -> None:
    model, served = build_model(), build_model()
    fill(model, 1)
    late = EngineProcess()
    again = late
    # Of several buckets: what has all of them before the fault may have installed the version in time.
    deadline_seconds = 6.0 if fault == "stop" else DEADLINE_SECONDS
    options = weightcast.PublishOptions(deadline_seconds=deadline_seconds, bucket_size_bytes=4096)

    struck = threading.Event()

    def strike(done: int, total: int) -> None:
        if struck.is_set():
            return
        struck.set()
        match fault:
            case "kill":
                late.kill()
            case "stop":
                late.signal(signal.SIGSTOP)
            case "link":
                late.ask("cut", "link")

    try:
        with weightcast.EngineServer(weightcast.ModuleEngine(served)) as stays:
            source = weightcast.ModuleSource(model)
            with weightcast.Publisher(source, transport=transport, engines=[stays.url], options=options) as publisher:
                publisher.publish()
                publisher.add_engine(late.url)
                killer = threading.Thread(target=lambda: (late.hear("at"), late.kill()))
                if fault == "kill at load":
                    late.ask("stop at", "load")
                    killer.start()
                with pytest.raises(PublishError) as caught:
                    publisher.sync(late.url, on_progress=strike)
                assert list(caught.value.failures) == [late.url]
                assert digests(served) == expected_digests(1)
                assert not stays.gate.is_paused
                if fault.startswith("kill"):
                    if killer.ident is not None:
                        killer.join()
                    again = EngineProcess(late.port)
                elif fault == "stop":
                    late.signal(signal.SIGCONT)
                assert publisher.sync(again.url).version == 0
                info, held = again.ask("served", answer="served")
                assert (info["weight_version"], held) == ("0", expected_digests(1))
                fill(model, 2)
                assert publisher.publish().ok
                assert again.ask("served", answer="served")[1] == digests(served) == expected_digests(2)
    finally:
        again.close()
        if again is not late:
            late.pipe.close()
