"""Intake: files and names of the Hub become bundles in the cache."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from maskdial.errors import ConfigError
from maskdial.model_cache import GGUF, cache_folder, hub_source, is_source, source_bundle
from maskdial.runtime.providers import find_provider


def take_in(name: str, path: Path, provider: str) -> Path:
    """The bundle of a model, exported now if it has to be, in a process of its own.

    Args:
        name: of the model, perhaps on the Hub.
        path: of its bundle, a GGUF file or a checkpoint.
        provider: the setting. CUDA does not run int8, which floats become by default.

    Raises:
        ConfigError: the export failed.
    """
    comes_from_path = is_source(path)
    folder = source_bundle(path) if comes_from_path else path
    of_hub = None if comes_from_path else hub_source(folder)
    if of_hub is not None and of_hub.partition(":")[0] != name:  # a folder of the user's choice
        of_hub = None
    if not (comes_from_path or of_hub) or folder.exists():
        return folder
    source = of_hub or str(path)
    print(f"maskdial: exporting {source} to {folder}", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    is_gguf = path.suffix == GGUF or ":" in (of_hub or "")
    floats = [] if is_gguf or _runs_on_cpu(provider) else ["--precision", "fp32"]
    command = [sys.executable, "-m", "maskdial", "export", *floats, source, str(folder)]
    status = subprocess.run(command, check=False).returncode
    if status:
        why = "the line above says why"
        if status < 0:  # of mapped weights that were cut, it is SIGBUS
            signal_name = signal.strsignal(-status) or f"signal {-status}"
            why = (
                f"its process was ended ({signal_name}): memory ran out, or the file was cut "
                "meanwhile"
            )
        raise ConfigError(
            f"model {name} is not in the cache {cache_folder()}, and its export failed; {why}; "
            "a bundle of your own is --model NAME=PATH"
        )
    if comes_from_path and source_bundle(path) != folder:
        shutil.rmtree(folder)
        raise ConfigError(f"{path} has changed while it was exported; wait until it is complete")
    return folder


def _runs_on_cpu(provider: str) -> bool:
    """Whether the CPU is the first provider of a setting, as far as this machine has others."""
    first = provider.split(",")[0]
    return first == "cpu" or (first == "auto" and not find_provider("cuda").installed())
