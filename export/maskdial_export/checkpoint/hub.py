"""Checkpoints on the Hugging Face Hub: downloading one, or finding it in the cache."""

import fcntl
import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import tqdm

from maskdial_export.errors import ExportError, first_line, io_reason, is_full
from maskdial_export.phase import BYTES, Progress, silent

_MODULES = "[0-9]*_*/model.safetensors"  # sentence-transformers' Dense and LayerNorm
_ADAPTERS = "*/adapter_model.safetensors"
_DOWNLOADED = (
    *("*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors"),
    *(_MODULES, _ADAPTERS),
)
# Where there are no weights: graphs, by the names of optimum; and what is refused by its name
_GRAPHS = ("model.onnx*", "onnx/model.onnx*", "*model_quantized.onnx*", "*/openvino_model.xml")
_GGUF_SOURCE = re.compile(r"([\w.-]+/[\w.-]+):(\w+)")
_PART = "-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]"
HYBRID_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
"""What stands beside the weights of a model with sparse weights and token vectors, BGE-M3."""
_PICKLES = ("*.bin", *HYBRID_HEADS)
_NOT_DOWNLOADED = ("*/*.bin", "*/*.txt", "*/*.model")


_SHA256 = re.compile("[0-9a-f]{64}")
_SNAPSHOTS = "snapshots"
_show: list[Progress] = [silent]
"""What downloads report to: tqdm's classes are all that huggingface_hub takes."""


@contextmanager
def shown_by(progress: Progress) -> Iterator[None]:
    """Within the block, downloads report their bytes."""
    _show.append(progress)
    try:
        yield
    finally:
        _show.pop()


class _Bytes(tqdm):
    """Counts for `shown_by`, and draws nothing. Of the bars of a snapshot, one counts bytes."""

    bar = "Reconstructing"

    def __init__(self, *args: Any, **options: Any) -> None:
        description = str(options.get("desc", ""))
        self._counts = options.get("unit") == "B" and self.bar in description
        super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

    def update(self, n: float | None = 1) -> None:
        if self._counts and n:
            self.n += n
            _show[-1](int(self.n), int(self.total or 0), BYTES)

    def set_postfix_str(self, *_: object, **__: object) -> None:
        pass


class _Rest(_Bytes):
    """Counts for a download of one file."""

    bar = ""


def provenance(path: Path) -> str:
    """What a manifest says of a file's origin: its name, and of the Hub's cache also where from.

    The cache has ``models--ORG--NAME/snapshots/COMMIT/FILE``.
    """
    snapshot = path.parent
    while snapshot.parent.name != _SNAPSHOTS and snapshot.parent != snapshot:
        snapshot = snapshot.parent
    repository = snapshot.parent.parent.name
    if not repository.startswith("models--"):
        return path.name
    name = repository.removeprefix("models--").replace("--", "/", 1)
    return f"{name}/{path.relative_to(snapshot).as_posix()}@{snapshot.name}"


def download(name: str, revision: str | None, *, allow_pickle: bool) -> Path:
    """The folder in the cache with a repository's files, downloaded as far as they are not there:
    of one without weights in safetensors, its graphs of ONNX.

    huggingface_hub takes the token from HF_TOKEN or ``hf auth login``, and asks nothing if
    HF_HUB_OFFLINE is set.

    Raises:
        ExportError: there is no such repository or revision, or it cannot be reached.
        OSError: the cache cannot be written.
    """
    patterns = [*_DOWNLOADED, *(_PICKLES if allow_pickle else ())]
    folder = _snapshot(name, revision, patterns, [*_NOT_DOWNLOADED])
    if not allow_pickle and not any(folder.glob("*.safetensors")):
        return _snapshot(name, revision, [*patterns, *_GRAPHS], [*_NOT_DOWNLOADED])
    return folder


def split_gguf(source: str) -> tuple[str, str] | None:
    """The repository and the quantization of ``ORG/NAME:Q4_K_M``; None if it is nothing such."""
    found = _GGUF_SOURCE.fullmatch(source)
    return None if found is None or Path(source).exists() else (found[1], found[2])


def download_gguf(name: str, quantization: str, revision: str | None) -> Path:
    """A repository's GGUF file of a quantization, as `download`; of one in parts, the first.

    Raises:
        ExportError: as `download`, or there is no such file, or several.
        OSError: the cache cannot be written.
    """
    ends = [
        f"*[-._]{spelled}{part}.gguf"
        for spelled in (quantization, quantization.upper(), quantization.lower())
        for part in ("", _PART)
    ]
    folder = _snapshot(name, revision, ends, ["*mmproj*"])
    files = {file for end in ends for file in folder.rglob(end)}
    files = {each for each in files if "mmproj" not in each.name}
    firsts = sorted(each for each in files if "-of-" not in each.name or "-00001-of-" in each.name)
    if len(firsts) == 1:
        return firsts[0]
    if firsts:
        names = ", ".join(each.name for each in firsts)
        raise ExportError(f"{name} has several files of {quantization}: {names}; download one")
    raise ExportError(
        f"{name} has no GGUF file of {quantization} (a name that ends with -{quantization}.gguf); "
        f"{huggingface_hub.constants.ENDPOINT}/{name}/tree/main lists those that it has"
    )


