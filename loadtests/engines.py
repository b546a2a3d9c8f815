"""The engines as the server builds them: the only module that constructs one for a measurement.

When an engine's interface changes, this module follows. Besides it, `loadtests.engine.rig` knows a
causal engine's streams and metrics, and `loadtests.engine.speculation` its model runner.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from loadtests import LoadTestError
from maskdial.bundle.bundle import Bundle, load_bundle
from maskdial.bundle.manifest import KVLayout
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.drafts.model import DraftModel, DraftRunner
from maskdial.causal.drafts.sources import PromptLookup
from maskdial.causal.drafts.speculation import MAX_PASS_DRAFTS, Speculation
from maskdial.causal.engine import CausalEngine
from maskdial.causal.executor import ModelRunner
from maskdial.causal.prefix_cache import PrefixCache, default_bytes
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.sampler import Sampler
from maskdial.causal.sequence import Sequence as Generation
from maskdial.causal.stream import TokenStream
from maskdial.config import Config, load_config
from maskdial.engine.model import max_length as model_length
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.grammar.matcher import GrammarMatcher
from maskdial.kernels.installed import find_kernels
from maskdial.kernels.logits import VocabularyKernels
from maskdial.masked.engine import MaskedEngine
from maskdial.metrics import Metrics, ModelMetrics
from maskdial.registry.loading import load_model
from maskdial.registry.served import ServedModel
from maskdial.runtime.memory import map_large_blocks
from maskdial.runtime.providers.cpu import CpuProvider
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

NUM_STREAMS = 8
"""Slots of every causal engine that is measured."""

_MIN_CONTEXT = 128
_STOP_TIMEOUT = 10.0
EngineT = TypeVar("EngineT", bound=CausalEngine | MaskedEngine)


def load_served(name: str, path: Path, settings: dict[str, Any]) -> ServedModel:
    """Loads a bundle and starts its engine, exactly as the server does.

    ``settings`` are fields of `Config`; ``MASKDIAL_*`` variables set the others.
    """
    map_large_blocks()
    return load_model(name, path, load_config(settings), Metrics())


def _session_options(config: Config, provider: str) -> SessionOptions:
    kernels = find_kernels(config.kernels) if provider == "cpu" else None
    return SessionOptions(provider, config.threads or 0, config.spins(alone=True), kernels=kernels)


@asynccontextmanager
async def started(engine: EngineT) -> AsyncIterator[EngineT]:
    """Runs an engine, warmed up, for the duration of the block."""
    async with AsyncExitStack() as stack:
        engine.start()
        stack.push_async_callback(asyncio.to_thread, engine.stop, _STOP_TIMEOUT)
        await engine.warm_up()
        yield engine


def open_stream(
    engine: CausalEngine,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    grammar: GrammarMatcher | None = None,
    **sampling: Any,
) -> TokenStream:
    """Submits a prompt; its stream goes on for ``num_tokens`` tokens, past any end of text.

    ``sampling`` sets other fields of `SamplingParams`; by default, decoding is greedy.
    """
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **sampling)
    return engine.stream(Generation(prompt, params, grammar=grammar))


@dataclass(frozen=True, slots=True)
class LoadedCausal:
    """A causal bundle and one session for all its engines, of which one runs at a time.

    ``max_length`` is the configured context in tokens.
    """

    bundle: Bundle
    layout: KVLayout
    tokenizer: Tokenizer
    session: Session
    config: Config
    max_length: int

    @classmethod
    def load(cls, path: Path, config: Config) -> "LoadedCausal":
        """Reads a bundle and loads its graph.

        Raises:
            LoadTestError: the bundle is not causal, or its context is too short to measure in.
            BundleError: it cannot be read.
        """
        bundle = load_bundle(path.resolve().name, path)
        manifest = bundle.manifest
        if manifest.family != "causal" or manifest.kv is None:
            raise LoadTestError(f"{path} is a {manifest.family} bundle; this needs a causal one")
        max_length = model_length(manifest, config)
        if max_length < _MIN_CONTEXT:
            raise LoadTestError(
                f"a context of {max_length} tokens is too short; this needs {_MIN_CONTEXT}"
            )
        tokenizer = Tokenizer.from_file(bundle.tokenizer, manifest.special_tokens)
        options = replace(_session_options(config, "cpu"), kv_cache=config.kv_cache_dtype)
        session = Session(bundle.graph, options)
        layout = manifest.kv.stored_as(session.kv_cache)
        return cls(bundle, layout, tokenizer, session, config, max_length)

    @property
    def vocab_size(self) -> int:
        return self.bundle.manifest.vocab_size

    @property
    def prefix_cache_bytes(self) -> int:
        """What a server without much free memory takes, unless it is configured."""
        given = self.config.prefix_cache_bytes
        return default_bytes(0, None) if given is None else given

    @property
    def packs(self) -> bool:
        """Whether prompts of different lengths share a pass without padding, and decode steps with
        them: so with kernels."""
        return self.runner().decode_and_prefill is not None

    @property
    def chunk_tokens(self) -> int:
        """The configured prefill chunk."""
        return self.whole_blocks(
            self.config.prefill_chunk_tokens or CpuProvider.prefill_chunk_tokens
        )

    def whole_blocks(self, num_tokens: int) -> int:
        """Rounds up to a multiple of the attention kernel's block."""
        return -(-num_tokens // self.layout.query_block) * self.layout.query_block

    def runner(self, slots: int = NUM_STREAMS) -> Runner:
        """A runner with a KV cache of its own."""
        return Runner(
            self.session,
            self.layout,
            slots=slots,
            max_length=self.max_length,
            vocab_size=self.vocab_size,
            max_tokens=max(self.max_length, self.chunk_tokens + 1) + MAX_PASS_DRAFTS,
            max_rows=self.max_length + MAX_PASS_DRAFTS,
        )

    def prefill(self, runner: Runner, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Reads a prompt in chunks, frees its KV cache, and returns the logits (vocab_size,)."""
        for start in range(0, len(prompt), self.chunk_tokens):
            chunk = np.array(prompt[start : start + self.chunk_tokens], np.int64)
            logits = runner.prefill(0, chunk, start)
        last: NDArray[np.float32] = np.array(logits)[-1]
        runner.cache.release_pages(0)
        return last

    def engine(
        self,
        runner: ModelRunner,
        metrics: ModelMetrics,
        *,
        chunk_tokens: int | None = None,
        block_tokens: int | None = None,
        prefix_cache: bool = False,
        slots: int = NUM_STREAMS,
        max_drafts: int = 0,
        draft: DraftRunner | None = None,
    ) -> CausalEngine:
        """An engine, not started.

        Args:
            runner: used by no other engine: an idle engine returns its cache's memory.
            metrics: where it reports.
            chunk_tokens: the prefill chunk; None for the configured one.
            block_tokens: longest prompts that are read together; None for the kernel's block. With
                1, each prompt is read alone; without a prefix cache nothing else changes.
            prefix_cache: whether it has one, of the configured size.
            slots: of the runner.
            max_drafts: most draft tokens of a sequence.
            draft: of a draft model, with as many slots.
        """
        block = self.layout.query_block
        cache = PrefixCache(
            model=self.bundle.manifest.files[self.bundle.manifest.graph],
            block_tokens=block,
            max_bytes=self.prefix_cache_bytes,
        )
        eos = frozenset(self.bundle.manifest.special_tokens.eos)
        found = find_kernels(self.config.kernels)
        kernels = None if found is None else VocabularyKernels(found.path, self.vocab_size)
        return CausalEngine(
            runner,
            self.tokenizer,
            slots=slots,
            max_length=self.max_length,
            vocab_size=self.vocab_size,
            prefill_chunk_tokens=chunk_tokens or self.chunk_tokens,
            block_tokens=block_tokens or block,
            max_queue=self.config.max_queue,
            eos_token_ids=eos,
            sampler=Sampler(self.vocab_size, eos, kernels=kernels),
            prefix_cache=cache if prefix_cache else None,
            speculation=self._speculation(runner, max_drafts, metrics, draft, slots),
            metrics=metrics,
            name=self.bundle.name,
        )

    def _speculation(
        self,
        runner: ModelRunner,
        max_drafts: int,
        metrics: ModelMetrics,
        draft: DraftRunner | None,
        slots: int,
    ) -> Speculation | None:
        if not max_drafts:
            return None
        model = None
        if draft is not None:
            model = DraftModel(
                draft,
                slots=slots,
                max_length=self.max_length,
                chunk_tokens=self.chunk_tokens,
                name="draft",
            )
        return Speculation(
            (PromptLookup(),),
            max_drafts=max_drafts,
            max_length=self.max_length,
            together=self.session.is_exact and runner.decode_and_prefill is not None,
            metrics=metrics,
            model=model,
        )

    def grammar_compiler(self) -> GrammarCompiler:
        """A compiler for this vocabulary; close it after use."""
        return GrammarCompiler.of_bundle(self.bundle)

    def random_prompt(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        """Draws token ids uniformly from those that stand for text."""
        prompt: list[int] = []
        while len(prompt) < num_tokens:
            drawn = rng.integers(0, self.vocab_size, num_tokens - len(prompt)).tolist()
            prompt += [token_id for token_id in drawn if self.tokenizer.is_text(token_id)]
        return prompt

    def encode(self, text: str) -> list[int]:
        """A text's token ids, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids
