"""The crew: front ends that die while the server ends."""

import asyncio
import logging
import marshal
import socket
import subprocess
import sys
import threading

import pytest
from starlette.types import Receive, Scope, Send

from maskdial.config import Config
from maskdial.fronts import crew as crew_module
from maskdial.fronts.crew import Crew
from maskdial.fronts.front import Setup
from maskdial.fronts.link import Kind
from maskdial.metrics import Metrics

# Reads its link until that ends, or says STOP.
_FRONT = f"""
import socket, sys
link, received = socket.socket(fileno=int(sys.argv[1])), b""
while part := link.recv(65_536):
    received += part
    if received.endswith({marshal.dumps((int(Kind.STOP), 0))!r}):
        break
"""


class Spawning:
    """Starts stand-ins for front ends; those after the first one when they may."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.asked, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, setup: Setup, link: int) -> subprocess.Popen[bytes]:
        if self.processes:
            self.asked.set()
            self.may_go_on.wait(60)
        command = [sys.executable, "-S", "-c", _FRONT, str(link)]
        self.processes.append(subprocess.Popen(command, pass_fds=(link,)))
        return self.processes[-1]


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError


async def _stop_after_a_death(spawning: Spawning, *, until_begun: bool) -> None:
    crew = Crew(_app, Config(), Metrics(), [[socket.create_server(("127.0.0.1", 0))]])
    await crew.start()
    spawning.processes[0].kill()
    if until_begun:
        await asyncio.to_thread(spawning.asked.wait, 60)
    else:
        await asyncio.to_thread(spawning.processes[0].wait)
        await asyncio.sleep(0.05)
    stopping = asyncio.create_task(crew.stop())
    await asyncio.sleep(0.05)
    spawning.may_go_on.set()
    await stopping


@pytest.mark.parametrize("until_begun", [True, False])
def test_a_front_end_that_is_started_anew_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, until_begun: bool
) -> None:
    spawning = Spawning()
    monkeypatch.setattr(crew_module, "_spawn", spawning)
    monkeypatch.setattr(crew_module, "_RESTART_SECONDS", 0.0 if until_begun else 0.5)
    with caplog.at_level(logging.WARNING):
        asyncio.run(_stop_after_a_death(spawning, until_begun=until_begun))
    assert "killed" not in caplog.text
    codes = [each.wait(60) for each in spawning.processes[1:]]
    assert codes == ([0] if until_begun else [])
