"""Plug-ins: execution providers in packages of their own, which ONNX Runtime loads on demand.

Such a package says where its library is and what its providers are called: ONNX Runtime's guide for
plug-ins (https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/packaging.html).
"""

import json
from functools import cache
from importlib import import_module

import onnxruntime as ort

from maskdial.bundle.bundle import Bundle
from maskdial.errors import ConfigError
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.providers import DEVICES
from maskdial.runtime.providers.provider import Provider


class PluginProvider(Provider):
    """Runs masked bundles on a device of a plug-in; inputs and outputs are in main memory."""

    batch_invariant = False  # as measured with OpenVINO's
    slots = context_slots = prefill_chunk_tokens = 0  # for causal models
    max_batch_tokens = 512

    def __init__(self, name: str, package: str, device: str = "") -> None:
        """Imports a plug-in's package.

        Args:
            name: as in ``--provider``.
            package: to import.
            device: the kind of device to run on, one of `DEVICES`; empty for the first of them.

        Raises:
            ConfigError: the package cannot be imported.
        """
        self.name, self._device = name, device
        try:
            self._plugin = import_module(package)
            self.ort_name = str(self._plugin.get_ep_name())
        except Exception as error:  # it may load libraries
            raise ConfigError(f"its package {package} cannot be imported: {error}") from error

    def check(self, bundle: Bundle) -> None:
        if bundle.manifest.family != "masked":
            raise ConfigError(f"model {bundle.label!r} is not masked, and plug-ins run no others")
        self.devices()

    def memory(self) -> HostMemory:
        return HostMemory()

    def devices(self) -> list[ort.OrtEpDevice]:
        """The device to run on.

        Raises:
            ConfigError: there is none, or the library cannot be loaded.
        """
        try:
            library = str(self._plugin.get_library_path())
        except Exception as error:
            raise ConfigError(f"its library cannot be found: {error}") from error
        found = {
            each.device.type.name.lower(): each
            for each in reversed(devices_of(self.ort_name, library))
        }
        for kind in (self._device,) if self._device else DEVICES:
            if kind in found:
                return [found[kind]]
        wanted = f"no {self._device}" if self._device else "no device that it can use"
        raise ConfigError(f"there is {wanted} (it found: {', '.join(found) or 'none'})")

    def options(self, *, stream: int, captures: bool, threads: int | None) -> dict[str, str]:
        (device,) = self.devices()
        if self.ort_name != "OpenVINOExecutionProvider" or device.device.type.name != "CPU":
            return {}
        # Otherwise it computes fp32 graphs in bfloat16 where the processor can, which was slower
        # and much further off than the golden check allows.
        settings: dict[str, str] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = str(threads)
        return {"load_config": json.dumps({"CPU": settings})}


def devices_of(name: str, library: str) -> list[ort.OrtEpDevice]:
    """The devices that a plug-in finds, by what ONNX Runtime calls its provider.

    Raises:
        ConfigError: its library cannot be loaded.
    """
    try:
        register(name, library)
    except Exception as error:  # ONNX Runtime's exceptions share no other base
        raise ConfigError(f"its library cannot be loaded: {error}") from error
    return [each for each in ort.get_ep_devices() if each.ep_name == name]


@cache
def register(name: str, library: str) -> None:
    """Has ONNX Runtime load a plug-in's library, once per process."""
    ort.register_execution_provider_library(name, library)
