"""GenerationDefaults: how a model samples where a request does not say, by its own files."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from maskdial.bundle.bundle import Bundle
from maskdial.bundle.manifest import GENERATION_CONFIG, Manifest
from maskdial.causal.sampling.params import CONTROLS, ModelSampling, NewTokens, SamplingParams

_log = logging.getLogger("maskdial.models")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults(ModelSampling):
    """What applies to a request that leaves a field out.

    Attributes:
        do_sample: for routes on which a request may leave that open; others always sample.
        max_new_tokens: None leaves it to the route.
    """

    max_new_tokens: NewTokens | None = None

    def new_tokens(self, otherwise: int, context: int) -> int:
        """The limit on a text: the model's own, or the route's, and no more than the context."""
        return min(self.max_new_tokens or otherwise, context)

    def sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """How to sample: as a request says, otherwise as the model does.

        Args:
            given: the parameters of `SamplingParams` that the request has.
        """
        return SamplingParams(**{name: getattr(self, name) for name in _DEFAULTED} | dict(given))


_DEFAULTED = tuple(ModelSampling.__dataclass_fields__)
_TYPES: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(hint)
    for name, hint in get_type_hints(GenerationDefaults, include_extras=True).items()
}


def read_generation_defaults(bundle: Bundle) -> GenerationDefaults:
    """The defaults in a bundle's ``generation_config.json``.

    A value that no request could send is left out, with a warning in the log. Where the file does
    not say whether to sample, it does if it has one of sampling's parameters.
    """
    if GENERATION_CONFIG not in bundle.manifest.files:
        return GenerationDefaults()
    found: dict[str, Any] = {}
    for name, value in _read(bundle).items():
        if name not in _TYPES or value is None or (name == "top_k" and value == -1):
            continue
        try:
            found[name] = _TYPES[name].validate_python(value, strict=False)
        except ValidationError as error:
            _log.warning(
                "model %s: %s in %s is ignored: %r is out of range (%s)",
                bundle.label,
                name,
                GENERATION_CONFIG,
                value,
                error.errors()[0]["msg"],
            )
    found.setdefault("do_sample", not CONTROLS.isdisjoint(found))
    return GenerationDefaults(**found)


def _read(bundle: Bundle) -> dict[str, Any]:
    try:
        content = json.loads((bundle.path / GENERATION_CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        _log.warning("model %s: %s is ignored: %s", bundle.label, GENERATION_CONFIG, error)
        return {}
    return content if isinstance(content, dict) else {}


def tokens_without_text(manifests: Iterable[Manifest]) -> frozenset[int]:
    """The mask and padding tokens of a model, which no text contains.

    A token that also ends texts is not among them. ``manifests``: of all the model's graphs, for
    one under the causal mask does not know the mask token that it was trained with under the other.
    """
    special = [manifest.special_tokens for manifest in manifests]
    found = {token for each in special for token in (each.pad, each.mask) if token is not None}
    return frozenset(found.difference(*(each.eos for each in special)))
