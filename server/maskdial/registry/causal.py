"""Causal models: a bundle becomes one, its graphs checked and its engine made."""

import logging
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from maskdial.bundle.bundle import Bundle, read_manifests
from maskdial.bundle.manifest import KVLayout, Manifest
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.block_text import MOST_TOKENS
from maskdial.causal.chat.decision_prompts import DecisionPrompts
from maskdial.causal.chat.template import ChatTemplate, read_chat_template
from maskdial.causal.drafts.speculation import MAX_PASS_DRAFTS
from maskdial.causal.engine import CausalEngine
from maskdial.causal.generation_config import (
    GenerationDefaults,
    read_generation_defaults,
    tokens_without_text,
)
from maskdial.causal.model import CausalModel
from maskdial.causal.prefix_cache import PrefixCache, default_bytes, snapshot_blocks
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.causal.prefix_disk.tier import DiskTier
from maskdial.causal.sampling.device_sampler import DeviceSampler
from maskdial.causal.sampling.sampler import Sampler, TokenSampler
from maskdial.causal.sampling.scores import ScoreReader
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.config import Config
from maskdial.engine.model import LEAST_CONTEXT, max_length, max_source_length
from maskdial.errors import BundleError, ConfigError
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.kernels.logits import VocabularyKernels
from maskdial.metrics import Metrics
from maskdial.registry.drafts import (
    drafted_token_bytes,
    find_max_drafts,
    hidden_size,
    make_speculation,
)
from maskdial.registry.fingerprint import fingerprint
from maskdial.registry.golden import (
    LONG_PASS,
    causal_logits,
    check_golden,
    check_kernels,
    check_long_pass,
    text_to_text_logits,
)
from maskdial.runtime.encoder import Encoder
from maskdial.runtime.kv_cache import plan_length, plan_slots
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.placement import Placement
from maskdial.runtime.providers.provider import Provider
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

_log = logging.getLogger("maskdial.models")
# Tokens of a block. Prompts are scored a block at a time, so shorter ones take longer; but a text
# with states goes on from the end of a block only.
_MAX_BLOCK, _MAX_BLOCK_WITH_STATES = 128, 64
_SAMPLED_BYTES = 128 * 2**20  # of logits that a pass of the sampler copies on a GPU, at most
_ROUND = 256  # tokens, of which a context that the memory limits is a multiple


