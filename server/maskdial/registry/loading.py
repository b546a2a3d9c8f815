"""Loading: a bundle becomes a served model, its graph checked and its engine started."""

import logging
from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import Path

from maskdial.bundle.bundle import Bundle, load_bundle, load_bundles, read_manifests
from maskdial.bundle.manifest import COUNT_GRAPH, KVLayout, Manifest
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.block_text import MOST_TOKENS
from maskdial.causal.chat.decision_prompts import DecisionPrompts
from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.drafts.speculation import MAX_PASS_DRAFTS
from maskdial.causal.engine import CausalEngine
from maskdial.causal.generation_config import (
    GenerationDefaults,
    read_generation_defaults,
    tokens_without_text,
)
from maskdial.causal.model import CausalModel
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.device_sampler import DeviceSampler
from maskdial.causal.sampling.sampler import Sampler, TokenSampler
from maskdial.causal.sampling.scores import ScoreReader
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.config import Config
from maskdial.engine.model import max_length, max_source_length
from maskdial.errors import BundleError, ConfigError, explain_exhaustion
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.kernels.installed import find_kernels
from maskdial.kernels.logits import VocabularyKernels
from maskdial.masked.count_queries import CountQueries
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.label_encoder import LabelEncoder
from maskdial.masked.model import MaskedModel
from maskdial.metrics import Metrics, PassMetrics
from maskdial.registry.drafts import find_max_drafts, make_speculation
from maskdial.registry.golden import (
    LONG_PASS,
    causal_logits,
    check_golden,
    check_kernels,
    check_long_pass,
    masked_logits,
    text_to_text_logits,
)
from maskdial.registry.served import ServedModel
from maskdial.runtime.encoder import Encoder
from maskdial.runtime.kv_cache import plan_slots
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.placement import Placement, place
from maskdial.runtime.providers.provider import Provider
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

_log = logging.getLogger("maskdial.models")
# Tokens of a block. Prompts are scored a block at a time, so shorter ones take longer; but a text
# with states goes on from the end of a block only.
_MAX_BLOCK, _MAX_BLOCK_WITH_STATES = 128, 64


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
    name: str, path: Path, config: Config, metrics: Metrics, *, alone: bool = True
) -> tuple[ServedModel, ...]:
    """Reads a bundle folder and starts all of its graphs, or none.

    ``alone``: no other model runs beside it.

    Raises:
        BundleError: the bundle cannot be served as it is.
        ConfigError: the provider cannot run it, or its KV cache does not fit into memory.
    """
    bundles = load_bundles(name, path)
    models: list[ServedModel] = []
    try:
        with explain_exhaustion():
            for bundle in bundles:
                each = start_model(bundle, config, metrics, alone=alone and len(bundles) == 1)
                models.append(each)
    except BaseException:
        for model in models:
            model.stop()
        raise
    return tuple(models)


def start_model(
    bundle: Bundle, config: Config, metrics: Metrics, *, alone: bool = True
) -> ServedModel:
    """Loads a bundle's graph, repeats its golden check and starts its engine.

    ``alone``: no other engine runs beside it.

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
            adapters=config.takes_adapters and bundle.manifest.text_to_text is None,
        )
        of_family = _start_masked if bundle.manifest.family == "masked" else _start_causal
        return of_family(bundle, config, metrics, placement, options)

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


def _start_masked(
    bundle: Bundle,
    config: Config,
    metrics: Metrics,
    placement: Placement,
    options: SessionOptions,
) -> MaskedModel:
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
    conversations, grammars = None, None
    if bundle.manifest.task == "fill-mask":
        conversations = read_chat_template(bundle, tokenizer)
        grammars = _grammar_compiler(bundle)
    queries = None
    if bundle.manifest.extraction is not None:
        queries = CountQueries(Session(bundle.path / COUNT_GRAPH, options))
    if label_encoder is not None:
        label_encoder.engine.start()
    return MaskedModel(
        bundle,
        tokenizer,
        model_metrics,
        options.provider,
        engine,
        kernels=session.kernels,
        projections=session.projections,
        prompts=prompts,
        auto_truncate=config.truncates(bundle.name),
        conversations=conversations,
        kernel_library=None if options.kernels is None else options.kernels.path,
        label_encoder=label_encoder,
        queries=queries,
        grammars=grammars,
    )


def _masked_engine(
    bundle: Bundle,
    config: Config,
    metrics: PassMetrics,
    placement: Placement,
    options: SessionOptions,
) -> tuple[MaskedEngine, Session]:
    """An engine for a bundle's graph, and its session."""
    session = Session(bundle.graph, options)
    if not session.multiplies_exactly:
        check_kernels(bundle, options, config.golden_check)
    golden = partial(masked_logits, session, of_entities=bundle.manifest.entities is not None)
    check_golden(bundle, golden, config.golden_check)
    if not placement.provider.batch_invariant:
        width = min(LONG_PASS, bundle.manifest.max_length)
        check_golden(bundle, partial(golden, width=width), config.golden_check)
    engine = MaskedEngine(
        session,
        max_batch_tokens=config.max_batch_tokens or placement.provider.max_batch_tokens,
        max_queue=config.max_queue,
        pad_token_id=bundle.manifest.special_tokens.pad or 0,
        pad_multiple=_pad_multiple(bundle.manifest, placement.provider.pad_multiple),
        max_length=bundle.manifest.max_length,
        metrics=metrics,
        name=bundle.label,
    )
    return engine, session


