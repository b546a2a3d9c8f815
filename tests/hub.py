"""A Hub of our own on this machine, which huggingface_hub asks as it does the real one.

What it says and how it refuses is described in huggingface_hub's sources (file_download.py,
utils/_http.py): large files have their SHA-256 as ETag, and downloads resume by Range.
"""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A repository acme/model of files, one that is gated, and none beside them.

    Attributes:
        url: its address, for HF_ENDPOINT.
        files: contents by name; large ones end in .gguf, .onnx or .safetensors.
        damaged: names of files of which the last byte arrives changed.
        held: stops downloads of large files after half of the bytes, until it is set.
        halves: is released for each download that has come so far.
        ranges: the Range of each download of a large file.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.damaged: set[str] = set()
        self.held: threading.Event | None = None
        self.halves = threading.Semaphore(0)
        self.ranges: list[str | None] = []
        self.url = ""


def _is_large(name: str) -> bool:
    return name.endswith((".gguf", ".onnx", ".safetensors"))


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "/acme/gated" in path:
            self._reply(403, {"X-Error-Code": "GatedRepo"})
        elif "/acme/model" not in path:
            self._reply(401, {"X-Error-Code": "RepoNotFound"})
        elif "/revision/nowhere" in path:
            self._reply(404, {"X-Error-Code": "RevisionNotFound"})
        elif "/resolve/" in path:
            self._file(path.partition("/resolve/")[2].partition("/")[2])
        else:
            entries: list[dict[str, Any]] = []
            for name, content in self.hub.files.items():
                entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
                entry["oid"] = hashlib.sha1(content, usedforsecurity=False).hexdigest()
                if _is_large(name):
                    digest = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 1}
                entries.append(entry)
            about = {"id": "acme/model", "sha": COMMIT, "siblings": []}
            self._reply(200, {}, json.dumps(entries if "/tree/" in path else about).encode())

    def _file(self, name: str) -> None:
        content = self.hub.files[name]
        large = _is_large(name)
        algorithm = hashlib.sha256 if large else hashlib.sha1
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{algorithm(content).hexdigest()}"'}
        if name in self.hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = 0
        wanted = self.headers.get("Range")
        if large and self.command == "GET":
            self.hub.ranges.append(wanted)
        if wanted is not None:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(200 if wanted is None else 206)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        half = max(start, len(content) // 2)
        try:
            self.wfile.write(content[start:half])
            self.wfile.flush()
            if large:
                self.hub.halves.release()
                if self.hub.held is not None:
                    self.hub.held.wait()
            self.wfile.write(content[half:])
        except OSError:  # the client was interrupted
            self.close_connection = True

    def _reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that listens while the block runs."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        if hub.held is not None:
            hub.held.set()
        server.shutdown()
        server.server_close()
        thread.join()
