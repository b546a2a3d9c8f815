"""Loading, serving, draining: who is refused, and what is waited for."""

import asyncio
import signal
import subprocess
import sys
import textwrap

import pytest

from maskdial import app as app_module
from maskdial.config import Config
from maskdial.errors import MaskdialError, UnavailableError
from maskdial.http.lifecycle import Lifecycle, Phase
from maskdial.server import Server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ends_process", [True, False])
def test_the_heap_is_frozen_once_the_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch, ends_process: bool
) -> None:
    frozen_in: list[Phase] = []

    async def scenario() -> None:
        server = Server(Config(port=0), ends_process=ends_process)
        lifecycle: Lifecycle = server.config.app.state.context.lifecycle  # type: ignore[union-attr]
        monkeypatch.setattr(
            "maskdial.server.freeze_heap", lambda: frozen_in.append(lifecycle.phase)
        )
        await server.on_tick(1)
        lifecycle.serve()
        await server.on_tick(2)
        await server.on_tick(3)

    asyncio.run(scenario())
    assert frozen_in == ([Phase.SERVING] if ends_process else [])


def test_requests_are_taken_between_loading_and_draining() -> None:
    async def scenario() -> None:
        lifecycle = Lifecycle()
        with pytest.raises(UnavailableError, match="loading"):
            lifecycle.check_accepting()
        lifecycle.serve()
        lifecycle.check_accepting()
        await lifecycle.drain(10)
        with pytest.raises(UnavailableError, match="shutting down"):
            lifecycle.check_accepting()
        lifecycle.serve()
        assert lifecycle.phase is Phase.DRAINING

    asyncio.run(scenario())


def test_a_drain_waits_for_the_running_requests() -> None:
    async def scenario() -> None:
        lifecycle = Lifecycle()
        lifecycle.serve()
        lifecycle.begin_request()
        lifecycle.begin_request()
        draining = asyncio.create_task(lifecycle.drain(3600))
        for _ in range(2):
            await asyncio.sleep(0)
            assert lifecycle.phase is Phase.DRAINING
            assert not draining.done()
            lifecycle.end_request()
        assert await draining == 0

    asyncio.run(scenario())


def test_a_drain_waits_for_downloads_which_are_no_load() -> None:
    async def scenario() -> None:
        lifecycle = Lifecycle()
        lifecycle.begin_request()
        with lifecycle.replying():
            assert lifecycle.idle_seconds == 0
            lifecycle.end_request()
            assert lifecycle.idle_seconds > 0
            draining = asyncio.create_task(lifecycle.drain(3600))
            await asyncio.sleep(0)
            assert (lifecycle.num_requests, draining.done()) == (0, False)
        assert await draining == 0

    asyncio.run(scenario())


def test_a_drain_ends_with_its_grace_period() -> None:
    async def scenario() -> None:
        lifecycle = Lifecycle()
        lifecycle.begin_request()
        assert await lifecycle.drain(0) == 1

    asyncio.run(scenario())


def test_a_fault_while_loading_is_a_failure_and_not_an_endless_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fault(*_: object, **__: object) -> None:
        raise RuntimeError("scripted")

    monkeypatch.setattr(app_module, "start_models", fault)

    async def scenario() -> MaskdialError:
        failure: asyncio.Future[MaskdialError] = asyncio.get_running_loop().create_future()
        app = app_module.create_app(Config(), failure.set_result)
        async with app.router.lifespan_context(app):
            return await asyncio.wait_for(failure, 30)

    assert "scripted" in asyncio.run(scenario()).message


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM")
@pytest.mark.parametrize("hangs", [True, False])
def test_a_shutdown_that_hangs_ends_with_all_stacks(hangs: bool) -> None:
    program = f"""
    import asyncio, faulthandler, time
    from maskdial.config import Config
    from maskdial import server
    from maskdial.registry.registry import Models

    async def hang(_):
        await asyncio.to_thread(time.sleep, 1000)

    if {hangs}:
        server._STOP_SECONDS = 2.0
        Models.close = hang
    else:
        faulthandler.dump_traceback_later = lambda *_, **__: print("armed", flush=True)
        faulthandler.cancel_dump_traceback_later = lambda: print("disarmed", flush=True)
    running = server.Server(Config(port=0), ends_process=True)
    on_tick = running.on_tick

    async def tell(counter):
        if counter == 0:
            print("up", flush=True)
        return await on_tick(counter)

    running.on_tick = tell
    running.run()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == int(hangs)
    assert output == ("" if hangs else "armed\ndisarmed\n")
    assert ("Timeout (0:00:02)!" in errors) == hangs
    assert ("in main_loop" in errors or "in run" in errors) == hangs


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("num_signals", [2, 4])
def test_a_second_signal_refuses_the_running_requests(name: str, num_signals: int) -> None:
    """Each is told so, as after the grace period; further signals change nothing of that."""
    program = f"""
    import asyncio, os, signal, threading, time
    import httpx
    from maskdial import dialects
    from maskdial.config import Config
    from maskdial.http.disconnect import unless_gone
    from maskdial.http.route import TaskRoute
    from maskdial.server import Server

    began = threading.Event()

    async def wait(request):
        await request.body()
        began.set()
        await unless_gone(request, asyncio.sleep(1000))

    dialects.ROUTES = [*dialects.ROUTES, TaskRoute("/wait", wait)]
    server = Server(Config(port=0, grace_period=1000), ends_process=True)

    def use():
        while not (server.started and server.servers):
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{{port}}"
        with httpx.Client(timeout=60) as http:
            while http.get(f"{{url}}/health/ready").status_code != 200:
                time.sleep(0.02)
            threading.Thread(target=interrupt).start()
            reply = http.post(f"{{url}}/wait", json={{}})
        print(reply.status_code, reply.text, flush=True)

    def interrupt():
        began.wait()
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.3)
        for _ in range({num_signals} - 1):
            os.kill(os.getpid(), signal.{name})

    client = threading.Thread(target=use)
    client.start()
    server.run()
    client.join()
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert process.stdout.startswith('503 {"error":"the server is shutting down')
    assert "Traceback" not in process.stderr
