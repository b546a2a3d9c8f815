"""Where the system gives no more threads or memory, a start ends with a sentence."""

import threading

import pytest

from maskdial.config import Config
from maskdial.errors import ConfigError, explain_exhaustion
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.loading import start_models


@pytest.mark.parametrize("name", ["hybrid", "sentiment"])
def test_no_thread_can_be_started(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConfigError, match="no more threads; raise the limits"):
        start_models(name, STARTER_FOLDER / name, Config(threads=1), Metrics())


def test_other_errors_are_their_own() -> None:
    with pytest.raises(ConfigError, match="no more memory"), explain_exhaustion():
        raise MemoryError
    with pytest.raises(RuntimeError, match="bug"), explain_exhaustion():
        raise RuntimeError("bug")