def make_causal(
    bundle: Bundle,
    config: Config,
    metrics: Metrics,
    placement: Placement,
    options: SessionOptions,
    disk: DiskStore | None = None,
) -> CausalModel:
    """The model of a bundle; its engine is not started yet.

    ``disk`` is where its prefix cache goes beyond memory.

    Raises:
        BundleError: the bundle cannot be served as it is.
        ConfigError: its KV cache does not fit into memory, or its draft model cannot draft.
    """
    manifest, provider = bundle.manifest, placement.provider
    if manifest.kv is None:
        raise BundleError(f"model {bundle.name!r}: a causal bundle without a KV layout")
    options = replace(
        options,
        stream=placement.memory.stream,
        kv_cache=config.kv_cache_dtype,
        gives_hidden=hidden_size(bundle, config) > 0,
    )
    texts = _Texts(bundle)
    session = _session(bundle, config, placement, options, texts)
    layout = manifest.kv.stored_as(session.kv_cache)
    block_tokens = _block_tokens(session, layout, provider)
    chunk_tokens = _chunk_tokens(manifest, config, provider, block_tokens)
    max_drafts = find_max_drafts(
        bundle, session, config, on_host=placement.memory.of_passes.on_host
    )
    runner = _runner(session, bundle, config, placement, layout, chunk_tokens, max_drafts)
    encoder = _checked(runner, session, bundle, config, placement, options, chunk_tokens)
    tokenizer, chat_template = texts.read.result()
    writes = manifest.task == "generate"
    mask_token_id, never = None, frozenset[int]()
    if writes and encoder is None:  # an encoder-decoder checkpoint names what it never writes
        mask_token_id, never = _mask_and_never(bundle, tokenizer)
    model_metrics = metrics.declare(bundle.label)
    source_length = max_source_length(manifest, config)
    prefix_cache = None
    if encoder is None:
        identity = fingerprint(
            bundle,
            session,
            options,
            layout,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
        )
        prefix_cache = _prefix_cache(
            bundle, identity, layout, config, block_tokens, runner.max_length
        )
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
        prefix_cache=prefix_cache,
        prefix_disk=None
        if prefix_cache is None or disk is None
        else DiskTier(
            disk,
            prefix_cache,
            model=bundle.name,
            dtype=layout.element,
            block_shape=(block_tokens, layout.elements_per_token),
            num_states=layout.state_bytes // 4,
        ),
        speculation=make_speculation(
            bundle, session, runner, options, config, max_drafts, chunk_tokens, model_metrics
        ),
        never=never,
        sampler=_sampler(bundle, placement, runner.slots, options, never),
        overlaps=not placement.memory.of_passes.on_host,
        metrics=model_metrics,
        name=bundle.label,
        encoder=encoder,
        max_source_length=source_length or 0,
    )
    from_checkpoint = config.generation_config == "auto"
    return CausalModel(
        bundle,
        tokenizer,
        model_metrics,
        provider.name,
        engine,
        runner.slots,
        runner.max_length,
        source_length,
        chat_template,
        ReplyFormat.of_bundle(bundle, tokenizer, chat_template)
        if writes
        else ReplyFormat(None, None),
        GrammarCompiler.of_bundle(bundle),
        read_generation_defaults(bundle) if from_checkpoint else GenerationDefaults(),
        layout.element.name,
        chunk_tokens if runner.looks_ahead and encoder is None else 0,
        mask_token_id=mask_token_id,
        kernel_library=None if options.kernels is None else options.kernels.path,
        kernels=session.kernels,
        numerics="" if encoder is not None else session.numerics,
        projections=session.projections,
        prompts=_decision_prompts(bundle, chat_template, tokenizer, runner.max_length),
        auto_truncate=config.truncates(bundle.name),
    )


