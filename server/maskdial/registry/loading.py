"""Loading: a bundle becomes a served model, its graph checked and its engine started."""

import logging
from pathlib import Path

from maskdial.bundle.bundle import Bundle, load_bundle, load_bundles
from maskdial.bundle.manifest import Manifest
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.config import Config
from maskdial.errors import BundleError, ConfigError, explain_exhaustion
from maskdial.kernels.installed import find_kernels
from maskdial.metrics import Metrics
from maskdial.registry.causal import make_causal
from maskdial.registry.masked import make_masked
from maskdial.registry.served import ServedModel
from maskdial.runtime.placement import Placement, place
from maskdial.runtime.session import SessionOptions

_log = logging.getLogger("maskdial.models")
_BYTES = {"int8": 1.13, "int4": 0.63}
"""Of a weight, with its share of a block's scale in the file."""
_TABLE = "StaticEmbedding"


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
    bundles = load_bundles(name, path, in_background=True)
    models: list[ServedModel] = []
    try:
        with explain_exhaustion():
            for bundle in bundles:
                each = start_model(
                    bundle,
                    config,
                    metrics,
                    alone=alone and len(bundles) == 1,
                    shares_weights=bool(models),
                    disk=disk,
                )
                models.append(each)
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
    shares_weights: bool = False,
    disk: DiskStore | None = None,
) -> ServedModel:
    """Loads a bundle's graph, repeats its golden check and starts its engine.

    Args:
        bundle: the model.
        config: the settings.
        metrics: where its figures are counted.
        alone: no other engine runs beside it.
        shares_weights: whether its weights are in memory, as those of another graph.
        disk: where prefix caches go beyond memory.

    Raises:
        BundleError: the bundle cannot be served as it is.
        ConfigError: the provider cannot run it, or it does not fit into memory.
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
        if placement.memory.of_passes.on_host and not shares_weights:
            _check_memory(bundle, placement.memory.free_bytes())
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

    try:
        model = place(bundle, config.provider, start)
    except Exception:
        bundle.finish_verifying()  # a damaged file says more than what comes of it
        raise
    bundle.finish_verifying()
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


def _check_memory(bundle: Bundle, free: int | None) -> None:
    """Refuses weights that do not fit into memory: the system would end the process.

    A graph takes about the size of its files. A table of vectors is read where it is mapped.

    Raises:
        ConfigError: they do not fit.
    """
    manifest, needed = bundle.manifest, bundle.num_bytes
    if free is None or needed <= free or manifest.architecture == _TABLE:
        return
    raise ConfigError(
        f"model {bundle.name!r} needs {needed / 1e9:.1f} GB of memory for its weights, and "
        f"{free / 1e9:.1f} are free; {_smaller(manifest, free)}"
    )


def _smaller(manifest: Manifest, free: int) -> str:
    lower = {"int8": ("int4",), "int4": ()}.get(manifest.precision, ("int8", "int4"))
    sizes = {name: (manifest.num_parameters or 0) * _BYTES[name] for name in lower}
    fitting = next((name for name, size in sizes.items() if 0 < size <= free), None)
    if fitting is None:
        return "serve fewer models beside it, or a smaller one"
    return f"exported with --precision {fitting} it would need {sizes[fitting] / 1e9:.1f}"


def _takes_adapters(bundle: Bundle, config: Config) -> bool:
    """Whether a graph is rewritten for adapters: those of the server, or the bundle's own."""
    manifest = bundle.manifest
    return bool(manifest.task_adapters) or (config.takes_adapters and manifest.text_to_text is None)
