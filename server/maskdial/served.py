"""The models that a server serves, and how a bundle becomes one."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import maskdial
from maskdial.bundle import (
    KERNEL_CHECK,
    MANIFEST,
    Bundle,
    GoldenCheck,
    KVLayout,
    Manifest,
    Task,
    load_bundle,
)
from maskdial.causal.engine import CausalEngine
from maskdial.causal.grammar import GrammarCompiler
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.runner import Runner
from maskdial.chat import ChatTemplate
from maskdial.config import Config
from maskdial.errors import BundleError, NotFoundError, ValidationError
from maskdial.golden import drift_message, golden_drift, kernel_message, multiplies_exactly
from maskdial.masked.engine import MaskedEngine
from maskdial.metrics import Metrics, ModelMetrics
from maskdial.runtime import Provider, Session, SessionOptions, resolve_provider
from maskdial.tokenizer import Tokenizer

_log = logging.getLogger("maskdial.models")

STARTER_FOLDER = Path(maskdial.__file__).parent / "starter"


ServedTask = Task | Literal["zero-shot-classify", "similarity", "rerank", "score", "tokenize"]


def served_tasks(manifest: Manifest) -> tuple[ServedTask, ...]:
    """What a model can be asked for; its own task first."""
    tasks: list[ServedTask] = [manifest.task]
    if manifest.task == "classify":
        if manifest.entailment is not None:
            tasks.append("zero-shot-classify")
        if len(manifest.labels) == 1:
            tasks.append("rerank")
    elif manifest.task == "embed":
        tasks.append("similarity")
    elif manifest.task in ("fill-mask", "generate"):
        tasks.append("score")
    return (*tasks, "tokenize")


@dataclass(frozen=True, slots=True)
class MaskedModel:
    """A masked model being served."""

    bundle: Bundle
    tokenizer: Tokenizer
    engine: MaskedEngine
    metrics: ModelMetrics
    provider: Provider

    @property
    def tasks(self) -> tuple[ServedTask, ...]:
        return served_tasks(self.bundle.manifest)

    def stop(self) -> None:
        """Ends the engine at once."""
        self.engine.stop(0)


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A causal model being served. ``max_length`` is the context in tokens, as configured."""

    bundle: Bundle
    tokenizer: Tokenizer
    engine: CausalEngine
    metrics: ModelMetrics
    provider: Provider
    max_length: int
    chat_template: ChatTemplate
    grammars: GrammarCompiler

    @property
    def tasks(self) -> tuple[ServedTask, ...]:
        return served_tasks(self.bundle.manifest)

    def stop(self) -> None:
        """Ends the engine at once, and the grammars with it."""
        self.engine.stop(0)
        self.grammars.close()


ServedModel = MaskedModel | CausalModel


class Models:
    """The served models by name; under one name there may be one for each mask."""

    def __init__(self) -> None:
        self._models: dict[str, list[ServedModel]] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return chain.from_iterable(self._models.values())

    def add(self, model: ServedModel) -> None:
        """Serves one more model, or one more mask of a model."""
        self._models.setdefault(model.bundle.name, []).append(model)

    def get(self, name: str) -> ServedModel:
        """A model by name; of one with both masks, the causal one.

        Raises:
            NotFoundError: there is none; the message lists those that exist.
        """
        return self.named(name)[0]

    def named(self, name: str) -> Sequence[ServedModel]:
        """All models of a name.

        Raises:
            NotFoundError: there is none; the message lists those that exist.
        """
        if name not in self._models:
            raise NotFoundError(f"no model {name!r} here; served models: {', '.join(self._models)}")
        return self._models[name]

    def for_masked_task(self, task: ServedTask, name: str | None) -> MaskedModel:
        """The masked model that a request for a task means."""
        model = self.for_task(task, name)
        assert isinstance(model, MaskedModel)
        return model

    def for_generation(self, name: str | None) -> CausalModel:
        """The causal model that a request to generate means."""
        model = self.for_task("generate", name)
        assert isinstance(model, CausalModel)
        return model

    def for_task(self, task: ServedTask, name: str | None) -> ServedModel:
        """The named model, or without a name the only one that fits.

        Where both masks of a model do the task, it is the causal one.

        Raises:
            NotFoundError: no such model, or none for the task.
            ValidationError: the model cannot do the task, or several could.
        """
        if name is not None:
            models = self.named(name)
            tasks = dict.fromkeys(each for model in models for each in model.tasks)
            if task not in tasks:
                raise ValidationError(
                    f"model {name!r} cannot do {task}; it does {', '.join(tasks)}"
                )
            return next(model for model in models if task in model.tasks)
        fitting: dict[str, ServedModel] = {}
        for model in self:
            if task in model.tasks:
                fitting.setdefault(model.bundle.name, model)
        if not fitting:
            raise NotFoundError(
                f"no model here does {task}; served models: {', '.join(self._models)}"
            )
        if len(fitting) > 1:
            raise ValidationError(
                f'several models do {task}; name one with "model": {", ".join(fitting)}'
            )
        return next(iter(fitting.values()))


