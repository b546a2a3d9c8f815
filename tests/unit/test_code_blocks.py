"""Every block of code in the documents is what its fence says: it parses, its commands and flags
exist. `tests/http/test_code_blocks.py` runs those that only need a server.
"""

import ast
import importlib.util
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from maskdial import cli
from maskdial.config import load_config
from tests.blocks import ROOT, Block, blocks, commands

ALL = list(blocks())
SHELL = list(blocks("sh"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OTHERS = frozenset(
    (
        *(
            "curl",
            "docker",
            "export",
            "hf",
            "helm",
            "jq",
            "openssl",
            "ray",
            "sed",
            "source",
            "zcat",
        ),
        *("aider", "aiperf", "claude", "cline", "guidellm", "mini", "open-webui", "py-spy", "qwen"),
    )
)
WRAPPERS = ("numactl", "taskset")
MAKEFILE = (ROOT / "Makefile").read_text()


def place(block: Block) -> str:
    return block.place


def parse_python(code: str) -> None:
    compile(code, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "json": json.loads,
    "python": parse_python,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}


@pytest.mark.parametrize("block", ALL, ids=place)
def test_a_block_is_what_its_fence_says(block: Block) -> None:
    assert block.language in {*PARSERS, "sh", "text", "mermaid"}
    if block.language in PARSERS:
        PARSERS[block.language](block.code)


@pytest.mark.parametrize("block", SHELL, ids=place)
def test_a_shell_reads_it(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check(arguments: list[str]) -> bool:
    """Whether a command is known; fails if it is one of ours and names what there is not."""
    while "=" in arguments[0]:  # a variable
        arguments = arguments[1:]
    if arguments[0].rpartition("/")[2] in OTHERS or (ROOT / arguments[0]).is_file():
        return True
    for number, each in enumerate(arguments):
        rest = arguments[number + 1 :]
        program = each.rpartition("/")[2]
        if program == "maskdial":
            if rest[0] != "ray" or importlib.util.find_spec("ray"):
                cli.command_parser(rest[0]).parse_args(rest)
            return True
        if program == "make":
            assert re.search(rf"^{rest[0]}:", MAKEFILE, re.MULTILINE), rest[0]
            return True
        if program == "python" and rest[:1] == ["-m"]:
            assert importlib.util.find_spec(rest[1]) is not None, rest[1]
            return True
        if program == "pip":
            for extra in re.findall(r"\[([a-z,]+)\]", " ".join(rest)):
                assert set(extra.split(",")) <= EXTRAS.keys(), extra
            return True
    return arguments[0] in WRAPPERS


@pytest.mark.parametrize("block", SHELL, ids=place)
def test_commands_and_flags_exist(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in commands(block.code):
        try:
            assert check(arguments) or block.why_not, f"what is {arguments}?"
        except SystemExit as end:
            if end.code:  # --help ends with 0
                pytest.fail(f"{' '.join(arguments)}: {capsys.readouterr().err}")


def test_the_file_of_settings_is_read(tmp_path: Path) -> None:
    (block,) = (each for each in blocks("toml") if each.place.startswith("docs/settings.md"))
    file = tmp_path / "maskdial.toml"
    file.write_text(block.code)
    assert set(load_config({}, file).models) == {"chat", "search"}


def test_commands_are_told_apart() -> None:
    found = list(commands("a 'b\nc' \\\n  d | e # f\n# g\nH=1 i && j < k > l\n"))
    assert found == [["a", "b\nc", "d"], ["e"], ["H=1", "i"], ["j"]]
    assert check(["X=1", "numactl", "--membind=0", "maskdial", "serve", "--port", "1"])
    with pytest.raises(SystemExit):
        check(["maskdial", "serve", "--no-such-flag"])
    assert not check(["rm", "x"])
