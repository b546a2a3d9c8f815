"""Hatchling's build hook: a wheel for Linux on x86-64 contains the kernels (docs/kernels.md).

A machine without a C++ compiler gets the wheel without them, and so does everybody else.
``HATCH_BUILD_NO_HOOKS=true`` leaves them out.
"""

import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "maskdial/kernels"


class KernelsHook(BuildHookInterface[Any]):
    """Builds the library into a wheel, and for an editable install into the source tree."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built; ``version`` is ``editable`` for an editable one."""
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        server = Path(self.root) / "server"
        sys.path.insert(0, str(server))  # the package is not installed yet
        from maskdial.errors import ConfigError
        from maskdial.kernels.build import build, library_path

        editable = version == "editable"
        if editable and library_path().exists():
            return
        try:
            if editable:
                build()
                return
            self._folder = tempfile.TemporaryDirectory()
            library = build(Path(self._folder.name))
        except ConfigError as error:
            self.app.display_warning(f"built without the kernels: {error.message}")
            return
        build_data["force_include"][str(library)] = f"{PACKAGE}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is written."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
