"""The cache of bundles that were exported to be served, by source, revision and precision.

Those of the Hub's repositories are at ORG/NAME, of a repository's GGUF file at
ORG/NAME--QUANTIZATION, those of GGUF files and of checkpoints' folders at
files/NAME-DIGEST. A revision that was asked for follows as @REVISION, a precision other than the
default as +PRECISION.

It has the form of ``--model-dir``.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from maskdial.bundle.manifest import MANIFEST
from maskdial.bundle.verified import VARIABLE as VARIABLE
from maskdial.bundle.verified import find_cache
from maskdial.errors import ConfigError, shortened

GGUF = ".gguf"
"""How the names of files end whose bundles are in the cache."""

_FILES = "files"
_CONFIG = "config.json"
_OF_FILE = "--"
"""In place of the colon, which paths cannot have everywhere; no repository's name has it."""
_HUB = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<quantization>\w+))?(?:@(?P<revision>[\w./-]+))?"
)
_HOSTS = ("hf.co/", "huggingface.co/")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A bundle in the cache.

    Attributes:
        name: of the repository, or files/NAME-DIGEST of a file or a folder.
        folder: of the bundle.
        num_bytes: of its files.
    """

    name: str
    folder: Path
    num_bytes: int


def cache_folder() -> Path:
    """Where the cache is: ``MASKDIAL_CACHE``, or ``maskdial`` where the system has its caches.

    Raises:
        ConfigError: the variable is empty.
    """
    if os.environ.get(VARIABLE) == "":
        raise ConfigError(f"{VARIABLE} is empty; set it to a folder, or unset it")
    return find_cache()


@dataclass(frozen=True, slots=True)
class HubSource:
    """What the Hub has of a model: a repository's checkpoint, or its GGUF file of a quantization.

    ``revision`` is a branch, a tag or a commit; None for the main branch.
    """

    repository: str
    quantization: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubSource | None":
        """``ORG/NAME[:QUANTIZATION][@REVISION]``, perhaps behind ``hf.co/``; None of another text.

        Files of this machine are not looked at.
        """
        for host in _HOSTS:
            text = text.removeprefix(host)
        found = _HUB.fullmatch(text)
        if found is None or {".", ".."}.intersection(found["repository"].split("/")):
            return None
        if _OF_FILE in found["repository"] or found["repository"].startswith(f"{_FILES}/"):
            return None
        return cls(**found.groupdict())

    @classmethod
    def named(cls, text: str) -> "HubSource | None":
        """As `parse`; None as well of the path of a folder that is there."""
        found = cls.parse(text)
        return None if found is None or Path(found.repository).exists() else found

    @classmethod
    def of_folder(cls, folder: Path) -> "HubSource | None":
        """What a folder of `folder` is the bundle of; None of another one."""
        if folder.parent.parent != cache_folder():
            return None
        name = unquote(folder.name.partition("+")[0].replace(_OF_FILE, ":"))
        return cls.parse(f"{folder.parent.name}/{name}")

    @property
    def source(self) -> str:
        """As the export takes it, without the revision."""
        return ":".join(filter(None, (self.repository, self.quantization)))

    @property
    def served_name(self) -> str:
        """What requests call it, without the revision."""
        return self.source.replace(":", _OF_FILE)

    def folder(self) -> Path:
        """Where the bundle is or would be."""
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return cache_folder() / f"{self.served_name}{revision}"


def with_precision(folder: Path, precision: str | None) -> Path:
    """Where the bundle of the same source in a precision is; None for the default."""
    return folder if precision is None else folder.with_name(f"{folder.name}+{precision}")


def is_source(path: Path) -> bool:
    """Whether a path is that of a GGUF file, or of a folder with a checkpoint and no bundle."""
    if path.suffix == GGUF and not path.is_dir():
        return True
    return (path / _CONFIG).is_file() and not (path / MANIFEST).exists()


def source_bundle(source: Path) -> Path:
    """Where the bundle of a GGUF file or a checkpoint's folder is, or would be; another place once
    a file has changed.

    Raises:
        ConfigError: there is no such file.
    """
    told = [str(source.resolve())]
    is_folder = source.is_dir()
    try:
        below = source.glob("onnx/*")  # graphs, which may be all that there is of the weights
        for file in sorted([*source.iterdir(), *below]) if is_folder else [source]:
            status = file.stat()
            told.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    except OSError as error:
        raise ConfigError(f"there is no file {source}: {error.strerror}") from error
    digest = hashlib.sha256(" ".join(told).encode()).hexdigest()[:12]
    name = source.resolve().name if is_folder else source.stem
    return cache_folder() / _FILES / f"{name}-{digest}"


def cached_models() -> list[CachedModel]:
    """The bundles in the cache, by name."""
    return [
        CachedModel(f"{folder.parent.name}/{folder.name}", folder, sum(_sizes(folder)))
        for folder in sorted(cache_folder().glob("[!.]*/[!.]*"))
        if (folder / MANIFEST).is_file()
    ]


def remove(name: str) -> None:
    """Removes a bundle from the cache.

    Raises:
        ConfigError: it is not there, or cannot be removed.
    """
    named = HubSource.parse(name)
    if named is not None:  # as it is asked for
        name = str(named.folder().relative_to(cache_folder()))
    found = next((each for each in cached_models() if each.name == name), None)
    if found is None:
        raise ConfigError(
            f"there is no {shortened(name)!r} in the cache {cache_folder()}; 'maskdial models' "
            "lists what is there"
        )
    if found.folder.resolve() != cache_folder().resolve() / name:
        raise ConfigError(
            f"{found.folder} is a link to {found.folder.resolve()}, which is not of the cache; "
            "remove the link yourself"
        )
    try:
        shutil.rmtree(found.folder)
    except OSError as error:
        raise ConfigError(f"{found.folder} cannot be removed: {error.strerror}") from error


def _sizes(folder: Path) -> Iterator[int]:
    return (file.stat().st_size for file in folder.rglob("*") if file.is_file())
