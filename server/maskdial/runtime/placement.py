"""Placement: the provider that a model runs on, and the memory that it runs in."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from maskdial.bundle.bundle import Bundle
from maskdial.errors import BundleError, ConfigError
from maskdial.runtime import providers
from maskdial.runtime.memory import Memory
from maskdial.runtime.providers.provider import Provider

_log = logging.getLogger(__name__)
_Started = TypeVar("_Started")


@dataclass(frozen=True, slots=True)
class Placement:
    """A provider that can run a model, and memory of its device for that model."""

    provider: Provider
    memory: Memory


def place(bundle: Bundle, choice: str, start: Callable[[Placement], _Started]) -> _Started:
    """Starts a model on the first provider that can run it.

    Args:
        bundle: the model.
        choice: names of providers, separated by commas, in the order to try them; ``auto`` stands
            for those that the server knows and that are installed. Why the model does not run on
            one is logged.
        start: starts the model on a provider that says it can run it. Plug-ins do not know before.

    Raises:
        BundleError: the last provider cannot run the model after all.
        ConfigError: the named provider, or all of them, cannot run the model.
    """
    names = _names(choice)
    reasons: list[str] = []
    for name in names:
        try:
            placement = _open(providers.find_provider(name), bundle)
        except ConfigError as error:
            if choice == name:
                other = "auto" if name in providers.NAMES else f"{name},cpu"
                raise ConfigError(
                    f"provider {name!r} was asked for, but {error.message}; or use "
                    f"--provider {other}"
                ) from error
            reasons.append(f"{name}: {error.message}")
            _log.info("model %s does not run on %s", bundle.label, reasons[-1])
            continue
        try:
            return start(placement)
        except BundleError as error:
            if name == names[-1]:
                raise
            reasons.append(f"{name}: {error.message}")
            _log.warning("model %s does not run on %s", bundle.label, reasons[-1])
    raise ConfigError(f"no provider can run model {bundle.label!r}: {'; '.join(reasons)}")


def _names(choice: str) -> list[str]:
    names: list[str] = []
    for name in choice.split(","):
        if name == "auto":
            names += [x for x in providers.NAMES if providers.find_provider(x).installed()]
        else:
            names.append(name)
    return names


def _open(provider: Provider, bundle: Bundle) -> Placement:
    provider.check(bundle)
    return Placement(provider, provider.memory())
