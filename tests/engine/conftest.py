"""The real engine over real models, driven step by step; no HTTP."""

import asyncio
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from prometheus_client import Counter

from maskdial.bundle.bundle import Bundle, load_bundle
from maskdial.bundle.manifest import CacheChoice
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.drafts.head import HeadDrafts
from maskdial.causal.drafts.model import DraftModel
from maskdial.causal.drafts.sources import Answers, ForcedText, Prediction, PromptLookup, Proposer
from maskdial.causal.drafts.speculation import MAX_PASS_DRAFTS, Speculation
from maskdial.causal.engine import CausalEngine
from maskdial.causal.events import PromptLogprob, TokenEvent
from maskdial.causal.prefix_cache import PrefixCache, snapshot_blocks
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.causal.prefix_disk.tier import DiskTier
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.sampler import Sampler
from maskdial.causal.sequence import Sequence, SharedPrompt
from maskdial.causal.stream import TokenStream
from maskdial.errors import MaskdialError
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.grammar.matcher import Grammar
from maskdial.grammar.source import GrammarKind, GrammarValue
from maskdial.kernels.installed import find_kernels
from maskdial.kernels.logits import VocabularyKernels
from maskdial.metrics import DraftKind, Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime.logits import Logits
from maskdial.runtime.piece import Piece
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from tests.engine_metrics import EngineMetrics, SteadyCosts

BLOCK = 64  # tokens; of the starter model's attention kernel
MAX_LENGTH = 512
NAME = "starter"
PATIENCE = 60  # seconds, after which a test that waits for something has failed


@dataclass(frozen=True)
class Request:
    """What a client asks for; it can be asked for many times."""

    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None
    priority: int = 0
    salt: str = ""
    seed: int | None = None
    borders: tuple[int, ...] = ()

    def sequence(self, shared: SharedPrompt | None = None) -> Sequence:
        return Sequence(
            self.prompt,
            self.params,
            seed=self.seed,
            priority=self.priority,
            cache_salt=self.salt,
            grammar=None if self.grammar is None else self.grammar.matcher(),
            shared_prompt=shared,
            borders=self.borders,
        )


@dataclass(frozen=True)
class Reply:
    """All that a client gets and that must not depend on others: equal only to the last bit."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    reason: str | None = None
    text: str | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    error: str | None = None


class Reader:
    """Reads a stream in a task of its own."""

    def __init__(self, sequence: Sequence, stream: TokenStream) -> None:
        self.sequence = sequence
        self.stream = stream
        self.events: list[TokenEvent] = []
        self.error: MaskdialError | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self.stream:
                self.events.append(event)
        except MaskdialError as error:
            self.error = error

    async def ended(self) -> None:
        """Waits for the end, which is not long in coming."""
        async with asyncio.timeout(PATIENCE):
            await self.task

    async def leave(self) -> None:
        """As a client that goes away."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.stream.aclose()  # a task that had not begun to read closes nothing

    @property
    def reply(self) -> Reply:
        """What came, once the stream has ended."""
        finish = self.events[-1].finish if self.events else None
        assert (finish is None) == (self.error is not None), "it has not ended in just one way"
        return Reply(
            token_ids=tuple(event.token_id for event in self.events),
            logprobs=tuple(event.logprob for event in self.events),
            texts=tuple(event.text for event in self.events),
            top=tuple(event.top for event in self.events),
            reason=None if finish is None else finish.reason,
            text=None if finish is None else finish.generated_text,
            prompt_logprobs=() if finish is None else finish.prompt_logprobs,
            error=None if self.error is None else repr(self.error),
        )


