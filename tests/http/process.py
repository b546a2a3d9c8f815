"""Process: the server's command line in a process of its own, on a free port."""

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from maskdial.registry.catalog import STARTER_FOLDER

TLS = Path(__file__).parents[1] / "data" / "tls"
MODEL = f"sentiment={STARTER_FOLDER / 'sentiment'}"


class Process:
    """`maskdial serve` with these arguments, the sentiment starter, and a certificate if ``tls``.

    Attributes:
        port: on localhost.
        context: with which clients connect under TLS; None without.
        http: a client.
    """

    def __init__(self, *arguments: str, tls: bool = False, **options: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.context: ssl.SSLContext | None = None
        self.url = f"http://127.0.0.1:{self.port}"
        common = ["--threads", "1", "--model", MODEL, "--port", str(self.port)]
        if tls:
            self.context = ssl.create_default_context(cafile=TLS / "first.crt")
            self.url = f"https://localhost:{self.port}"
            common += ["--ssl-certfile", str(TLS / "first.crt")]
            common += ["--ssl-keyfile", str(TLS / "first.key")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "maskdial", "serve", *common, *arguments], **options
        )
        self.http = self.client()

    def client(self) -> httpx.Client:
        """Another client."""
        return httpx.Client(base_url=self.url, timeout=60, verify=self.context or False)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health/ready").status_code == 200:
                    return
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
