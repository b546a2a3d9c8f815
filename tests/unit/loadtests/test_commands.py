"""`loadtests.__main__`: every command has a help text; how a run ends is the exit status."""

import pytest

from loadtests import run
from loadtests.__main__ import main
from loadtests.faults import KINDS

COMMANDS = (
    "run",
    "engine",
    "kernels",
    "scaling",
    "faults",
    "decisions",
    "encoders",
    "policies",
    "adapters",
    "fairness",
    "prefix",
    "compare",
)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command}" in shown for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *(f"faults {kind}" for kind in KINDS)])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert ("--output" in capsys.readouterr().out) is (command != "faults")


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["run", "--nothing"]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_an_interrupted_run_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "main", interrupt)
    assert main(["run"]) == 130
    assert capsys.readouterr().err == "loadtests: interrupted, no report\n"
