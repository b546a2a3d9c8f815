"""Catalog: which bundle folders there are to serve, by name.

A folder of bundles holds them as ``NAME`` or as ``ORG/NAME``, and beside them GGUF files and
folders of checkpoints, which become bundles in the cache when they are first asked for. Links in
it are followed: write access to the folder decides what is served. A path in a request is confined
to the folder.
"""

import logging
from pathlib import Path

from maskdial.bundle.manifest import MANIFEST
from maskdial.bundle.starters import STARTER_FOLDER as STARTER_FOLDER
from maskdial.bundle.starters import starters as starters
from maskdial.config import Config, model_name_fault
from maskdial.errors import BundleError, ConfigError, ValidationError, io_reason
from maskdial.model_cache import GGUF, is_source

_log = logging.getLogger("maskdial.models")


class Catalog:
    """The bundles to serve: those configured by name, and those in a folder.

    Args:
        configured: folders by name.
        folder: a folder of further bundles; a configured name hides one in it.
    """

    def __init__(self, configured: dict[str, Path], folder: Path | None = None) -> None:
        self.configured = configured
        self.folder = folder
        self._complained: set[object] = set()

    def scan(self) -> dict[str, Path]:
        """All bundles that there are now, by name: first those configured.

        Raises:
            ConfigError: the folder of bundles cannot be read.
        """
        found = dict(self.configured)
        if self.folder is None:
            return found
        try:
            children = _children(self.folder)
        except OSError as error:
            reason = io_reason(error)
            raise ConfigError(f"--model-dir {self.folder} cannot be read: {reason}") from error
        for path in children:
            for bundle in self._bundles(path):
                name = bundle.relative_to(self.folder).as_posix()
                if is_source(bundle):
                    name = name.removesuffix(GGUF)
                if self._is_usable(name):
                    found.setdefault(name, bundle)
        return found

    def _bundles(self, path: Path, *, deeper: bool = True) -> list[Path]:
        """A path if it is a bundle or becomes one, otherwise those in it.

        One that cannot be read, such as ``lost+found``, hides the others no more than a file does.
        """
        try:
            if (path / MANIFEST).is_file() or _becomes_bundle(path):
                return [path]
            children = _children(path) if deeper and path.is_dir() else []
        except OSError as error:
            self._complain(path, f"{path} is left out of --model-dir: {io_reason(error)}")
            return []
        return [bundle for child in children for bundle in self._bundles(child, deeper=False)]

    def within(self, path: str) -> Path:
        """A path that came with a request: inside the folder of bundles, links resolved.

        Raises:
            ValidationError: it leads elsewhere, or there is no such folder.
        """
        if self.folder is None:
            raise ValidationError(
                "this server loads no paths; start it with --model-dir", field="path"
            )
        root = self.folder.resolve()
        try:
            resolved = (root / path).resolve()
            inside = resolved.is_relative_to(root) and resolved != root
            found = inside and resolved.is_dir()
        except (OSError, ValueError):  # too long, or a null character
            inside, found = True, False
        if not inside:
            raise ValidationError("must lie inside the server's --model-dir", field="path")
        if not found:
            raise ValidationError("there is no such folder in --model-dir", field="path")
        return resolved

    def _is_usable(self, name: str) -> bool:
        fault = model_name_fault(name)
        if fault is not None:
            self._complain(name, f"a bundle in --model-dir is left out: {fault}")
        return fault is None

    def _complain(self, about: object, text: str) -> None:
        """Warns once: the folder is read again and again."""
        if about not in self._complained:
            self._complained.add(about)
            _log.warning("%s", text)


def find_bundles(config: Config) -> Catalog:
    """The bundles of a configuration; without any, the starter models.

    Raises:
        BundleError: there are no starter models either.
        ConfigError: nobody could have the bundles of the folder loaded.
    """
    if config.model_dir is not None and config.models_autoload == "off" and not config.admin_key:
        raise ConfigError(
            "with --models-autoload off, bundles in --model-dir are loaded by /models/load only; "
            "set --admin-key as well"
        )
    if config.models or config.model_dir is not None:
        return Catalog(dict(config.models), config.model_dir)
    found = starters()
    if not found:
        raise BundleError("no --model was given, and this installation has no starter models")
    return Catalog(found)


def _becomes_bundle(path: Path) -> bool:
    """Whether a path is one that `maskdial.intake` exports. Parts of a file come with the first."""
    if path.suffix == GGUF:
        return path.is_file() and ("-of-" not in path.stem or "-00001-of-" in path.stem)
    return is_source(path) and any(
        any(path.glob(each)) for each in ("*.safetensors", "*.onnx", "onnx/*.onnx")
    )


def _children(folder: Path) -> list[Path]:
    """What is in a folder, without what is hidden, such as an export that is not complete."""
    return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