def _pad_multiple(manifest: Manifest, of_provider: int) -> int:
    """What lengths of passes are rounded up to.

    GroupQueryAttention rounds a last block of a single token in another way (`KVLayout`), and its
    blocks are even: in passes of odd lengths, a text's last bits could depend on the others.
    """
    return lcm(of_provider, 2) if manifest.reads_left else of_provider


def _start_causal(
    bundle: Bundle,
    config: Config,
    metrics: Metrics,
    placement: Placement,
    options: SessionOptions,
) -> CausalModel:
    manifest, provider = bundle.manifest, placement.provider
    if manifest.kv is None:
        raise BundleError(f"model {bundle.name!r}: a causal bundle without a KV layout")
    options = replace(options, stream=placement.memory.stream, kv_cache=config.kv_cache_dtype)
    session = _causal_session(bundle, config, placement, options)
    layout = manifest.kv.stored_as(session.kv_cache)
    # Chunks of whole blocks leave the logits as they are in one piece.
    block_tokens = _block_tokens(session, layout, provider)
    chunk_tokens = _round_up(
        config.prefill_chunk_tokens or provider.prefill_chunk_tokens, block_tokens
    )
    most = None if manifest.text_to_text is not None else provider.max_query_tokens()
    if most is not None:  # an encoder reads a text whole, and has another attention
        chunk_tokens = most
    on_host = placement.memory.of_passes.on_host
    max_drafts = find_max_drafts(bundle, session, config, on_host=on_host)
    runner = _runner(session, bundle, config, placement, layout, chunk_tokens, max_drafts)
    if not session.multiplies_exactly:
        check_kernels(bundle, options, config.golden_check)
    encoder = None
    if runner.cache.source is None:
        golden = partial(causal_logits, runner, chunk_tokens=most)
        check_golden(bundle, golden, config.golden_check, kv_cache=session.kv_cache)
        if not (provider.batch_invariant or most):
            check_long_pass(bundle, runner, config.golden_check)
    else:
        encoder = _encoder(bundle, config, placement, options, runner, chunk_tokens)
    tokenizer = Tokenizer.from_file(
        bundle.tokenizer, manifest.special_tokens, manifest.tokenization
    )
    chat_template = read_chat_template(bundle, tokenizer)
    writes = manifest.task == "generate"
    reply_format = ReplyFormat(None, None)
    if writes:
        reply_format = ReplyFormat.of_bundle(bundle, tokenizer, chat_template)
    never: frozenset[int] = frozenset()
    mask_token_id = None
    if writes and encoder is None:  # an encoder-decoder checkpoint names what it never writes
        manifests = read_manifests(bundle.name, bundle.path)
        mask_token_id = next((m.special_tokens.mask for m in manifests if m.mask == "full"), None)
        never = tokens_without_text(manifests)
        gaps = tokenizer.ids_without_token(manifest.vocab_size)
        never |= gaps.difference(manifest.special_tokens.eos)
    model_metrics = metrics.declare(bundle.label)
    engine = CausalEngine(
        runner,
        tokenizer,
        slots=runner.slots,
        max_length=runner.max_length,
        vocab_size=_num_logits(manifest),
        prefill_chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        # Longer prompts than a block would differ in their last bits from those prefilled alone.
        joint_tokens=_joint_tokens(placement, layout, chunk_tokens),
        max_queue=config.max_queue,
        eos_token_ids=frozenset(manifest.special_tokens.eos) if writes else frozenset(),
        prefix_cache=_prefix_cache(bundle, layout, config, block_tokens)
        if encoder is None
        else None,
        speculation=make_speculation(
            bundle,
            session,
            runner,
            options,
            config,
            max_drafts,
            chunk_tokens,
            model_metrics,
        ),
        never=never,
        sampler=_sampler(bundle, placement, runner.slots, options, never),
        overlaps=not on_host,
        metrics=model_metrics,
        name=bundle.label,
        encoder=encoder,
        max_source_length=max_source_length(manifest, config) or 0,
    )
    return CausalModel(
        bundle,
        tokenizer,
        model_metrics,
        provider.name,
        engine,
        runner.slots,
        runner.max_length,
        max_source_length(manifest, config),
        chat_template,
        reply_format,
        _grammar_compiler(bundle),
        read_generation_defaults(bundle)
        if config.generation_config == "auto"
        else GenerationDefaults(),
        layout.element.name,
        chunk_tokens if runner.looks_ahead and encoder is None else 0,
        mask_token_id=mask_token_id,
        kernel_library=None if options.kernels is None else options.kernels.path,
        kernels=session.kernels,
        projections=session.projections,
        prompts=_decision_prompts(bundle, chat_template, tokenizer, runner.max_length),
        auto_truncate=config.truncates(bundle.name),
    )


