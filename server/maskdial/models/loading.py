"""How a bundle becomes a served model: its graph loaded and checked, its engine started."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.chat import ChatTemplate
from maskdial.causal.engine import CausalEngine
from maskdial.causal.executor import ModelRunner
from maskdial.causal.grammar.compiler import GrammarCompiler
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.device_sampler import DeviceSampler
from maskdial.causal.sampling.sampler import Sampler, TokenSampler
from maskdial.config import Config
from maskdial.errors import BundleError, ConfigError
from maskdial.masked.engine import MaskedEngine
from maskdial.metrics import Metrics, ModelMetrics
from maskdial.models.bundle import (
    KERNEL_CHECK,
    Bundle,
    GoldenCheck,
    KVLayout,
    load_bundle,
)
from maskdial.models.golden import drift_message, golden_drift, kernel_message, multiplies_exactly
from maskdial.models.registry import CausalModel, MaskedModel, ServedModel
from maskdial.models.tokenizer import Tokenizer
from maskdial.runtime.cuda import CudaDevice
from maskdial.runtime.device_runner import BATCH_SIZES, DeviceRunner
from maskdial.runtime.kv_plan import plan_slots
from maskdial.runtime.memory import Device
from maskdial.runtime.placement import find_device
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Provider, Session, SessionOptions

_log = logging.getLogger("maskdial.models")

_CPU_SLOTS = 8


def load_model(
    name: str, path: Path, config: Config, metrics: Metrics, *, alone: bool = True
) -> ServedModel:
    """Reads a bundle and serves it; of a folder with two graphs, the first one.

    Raises:
        BundleError: the bundle cannot be served as it is.
        ConfigError: the provider is not there.
    """
    return start_model(load_bundle(name, path), config, metrics, alone=alone)


def start_model(
    bundle: Bundle, config: Config, metrics: Metrics, *, alone: bool = True
) -> ServedModel:
    """Loads a bundle's graph, repeats its golden check and starts its engine.

    ``alone``: no other engine runs beside it.

    Raises:
        BundleError: the bundle cannot be served as it is.
        ConfigError: the provider is not there.
    """
    device = find_device(bundle, config.provider)
    spins = config.spins(alone=alone)
    provider: Provider = "cpu" if device is None else device.name
    options = SessionOptions(provider, config.threads or 0, spins)
    model_metrics = metrics.declare(bundle.name, bundle.label)
    model: ServedModel
    if bundle.manifest.family == "masked":
        model = _start_masked(bundle, config, model_metrics, options)
    else:
        model = _start_causal(bundle, config, model_metrics, options, device)
    model.engine.start()
    _log.info(
        "model %s: %s %s, %s, %s",
        bundle.label,
        bundle.manifest.architecture,
        bundle.manifest.task,
        bundle.manifest.precision,
        provider,
    )
    return model


def _start_masked(
    bundle: Bundle, config: Config, metrics: ModelMetrics, options: SessionOptions
) -> MaskedModel:
    session = Session(bundle.graph, options)
    _check_kernels(bundle, config, options)
    _check_golden(bundle, config, lambda golden: _golden_masked(session, golden))
    special = bundle.manifest.special_tokens
    engine = MaskedEngine(
        session,
        max_batch_tokens=config.max_batch_tokens,
        max_queue=config.max_queue,
        pad_token_id=special.pad or 0,
        # In half precision CUDA's kernel for attention within a window takes no other lengths.
        pad_multiple=1 if options.provider == "cpu" else 8,
        max_length=bundle.manifest.max_length,
        metrics=metrics,
        name=bundle.label,
    )
    tokenizer = Tokenizer.from_file(bundle.tokenizer, special)
    return MaskedModel(bundle, tokenizer, engine, metrics, options.provider)


def _start_causal(
    bundle: Bundle,
    config: Config,
    metrics: ModelMetrics,
    options: SessionOptions,
    device: CudaDevice | None,
) -> CausalModel:
    manifest = bundle.manifest
    if manifest.kv is None:
        raise BundleError(f"model {bundle.name!r}: a causal bundle without a KV layout")
    shape = _CausalShape(bundle, config, manifest.kv, on_gpu=device is not None)
    parts = _on_host(shape, options) if device is None else _on_device(shape, options, device)
    _check_golden(bundle, config, lambda golden: _golden_causal(parts.runner, golden))
    tokenizer = Tokenizer.from_file(bundle.tokenizer, manifest.special_tokens)
    engine = CausalEngine(
        parts.runner,
        tokenizer,
        slots=parts.slots,
        max_length=shape.max_length,
        vocab_size=manifest.vocab_size,
        prefill_chunk_tokens=shape.chunk,
        block_tokens=manifest.kv.query_block,
        # No bits to keep there: a GPU's kernels differ between batch sizes.
        joint_tokens=None if device is None else shape.chunk,
        max_queue=config.max_queue,
        eos_token_ids=frozenset(manifest.special_tokens.eos),
        prefix_cache=_prefix_cache(bundle, manifest.kv, config),
        max_drafts=config.speculative_tokens,
        sampler=parts.sampler,
        overlaps=device is not None,
        metrics=metrics,
        name=bundle.label,
    )
    return CausalModel(
        bundle,
        tokenizer,
        engine,
        metrics,
        options.provider,
        parts.slots,
        shape.max_length,
        read_chat_template(bundle, tokenizer),
        _grammar_compiler(bundle),
    )


@dataclass(frozen=True, slots=True)
class _CausalShape:
    """A causal model's sizes, as its bundle and the configuration have them."""

    bundle: Bundle
    config: Config
    layout: KVLayout
    on_gpu: bool

    @property
    def max_length(self) -> int:
        return min(self.bundle.manifest.max_length, self.config.max_context)

    @property
    def vocab_size(self) -> int:
        return self.bundle.manifest.vocab_size

    @property
    def chunk(self) -> int:
        """At least the configured tokens; such chunks leave the logits as they are in one piece."""
        block = self.layout.query_block
        return -(-self.config.chunk_tokens(on_gpu=self.on_gpu) // block) * block

    def slots(self, most: int, budget: int | None) -> int:
        """As many as are configured, or ``most``, in a ``budget`` of bytes.

        Raises:
            ConfigError: they do not fit.
        """
        try:
            return plan_slots(
                self.layout, self.max_length, asked=self.config.slots or 0, most=most, budget=budget
            )
        except ConfigError as error:
            raise ConfigError(f"model {self.bundle.label!r}: {error.message}") from error


@dataclass(frozen=True, slots=True)
class _CausalParts:
    """What of a causal model differs between the CPU and a GPU."""

    runner: ModelRunner
    sampler: TokenSampler
    slots: int


def _on_host(shape: _CausalShape, options: SessionOptions) -> _CausalParts:
    session = Session(shape.bundle.graph, options)
    _check_kernels(shape.bundle, shape.config, options)
    slots = shape.slots(_CPU_SLOTS, shape.config.kv_cache_bytes)
    runner = Runner(
        session,
        shape.layout,
        slots=slots,
        max_length=shape.max_length,
        vocab_size=shape.vocab_size,
    )
    return _CausalParts(runner, _host_sampler(shape), slots)


def _on_device(shape: _CausalShape, options: SessionOptions, device: Device) -> _CausalParts:
    config = shape.config
    options = replace(options, stream=device.stream)
    session = _capturing_session(shape, options)
    # What the weights have left is shared by the cache and the memory of the passes.
    free = device.free_bytes()
    budget = min(config.kv_cache_bytes or int(free * config.kv_cache_fraction), free)
    slots = shape.slots(max(BATCH_SIZES), budget)
    num_drafted = config.speculative_tokens + 1
    golden_tokens = len(shape.bundle.manifest.golden.input_ids)
    runner = DeviceRunner(
        session,
        device,
        shape.layout,
        slots=slots,
        max_length=shape.max_length,
        vocab_size=shape.vocab_size,
        max_tokens=max(shape.chunk + 1, num_drafted, golden_tokens),
        max_rows=max(slots, shape.layout.query_block + 1, num_drafted),
    )
    sampler = DeviceSampler(
        device,
        _host_sampler(shape),
        vocab_size=shape.vocab_size,
        max_rows=slots,
        options=options,
    )
    return _CausalParts(runner, sampler, slots)


def _host_sampler(shape: _CausalShape) -> Sampler:
    return Sampler(shape.vocab_size, frozenset(shape.bundle.manifest.special_tokens.eos))


def _capturing_session(shape: _CausalShape, options: SessionOptions) -> Session:
    """A session that captures decode steps, where that is wanted and the provider can do it."""
    graph = shape.bundle.graph
    if shape.config.cuda_graphs == "off":
        return Session(graph, options)
    try:
        return Session(graph, replace(options, captures=True))
    except BundleError as error:
        session = Session(graph, options)  # what else is wrong shows here
        _log.warning("model %s runs without CUDA graphs: %s", shape.bundle.label, error.message)
        return session


def read_chat_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a bundle, which may lack one, with its tokenizer's special tokens."""
    special = bundle.manifest.special_tokens
    return ChatTemplate.from_bundle(
        bundle,
        bos_token="" if special.bos is None else tokenizer.id_to_token(special.bos),
        eos_token=tokenizer.id_to_token(special.eos[0]) if special.eos else "",
    )


def _grammar_compiler(bundle: Bundle) -> GrammarCompiler:
    return GrammarCompiler(
        bundle.tokenizer.read_text(encoding="utf-8"),
        vocab_size=bundle.manifest.vocab_size,
        eos_token_ids=bundle.manifest.special_tokens.eos,
    )


def _prefix_cache(bundle: Bundle, layout: KVLayout, config: Config) -> PrefixCache | None:
    if not config.prefix_cache_bytes:
        return None
    return PrefixCache(
        model=bundle.manifest.files[bundle.manifest.graph],
        block_tokens=layout.query_block,
        max_bytes=config.prefix_cache_bytes,
    )


def _golden_masked(session: Session, golden: GoldenCheck) -> NDArray[np.float32]:
    length = len(golden.input_ids)
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": np.array([golden.input_ids], np.int64),
        "lengths": np.array([length], np.int32),
        "token_type_ids": np.zeros((1, length), np.int64),
        "rows": np.array([golden.row], np.int64),
    }
    (logits,) = session.run(feeds)
    return np.asarray(logits)


