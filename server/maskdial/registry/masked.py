"""Masked models: a bundle becomes one, its graph checked and its engine made."""

import logging
from dataclasses import replace
from functools import partial
from math import lcm

from maskdial.bundle.adapter import read_adapter
from maskdial.bundle.bundle import Bundle
from maskdial.bundle.manifest import Manifest
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.decision_prompts import DecisionPrompts
from maskdial.causal.chat.template import read_chat_template
from maskdial.causal.model import ChatForm
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.config import Config
from maskdial.engine.model import is_batch_invariant
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.masked.answer_cache import AnswerCache
from maskdial.masked.boundary_spans import BoundarySpans
from maskdial.masked.count_queries import CountQueries
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.label_encoder import LabelEncoder
from maskdial.masked.model import MaskedModel
from maskdial.metrics import MaskedMetrics, Metrics
from maskdial.registry.golden import LONG_PASS, check_golden, check_kernels, masked_logits
from maskdial.runtime.adapter import Adapter, load_adapter
from maskdial.runtime.placement import Placement
from maskdial.runtime.session import Session, SessionOptions

_log = logging.getLogger(__name__)


def make_masked(
    bundle: Bundle,
    config: Config,
    metrics: Metrics,
    placement: Placement,
    options: SessionOptions,
) -> MaskedModel:
    """The model of a bundle; its engine is not started yet.

    Raises:
        BundleError: the bundle cannot be served as it is.
    """
    label_encoder, encoder = None, bundle.label_encoder()
    if encoder is not None:
        # Labels are few: its threads need not spin for the next ones
        idle = replace(options, allow_spinning=False)
        of_labels = metrics.declare_masked(encoder.label)
        engine, _ = _masked_engine(encoder, config, of_labels, placement, idle)
        tokens = Tokenizer.from_file(encoder.tokenizer, encoder.manifest.special_tokens)
        label_encoder = LabelEncoder(engine, tokens, encoder.manifest.max_length)
    model_metrics = metrics.declare_masked(bundle.label)
    engine, session = _masked_engine(bundle, config, model_metrics, placement, options)
    tokenizer = Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens)
    prompts = None
    if bundle.manifest.decision is not None:
        template = read_chat_template(bundle, tokenizer)
        prompts = DecisionPrompts(bundle, template, tokenizer, bundle.manifest.max_length)
    chat_form, grammars = None, None
    if bundle.manifest.task in ("fill-mask", "block-diffusion"):
        template = read_chat_template(bundle, tokenizer)
        chat_form = ChatForm(template, ReplyFormat.of_bundle(bundle, tokenizer, template))
    if bundle.manifest.task == "fill-mask":
        grammars = GrammarCompiler.of_bundle(bundle)
    queries, spans = None, None
    if (extraction := bundle.manifest.extraction) is not None:
        of_fields = Session(bundle.path / extraction.graph, options)
        if extraction.scores == "span":
            queries = CountQueries(of_fields)
        else:
            spans = BoundarySpans(of_fields)
    if label_encoder is not None:
        label_encoder.engine.start()
    return MaskedModel(
        bundle,
        tokenizer,
        model_metrics,
        options.provider,
        engine,
        kernels=session.kernels,
        numerics="" if extraction is not None or label_encoder is not None else session.numerics,
        projections=session.projections,
        prompts=prompts,
        auto_truncate=config.truncates(bundle.name),
        chat_form=chat_form,
        kernel_library=None if options.kernels is None else options.kernels.path,
        label_encoder=label_encoder,
        queries=queries,
        spans=spans,
        query_weights=bundle.query_weights(),
        task_adapters=_task_adapters(bundle, session, options),
        grammars=grammars,
    )


def _task_adapters(bundle: Bundle, session: Session, options: SessionOptions) -> dict[str, Adapter]:
    """The adapters that a bundle brings; none where it takes none."""
    if options.kernels is None or not session.projections:
        return {}
    return {
        name: load_adapter(
            read_adapter(f"{bundle.name}:{name}", bundle.task_adapter(name)),
            options.kernels,
            [session.projections],
            bundle.name,
        )
        for name in bundle.manifest.task_adapters
    }


def _masked_engine(
    bundle: Bundle,
    config: Config,
    metrics: MaskedMetrics,
    placement: Placement,
    options: SessionOptions,
) -> tuple[MaskedEngine, Session]:
    """An engine for a bundle's graph, and its session."""
    session = Session(bundle.graph, options)
    if not session.multiplies_exactly:
        check_kernels(bundle, options, config.golden_check)
    how = bundle.manifest.denoising
    soft_columns = 0 if how is None else how.hidden_size
    golden = partial(
        masked_logits,
        session,
        of_entities=bundle.manifest.entities is not None,
        soft_columns=soft_columns,
    )
    check_golden(bundle, golden, config.golden_check, kernels=session.kernels)
    if not placement.provider.batch_invariant:
        width = min(LONG_PASS, bundle.manifest.max_length)
        check_golden(bundle, partial(golden, width=width), config.golden_check)
    engine = MaskedEngine(
        session,
        max_batch_tokens=config.max_batch_tokens or placement.provider.max_batch_tokens,
        max_queue=config.max_queue,
        pad_token_id=bundle.manifest.special_tokens.pad or 0,
        free_padding=placement.provider.free_padding,
        pad_multiple=_pad_multiple(bundle.manifest, placement.provider.pad_multiple),
        max_length=bundle.manifest.max_length,
        soft_columns=soft_columns,
        answers=_answer_cache(bundle, config, options.provider, session.kernels),
        metrics=metrics,
        name=bundle.label,
    )
    return engine, session


def _answer_cache(
    bundle: Bundle, config: Config, provider: str, kernels: str
) -> AnswerCache | None:
    """A model's cache of answers, if the server has any and another pass would give the same."""
    if config.answer_cache_bytes is None:
        return None
    if not is_batch_invariant(bundle.manifest, provider, kernels):
        _log.warning(
            "model %r: its answers are not kept, as their last bits depend on what shares a batch",
            bundle.label,
        )
        return None
    return AnswerCache(config.answer_cache_bytes, shared=config.prefix_cache_shared == "on")


def _pad_multiple(manifest: Manifest, of_provider: int) -> int:
    """What lengths of passes are rounded up to.

    GroupQueryAttention rounds a last block of a single token in another way (`KVLayout`), and its
    blocks are even: in passes of odd lengths, a text's last bits could depend on the others.
    """
    return lcm(of_provider, 2) if manifest.reads_left else of_provider
