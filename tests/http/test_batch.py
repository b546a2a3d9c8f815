"""`maskdial batch`: a file is answered as the server answers it, whatever stops it meanwhile."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial import cli
from maskdial.batches.answers import Answer, Answers
from maskdial.batches.batch import Batch
from maskdial.batches.lines import Line, open_input
from maskdial.batches.output import Files
from maskdial.config import Config
from maskdial.errors import UnavailableError
from maskdial.grammar import compiler, memory
from maskdial.offline.application import Application
from maskdial.registry.catalog import STARTER_FOLDER

TEXTS = [
    f"A {word} film about a {thing}." for word in ("dull", "fine") for thing in ("ship", "dog")
]
VARIABLES = ("MASKDIAL_THREADS", "1"), ("MASKDIAL_GENERATION_CONFIG", "off")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES:
        monkeypatch.setenv(name, value)


@pytest.fixture
def batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command in this process; returns its status and the last line that it says."""

    def run(source: Path | str, *arguments: str) -> tuple[int, str]:
        status = cli.main(["batch", str(source), str(tmp_path / "out.jsonl"), *arguments])
        return status, capsys.readouterr().err.strip()

    return run


def write_lines(path: Path, lines: list[Any]) -> Path:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_ids(body: Any) -> Any:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_native_lines_get_the_replies_of_the_server(
    tmp_path: Path, batch: Callable[..., Any], openai_http: httpx.Client
) -> None:
    parameters = {"function_to_apply": "none"}
    lines: list[dict[str, Any]] = [
        {"id": [index], "inputs": text} for index, text in enumerate(TEXTS)
    ]
    lines[1]["parameters"] = {"top_k": 1}
    lines.append({"inputs": TEXTS})
    source = write_lines(tmp_path / "in.jsonl", lines)
    chosen = ("--task", "classify", "--parameters", json.dumps(parameters))
    assert batch(source, *chosen) == (0, "")
    found = read_lines(tmp_path / "out.jsonl")
    assert [each["line"] for each in found] == [1, 2, 3, 4, 5]
    for line, result in zip(lines, found, strict=True):
        reply = openai_http.post(
            "/classify", json={"parameters": parameters, **line} | {"id": None}
        )
        assert reply.status_code == 422  # the id is the batch's
        body = {name: value for name, value in line.items() if name != "id"}
        reply = openai_http.post("/classify", json={"parameters": parameters, **body})
        expected = reply.json()
        assert result["output"] == (expected if isinstance(line["inputs"], list) else expected[0])
        assert result.get("id") == line.get("id")
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def test_lines_of_openai_batches_get_the_replies_of_their_routes(
    tmp_path: Path, batch: Callable[..., Any], openai_http: httpx.Client
) -> None:
    bodies = [
        ("/v1/completions", {"model": "hybrid", "prompt": "Once", "max_tokens": 5, "seed": 1}),
        ("/classify", {"inputs": TEXTS}),
        ("/v1/completions", {"model": "gpt-4o", "prompt": "Once"}),
        ("/generate", {"model": "hybrid", "inputs": "A", "parameters": {"max_new_tokens": 3}}),
    ]
    lines = [
        {"custom_id": f"line {index}", "method": "POST", "url": url, "body": body}
        for index, (url, body) in enumerate(bodies)
    ]
    status, said = batch(write_lines(tmp_path / "in.jsonl", lines))
    assert status == 1
    assert said.startswith("maskdial: 1 of 4 lines failed; ")
    results = read_lines(tmp_path / "out.jsonl")
    (failure,) = read_lines(tmp_path / "out.jsonl.errors.jsonl")
    results.insert(2, failure)
    for line, result in zip(lines, results, strict=True):
        reply = openai_http.post(str(line["url"]), json=line["body"])
        assert result["custom_id"] == line["custom_id"]
        assert result["error"] is None
        response = result["response"]
        body, expected = response["body"], reply.json()
        if response["status_code"] != 200:
            assert body["error"]["code"] == expected["error"]["code"] == "model_not_found"
            continue
        assert reply.status_code == 200
        if isinstance(body, dict):
            body, expected = without_ids(body), without_ids(expected)
            expected.pop("usage", None), body.pop("usage", None)  # the server has cached prompts
        assert body == expected


