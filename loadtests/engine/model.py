"""Model: a causal bundle, loaded, of which engines are made as the server makes them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtests.engine.recorder import Recorder
from loadtests.errors import LoadTestError
from maskdial.causal.engine import CausalEngine
from maskdial.causal.executor import ModelRunner
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.config import Config
from maskdial.models.bundle import Bundle, KVLayout, load_bundle
from maskdial.models.tokenizer import Tokenizer
from maskdial.runtime.providers.cpu import CpuProvider
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

NUM_STREAMS = 8
"""Slots of every engine that is measured."""

_MIN_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Model:
    """One session for all engines, which never run at the same time.

    ``max_length`` is the context in tokens and ``chunk_tokens`` the prefill chunk, as configured.
    """

    bundle: Bundle
    layout: KVLayout
    tokenizer: Tokenizer
    session: Session
    config: Config
    max_length: int

    @classmethod
    def load(cls, path: Path, config: Config) -> "Model":
        """Reads a bundle and loads its graph.

        Raises:
            LoadTestError: the bundle is not causal, or its context is too short to measure in.
            BundleError: it cannot be read.
        """
        bundle = load_bundle(path.resolve().name, path)
        manifest = bundle.manifest
        if manifest.family != "causal" or manifest.kv is None:
            raise LoadTestError(
                f"{path} holds a {manifest.family} model; this measures causal ones"
            )
        max_length = min(manifest.max_length, config.max_context)
        if max_length < _MIN_CONTEXT:
            raise LoadTestError(
                f"a context of {max_length} tokens is too short; this needs {_MIN_CONTEXT}"
            )
        tokenizer = Tokenizer.from_file(bundle.tokenizer, manifest.special_tokens)
        session = Session(
            bundle.graph, SessionOptions("cpu", config.threads, config.spins(alone=True))
        )
        return cls(bundle, manifest.kv, tokenizer, session, config, max_length)

    @property
    def vocab_size(self) -> int:
        return self.bundle.manifest.vocab_size

    @property
    def chunk_tokens(self) -> int:
        return self.whole_blocks(
            self.config.prefill_chunk_tokens or CpuProvider.prefill_chunk_tokens
        )

    def whole_blocks(self, num_tokens: int) -> int:
        """The next multiple of the attention kernel's block."""
        return -(-num_tokens // self.layout.query_block) * self.layout.query_block

    def runner(self) -> Runner:
        """A runner with a cache of its own."""
        return Runner(
            self.session,
            self.layout,
            slots=NUM_STREAMS,
            max_length=self.max_length,
            vocab_size=self.vocab_size,
        )

    def engine(
        self,
        runner: ModelRunner,
        recorder: Recorder,
        *,
        chunk_tokens: int | None = None,
        block_tokens: int | None = None,
        prefix_cache: bool = False,
        max_drafts: int = 0,
    ) -> CausalEngine:
        """An engine, not started.

        Args:
            runner: no other engine's: an idle engine returns its cache's memory.
            recorder: where it reports.
            chunk_tokens: the prefill chunk; None is the configured one.
            block_tokens: longest prompts to read together; None is the kernel's block. With 1 each
                prompt is read alone, and nothing else changes as long as there is no prefix cache.
            prefix_cache: whether it has one, of the configured size.
            max_drafts: most tokens to guess.
        """
        block = self.layout.query_block
        cache = PrefixCache(
            model=self.bundle.manifest.files[self.bundle.manifest.graph],
            block_tokens=block,
            max_bytes=self.config.prefix_cache_bytes,
        )
        return CausalEngine(
            runner,
            self.tokenizer,
            slots=NUM_STREAMS,
            max_length=self.max_length,
            vocab_size=self.vocab_size,
            prefill_chunk_tokens=chunk_tokens or self.chunk_tokens,
            block_tokens=block_tokens or block,
            max_queue=self.config.max_queue,
            eos_token_ids=frozenset(self.bundle.manifest.special_tokens.eos),
            prefix_cache=cache if prefix_cache else None,
            max_drafts=max_drafts,
            metrics=recorder,
            name=self.bundle.name,
        )

    def random_prompt(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        """Tokens drawn evenly from those that make text."""
        prompt: list[int] = []
        while len(prompt) < num_tokens:
            drawn = rng.integers(0, self.vocab_size, num_tokens - len(prompt)).tolist()
            prompt += [token_id for token_id in drawn if self.tokenizer.is_text(token_id)]
        return prompt

    def encode(self, text: str) -> list[int]:
        """A text's tokens, without special ones."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids
