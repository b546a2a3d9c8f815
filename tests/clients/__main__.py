"""Starts a server that chats and calls tools, and runs every client against it.

    python -m tests.clients PYTHON [SCRIPT ...]

PYTHON is the interpreter of the clients' environment.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import RunningServer
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle

_FOLDER = Path(__file__).parent
_MODEL = "tools"
_TIMEOUT = 300  # seconds for one client
# Clients that would report home, or look up prices
_OFFLINE = {"HAYSTACK_TELEMETRY_ENABLED": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def main(python: str, *names: str) -> int:
    """Runs the named clients, or all of them; returns how many failed."""
    scripts = [_FOLDER / name for name in names] or sorted(_FOLDER.glob("use_*.py"))
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        template = (TEMPLATES / "hermes.jinja").read_text(encoding="utf-8")
        server = RunningServer(models={_MODEL: make_chat_bundle(Path(folder) / _MODEL, template)})
        try:
            server.wait_until_ready()
            for script in scripts:
                print(f"{script.name}", flush=True)
                if not _works([python, str(script), server.url, _MODEL]):
                    failed.append(script.name)
        finally:
            server.stop()
    print(f"{len(scripts) - len(failed)} of {len(scripts)} clients work", *failed)
    return len(failed)


def _works(command: list[str]) -> bool:
    try:
        environment = os.environ | _OFFLINE
        client = subprocess.run(command, timeout=_TIMEOUT, check=False, env=environment)
        return client.returncode == 0
    except subprocess.TimeoutExpired as error:
        print(error)
        return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