def _num_logits(manifest: Manifest) -> int:
    """The width of a causal graph's logits."""
    assert manifest.num_outputs is not None, "the graph's output is logits"
    return manifest.num_outputs


def _encoder(
    bundle: Bundle,
    config: Config,
    placement: Placement,
    options: SessionOptions,
    runner: Runner,
    chunk_tokens: int,
) -> Encoder:
    """The encoder of a runner, which passed the golden check."""
    cache, text_to_text = runner.cache.source, bundle.manifest.text_to_text
    assert cache is not None, "the runner of an encoder-decoder model has source texts"
    assert text_to_text is not None, "only an encoder-decoder model reads source texts"
    width = 0 if placement.provider.batch_invariant else min(LONG_PASS, cache.max_length)
    encoder = Encoder(
        Session(bundle.encoder, options),
        cache,
        placement.memory,
        max(chunk_tokens, cache.max_length),
    )
    for each in (0, width) if width else (0,):
        golden = partial(
            text_to_text_logits, runner, encoder, text_to_text.start_token_id, width=each
        )
        check_golden(bundle, golden, config.golden_check)
    return encoder


def _joint_tokens(placement: Placement, layout: KVLayout, chunk_tokens: int) -> int:
    """The longest prompt that shares a pass with others; 1 where the runner's bench is for one."""
    if not placement.memory.binds_views:
        return 1
    return layout.query_block if placement.provider.batch_invariant else chunk_tokens


def _decision_prompts(
    bundle: Bundle, template: ChatTemplate, tokenizer: Tokenizer, context: int
) -> DecisionPrompts | None:
    """What asks a causal model questions; None for one without a template."""
    if not template.exists and template.decision_source is None:
        return None
    return DecisionPrompts(bundle, template, tokenizer, context - 1)


def _runner(
    session: Session,
    bundle: Bundle,
    config: Config,
    placement: Placement,
    layout: KVLayout,
    chunk_tokens: int,
    max_drafts: int,
) -> Runner:
    """Allocates what the loaded graph leaves of the memory for the KV cache."""
    context = max_length(bundle.manifest, config)
    num_drafted = (MAX_PASS_DRAFTS if session.is_exact else max_drafts) + 1 if max_drafts else 0
    num_golden = len(bundle.manifest.golden.input_ids)
    source_length = max_source_length(bundle.manifest, config)
    if source_length is not None:
        source_length = max(source_length, num_golden)
    slots = _plan_slots(bundle, config, placement, layout, context, source_length or 0)
    # Where drafts were wrong, recurrent layers read the right ones again.
    num_again = slots * max_drafts if layout.states else 0
    return Runner(
        session,
        layout,
        memory=placement.memory,
        slots=slots,
        max_length=context,
        vocab_size=_num_logits(bundle.manifest),
        # A last chunk is longer by one token rather than followed by a single one.
        max_tokens=max(chunk_tokens + 1 + num_drafted + num_again, num_golden),
        max_rows=max(slots, layout.query_block + 1) + num_drafted,
        max_ahead=min(chunk_tokens, MOST_TOKENS) if placement.memory.on_host else 0,
        max_source_length=source_length,
        batch_sizes=placement.provider.batch_sizes,
    )