def _snapshot(name: str, revision: str | None, allowed: list[str], ignored: list[str]) -> Path:
    blobs = _blobs(name)
    before = _names(blobs)
    try:
        _resume(name, revision, blobs)
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=allowed,
            ignore_patterns=ignored,
            tqdm_class=_Bytes,
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ExportError(_reason(name, revision, error)) from error
    except OSError as error:
        size = re.search("Consistency check failed", str(error))
        if size is None and not is_full(error):
            raise
        why = "what came is not as long as the Hub says" if size else io_reason(error)
        where = "" if size else f"make room in {huggingface_hub.constants.HF_HUB_CACHE}, and "
        raise ExportError(
            f"{name} cannot be downloaded: {why}; {where}run it again to go on where it stopped"
        ) from error
    except Exception as error:  # of the HTTP client
        raise ExportError(
            f"{name} cannot be downloaded from the Hub: {first_line(error)}; run the export again "
            "to go on where it stopped"
        ) from error
    for blob in sorted(_names(blobs) - before):
        _check_hash(name, blobs / blob)
    return Path(folder)


def _resume(name: str, revision: str | None, blobs: Path) -> None:
    """Gets the rest of large files of which an interrupted download has left the beginning.

    huggingface_hub gives each download a file of its own, SHA256.RANDOM.incomplete, and does not
    go on with those of others. Like it, this holds the lock of the file.
    """
    parts: dict[str, list[Path]] = {}
    for each in blobs.glob("*.incomplete") if blobs.is_dir() else ():
        if _SHA256.fullmatch(sha256 := each.name.partition(".")[0]):
            parts.setdefault(sha256, []).append(each)
    if not parts or huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    token = huggingface_hub.get_token()
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    for entry in huggingface_hub.HfApi().list_repo_tree(name, recursive=True, revision=revision):
        found = entry.lfs.sha256 if isinstance(entry, RepoFile) and entry.lfs else ""
        if not isinstance(entry, RepoFile) or found not in parts:
            continue
        lock = blobs.parent.parent / ".locks" / blobs.parent.name / f"{found}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another process downloads it
                continue
            *others, longest = sorted(parts[found], key=lambda part: part.stat().st_size)
            for other in others:
                other.unlink()
            url = huggingface_hub.hf_hub_url(name, entry.path, revision=revision)
            with longest.open("ab") as file:
                http_get(
                    url,
                    file,
                    resume_size=file.tell(),
                    headers=headers,
                    expected_size=entry.size,
                    tqdm_class=_Rest,
                )
            longest.replace(blobs / found)


def _blobs(name: str) -> Path:
    return Path(
        huggingface_hub.constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs"
    )


def _names(folder: Path) -> set[str]:
    """The complete files of a folder that are named by their SHA-256, as large ones are."""
    if not folder.is_dir():
        return set()
    return {each.name for each in folder.iterdir() if _SHA256.fullmatch(each.name)}


def _check_hash(name: str, blob: Path) -> None:
    """Removes a file that is another one than its name says: the next download gets it anew.

    Raises:
        ExportError: it is another one.
    """
    with blob.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == blob.name:
        return
    blob.unlink()
    # Links to it would count as downloaded
    shutil.rmtree(blob.parent.parent / _SNAPSHOTS, ignore_errors=True)
    raise ExportError(
        f"a file of {name} has arrived damaged: its SHA-256 is {found[:12]}..., and the Hub says "
        f"{blob.name[:12]}...; it was removed, run it again to download it"
    )


def _reason(name: str, revision: str | None, error: Exception) -> str:
    if isinstance(error, HFValidationError):
        return f"{name} is neither a folder nor a valid Hub id"
    if isinstance(error, LocalEntryNotFoundError):
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            at = "" if revision is None else f" at {revision}"
            return (
                f"there is no folder {name}, HF_HUB_OFFLINE is set, and the Hub's cache does not "
                f"have {name}{at}; download it first, or pass the path of a checkpoint folder"
            )
        return (
            f"there is no folder {name}, and the Hub cannot be reached; to work offline, pass the "
            "path of a checkpoint folder"
        )
    if isinstance(error, GatedRepoError):
        return (
            f"{name} is gated: accept its terms at {huggingface_hub.constants.ENDPOINT}/{name}, "
            "and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {name}, and the Hub shows no such repository; check the id, and "
            "if it is private set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {revision}; pass a branch, a tag or a commit of it"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        token = "; check HF_TOKEN" if status in (401, 403) else ""
        return f"the Hub refuses to serve {name} (HTTP {status}){token}"
    raise AssertionError(error)
