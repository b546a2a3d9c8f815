"""Loading: a bundle becomes a served model, its graph checked and its engine started."""

import logging
from pathlib import Path

from maskdial.bundle.bundle import Bundle, load_bundle, load_bundles
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.config import Config
from maskdial.errors import BundleError, explain_exhaustion
from maskdial.kernels.installed import find_kernels
from maskdial.metrics import Metrics
from maskdial.registry.causal import make_causal
from maskdial.registry.masked import make_masked
from maskdial.registry.served import ServedModel
from maskdial.runtime.placement import Placement, place
from maskdial.runtime.session import SessionOptions

_log = logging.getLogger("maskdial.models")


def load_model(
    name: str, path: Path, config: Config, metrics: Metrics, *, alone: bool = True
) -> ServedModel:
    """Reads a bundle and starts it; of a folder with two graphs, the first one.

    Raises:
        BundleError: the bundle cannot be served as it is.
        ConfigError: the provider cannot run it, or its KV cache does not fit into memory.
    """
    return start_model(load_bundle(name, path), config, metrics, alone=alone)


def start_models(
    name: str,
    path: Path,
    config: Config,
    metrics: Metrics,
    *,
    alone: bool = True,
    disk: DiskStore | None = None,
) -> tuple[ServedModel, ...]:
    """Reads a bundle folder and starts all of its graphs, or none.

    ``alone``: no other model runs beside it. ``disk``: where prefix caches go beyond memory.

    Raises:
        BundleError: the bundle cannot be served as it is.
        ConfigError: the provider cannot run it, or its KV cache does not fit into memory.
    """
    bundles = load_bundles(name, path)
    models: list[ServedModel] = []
    try:
        with explain_exhaustion():
            for bundle in bundles:
                alone = alone and len(bundles) == 1
                models.append(start_model(bundle, config, metrics, alone=alone, disk=disk))
    except BaseException:
        for model in models:
            model.stop()
        raise
    return tuple(models)


def start_model(
    bundle: Bundle,
    config: Config,
    metrics: Metrics,
    *,
    alone: bool = True,
    disk: DiskStore | None = None,
) -> ServedModel:
    """Loads a bundle's graph, repeats its golden check and starts its engine.

    ``alone``: no other engine runs beside it. ``disk``: where prefix caches go beyond memory.

    Raises:
        BundleError: the bundle cannot be served as it is.
        ConfigError: the provider cannot run it, or its KV cache does not fit into memory.
    """
    try:
        str(bundle.path).encode()
    except UnicodeEncodeError as error:
        raise BundleError(
            f"model {bundle.name!r}: the path {bundle.path} is not UTF-8, so ONNX Runtime cannot "
            "open it; rename its folders"
        ) from error

    def start(placement: Placement) -> ServedModel:
        name = placement.provider.name
        kernels = find_kernels(config.kernels) if name == "cpu" else None
        options = SessionOptions(
            name,
            config.threads,
            config.spins(alone=alone),
            kernels=kernels,
            adapters=_takes_adapters(bundle, config),
        )
        if bundle.manifest.family == "masked":
            return make_masked(bundle, config, metrics, placement, options)
        return make_causal(bundle, config, metrics, placement, options, disk)

    model = place(bundle, config.provider, start)
    model.engine.start()
    _log.info(
        "model %s: %s %s, %s, %s%s",
        bundle.label,
        bundle.manifest.architecture,
        bundle.manifest.task,
        bundle.manifest.precision,
        model.provider,
        f" with {model.kernels} kernels" if model.kernels else "",
    )
    return model


def _takes_adapters(bundle: Bundle, config: Config) -> bool:
    """Whether a graph is rewritten for adapters: those of the server, or the bundle's own."""
    manifest = bundle.manifest
    return bool(manifest.task_adapters) or (config.takes_adapters and manifest.text_to_text is None)
