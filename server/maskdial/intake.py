"""Intake: files and names of the Hub become bundles in the cache."""

import logging
import shutil
import sys
import threading
from pathlib import Path

from maskdial.bundle.bundle import remember_hashes
from maskdial.errors import ConfigError
from maskdial.exporting import Show, export_apart
from maskdial.model_cache import (
    GGUF,
    HubSource,
    is_source,
    source_bundle,
    with_precision,
)
from maskdial.progress import ProgressLine
from maskdial.runtime.providers import find_provider

_log = logging.getLogger("maskdial.models")
_GO_ON = "run it again to go on: what was downloaded is kept"


def take_in(
    name: str,
    path: Path,
    provider: str,
    *,
    show: Show | None = None,
    stopping: threading.Event | None = None,
) -> Path:
    """The bundle of a model, exported now if it has to be, in a process of its own.

    Args:
        name: of the model, perhaps on the Hub.
        path: of its bundle, a GGUF file or a checkpoint.
        provider: the setting. CUDA does not run int8, which floats become by default.
        show: is told how far it is, in place of standard error, or of the log in other threads
            than the main one.
        stopping: the export is given up once it is set.

    Raises:
        ConfigError: the export failed.
        InterruptedError: it was given up.
        KeyboardInterrupt: it was interrupted, with what to do.
    """
    comes_from_path = is_source(path)
    of_hub = None if comes_from_path else HubSource.of_folder(path)
    if of_hub is not None and of_hub.repository != name:  # a folder of the user's choice
        of_hub = None
    if not (comes_from_path or of_hub):
        return path
    if of_hub is not None:
        precision = _precision(of_hub.quantization is not None, provider)
        folder = hub_bundle(of_hub, provider)
    else:
        precision = _precision(path.suffix == GGUF, provider)
        folder = with_precision(source_bundle(path), precision)
    if folder.exists():
        return folder
    source = str(path) if of_hub is None else of_hub.source
    options = [] if precision is None else ["--precision", precision]
    if of_hub is not None and of_hub.revision is not None:
        options += ["--revision", of_hub.revision]
    by_log = threading.current_thread() is not threading.main_thread()
    line = ProgressLine(name, log=_log.info if by_log else None)
    if by_log:
        _log.info("exporting %s to %s", source, folder)
    else:
        print(f"maskdial: exporting {source} to {folder}", file=sys.stderr)
    try:
        export_apart([*options, source], folder, show or line.show, line.say, stopping)
    except ConfigError as error:
        raise ConfigError(f"model {name}: {error.message}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_GO_ON) from None
    finally:
        line.clear()
    if comes_from_path and with_precision(source_bundle(path), precision) != folder:
        shutil.rmtree(folder)
        raise ConfigError(f"{path} has changed while it was exported; wait until it is complete")
    remember_hashes(folder)
    return folder


def hub_bundle(source: HubSource, provider: str) -> Path:
    """Where the bundle of a model of the Hub is, or would be, with a setting of the provider."""
    return with_precision(source.folder(), _precision(source.quantization is not None, provider))


def _precision(is_gguf: bool, provider: str) -> str | None:
    """The precision that the export is asked for; None for its own choice."""
    return None if is_gguf or _runs_on_cpu(provider) else "fp32"


def _runs_on_cpu(provider: str) -> bool:
    """Whether the CPU is the first provider of a setting, as far as this machine has others."""
    first = provider.split(",")[0]
    return first == "cpu" or (first == "auto" and not find_provider("cuda").installed())
