"""What the command says before it does anything: helps, and what is wrong with a command line."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "peft"):
            raise ImportError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
from maskdial import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def without_torch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["export", "export-adapter"])
def test_the_help_of_an_export_needs_no_torch(command: str) -> None:
    helped = without_torch(command, "--help")
    assert helped.returncode == 0, helped.stderr
    assert f"usage: maskdial {command}" in helped.stdout


@pytest.mark.parametrize(
    "arguments", [("export", "a", "b"), ("export-adapter", "a", "b", "--base=c")]
)
def test_an_export_without_torch_says_what_to_install(arguments: tuple[str, ...]) -> None:
    refused = without_torch(*arguments)
    assert refused.returncode == 1
    (told,) = refused.stderr.splitlines()
    assert "export needs torch and transformers (No module named" in told
    assert "[export]'" in told
