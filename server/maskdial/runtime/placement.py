"""Placement: the provider that a model runs on, and the memory that it runs in."""

import logging
from dataclasses import dataclass

from maskdial.errors import ConfigError
from maskdial.models.bundle import Bundle
from maskdial.runtime import providers
from maskdial.runtime.memory import Memory
from maskdial.runtime.providers.provider import Provider

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """A provider that can run a model, and memory of its device for that model."""

    provider: Provider
    memory: Memory


def place(bundle: Bundle, name: str) -> Placement:
    """Finds the provider for a model.

    Args:
        bundle: the model.
        name: of a provider; ``auto`` takes the first one that can run the model, and logs why
            those before it cannot.

    Raises:
        ConfigError: the named provider, or with ``auto`` all of them, cannot run the model.
    """
    if name != "auto":
        try:
            return _open(providers.find_provider(name), bundle)
        except ConfigError as error:
            raise ConfigError(
                f"provider {name!r} was asked for, but {error.message}; or use --provider auto"
            ) from error
    reasons: list[str] = []
    for provider in map(providers.find_provider, providers.NAMES):
        if not provider.installed():
            continue
        try:
            return _open(provider, bundle)
        except ConfigError as error:
            reasons.append(f"{provider.name}: {error.message}")
            _log.info("model %s does not run on %s", bundle.label, reasons[-1])
    raise ConfigError(f"no provider can run model {bundle.label!r}: {'; '.join(reasons)}")


def _open(provider: Provider, bundle: Bundle) -> Placement:
    provider.check(bundle)
    return Placement(provider, provider.memory())