class WatchedRunner(Runner):
    """Counts what the model reads, and holds every pass to the bounds of the context.

    ``furthest`` is how many tokens of one text it was given at most, but for decode passes.

    ``fail_at`` fails the prefill pass of that number, counted from 0.
    """

    def __init__(self, *args: object, max_length: int, **kwargs: object) -> None:
        super().__init__(*args, max_length=max_length, **kwargs)  # type: ignore[arg-type]
        self._max_length = max_length
        self.num_prefills = 0
        self.num_joint_prefills = 0
        self.num_decodes = 0
        self.largest_decode = 0
        self.furthest = 0
        self.fail_at: int | None = None
        self.num_shared = 0

    @property
    def decode_and_prefill(self) -> Callable[..., Logits] | None:
        return None if super().decode_and_prefill is None else self._watch_shared

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> Logits:
        self._check_end(start + len(token_ids))
        self._count_prefill()
        return super().prefill(slot, token_ids, start, num_logits)

    def _watch_shared(
        self,
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        pieces: SequenceOf[Piece],
    ) -> Logits:
        self.num_shared += 1
        self.num_decodes += 1
        self.largest_decode = max(self.largest_decode, len(token_ids))
        read = [each for each in pieces if not _has_drafts(each)]
        if len(read) > 1:
            self.num_joint_prefills += 1
        for piece in pieces:
            self._check_end(piece.start + len(piece.token_ids))
        for _ in read:
            self._count_prefill()
        return self._decode_and_prefill(token_ids, lengths, rows, pieces)

    def _check_end(self, end: int) -> None:
        self.furthest = max(self.furthest, end)
        assert self.furthest <= self._max_length

    def _count_prefill(self) -> None:
        self.num_prefills += 1
        if self.fail_at == self.num_prefills - 1:
            raise RuntimeError("the pass was made to fail")

    def prefill_together(self, slot: int, prompts: SequenceOf[NDArray[np.int64]]) -> Logits:
        self.num_joint_prefills += 1
        return super().prefill_together(slot, prompts)

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Logits:
        assert lengths.max() < self._max_length
        self.num_decodes += 1
        self.largest_decode = max(self.largest_decode, len(token_ids))
        return super().decode(token_ids, lengths, rows)


def _has_drafts(piece: Piece) -> bool:
    """Whether a piece of a text is its newest token and draft tokens, and not one of a prompt."""
    return piece.start > 0 and len(piece.rows) == len(piece.token_ids) > 1


class ListedCounter(Counter):
    """Keeps what was added to it, one by one."""

    def __init__(self) -> None:
        super().__init__("listed", "Listed", registry=None)
        self.amounts: list[int] = []

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        self.amounts.append(int(amount))


class Tally(EngineMetrics):
    """The numbers that the tests look at."""

    def __init__(self) -> None:
        metrics = Metrics()
        super().__init__(metrics, NAME)
        self._drafts, self._accepted = ListedCounter(), ListedCounter()
        kinds = get_args(DraftKind)
        self.metrics = replace(
            metrics.declare(NAME),
            draft_tokens=dict.fromkeys(kinds, self._drafts),
            accepted_draft_tokens=dict.fromkeys(kinds, self._accepted),
        )

    @property
    def num_open(self) -> int:
        """Sequences that wait or run."""
        return self.num_waiting + self.num_running

    @property
    def num_read(self) -> int:
        return self.value("prompt_tokens_total")

    @property
    def num_generated(self) -> int:
        return self.value("generation_tokens_total")

    @property
    def num_queried(self) -> int:
        return self.value("prefix_cache_queries_total")

    @property
    def num_hit(self) -> int:
        return self.value("prefix_cache_hits_total")

    @property
    def num_from_disk(self) -> int:
        return self.value("prefix_cache_disk_hits_total")

    @property
    def kv_bytes(self) -> int:
        return self.value("kv_cache_bytes")

    @property
    def drafts(self) -> list[tuple[int, int]]:
        """Of each pass that verified draft tokens: how many, and how many were accepted."""
        return list(zip(self._drafts.amounts, self._accepted.amounts, strict=True))


class Bench:
    """An engine without its thread: tests run it step by step, in their event loop."""

    def __init__(
        self,
        engine: CausalEngine,
        runner: WatchedRunner,
        tally: Tally,
        model: DraftModel | None = None,
    ) -> None:
        self.engine = engine
        self.runner = runner
        self.tally = tally
        self.model = model

    def submit(
        self, request: Request, shared: SharedPrompt | None = None, timeout: float | None = None
    ) -> Reader:
        sequence = request.sequence(shared)
        return Reader(sequence, self.engine.stream(sequence, timeout))

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()
            await asyncio.sleep(0)  # the loop delivers what was published,
            await asyncio.sleep(0)  # and the readers take it

    async def run_dry(self) -> None:
        while self.tally.num_open:
            await self.step()
        await self.step()

    def run_alone(self, requests: SequenceOf[Request]) -> list[Reply]:
        """The replies to requests that find the engine idle."""

        async def main() -> list[Reply]:
            replies = []
            for request in requests:
                reader = self.submit(request)
                await self.run_dry()
                replies.append(reader.reply)
            return replies

        return asyncio.run(main())

    def run_together(self, requests: SequenceOf[Request]) -> list[Reply]:
        """The replies to requests that all arrive at once."""

        async def main() -> list[Reply]:
            readers = [self.submit(request) for request in requests]
            await self.run_dry()
            return [reader.reply for reader in readers]

        return asyncio.run(main())


