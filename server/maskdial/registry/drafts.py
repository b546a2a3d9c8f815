"""Drafts: what a causal model speculates with, as the configuration has it."""

import logging
from dataclasses import replace

import numpy as np
import tokenizers

from maskdial.bundle.bundle import Bundle, load_bundle, read_manifests
from maskdial.causal.drafts.head import HeadDrafts
from maskdial.causal.drafts.model import DraftModel
from maskdial.causal.drafts.sources import Answers, ForcedText, Prediction, PromptLookup
from maskdial.causal.drafts.speculation import Speculation
from maskdial.config import Config
from maskdial.errors import ConfigError
from maskdial.metrics import ModelMetrics
from maskdial.registry.catalog import find_bundles
from maskdial.runtime.piece import Piece
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

_log = logging.getLogger("maskdial.models")

_DRAFTS = 16


def find_max_drafts(bundle: Bundle, session: Session, config: Config, *, on_host: bool) -> int:
    """The draft tokens of a sequence to verify at once; 0 for no speculation.

    ``on_host``: whether passes read and write the host's memory.
    """
    manifest = bundle.manifest
    if manifest.text_to_text is not None or manifest.task == "decide":
        return 0
    if manifest.kv is not None and manifest.kv.states and not session.is_exact:
        if config.speculative_tokens:
            _log.warning(
                "model %s has recurrent layers, so without the kernels it runs without "
                "--speculative-tokens",
                bundle.label,
            )
        return 0
    if config.speculative_tokens is None:
        return _DRAFTS if session.is_exact and on_host else 0
    return config.speculative_tokens


def hidden_size(bundle: Bundle, config: Config) -> int:
    """The columns of the hidden states that drafts are made from; 0 if none are."""
    head = bundle.manifest.draft_head
    is_asked = config.draft in (None, bundle.name) and config.speculative_tokens != 0
    return head.hidden_size if head is not None and is_asked else 0


def make_speculation(
    bundle: Bundle,
    session: Session,
    runner: Runner,
    options: SessionOptions,
    config: Config,
    max_drafts: int,
    chunk_tokens: int,
    metrics: ModelMetrics,
) -> Speculation | None:
    """What a model's engine speculates with.

    Raises:
        ConfigError: the draft model cannot draft.
        BundleError: its bundle cannot be read, or the list of a head's tokens.
    """
    if not max_drafts:
        return None
    return Speculation(
        (ForcedText(), Prediction(), PromptLookup()),
        max_drafts=max_drafts,
        max_length=runner.max_length,
        together=session.is_exact,
        metrics=metrics,
        answers=Answers(shared=config.prefix_cache_shared == "on"),
        model=_draft_model(bundle, runner, options, config, chunk_tokens, exact=session.is_exact),
    )


def drafted_token_bytes(bundle: Bundle, session: Session, config: Config) -> int:
    """The size of a token's keys and values in the cache of what drafts for a model; 0 if that has
    none.
    """
    if not session.is_exact:
        return 0
    layout, head = None, bundle.manifest.draft_head
    if config.draft is None or config.draft == bundle.name:
        if head is not None and hidden_size(bundle, config):
            layout = head.kv
    elif (path := find_bundles(config).scan().get(config.draft)) is not None:
        layout = read_manifests(config.draft, path)[0].kv
    return 0 if layout is None else layout.stored_as(session.kv_cache).bytes_per_token


def _draft_model(
    bundle: Bundle,
    runner: Runner,
    options: SessionOptions,
    config: Config,
    chunk_tokens: int,
    *,
    exact: bool,
) -> DraftModel | None:
    """The model of ``--draft``, loaded for a model with its vocabulary; or else what the model's
    own bundle has for drafts.
    """
    name = config.draft
    if name is None or name == bundle.name:
        return _head_drafts(bundle, runner, options, config, chunk_tokens) if exact else None
    if not exact:
        _log.warning(
            "model %s runs without the draft model %s: its own last bits would depend on it; see "
            "docs/speculation.md",
            bundle.label,
            name,
        )
        return None
    path = find_bundles(config).scan().get(name)
    if path is None:
        raise ConfigError(
            f"--draft {name}: there is no such model; serve it as well (--model {name}=PATH)"
        )
    draft = load_bundle(name, path)
    layout = draft.manifest.kv
    if draft.manifest.task != "generate" or layout is None or draft.manifest.text_to_text:
        raise ConfigError(f"--draft {name}: it is no causal model, so it cannot draft")
    if layout.states:
        raise ConfigError(f"--draft {name}: a model with recurrent layers cannot draft")
    if not _has_same_tokens(bundle, draft):
        _log.warning(
            "model %s runs without the draft model %s: their vocabularies differ",
            bundle.label,
            name,
        )
        return None
    session = Session(draft.graph, replace(options, kv_cache="auto"))
    drafting = Runner(
        session,
        layout.stored_as(session.kv_cache),
        slots=runner.slots,
        max_length=min(runner.max_length, draft.manifest.max_length),
        vocab_size=draft.manifest.vocab_size,
        max_tokens=chunk_tokens,
        max_rows=runner.slots,
    )
    if drafting.decode_and_prefill is None:
        raise ConfigError(f"--draft {name}: the kernels do not compute its attention")
    drafting.warm_up()  # its first step would pass for what a step takes
    return DraftModel(
        drafting,
        slots=drafting.slots,
        max_length=drafting.max_length,
        chunk_tokens=chunk_tokens,
        name=name,
    )


def _head_drafts(
    bundle: Bundle, runner: Runner, options: SessionOptions, config: Config, chunk_tokens: int
) -> HeadDrafts | None:
    """The head that a model's bundle has for drafts, if it has one."""
    size, head = hidden_size(bundle, config), bundle.manifest.draft_head
    if not size or head is None:
        return None
    session = Session(
        bundle.draft_graph, replace(options, kv_cache="auto", adapters=False, gives_hidden=True)
    )
    if not session.is_exact:
        _log.warning(
            "model %s runs without what its bundle has for drafts: the kernels do not compute all "
            "of it",
            bundle.label,
        )
        return None
    drafting = Runner(
        session,
        head.kv.stored_as(session.kv_cache),
        slots=runner.slots,
        max_length=runner.max_length,
        vocab_size=head.vocab_size,
        max_tokens=chunk_tokens,
        max_rows=runner.slots,
        hidden_size=size,
    )
    none, before = np.empty(0, np.int64), np.zeros((1, size), np.float32)
    first = Piece.of(0, np.zeros(1, np.int64), 0)._replace(previous_hidden=before)
    assert drafting.decode_and_prefill is not None, "an exact graph has the shared pass"
    drafting.decode_and_prefill(none, none, none, [first])  # as a draft model's warm-up
    return HeadDrafts(
        drafting,
        runner,
        slots=drafting.slots,
        max_length=drafting.max_length,
        chunk_tokens=chunk_tokens,
        name=bundle.name,
        kind=head.kind,
        token_ids=bundle.draft_tokens(),
    )


def _has_same_tokens(one: Bundle, other: Bundle) -> bool:
    if one.manifest.vocab_size != other.manifest.vocab_size:
        return False
    vocabularies = (
        tokenizers.Tokenizer.from_file(str(each.tokenizer)).get_vocab() for each in (one, other)
    )
    return next(vocabularies) == next(vocabularies)