def _chunk_tokens(manifest: Manifest, config: Config, provider: Provider, block_tokens: int) -> int:
    """The most tokens of a prompt in a pass.

    Chunks of whole blocks leave the logits as they are in one piece.
    """
    most = _max_query_tokens(manifest, provider)
    if most is not None:
        return most
    tokens = config.prefill_chunk_tokens or provider.prefill_chunk_tokens
    return -(-tokens // block_tokens) * block_tokens


def _max_query_tokens(manifest: Manifest, provider: Provider) -> int | None:
    """The provider's limit of a pass; an encoder reads a text whole, and has another attention."""
    return None if manifest.text_to_text is not None else provider.max_query_tokens()


def _checked(
    runner: Runner,
    session: Session,
    bundle: Bundle,
    config: Config,
    placement: Placement,
    options: SessionOptions,
    chunk_tokens: int,
) -> Encoder | None:
    """Compares the runner's logits with the export's; returns its encoder, if the model has one.

    Raises:
        BundleError: as `check_golden` and `check_kernels`.
    """
    if not session.multiplies_exactly:
        check_kernels(bundle, options, config.golden_check)
    if runner.cache.source is not None:
        return _encoder(bundle, config, placement, options, runner, chunk_tokens, session.kernels)
    most = _max_query_tokens(bundle.manifest, placement.provider)
    golden = partial(causal_logits, runner, chunk_tokens=most)
    check_golden(
        bundle, golden, config.golden_check, kernels=session.kernels, kv_cache=session.kv_cache
    )
    if not (placement.provider.batch_invariant or most):
        check_long_pass(bundle, runner, config.golden_check)
    return None


class _Texts:
    """A bundle's tokenizer and chat template."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.read: Future[tuple[Tokenizer, ChatTemplate]] = Future()

    def start(self) -> None:
        """Reads them; an error is that of the result."""
        if self.read.done():
            return
        bundle = self._bundle
        manifest = bundle.manifest
        try:
            tokenizer = Tokenizer.from_file(
                bundle.tokenizer, manifest.special_tokens, manifest.tokenization
            )
            self.read.set_result((tokenizer, read_chat_template(bundle, tokenizer)))
        except BaseException as error:
            self.read.set_exception(error)


def _mask_and_never(bundle: Bundle, tokenizer: Tokenizer) -> tuple[int | None, frozenset[int]]:
    """The mask token of a hybrid, and the tokens that no text contains."""
    manifests = read_manifests(bundle.name, bundle.path)
    mask = next((each.special_tokens.mask for each in manifests if each.mask == "full"), None)
    gaps = tokenizer.ids_without_token(bundle.manifest.vocab_size)
    gaps = frozenset(gaps).difference(bundle.manifest.special_tokens.eos)
    return mask, tokens_without_text(manifests) | gaps


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
    kernels: str,
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
        check_golden(bundle, golden, config.golden_check, kernels=kernels)
    return encoder


def _joint_tokens(placement: Placement, layout: KVLayout, chunk_tokens: int) -> int:
    """The longest prompt that shares a pass with others; 1 where a staging slot takes one only."""
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
    num_drafted = (MAX_PASS_DRAFTS if session.is_exact else max_drafts) + 1 if max_drafts else 0
    num_golden = len(bundle.manifest.golden.input_ids)
    source_length = max_source_length(bundle.manifest, config)
    if source_length is not None:
        source_length = max(source_length, num_golden)
    drafted = drafted_token_bytes(bundle, session, config) if max_drafts else 0
    budget = _cache_budget(config, placement, layout.bytes_per_token, drafted)
    context, slots = _plan_cache(bundle, config, placement, layout, budget, source_length or 0)
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
        hidden_size=hidden_size(bundle, config) if session.is_exact else 0,
        batch_sizes=placement.provider.batch_sizes,
    )


def _session(
    bundle: Bundle,
    config: Config,
    placement: Placement,
    options: SessionOptions,
    texts: _Texts,
) -> Session:
    """A session that captures decode steps, if that is wanted and the provider can do it.

    The texts are read meanwhile, where the graph is loaded in main memory alone.
    """
    if placement.memory.of_passes.on_host:
        return Session(bundle.graph, replace(options, meanwhile=texts.start))
    texts.start()
    if config.cuda_graphs == "off" or not placement.provider.captures:
        return Session(bundle.graph, options)
    try:
        return Session(bundle.graph, replace(options, captures=True))
    except BundleError as error:
        session = Session(bundle.graph, options)  # raises what has nothing to do with capturing
        _log.warning("model %s runs without CUDA graphs: %s", bundle.label, error.message)
        return session


def _cache_budget(
    config: Config, placement: Placement, token_bytes: int, drafted_token_bytes: int
) -> int | None:
    """Bytes that a KV cache may have, once the weights are loaded; None for no limit.

    What drafts for the model has a cache of as many tokens beside it.
    """
    free = placement.memory.free_bytes()
    if free is None:
        return config.kv_cache_bytes
    # Passes need some of the rest.
    budget = min(config.kv_cache_bytes or int(free * config.kv_cache_fraction), free)
    if config.kv_cache_bytes is None and drafted_token_bytes:
        budget = budget * token_bytes // (token_bytes + drafted_token_bytes)
    return budget


def _plan_cache(
    bundle: Bundle,
    config: Config,
    placement: Placement,
    layout: KVLayout,
    budget: int | None,
    max_source_length: int,
) -> tuple[int, int]:
    """The context, and the number of slots.

    The context is the model's own, unless a setting says another or the memory has no room for it.
    Without a number of slots, each model has its share of the memory.

    Raises:
        ConfigError: the configured slots do not fit into memory.
    """
    context, share = max_length(bundle.manifest, config), _share_of(config, budget)
    if config.max_context is None and context > LEAST_CONTEXT:
        chosen = _plan_context(config, placement, layout, share, context, max_source_length)
        why = "its own" if chosen == context else f"of its own {context}, as far as memory allows"
        _log.info("model %s: a context of %d tokens, %s (--max-context)", bundle.label, chosen, why)
        context = chosen
    if config.slots is None and budget is not None and share is not None:
        one = (context + max_source_length) * layout.bytes_per_token + layout.state_bytes
        budget = min(budget, max(share, one))
    try:
        slots = plan_slots(
            layout,
            context,
            asked=config.slots,
            max_slots=placement.provider.slots,
            budget=budget,
            pass_bytes=_pass_bytes(bundle, placement),
            max_source_length=max_source_length,
            max_buffer_bytes=placement.memory.max_buffer_bytes,
        )
    except ConfigError as error:
        raise ConfigError(f"model {bundle.label!r}: {error.message}") from error
    return context, slots


def _share_of(config: Config, budget: int | None) -> int | None:
    """One model's part of the memory for KV caches.

    What is promised to one is not free for the next: to those that are configured, and to one that
    is loaded later, where that can be.
    """
    if budget is None or config.kv_cache_bytes is not None:  # which is each model's own
        return budget
    loads_later = config.model_dir is not None or config.admin_key is not None
    return budget // (max(len(config.models), 1) + loads_later)


def _pass_bytes(bundle: Bundle, placement: Placement) -> int:
    """What a slot takes of a GPU besides its cache: a row of logits in steps, and one in prefills.

    Main memory is committed when it is written, for the slots that are used.
    """
    on_host = placement.memory.of_passes.on_host
    return 0 if on_host else 2 * 4 * _num_logits(bundle.manifest)


def _plan_context(
    config: Config,
    placement: Placement,
    layout: KVLayout,
    share: int | None,
    context: int,
    max_source_length: int,
) -> int:
    """The most of a context for which a share of the memory has a good part of the slots."""
    if share is None:  # the memory does not tell what is free
        return LEAST_CONTEXT
    fitting = plan_length(
        layout,
        context,
        slots=config.slots or placement.provider.context_slots,
        budget=share,
        max_source_length=max_source_length,
        max_buffer_bytes=placement.memory.max_buffer_bytes,
    )
    return min(context, max(fitting // _ROUND * _ROUND, LEAST_CONTEXT))


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
    max_rows = min(slots, max(_SAMPLED_BYTES // (4 * vocab_size), 1))
    return DeviceSampler(
        placement.memory, sampler, vocab_size=vocab_size, max_rows=max_rows, options=options
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
    bundle: Bundle,
    identity: str,
    layout: KVLayout,
    config: Config,
    block_tokens: int,
    max_length: int,
) -> PrefixCache | None:
    max_bytes, free = config.prefix_cache_bytes, HostMemory().free_bytes()
    if max_bytes is None:
        max_bytes = default_bytes(max_length * layout.bytes_per_token + layout.state_bytes, free)
    if not max_bytes:
        return None
    if free is not None and free * config.kv_cache_fraction < max_bytes:
        max_bytes = int(free * config.kv_cache_fraction)
        _log.warning(
            "model %s: memory for %d bytes of its prefix cache is free", bundle.label, max_bytes
        )
    return PrefixCache(
        model=identity,
        block_tokens=block_tokens,
        max_bytes=max_bytes,
        shared=config.prefix_cache_shared == "on",
        snapshot_blocks=snapshot_blocks(
            layout.state_bytes, block_tokens * layout.bytes_per_token, block_tokens
        ),
    )
