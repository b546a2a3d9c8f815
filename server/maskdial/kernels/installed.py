"""Kernels: the library of the kernels' operators, if it was built on this machine."""

import ctypes
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnxruntime as ort

from maskdial.errors import ConfigError
from maskdial.extras import how_to_install
from maskdial.kernels.build import library_path

_log = logging.getLogger("maskdial.kernels")

EXTERNAL_DATA = "session.model_external_initializers_file_folder_path"
"""The entry of a session's configuration that says where the weights of a graph are that is loaded
from memory."""
_BUILD = "python -m maskdial.kernels build"


@dataclass(frozen=True, slots=True)
class Kernels:
    """A library that ONNX Runtime can load.

    Attributes:
        path: its file.
        processor: the instruction set that it uses here, such as amx, avx512vnni or avx2.
    """

    path: Path
    processor: str

    @classmethod
    def load(cls, path: Path) -> "Kernels":
        """Loads a library and asks it for its instruction set.

        Raises:
            ConfigError: it cannot be loaded, or MASKDIAL_KERNELS_ISA asks for instructions that
                this processor does not have.
        """
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise ConfigError(f"the kernels cannot be loaded: {error}; run {_BUILD}") from error
        loaded.maskdial_kernels_processor.restype = ctypes.c_char_p
        processor = loaded.maskdial_kernels_processor().decode()
        if not processor:
            raise ConfigError(
                "MASKDIAL_KERNELS_ISA names instructions that this processor does not have"
            )
        return cls(path, processor)

    def prepare(
        self, settings: ort.SessionOptions, folder: Path, tables: bytes
    ) -> list[ort.OrtValue]:
        """Prepares a session of a rewritten graph, whose weights are in a folder.

        ``settings`` say how many threads it has; the kernels divide their work by that. ``tables``
        are those of `maskdial.kernels.rewrite.Rewritten`. The result is to be kept until the
        session is made, which copies it.
        """
        threads = settings.intra_op_num_threads
        self._register(settings, folder, threads)
        if not tables:
            return []
        alone = ort.SessionOptions()
        alone.intra_op_num_threads = threads
        alone.log_severity_level = settings.log_severity_level
        alone.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._register(alone, folder, threads)
        session = ort.InferenceSession(
            tables, alone, providers=["CPUExecutionProvider"], enable_fallback=False
        )
        names = [each.name for each in session.get_outputs()]
        values = [ort.OrtValue.ortvalue_from_numpy(each) for each in session.run(names, {})]
        settings.add_external_initializers(names, values)
        return values

    def _register(self, settings: ort.SessionOptions, folder: Path, threads: int) -> None:
        settings.register_custom_ops_library(str(self.path))
        settings.add_session_config_entry("maskdial.threads", str(threads))
        settings.add_session_config_entry(EXTERNAL_DATA, str(folder))


def find_kernels(setting: Literal["auto", "on", "off"]) -> Kernels | None:
    """The kernels to serve with: those that are built, unless the setting is ``off``.

    Raises:
        ConfigError: the setting is ``on`` and they cannot be used, or the library does not load.
    """
    if setting == "off":
        return None
    library = library_path()
    missing = ""
    if not library.exists():
        missing = f"they are not built; run {_BUILD}"
    elif importlib.util.find_spec("onnx") is None:
        how = how_to_install("kernels")
        missing = f"onnx is missing, which rewrites graphs for them; {how}"
    if not missing:
        return Kernels.load(library)
    if setting == "on":
        raise ConfigError(f"kernels were asked for, but {missing}")
    if any(library.parent.glob("maskdial_kernels-*.so")):
        _log.warning("the kernels are not used: %s", missing)
    return None