class WatchedDrafts(HeadDrafts):
    """Keeps what was drafted after which text."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.drafted: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def propose(
        self, sequences: SequenceOf[Sequence], sizes: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        proposed = super().propose(sequences, sizes)
        texts = [tuple(each.token_ids.tolist()) for each in sequences]
        self.drafted += [pair for pair in zip(texts, proposed, strict=True) if pair[1]]
        return proposed


class LoadedModel:
    """A causal model, loaded once."""

    def __init__(self, bundle: Bundle, kv_cache: CacheChoice = "auto") -> None:
        self.bundle = bundle
        self.manifest = self.bundle.manifest
        self.tokenizer = Tokenizer.from_file(self.bundle.tokenizer, self.manifest.special_tokens)
        # As the server does: where the kernels are built, these tests hold for them.
        self.kernels = find_kernels("auto")
        head = self.manifest.draft_head
        self.options = SessionOptions(
            "cpu", 1, False, kernels=self.kernels, kv_cache=kv_cache, gives_hidden=head is not None
        )
        self.session = Session(self.bundle.graph, self.options)
        self.hidden_size = head.hidden_size if head is not None and self.session.is_exact else 0
        assert self.manifest.kv is not None
        self.layout = self.manifest.kv.stored_as(self.session.kv_cache)
        self.compiler = GrammarCompiler(
            self.bundle.tokenizer.read_text(encoding="utf-8"),
            vocab_size=self.manifest.vocab_size,
            eos_token_ids=self.manifest.special_tokens.eos,
        )

    def bench(
        self,
        *,
        slots: int = 8,
        chunk: int = 4 * BLOCK,
        cache_blocks: float = 0,
        max_drafts: int = 0,
        together: bool = True,
        answers: Answers | None = None,
        model: DraftModel | None = None,
        head_slots: int = 0,
        proposers: SequenceOf[Proposer] = (ForcedText(), Prediction(), PromptLookup()),
        max_length: int = MAX_LENGTH,
        eos_token_ids: SequenceOf[int] | None = None,
        disk: DiskStore | None = None,
    ) -> Bench:
        """A fresh engine; with ``head_slots``, it drafts by the head of its bundle.

        ``disk`` needs ``cache_blocks``.
        """
        layout = self.layout
        vocab_size = self.manifest.vocab_size
        runner = WatchedRunner(
            self.session,
            layout,
            slots=slots,
            max_length=max_length,
            vocab_size=vocab_size,
            max_tokens=max_length + MAX_PASS_DRAFTS,
            max_rows=max_length + MAX_PASS_DRAFTS,
            hidden_size=self.hidden_size,
        )
        if head_slots:
            model = self.head_drafts(runner, head_slots)
        block_bytes = layout.query_block * layout.bytes_per_token + layout.state_bytes
        cache_bytes = int(cache_blocks * block_bytes)
        tally = Tally()
        if eos_token_ids is None:
            eos_token_ids = self.manifest.special_tokens.eos
        fast = None if self.kernels is None else VocabularyKernels(self.kernels.path, vocab_size)
        prefix_cache = prefix_disk = None
        if cache_bytes:
            prefix_cache = PrefixCache(
                model=str((NAME, self.bundle.path, self.session.kv_cache)),
                block_tokens=layout.query_block,
                max_bytes=cache_bytes,
                snapshot_blocks=snapshot_blocks(
                    layout.state_bytes,
                    layout.query_block * layout.bytes_per_token,
                    layout.query_block,
                ),
            )
        if prefix_cache is not None and disk is not None:
            prefix_disk = DiskTier(
                disk,
                prefix_cache,
                model=NAME,
                dtype=layout.element,
                block_shape=(layout.query_block, layout.elements_per_token),
                num_states=layout.state_bytes // 4,
            )
        engine = CausalEngine(
            runner,
            self.tokenizer,
            slots=slots,
            max_length=max_length,
            vocab_size=vocab_size,
            prefill_chunk_tokens=chunk,
            block_tokens=layout.query_block,
            max_queue=1000,
            eos_token_ids=eos_token_ids,
            sampler=Sampler(vocab_size, frozenset(eos_token_ids), kernels=fast),
            prefix_cache=prefix_cache,
            prefix_disk=prefix_disk,
            speculation=Speculation(
                proposers,
                max_drafts=max_drafts,
                max_length=max_length,
                together=together and self.session.is_exact,
                metrics=tally.metrics,
                answers=answers,
                model=model,
                costs=SteadyCosts(),
            )
            if max_drafts
            else None,
            metrics=tally.metrics,
            name=NAME,
        )
        return Bench(engine, runner, tally, model)

    def draft_model(self, slots: int = 8, *, fail_at: int | None = None) -> DraftModel:
        """This model as a draft model."""
        runner = WatchedRunner(
            self.session,
            self.layout,
            slots=slots,
            max_length=MAX_LENGTH,
            vocab_size=self.manifest.vocab_size,
        )
        runner.fail_at = fail_at
        return DraftModel(runner, slots=slots, max_length=MAX_LENGTH, chunk_tokens=40, name=NAME)

    def head_runner(self, slots: int) -> Runner:
        """The head that drafts by hidden states."""
        head = self.manifest.draft_head
        assert head is not None
        session = Session(self.bundle.draft_graph, self.options)
        return Runner(
            session,
            head.kv.stored_as(session.kv_cache),
            slots=slots,
            max_length=MAX_LENGTH,
            vocab_size=head.vocab_size,
            hidden_size=self.hidden_size,
        )

    def head_drafts(self, main: Runner, slots: int) -> "WatchedDrafts":
        assert self.manifest.draft_head is not None
        return WatchedDrafts(
            self.head_runner(slots),
            main,
            slots=slots,
            max_length=MAX_LENGTH,
            chunk_tokens=40,
            name=NAME,
            kind=self.manifest.draft_head.kind,
            token_ids=self.bundle.draft_tokens(),
        )

    def request(
        self, prompt: str | SequenceOf[int], *, seed: int | None = None, **params: object
    ) -> Request:
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt).ids
        given = SamplingParams(**params)  # type: ignore[arg-type]
        return Request(tuple(prompt), given, seed=seed)

    def random_prompt(self, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, self.manifest.vocab_size) for _ in range(num_tokens))

    def grammar(self, kind: GrammarKind, value: GrammarValue) -> Grammar:
        return self.compiler.submit(kind, value).result()


@pytest.fixture(scope="session")
def starter() -> LoadedModel:
    """The int8 model that ships, under the causal mask."""
    loaded = LoadedModel(load_bundle("starter", STARTER_FOLDER / "hybrid"))
    assert loaded.manifest.kv is not None
    assert loaded.manifest.kv.query_block == BLOCK
    return loaded


@pytest.fixture(scope="session")
def circling_model(circling: Path) -> LoadedModel:
    """A small int8 model with a layer for multi-token prediction."""
    return LoadedModel(load_bundle("circling", circling / "bundle"))


@pytest.fixture(scope="session")
def circling_experts_model(circling_experts: Path) -> LoadedModel:
    """Such a model with mixtures of experts."""
    return LoadedModel(load_bundle("circling", circling_experts / "bundle"))


@pytest.fixture(scope="session")
def circling_eagle_model(circling_eagle: Path) -> LoadedModel:
    """A small int8 model with an EAGLE-3 head."""
    return LoadedModel(load_bundle("circling", circling_eagle / "bundle"))


@pytest.fixture(scope="session")
def tiny(
    torch: ModuleType,
    byte_tokenizer: Callable[..., tokenizers.Tokenizer],
    tmp_path_factory: pytest.TempPathFactory,
) -> LoadedModel:
    """A small int8 model of random weights but for its head, which goes in a circle of letters."""
    import transformers

    from maskdial_export.export import export
    from maskdial_export.quantize.gate import Gate

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
        initializer_range=0.15,
    )
    model = transformers.LlamaForCausalLM(config)
    circle = [tokenizer.token_to_id(letter) for letter in "abcdefg"]
    with torch.no_grad():
        table = model.model.embed_tokens.weight.normal_()
        head = torch.zeros_like(table)
        head[circle] = 0.3 * table[circle[-1:] + circle[:-1]]  # each is like the one before it
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    export(str(folder), folder / "bundle", precision="int8", gate=Gate(max_loss=math.inf))
    return LoadedModel(load_bundle("tiny", folder / "bundle"))
