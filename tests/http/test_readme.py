"""The README's own lines, as they stand but for the port."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


CURL_LINES = [line for block in blocks("sh") for line in block.splitlines() if "curl " in line]


def test_the_readme_has_its_three_lines() -> None:
    routes = [re.findall(r"localhost:8000(/\S+)", line) for line in CURL_LINES]
    assert routes == [["/fill-mask"], ["/classify"], ["/generate_stream"]]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", CURL_LINES)
def test_curl_line(url: str, line: str) -> None:
    command = line.replace("localhost:8000", url.removeprefix("http://"))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r'"(sequence|label|generated_text)":', done.stdout), done.stdout
    assert '"error"' not in done.stdout


def run_snippet(name: str, url: str) -> str:
    (snippet,) = (block for block in blocks("python") if f"import {name}" in block)
    code = snippet.replace("http://127.0.0.1:8000", url)
    assert code != snippet
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_client_snippet(url: str) -> None:
    sentence, label, story = run_snippet("Client", url).split("\n", 2)
    assert re.fullmatch(r"She opened the \S+ and went in\.", sentence)
    assert label == "NEGATIVE"
    assert len(story) > 20


def test_openai_snippet(openai_server: Any) -> None:
    assert run_snippet("openai", str(openai_server.url)).strip()


def test_it_can_be_read_at_once() -> None:
    assert len(README.splitlines()) <= 100
