"""The execution providers that the server knows, one module each, and those that are plug-ins.

To add one, write a module with a ``PROVIDER`` and add its name to `NAMES`. The modules are imported
when they are needed: the settings check names without importing ONNX Runtime.

A plug-in is a package such as ``onnxruntime-ep-openvino``, whose name here is ``openvino``.
"""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports ONNX Runtime
    from maskdial.runtime.providers.provider import Provider

NAMES = ("cuda", "webgpu", "cpu")
"""Names for ``--provider``, in the order in which ``auto`` tries them."""

DEVICES = ("gpu", "cpu", "npu")
"""Kinds of devices of a plug-in, in the order in which it is given one."""

_PACKAGE = "onnxruntime_ep_"


def plugin_names() -> tuple[str, ...]:
    """The plug-ins that are installed, but for those that have a module here."""
    modules = {each.name for each in pkgutil.iter_modules() if each.name.startswith(_PACKAGE)}
    names = {name.removeprefix(_PACKAGE).replace("_", "-") for name in modules}
    return tuple(sorted(names.difference(NAMES)))


def check_name(name: str) -> bool:
    """Whether a name is one of `NAMES`, or a plug-in's, with ``:DEVICE`` if need be."""
    plugin, colon, device = name.partition(":")
    return name in NAMES or (plugin in plugin_names() and (not colon or device in DEVICES))


def find_provider(name: str) -> "Provider":
    """The provider of a name as `check_name` takes it.

    Raises:
        ConfigError: it is a plug-in that cannot be imported.
    """
    if name in NAMES:
        provider: Provider = import_module(f"{__name__}.{name}").PROVIDER
        return provider
    from maskdial.runtime.providers.plugin import PluginProvider

    plugin, _, device = name.partition(":")
    return PluginProvider(name, _PACKAGE + plugin.replace("-", "_"), device)