def _golden_causal(runner: ModelRunner, golden: GoldenCheck) -> NDArray[np.float32]:
    logits = np.asarray(runner.prefill(0, np.array(golden.input_ids, np.int64), 0), np.float32)
    return logits.reshape(-1)


def _check_kernels(bundle: Bundle, config: Config, options: SessionOptions) -> None:
    """Lets the provider multiply the largest 8-bit numbers, where the bundle has them."""
    if KERNEL_CHECK not in bundle.manifest.files:
        return
    if not multiplies_exactly(Session(bundle.path / KERNEL_CHECK, options)):
        _complain(config, kernel_message(bundle))


def _check_golden(
    bundle: Bundle, config: Config, run: Callable[[GoldenCheck], NDArray[np.float32]]
) -> None:
    """Repeats the golden check; ``run`` computes the checked row's logits."""
    try:
        drift = golden_drift(bundle.manifest.golden, run(bundle.manifest.golden))
    except Exception as error:  # whatever ONNX Runtime raises
        raise BundleError(f"model {bundle.name!r}: its golden check fails: {error}") from error
    if drift <= bundle.manifest.golden.tolerance:
        return
    _complain(config, drift_message(bundle, drift))


def _complain(config: Config, message: str) -> None:
    if config.golden_check == "error":
        raise BundleError(message)
    _log.warning("%s", message)
