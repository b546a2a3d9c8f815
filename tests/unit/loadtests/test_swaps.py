"""`loadtests faults swaps`: a model is replaced under load, and what went wrong is counted."""

import asyncio
import itertools

import pytest

from loadtests import server
from loadtests.faults import swaps
from loadtests.server import Connection, Reply
from maskdial.bundle.bundle import load_bundle
from maskdial.registry.catalog import STARTER_FOLDER

pytestmark = pytest.mark.slow


def test_a_short_run_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(swaps, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setenv("MASKDIAL_THREADS", "1")
    bundle = load_bundle("sentiment", STARTER_FOLDER / "sentiment")
    row = asyncio.run(swaps.measure(bundle, num_requests=40, num_swaps=2, num_clients=4, seed=0))
    assert (row.errors, row.differing) == (0, 0)
    assert row.requests >= 40
    assert row.swaps == 2
    assert abs(row.files_after - row.files_before) <= 4, "connections may not be closed yet"
    assert capsys.readouterr().err == ""


def test_both_versions_are_loaded_as_different_ones() -> None:
    bundle = load_bundle("hybrid", STARTER_FOLDER / "hybrid")
    with swaps.two_versions(bundle) as folder:
        first, second = (load_bundle("live", folder / name) for name in ("0", "1"))
        assert first.manifest != second.manifest
        assert first.manifest.files == second.manifest.files


def test_failed_requests_and_other_answers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = itertools.chain((b"a", b"a", b"b", None), itertools.repeat(b"a"))

    class Scripted(Connection):
        closed = False

        @classmethod
        async def open(cls, port: int) -> Connection:
            return cls()

        async def send(self, request: bytes, on_body: object = None) -> Reply:
            await asyncio.sleep(0)
            body = next(replies)
            return Reply(503, b"gone") if body is None else Reply(200, body)

        def close(self) -> None:
            pass

    monkeypatch.setattr(server, "Connection", Scripted)

    async def scenario() -> swaps.Load:
        load = swaps.Load(0, [b"{}"])
        await load.run(1, 5)
        return load

    load = asyncio.run(scenario())
    assert load.num_requests >= 5
    assert (load.num_errors, load.num_differing) == (1, 1)
    assert load.first_error == "503 gone"
