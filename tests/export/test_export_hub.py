"""Checkpoints by Hub id, from a Hub of our own on this machine."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tokenizers
from rich.console import Console
from transformers import BertConfig

from maskdial_export.checkpoint.files import read_files
from maskdial_export.checkpoint.hub import download_gguf, split_gguf
from maskdial_export.checkpoint.source import find
from maskdial_export.errors import ExportError
from maskdial_export.route import export_any_way
from tests.export.test_direct import TYPES
from tests.export.test_gguf_models import write

New = Callable[[str], Path]
Refuse = Callable[..., None]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves a public repository, some/model, and refuses others as the real one does."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "/some/gated" in path:
            self.reply(403, {"X-Error-Code": "GatedRepo"})
        elif "/some/model" not in path:
            self.reply(401, {"X-Error-Code": "RepoNotFound"})
        elif "/revision/nowhere" in path:
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in self.files.items()
            ]
            self.reply(200, {}, json.dumps(entries).encode())
        elif "/resolve/" in path:
            content = self.files[path.rpartition("/")[2]]
            self.reply(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{len(content)}"'}, content)
        else:
            about = {"id": "some/model", "sha": COMMIT, "siblings": []}
            self.reply(200, {}, json.dumps(about).encode())

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The files of some/model, which the test may change."""
    Hub.files = {
        "config.json": json.dumps(
            BertConfig().to_dict() | {"architectures": ["BertForMaskedLM"]}
        ).encode()
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield Hub.files
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        (
            "some/other",
            (),
            "shows no such repository; check the id, and if it is private set",
        ),
        ("some/gated", (), "some/gated is gated: accept its terms at http://127.0.0.1:"),
        ("some/model", ("--revision", "nowhere"), "some/model has no revision nowhere"),
        (
            "some/model",
            (),
            "if the repository has .bin files, which can run code when loaded",
        ),
        ("/no/such/folder", (), "/no/such/folder is neither a folder nor a valid Hub id"),
    ],
)
def test_refusals(name: str, options: tuple[str, ...], why: str, assert_refused: Refuse) -> None:
    assert_refused(name, why, *options)


def test_checkpoint_that_is_a_folder_of_links(hub: dict[str, bytes], new_checkpoint: New) -> None:
    """In the Hub's cache every file is a link to ../../blobs, the chat template as well."""
    for file in new_checkpoint("llama").iterdir():
        hub[file.name] = file.read_bytes()
    hub["chat_template.jinja"] = b"{{ messages }}"
    source = find("some/model", "auto", revision=None, allow_pickle=False)
    assert (source.path / "chat_template.jinja").is_symlink()
    assert source.provenance == f"some/model@{COMMIT}"
    assert len(source.weight_files()) == 1
    texts = read_files(source, tokenizers.Tokenizer.from_file(str(source.path / "tokenizer.json")))
    assert texts["chat_template.jinja"] == "{{ messages }}"


def test_offline(monkeypatch: pytest.MonkeyPatch, assert_refused: Refuse) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    why = "HF_HUB_OFFLINE is set, and the Hub's cache does not have some/model at main"
    assert_refused("some/model", why, "--revision", "main")


def test_unreachable(monkeypatch: pytest.MonkeyPatch, assert_refused: Refuse) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert_refused("some/model", "there is no folder some/model, and the Hub cannot be reached")


def test_weights_that_git_lfs_did_not_fetch(new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (source / "model.safetensors").write_bytes(pointer)
    with pytest.raises(ExportError, match="is a pointer of Git LFS"):
        find(str(source), "auto", revision=None, allow_pickle=False)


def test_adapter_in_place_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    with pytest.raises(ExportError, match="is an adapter of some/model; export that model with"):
        find(str(tmp_path), "auto", revision=None, allow_pickle=False)


def test_a_gguf_file_by_its_quantization(hub: dict[str, bytes], tmp_path: Path) -> None:
    write("llama", tmp_path / "made.gguf", quantize=TYPES)
    content = (tmp_path / "made.gguf").read_bytes()
    hub["model-Q4_K_M.gguf"] = content
    parts = [f"other-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    others = ["model-Q4_K_S.gguf", "mmproj-Q4_K_M.gguf", "a-Q5_0.gguf", "b-Q5_0.gguf", *parts]
    hub.update(dict.fromkeys(others, b"GGUF"))
    console = Console(quiet=True)
    manifest = export_any_way("some/model:q4_k_m", tmp_path / "bundle", console=console)
    assert (manifest.source, manifest.precision) == (
        f"some/model/model-Q4_K_M.gguf@{COMMIT}",
        "int4",
    )
    with pytest.raises(ExportError, match=r"some/model has no GGUF file of Q9 \(a name that ends"):
        export_any_way("some/model:Q9", tmp_path / "other")
    with pytest.raises(ExportError, match=r"several files of Q5_0: a-Q5_0.gguf, b-Q5_0.gguf"):
        export_any_way("some/model:Q5_0", tmp_path / "other")
    with pytest.raises(ExportError, match="shows no such repository"):
        export_any_way("some/other:Q4_K_M", tmp_path / "other")
    first = download_gguf("some/model", "Q8_0", None)
    assert first.name == parts[0]
    assert (first.parent / parts[1]).is_file()
    assert split_gguf("C:/models") is None
    assert split_gguf("org/name") is None
