"""The watchdog: stuck engines, stuck event loops, dead engines."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from maskdial.config import Config
from maskdial.engine.life import Engine, EngineState
from maskdial.http import watchdog as watchdog_module
from maskdial.http.watchdog import Watchdog
from maskdial.logs import STACKS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "_INTERVAL", 0.02)


def engine(**changes: object) -> Any:
    facts = {"name": "m", "state": EngineState.SERVING, "step_seconds": 0.0, "cause_of_death": ""}
    return SimpleNamespace(**{**facts, **changes})


def watch(config: Config, engines: list[Any], story: Callable[[Watchdog], Awaitable[None]]) -> None:
    watchdog = Watchdog(lambda: cast(list[Engine], engines), config)

    async def main() -> None:
        watchdog.start()
        await story(watchdog)
        await watchdog.stop()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_stuck_engine_is_told_once_with_all_stacks(caplog: pytest.LogCaptureFixture) -> None:
    stuck = engine(step_seconds=7.0)

    async def story(watchdog: Watchdog) -> None:
        await until(lambda: bool(watchdog.stalled))
        assert watchdog.stalled == "the engine of model 'm' has made no progress for 7 s"
        await asyncio.sleep(0.1)
        stuck.step_seconds = 0.0
        await until(lambda: not watchdog.stalled)

    with caplog.at_level(logging.WARNING):
        watch(Config(stall_timeout=5), [engine(), stuck], story)
    told = [record for record in caplog.records if record.name == "maskdial.watchdog"]
    assert [record.levelname for record in told] == ["CRITICAL", "WARNING"]
    assert getattr(told[0], STACKS).lower().count("thread 0x") >= 2


def test_a_stuck_event_loop_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    async def story(_: Watchdog) -> None:
        until = time.monotonic() + 30
        while "made no progress" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)  # noqa: ASYNC251 (on purpose)

    watch(Config(stall_timeout=0.2), [], story)
    assert "the event loop has made no progress" in caplog.text


@pytest.mark.parametrize("config", [Config(stall_timeout=5), Config(stall_timeout=None)])
def test_progress_is_no_stall(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    slow = engine(step_seconds=4.0 if config.stall_timeout else 1e9)

    async def story(watchdog: Watchdog) -> None:
        await asyncio.sleep(0.2)
        assert not watchdog.stalled

    watch(config, [slow], story)
    assert "progress" not in caplog.text


def test_engines_are_listed_on_the_event_loop() -> None:
    """Models come and go there, and a dictionary must not change while another thread reads it."""
    threads = set()
    num_calls = 0

    def engines() -> list[Engine]:
        nonlocal num_calls
        num_calls += 1
        threads.add(threading.current_thread())
        return []

    async def main() -> None:
        watchdog = Watchdog(engines, Config())
        watchdog.start()
        await until(lambda: num_calls > 2)
        await watchdog.stop()

    asyncio.run(main())
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize("what", ["exit", "degrade"])
def test_a_dead_engine_is_told_once_if_the_server_is_to_exit(what: Any) -> None:
    causes: list[str] = []
    dead = engine(state=EngineState.DEAD, cause_of_death="the engine of model 'm' died (why)")

    async def story(watchdog: Watchdog) -> None:
        watchdog.on_death = causes.append
        if what == "exit":
            await until(lambda: bool(causes))
        await asyncio.sleep(0.1)

    watch(Config(on_engine_failure=what), [engine(), dead], story)
    assert causes == (["the engine of model 'm' died (why)"] if what == "exit" else [])


def engines_of(running: Any) -> list[Engine]:
    return [model.engine for model in running.server.config.app.state.context.models]


def test_liveness_turns_red_while_an_engine_is_stuck(start_server: Callable[..., Any]) -> None:
    running = start_server(stall_timeout=0.5)
    try:
        stuck = engines_of(running)[0]
        stuck._step_began = time.monotonic() - 60
        deadline = time.monotonic() + 30
        while httpx.get(f"{running.url}/health/live").status_code == 200:
            assert time.monotonic() < deadline
        reply = httpx.get(f"{running.url}/health/live")
        assert reply.status_code == 503
        assert "has made no progress" in reply.json()["error"]
        stuck._step_began = None
        while httpx.get(f"{running.url}/health/live").status_code != 200:
            assert time.monotonic() < deadline
    finally:
        running.stop()


def test_readiness_is_red_once_no_engine_is_left(start_server: Callable[..., Any]) -> None:
    running = start_server()
    try:
        for engine in engines_of(running):
            assert httpx.get(f"{running.url}/health/ready").status_code == 200
            engine.fail("scripted")
        reply = httpx.get(f"{running.url}/health/ready")
        assert reply.status_code == 503
        assert reply.json()["status"] == "engine down"
        assert httpx.get(f"{running.url}/health/live").status_code == 200
    finally:
        running.stop()


def test_the_server_exits_if_it_is_told_to(start_server: Callable[..., Any]) -> None:
    running = start_server(on_engine_failure="exit")
    engines_of(running)[0].fail("scripted")
    running._thread.join(30)
    assert not running._thread.is_alive()
    running.stop()
    assert "scripted" in str(running.server.failure)
