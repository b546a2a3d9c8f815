"""Child processes see no secrets."""

import subprocess

import pytest

from maskdial.causal.grammar.check import GrammarChecker
from maskdial.child_process import child_environment

SECRETS = {
    "MASKDIAL_API_KEYS": "k",
    "MASKDIAL_ADMIN_KEY": "k",
    "HF_TOKEN": "k",
    "OPENAI_API_KEY": "k",
    "AWS_SECRET_ACCESS_KEY": "k",
    "DATABASE_URL": "postgres://user:k@host",
    "LD_PRELOAD": "k.so",
}


def test_only_what_a_child_needs_passes() -> None:
    given = SECRETS | {"PATH": "/bin", "LC_ALL": "C", "PYTHONUTF8": "1", "HOME": "/root"}
    kept = child_environment(given)
    assert kept.pop("PYTHONPATH")
    assert kept == {"PATH": "/bin", "LC_ALL": "C", "PYTHONUTF8": "1", "HOME": "/root"}


def test_the_process_that_checks_grammars_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        if name != "LD_PRELOAD":
            monkeypatch.setenv(name, value)
    seen: dict[str, str] = {}

    def note(command: list[str], *, env: dict[str, str], **_: object) -> None:
        seen.update(env)
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", note)
    with pytest.raises(InterruptedError):
        GrammarChecker("{}", [0]).check("{}")
    assert "PATH" in seen
    assert not SECRETS.keys() & seen.keys()