def _causal_session(
    bundle: Bundle, config: Config, placement: Placement, options: SessionOptions
) -> Session:
    """A session that captures decode steps, if that is wanted and the provider can do it."""
    if config.cuda_graphs == "off" or not placement.provider.captures:
        return Session(bundle.graph, options)
    try:
        return Session(bundle.graph, replace(options, captures=True))
    except BundleError as error:
        session = Session(bundle.graph, options)  # raises what has nothing to do with capturing
        _log.warning("model %s runs without CUDA graphs: %s", bundle.label, error.message)
        return session


def _plan_slots(
    bundle: Bundle,
    config: Config,
    placement: Placement,
    layout: KVLayout,
    max_length: int,
    max_source_length: int,
) -> int:
    """The number of slots, once the weights are loaded.

    Raises:
        ConfigError: the configured slots do not fit into memory.
    """
    budget = config.kv_cache_bytes
    free = placement.memory.free_bytes()
    if free is not None:  # passes need some of the rest
        budget = min(budget or int(free * config.kv_cache_fraction), free)
    try:
        return plan_slots(
            layout,
            max_length,
            asked=config.slots,
            max_slots=placement.provider.slots,
            budget=budget,
            max_source_length=max_source_length,
            max_buffer_bytes=placement.memory.max_buffer_bytes,
        )
    except ConfigError as error:
        raise ConfigError(f"model {bundle.label!r}: {error.message}") from error


def _sampler(
    bundle: Bundle,
    placement: Placement,
    slots: int,
    options: SessionOptions,
    never: frozenset[int],
) -> TokenSampler:
    """The sampler that works where the logits lie; of a decision model, what reads its scores."""
    if bundle.manifest.task == "decide":
        return ScoreReader()
    vocab_size = bundle.manifest.vocab_size
    kernels = None
    if options.kernels is not None:
        kernels = VocabularyKernels(options.kernels.path, vocab_size)
    eos = frozenset(bundle.manifest.special_tokens.eos)
    sampler = Sampler(vocab_size, eos, never, kernels)
    if placement.memory.of_passes.on_host:
        return sampler
    return DeviceSampler(
        placement.memory, sampler, vocab_size=vocab_size, max_rows=slots, options=options
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def read_chat_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a bundle, which may lack one, with its tokenizer's special tokens."""
    special = bundle.manifest.special_tokens
    ids = {
        "bos_token": special.bos,
        "eos_token": next(iter(special.eos), None),
        "pad_token": special.pad,
        "unk_token": tokenizer.unknown_id if tokenizer.unknown_id >= 0 else None,
        "mask_token": special.mask,
    }
    tokens = {
        name: tokenizer.id_to_token(token_id)
        for name, token_id in ids.items()
        if token_id is not None
    }
    return ChatTemplate.from_bundle(bundle, {name: each for name, each in tokens.items() if each})


def _grammar_compiler(bundle: Bundle) -> GrammarCompiler:
    return GrammarCompiler(
        bundle.tokenizer.read_text(encoding="utf-8"),
        vocab_size=bundle.manifest.vocab_size,
        eos_token_ids=bundle.manifest.special_tokens.eos,
    )


def _block_tokens(session: Session, layout: KVLayout, provider: Provider) -> int:
    """How many tokens the blocks have in which prompts are kept, and that chunks are multiples of.

    Our kernels compute the same bits wherever a chunk begins, so that blocks need not be those of
    ONNX Runtime's attention, which are long for large heads.
    """
    if "new_tokens" not in session.input_names:
        return min(layout.query_block, provider.max_query_tokens() or layout.query_block)
    return min(layout.query_block, _MAX_BLOCK_WITH_STATES if layout.states else _MAX_BLOCK)


def _prefix_cache(
    bundle: Bundle, layout: KVLayout, config: Config, block_tokens: int
) -> PrefixCache | None:
    if not config.prefix_cache_bytes:
        return None
    max_bytes, free = config.prefix_cache_bytes, HostMemory().free_bytes()
    if free is not None and free * config.kv_cache_fraction < max_bytes:
        max_bytes = int(free * config.kv_cache_fraction)
        _log.warning(
            "model %s: memory for %d bytes of its prefix cache is free", bundle.label, max_bytes
        )
    return PrefixCache(
        model=bundle.manifest.files[bundle.manifest.graph],
        block_tokens=block_tokens,
        max_bytes=max_bytes,
        shared=config.prefix_cache_shared == "on",
        needs_states=bool(layout.states),
    )
