"""What the command says before it does anything: helps, and what is wrong with a command line."""

import errno
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maskdial import cli
from maskdial.bundle.starters import STARTER_FOLDER
from maskdial.config import Config, load_config
from maskdial.errors import ConfigError
from maskdial.http.listener import listen
from maskdial.registry.catalog import Catalog
from maskdial.server import Server

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
    "arguments", [("export", "a", "b", "--trace"), ("export-adapter", "a", "b", "--base=c")]
)
def test_an_export_without_torch_says_what_to_install(arguments: tuple[str, ...]) -> None:
    refused = without_torch(*arguments)
    assert refused.returncode == 1
    (told,) = refused.stderr.splitlines()
    assert "this needs torch and transformers (No module named" in told
    assert "[export]'" in told


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """The exit status of a command line that cannot be run, and what it says."""
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = int(str(end.code))
    return status, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("serve --prot 1", "serve: there is no flag --prot; did you mean --port?"),
        ("serve --threads", "serve: argument --threads: expected one argument; see --help"),
        ("serve more", "serve: there are more arguments than the command takes; see --help"),
        ("inspect", "inspect: the following arguments are required: bundle; see --help"),
    ],
)
def test_a_command_line_that_is_wrong_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: str, told: str
) -> None:
    assert refused(capsys, *arguments.split()) == (2, [f"maskdial {told}"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--threads abc", "setting 'threads': must be a whole number or 'auto', not 'abc'"),
        ("--slots 0", "setting 'slots': must be at least 1 or 'auto', not '0'"),
        ("--port 70000", "setting 'port': must be at most 65,535, not '70000'"),
        ("--grace-period soon", "setting 'grace_period': must be a number, not 'soon'"),
        (
            "--log-format maybe",
            "setting 'log_format': must be 'text', 'json' or 'json-texts', not 'maybe'",
        ),
        (
            "--log-level loud",
            "setting 'log_level': must be 'debug', 'info', 'warning' or 'error', not 'loud'",
        ),
        (
            "--model hybrd",
            "setting 'model': 'hybrd' is neither NAME=PATH, nor a name of the Hub, ORG/NAME, nor a "
            "GGUF file, nor a starter model (hybrid, sentiment)",
        ),
        (
            "--cors-allow-origin here",
            "setting 'cors_allow_origin.0': 'here' is no origin; write it as https://example.org, "
            "or *",
        ),
    ],
)
def test_a_setting_that_is_wrong_is_told_in_its_own_words(
    capsys: pytest.CaptureFixture[str], arguments: str, told: str
) -> None:
    assert refused(capsys, "serve", *arguments.split()) == (1, [f"maskdial: {told}"])


def test_a_bundle_without_a_name_is_asked_for_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, (told,) = refused(capsys, "serve", "--model", str(tmp_path))
    assert status == 1
    assert told.endswith(f"say what the bundle is called: NAME={tmp_path}")


def test_starters_are_served_by_name_beside_others(tmp_path: Path) -> None:
    config = load_config({"model": [f"mine={tmp_path}", "hybrid"]})
    assert config.models == {"mine": tmp_path, "hybrid": STARTER_FOLDER / "hybrid"}


@pytest.mark.parametrize("command", ["serve", "health"])
def test_the_help_is_for_people(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help-all"])
    told = capsys.readouterr().out
    assert "<class" not in told
    assert "(default: )" not in told
    assert not re.search(r"--[a-z-]+ [A-Z]+_[A-Z_]+", told)  # argparse's own names of values


def test_a_port_in_use_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = Server(Config(port=port, log_level="warning"))
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use; stop what"):
            server.run()
        assert list(server.config.app.state.context.models) == []  # type: ignore[union-attr]


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: --host is no address"):
        listen("192.0.2.1", 0, 10)


def without_ipv6(monkeypatch: pytest.MonkeyPatch, *, by_boot: bool) -> None:
    """Has a system without IPv6, since the start of its kernel (`ipv6.disable=1`) or by sysctl."""

    class Socket(socket.socket):
        def __init__(self, family: int, *rest: int) -> None:
            if by_boot and family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(socket.AF_INET, *rest)
            self.pretended = family

        def setsockopt(self, level: int, *rest: Any) -> None:
            if level != socket.IPPROTO_IPV6:
                super().setsockopt(level, *rest)

        def bind(self, address: Any) -> None:
            if self.pretended == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    def addresses(host: str, port: int, **_: Any) -> list[Any]:
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        return [six] if host == "::1" else [six, four]

    monkeypatch.setattr("maskdial.http.listener.socket.socket", Socket)
    monkeypatch.setattr("maskdial.http.listener.socket.getaddrinfo", addresses)


@pytest.mark.parametrize("by_boot", [True, False])
def test_a_system_without_ipv6_listens_on_ipv4(
    monkeypatch: pytest.MonkeyPatch, by_boot: bool
) -> None:
    without_ipv6(monkeypatch, by_boot=by_boot)
    (listener,) = listen("localhost", 0, 10)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"localhost:{port}: the port is in use"):
            listen("localhost", port, 10)


@pytest.mark.parametrize(
    ("by_boot", "why"), [(True, "address family not supported"), (False, "is no address of this")]
)
def test_a_system_without_ipv6_has_no_address_of_it(
    monkeypatch: pytest.MonkeyPatch, by_boot: bool, why: str
) -> None:
    without_ipv6(monkeypatch, by_boot=by_boot)
    with pytest.raises(ConfigError, match=rf"cannot listen on ::1:0: .*{why}"):
        listen("::1", 0, 10)


def test_a_folder_of_models_that_is_not_there_has_no_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent cannot be read: no such file or directory$"):
        Catalog({}, tmp_path / "absent").scan()


@pytest.mark.parametrize("lines", [['{"inputs": "a"}'] * 3, ['{"text": 1}']])
def test_a_batch_without_a_task_is_refused_as_a_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: list[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    status, (told,) = refused(capsys, "batch", str(source), str(tmp_path / "out.jsonl"))
    assert status == 1
    assert told.endswith("say what to do with them by --task, such as --task classify")
    assert not (tmp_path / "out.jsonl").exists()