def find_bundles(config: Config) -> dict[str, Path]:
    """The bundle folders to serve by name: the configured ones, or else the starter models.

    Raises:
        BundleError: neither exist.
    """
    if config.models:
        return dict(config.models)
    starters = {
        path.parent.name: path.parent for path in sorted(STARTER_FOLDER.glob(f"*/{MANIFEST}"))
    }
    if not starters:
        raise BundleError("no --model was given, and this installation has no starter models")
    return starters


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
    name = bundle.name
    manifest = bundle.manifest
    tokenizer = Tokenizer.from_file(bundle.tokenizer, manifest.special_tokens)
    asked = config.provider
    if asked == "auto" and manifest.family == "causal":
        asked = "cpu"  # the KV cache lies in main memory
    spins = config.spins(alone=alone)
    options = SessionOptions(resolve_provider(asked), config.threads, spins)
    session = Session(bundle.graph, options)
    _check_kernels(bundle, config, options)
    model_metrics = metrics.declare(name, bundle.label)
    model: ServedModel
    if manifest.family == "masked":
        _check_golden(bundle, config, lambda golden: _golden_masked(session, golden))
        masked_engine = MaskedEngine(
            session,
            max_batch_tokens=config.max_batch_tokens,
            max_queue=config.max_queue,
            pad_token_id=manifest.special_tokens.pad or 0,
            metrics=model_metrics,
            name=bundle.label,
        )
        model = MaskedModel(bundle, tokenizer, masked_engine, model_metrics, options.provider)
    else:
        if manifest.kv is None:
            raise BundleError(f"model {name!r}: a causal bundle without a KV layout")
        max_length = min(manifest.max_length, config.max_context)
        runner = Runner(
            session,
            manifest.kv,
            slots=config.slots,
            max_length=max_length,
            vocab_size=manifest.vocab_size,
        )
        _check_golden(bundle, config, lambda golden: _golden_causal(runner, golden))
        causal_engine = CausalEngine(
            runner,
            tokenizer,
            slots=config.slots,
            max_length=max_length,
            vocab_size=manifest.vocab_size,
            prefill_chunk_tokens=_whole_blocks(config.prefill_chunk_tokens, manifest.kv),
            block_tokens=manifest.kv.query_block,
            max_queue=config.max_queue,
            eos_token_ids=frozenset(manifest.special_tokens.eos),
            prefix_cache=_prefix_cache(bundle, manifest.kv, config),
            max_drafts=config.speculative_tokens,
            metrics=model_metrics,
            name=bundle.label,
        )
        model = CausalModel(
            bundle,
            tokenizer,
            causal_engine,
            model_metrics,
            options.provider,
            max_length,
            _chat_template(bundle, tokenizer),
            _grammar_compiler(bundle),
        )
    model.engine.start()
    _log.info(
        "model %s: %s %s, %s, %s",
        bundle.label,
        manifest.architecture,
        manifest.task,
        manifest.precision,
        options.provider,
    )
    return model


def _chat_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate:
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


def _whole_blocks(num_tokens: int, layout: KVLayout) -> int:
    """A chunk size at least as long whose chunks leave the logits as they are in one piece."""
    return -(-num_tokens // layout.query_block) * layout.query_block


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


def _golden_causal(runner: Runner, golden: GoldenCheck) -> NDArray[np.float32]:
    (logits,) = runner.prefill(0, np.array(golden.input_ids, np.int64), 0)
    return np.asarray(logits)


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