def test_no_line_is_refused_for_what_others_have_open(
    tmp_path: Path, batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a grammar of its own, far more than one client of a server may have."""
    monkeypatch.setattr(compiler, "_MAX_COMPILING_PER_CLIENT", 1)
    monkeypatch.setattr(memory, "MAX_BYTES_PER_CLIENT", 300)
    monkeypatch.setenv("MASKDIAL_MAX_REQUESTS_PER_CLIENT", "1")
    monkeypatch.setenv("MASKDIAL_MAX_TOKENS_PER_MINUTE", "1")
    lines = []
    for number in range(40):
        schema = {"type": "integer", "minimum": number, "maximum": number}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = {"prompt": "There are ", "max_tokens": 9, "response_format": form}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(line)
    assert batch(write_lines(tmp_path / "in.jsonl", lines)) == (0, "")
    found = read_lines(tmp_path / "out.jsonl")
    texts = [each["response"]["body"]["choices"][0]["text"] for each in found]
    assert [int(text) for text in texts] == list(range(40))


def test_each_bad_line_is_a_sentence_and_the_others_are_answered(
    tmp_path: Path, batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASKDIAL_MAX_BODY_BYTES", "2000")
    call = {"custom_id": "a", "method": "POST", "url": "/classify", "body": {"inputs": "x"}}
    lines: list[Any] = [
        {"inputs": "good"},
        "{broken",
        {"inputs": " "},
        "",
        "[1]",
        {"inputs": "x" * 5000},
        {"inputs": "x", "parameters": {"top_k": 0}},
        {"text": "x"},
        call,
        call,
        {**call, "custom_id": "b", "method": "GET"},
        {**call, "custom_id": "c", "url": "/models/load"},
        {**call, "custom_id": "d", "body": {"inputs": "x", "stream": True}},
        {"inputs": "x", "stream": True},
        {"inputs": "good"},
    ]
    status, said = batch(write_lines(tmp_path / "in.jsonl", lines), "--task", "classify")
    assert status == 1
    assert "11 of 15 lines failed" in said
    assert [each.get("line") for each in read_lines(tmp_path / "out.jsonl")] == [1, None, 15]
    found = {
        each["line"]: each["error"] if isinstance(each["error"], str) else each["error"]["message"]
        for each in read_lines(tmp_path / "out.jsonl.errors.jsonl")
    }
    assert found.pop(2).startswith("the line is not valid JSON: ")
    assert found == {
        3: "inputs: must not be empty",
        5: "the line must be a JSON object",
        6: "the line has 5,014 bytes; one may have at most 2,000 (MASKDIAL_MAX_BODY_BYTES)",
        7: "parameters.top_k: must be at least 1, not 0",
        8: 'the line has no "inputs"',
        10: "custom_id was given to a line before",
        11: 'method must be "POST"',
        12: 'url must be the path of a task, such as "/v1/embeddings"',
        13: "body.stream: a batch has whole replies; leave it out",
        14: "stream: a batch has whole replies; leave it out",
    }


def test_columns_of_csv_and_parquet(tmp_path: Path, batch: Callable[..., Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = tmp_path / "in.csv"
    rows.write_bytes(b'\xef\xbb\xbfkey,text\r\n7,"A ""fine""\nfilm."\r\n8\r\n9,\xff\r\n10,dull\r\n')
    chosen = ("--task", "classify", "--column", "text", "--id-column", "key", "--overwrite")
    assert batch(rows, *chosen)[0] == 1
    found = read_lines(tmp_path / "out.jsonl")
    assert [(each["line"], each["id"]) for each in found] == [(1, "7"), (4, "10")]
    failures = read_lines(tmp_path / "out.jsonl.errors.jsonl")
    assert [(each["line"], each["error"]) for each in failures] == [
        (2, "the row has 1 fields; the header has 2"),
        (3, "the row is not UTF-8"),
    ]
    table = pyarrow.table({"text": ['A "fine"\nfilm.', None, "dull"], "key": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "in.parquet")
    assert batch(tmp_path / "in.parquet", *chosen)[0] == 1
    again = read_lines(tmp_path / "out.jsonl")
    assert [each["output"] for each in again] == [each["output"] for each in found]
    assert [each["id"] for each in again] == [1, 3]
    for source, column, why in (
        ("in.csv", "texts", "has no column 'texts'; it has 'key', 'text'"),
        ("in.parquet", "texts", "has no column 'texts'; it has 'text', 'key'"),
        ("in.parquet", "key", "has the type int64; it must be string"),
    ):
        status, said = batch(
            tmp_path / source, "--task", "classify", "--overwrite", "--column", column
        )
        assert (status, why in said) == (1, True), said


def test_what_cannot_begin_says_why_in_a_sentence(
    tmp_path: Path,
    batch: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"inputs": "x"}])

    def refused(*arguments: str, given: Path | str = source) -> str:
        status, said = batch(given, *arguments)
        assert status == 1
        assert "\n" not in said
        return str(said)

    assert "there is no task 'embedd'" in refused("--task", "embedd", "--overwrite")
    assert "cannot be read: No such file" in refused(given=tmp_path / "absent.jsonl")
    assert "tells no format" in refused(given=tmp_path / "in")
    assert "--column are" in refused("--task", "classify", "--column", "a", "--overwrite").replace(
        "--id-column ", "--column "
    )
    assert "is not JSON" in refused("--parameters", "{")
    assert "is there already; go on with it by --resume" in refused("--task", "classify")
    for mine in (tmp_path / "new.jsonl.errors.jsonl", tmp_path / "new.jsonl.journal"):
        mine.write_bytes(b"mine\n")  # of somebody, and of no run
        for choice in ((), ("--resume",)):
            arguments = ["batch", str(source), str(tmp_path / "new.jsonl"), "--task", "classify"]
            assert cli.main([*arguments, *choice]) == 1
            assert f"{mine} is there already, and of no run to" in capsys.readouterr().err
        assert mine.read_bytes() == b"mine\n"
        mine.unlink()
    assert batch(source, "--task", "classify", "--overwrite") == (0, "")
    assert "had another task" in refused("--task", "score", "--resume")
    same = refused("--task", "classify", "--overwrite", given=tmp_path / "out.jsonl")
    assert "IN and OUT are the same file" in same
    assert batch(source, "--task", "classify", "--resume") == (0, "")  # nothing is left to do
    with source.open("a") as file:
        file.write('{"inputs": "y"}\n')
    assert batch(source, "--task", "classify", "--resume") == (0, "")  # it has grown
    assert [each["line"] for each in read_lines(tmp_path / "out.jsonl")] == [1, 2]
    source.write_text('{"inputs": "z"}\n{"inputs": "y"}\n')
    assert "have changed; begin anew" in refused("--task", "classify", "--resume")
    source.write_text('{"inputs": "x"}\n')
    assert "has 1 lines, but 2 were answered" in refused("--task", "classify", "--resume")
    (tmp_path / "out.jsonl.journal").unlink()
    assert "there is no journal" in refused("--task", "classify", "--resume")
    empty = write_lines(tmp_path / "empty.jsonl", [])
    empty.write_bytes(b"")
    assert batch(empty, "--task", "classify", "--overwrite") == (0, "")
    assert (tmp_path / "out.jsonl").read_bytes() == b""

    def full(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        said = refused("--task", "classify", "--overwrite")
    assert said.endswith("is full; make room, and go on with --resume")
    assert batch(source, "--task", "classify", "--resume") == (0, "")
    assert len(read_lines(tmp_path / "out.jsonl")) == 1
    folder = tmp_path / "absent" / "out.jsonl"
    assert cli.main(["batch", str(source), str(folder), "--task", "classify"]) == 1


def test_commands_in_this_process_are_not_limited() -> None:
    """Neither those that are open at once, nor in a minute."""
    sentiment = {"sentiment": STARTER_FOLDER / "sentiment"}
    config = Config(models=sentiment, max_requests_per_client=1, max_tokens_per_minute=1)

    async def status(application: Application) -> int:
        messages = application.stream("POST", "/classify", json.dumps({"inputs": TEXTS}).encode())
        (start, *_) = [message async for message in messages]
        return int(start["status"])

    async def main() -> None:
        async with Application.start(config) as application:
            for _ in range(3):
                found = await asyncio.gather(status(application), status(application))
                assert list(found) == [200, 200]

    asyncio.run(main())


@pytest.mark.parametrize("is_envelope", [False, True])
def test_a_dead_engine_ends_the_run_and_not_the_lines(tmp_path: Path, is_envelope: bool) -> None:
    line: dict[str, Any] = {"inputs": "fine"}
    if is_envelope:
        line = {"custom_id": "a", "method": "POST", "url": "/classify", "body": line}
    source = write_lines(tmp_path / "in.jsonl", [line])

    async def run(files: Files, *, dies: bool) -> None:
        config = Config(models={"sentiment": STARTER_FOLDER / "sentiment"})
        async with Application.start(config) as application:
            if dies:
                next(iter(application.context.models)).engine.fail("it is out of order")
            answers = Answers(application, "classify", None)
            with contextlib.closing(open_input(str(source), "jsonl", 2000, None, None)) as lines:
                await Batch(lines, "IN", answers, files, lambda _, __: None).run()

    for dies in (True, False):
        files = Files(tmp_path / "out.jsonl", {}, resume=True, overwrite=False)
        with contextlib.closing(files):
            if dies:
                with pytest.raises(UnavailableError, match="it is out of order"):
                    asyncio.run(run(files, dies=True))
                assert files.journal.number == 0
            else:
                asyncio.run(run(files, dies=False))
                assert (files.journal.number, files.journal.num_failed) == (1, 0)
    assert len(read_lines(tmp_path / "out.jsonl")) == 1


def test_other_requests_get_their_turn_while_lines_begin(tmp_path: Path) -> None:
    """Half a thousand lines that begin at once would hold a server's event loop."""
    line = {"method": "POST", "url": "/classify", "body": {"inputs": "fine"}}
    lines = [line | {"custom_id": str(number)} for number in range(400)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    num_begun, most = 0, 0

    class Counted(Answers):
        def fault_of(self, line: Line) -> str:
            nonlocal num_begun
            num_begun += 1
            return super().fault_of(line)

        async def answer(self, group: Sequence[Line]) -> list[Answer]:
            nonlocal num_begun
            num_begun += 1
            return [self.failure(line, "not asked") for line in group]

    async def take_turns() -> None:
        nonlocal num_begun, most
        while True:
            num_begun = 0
            await asyncio.sleep(0)
            most = max(most, num_begun)

    async def run(files: Files) -> None:
        config = Config(models={"sentiment": STARTER_FOLDER / "sentiment"})
        async with Application.start(config) as application:
            answers = Counted(application, None, None)
            turns = asyncio.create_task(take_turns())
            with contextlib.closing(open_input(str(source), "jsonl", 2000, None, None)) as opened:
                await Batch(opened, "IN", answers, files, lambda _, __: None).run()
            turns.cancel()

    files = Files(tmp_path / "out.jsonl", {}, resume=False, overwrite=False)
    with contextlib.closing(files):
        asyncio.run(run(files))
        assert files.journal.num_failed == 400
    assert 0 < most <= 32


NUM_LINES = 1600


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Each time that something counts, until all of it does; the results are those of one run."""
    lines = [{"id": index, "inputs": TEXTS[index % 4]} for index in range(NUM_LINES)]
    lines[600] = {"inputs": ""}
    source = write_lines(tmp_path / "in.jsonl", lines)
    command = [sys.executable, "-m", "maskdial", "batch", "-"]
    chosen = ["--task", "classify", "--resume"]
    content = source.read_bytes().splitlines(keepends=True)
    results = tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"

    def num_done() -> int:
        return int(json.loads(journal.read_bytes())["number"]) if journal.exists() else 0

    for fed in (700, 1300):  # lines that it gets to see before it is killed
        before = num_done()
        with subprocess.Popen([*command, str(results), *chosen], stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.writelines(content[:fed])
            process.stdin.flush()
            deadline = time.monotonic() + 60
            while num_done() <= before:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
        with results.open("ab") as end:  # as if it had been killed within a write
            end.write(b'{"line": 17')
    with source.open("rb") as file:
        whole = subprocess.run(
            [*command, str(results), *chosen], stdin=file, check=False, timeout=120
        )
    assert whole.returncode == 1
    numbers = [each["line"] for each in read_lines(results)]
    assert numbers == [number for number in range(1, NUM_LINES + 1) if number != 601]
    assert [each["line"] for each in read_lines(tmp_path / "out.jsonl.errors.jsonl")] == [601]
    assert cli.main(["batch", str(source), str(tmp_path / "once.jsonl"), "--task", "classify"]) == 1
    assert (tmp_path / "once.jsonl").read_bytes() == results.read_bytes()
    assert not os.path.exists(f"{journal}.partial")
