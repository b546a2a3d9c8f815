"""The cache of bundles that were exported to be served.

Those of the Hub's repositories are at ORG/NAME, of a repository's GGUF file at
ORG/NAME--QUANTIZATION, those of GGUF files and of checkpoints' folders at
files/NAME-DIGEST.

It has the form of ``--model-dir``.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maskdial.bundle.manifest import MANIFEST
from maskdial.errors import ConfigError, shortened

VARIABLE = "MASKDIAL_CACHE"
"""The environment variable that says where it is."""

GGUF = ".gguf"
"""How the names of files end whose bundles are in the cache."""

_FILES = "files"
_CONFIG = "config.json"
_OF_FILE = "--"
"""In place of the colon, which paths cannot have everywhere; no repository's name has it."""
_HUB_FILE = re.compile(r"[\w.-]+/[\w.-]+:\w+")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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
    given = os.environ.get(VARIABLE)
    if given is not None:
        if not given:
            raise ConfigError(f"{VARIABLE} is empty; set it to a folder, or unset it")
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "maskdial"


def is_hub_name(text: str) -> bool:
    """Whether a text may be a repository's name, and is not the path of a folder."""
    parts = text.split("/")
    named = _HUB_NAME.fullmatch(text) is not None and not {".", ".."}.intersection(parts)
    return named and not Path(text).exists()


def is_hub_file(text: str) -> bool:
    """Whether a text may name a GGUF file of a repository, ORG/NAME:QUANTIZATION."""
    return _HUB_FILE.fullmatch(text) is not None and is_hub_name(text.partition(":")[0])


def bundle_folder(name: str) -> Path:
    """Where the bundle of a repository, or of one of its GGUF files, is or would be."""
    return cache_folder() / name.replace(":", _OF_FILE)


def hub_source(folder: Path) -> str | None:
    """What of the Hub a folder of `bundle_folder` is the bundle of; None of another one."""
    if folder.parent.parent != cache_folder() or folder.parent.name == _FILES:
        return None
    return f"{folder.parent.name}/{folder.name.replace(_OF_FILE, ':')}"


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
        for file in sorted(source.iterdir()) if is_folder else [source]:
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
        for folder in sorted(cache_folder().glob("*/*"))
        if (folder / MANIFEST).is_file()
    ]


def remove(name: str) -> None:
    """Removes a bundle from the cache.

    Raises:
        ConfigError: it is not there, or cannot be removed.
    """
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
