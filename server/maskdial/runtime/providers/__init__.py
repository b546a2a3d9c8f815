"""The execution providers that the server knows, one module each.

To add one, write a module with a ``PROVIDER`` and add its name to `NAMES`. The modules are imported
when they are needed: the settings check names without importing ONNX Runtime.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports ONNX Runtime
    from maskdial.runtime.providers.provider import Provider

NAMES = ("cuda", "cpu")
"""Names for ``--provider``, in the order in which ``auto`` tries them."""


def find_provider(name: str) -> "Provider":
    """The provider of one of the `NAMES`."""
    provider: Provider = import_module(f"{__name__}.{name}").PROVIDER
    return provider
