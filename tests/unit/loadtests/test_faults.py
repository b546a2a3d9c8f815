"""`loadtests faults` and `fairness`: what they send and count."""

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest

from loadtests import LoadTestError
from loadtests.__main__ import main
from loadtests.faults import chaos, crashes, overload, soak
from loadtests.faults.mix import draw_questions, essence
from loadtests.faults.proxy import Fault, FaultyProxy
from loadtests.kinds import KINDS


def test_questions_are_the_same_for_a_seed_and_to_every_route() -> None:
    questions = draw_questions(3)
    assert questions == draw_questions(3)
    assert questions != draw_questions(4)
    assert {question.path for question in questions} >= {
        "/classify",
        "/fill-mask",
        "/score",
        "/generate",
        "/generate_stream",
        "/v1/completions",
        "/v1/decisions",
    }
    for question in questions:
        body = json.loads(question.body)
        sampling = body.get("parameters", body)
        assert sampling.get("temperature", 0) == 0, "an answer has to be known"


def test_ids_and_times_are_no_part_of_a_reply() -> None:
    first = b'{"id":"cmpl-1","created":17,"usage":{"cached_tokens":0},"text":"a"}'
    second = b'{"id":"cmpl-2","created": 18.5,"usage":{"cached_tokens":9},"text":"a"}'
    assert essence(first) == essence(second)
    assert essence(first) != essence(first.replace(b'"a"', b'"b"'))
    events = b"data: :a\n\ndata: [DONE]\n\n"
    assert essence(b": keep-alive\n\n" + events) == essence(events) == events


@pytest.mark.parametrize("fault", list(Fault))
def test_the_proxy_does_to_a_connection_what_it_says(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a server that echoes what it got, and ends when the client has."""
    received: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = b""
        try:
            while data := await reader.read(65536):
                got += data
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        received.append(got)
        writer.close()

    async def scenario() -> bytes:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        proxy = FaultyProxy(server.sockets[0].getsockname()[1], seed=1)
        monkeypatch.setattr("loadtests.faults.proxy._WEIGHTS", {fault: 1})
        await proxy.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(sent)
        back = b""
        num_connections = 2 if fault is Fault.DUPLICATE else 1
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while len(back) < len(sent) and (data := await reader.read(65536)):
                    back += data
            writer.close()
            while len(received) < num_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await proxy.stop()
        server.close()
        assert proxy.num_faults == {fault: 1}
        return back

    sent = bytes(range(256)) * 8
    back = asyncio.run(scenario())
    assert all(sent.startswith(got) for got in received)
    if fault in (Fault.NONE, Fault.DELAY, Fault.DRIBBLE, Fault.DUPLICATE, Fault.HALF_CLOSE):
        assert back == sent
    if fault is Fault.CUT_REPLY:
        assert len(back) < len(sent)
    if fault is Fault.CUT_REQUEST:
        assert 0 < len(received[0]) < len(sent)
    if fault is Fault.DUPLICATE:
        assert received == [sent, sent]


@pytest.mark.slow
@pytest.mark.zoo
def test_short_runs_lose_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASKDIAL_THREADS", "1")
    monkeypatch.setattr(chaos, "_SETTLE_SECONDS", 2.0)
    questions = draw_questions(0)[:20]
    for module in (chaos, crashes, soak):
        monkeypatch.setattr(module, "draw_questions", lambda _: questions)
    assert main(["faults", "chaos", "--seconds=60", "--requests=100", "--clients=4"]) == 0
    assert main(["faults", "crashes", "--times=2", "--clients=4"]) == 0
    assert main(["faults", "soak", "--minutes=0.02", "--warm-up=0.01", "--clients=4"]) == 0
    printed = capsys.readouterr()
    assert "tracebacks in the log: 0" in printed.out
    assert "resident memory" in printed.out


@pytest.mark.slow
def test_a_kind_that_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASKDIAL_THREADS", "1")
    good, other = KINDS[:2]
    bad = replace(good, name="bad", status=418)
    monkeypatch.setattr(soak, "KINDS", (good, bad, other))
    assert main(["faults", "soak", "--minutes=0.01", "--by-kind"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f" {good.name} " in printed
    assert f" {other.name} " in printed
    assert "failed: bad: 200" in printed
    assert "steepest: " in printed


def test_without_a_kind_that_can_be_measured_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise LoadTestError("it is gone")

    monkeypatch.setattr(soak, "running_server", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(soak, "measure", fail)
    assert main(["faults", "soak", "--minutes=0.01", "--by-kind"]) == 1
    assert "no kind of request could be measured; failed: it is gone" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.zoo
def test_short_measurements_count_every_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASKDIAL_THREADS", "1")
    monkeypatch.setattr(overload, "_CALIBRATION_SECONDS", 0.3)
    assert main(["faults", "overload", "--times=1.5", "--seconds=1"]) == 0
    assert main(["fairness", "--rounds=1", "--rate=1", "--seconds=1"]) == 0
    assert "(0 errors)" in " ".join(capsys.readouterr().out.split())
