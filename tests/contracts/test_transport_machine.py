"""Every transport does what `memory` does, whatever the order of calls."""

from __future__ import annotations

import hypothesis
import pytest

from weightcast.testing.transport_machine import TransportMachine


class IpcMachine(TransportMachine):
    url = "ipc://"


TestIpc = IpcMachine.TestCase
TestIpc.settings = hypothesis.settings(max_examples=40, stateful_step_count=20)
TestIpc = pytest.mark.usefixtures("leaves_nothing")(TestIpc)


class GlooMachine(TransportMachine):
    url = "gloo://127.0.0.1:0"


TestGloo = GlooMachine.TestCase
TestGloo.settings = hypothesis.settings(max_examples=15, stateful_step_count=15, deadline=None)
TestGloo = pytest.mark.usefixtures("leaves_nothing")(TestGloo)
