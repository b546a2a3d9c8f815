"""A causal model whose every token depends on all that is in its cache, and an engine over it."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from maskdial.causal.drafts.sources import ForcedText, Prediction, PromptLookup
from maskdial.causal.drafts.speculation import Speculation
from maskdial.causal.engine import CausalEngine
from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.prefix_disk.tier import DiskTier
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence as Generated
from maskdial.causal.stream import TokenStream
from maskdial.metrics import Metrics
from maskdial.runtime.piece import Piece
from tests.engine_metrics import EngineMetrics, SteadyCosts

VOCAB = 64
EOS = 63  # the scripted model never says it unless told to
MAX_LENGTH = 200
BLOCK = 4
NAME = "fake"


def next_token(context: Iterable[int]) -> int:
    """The scripted model's answer to a context: any change in it changes the answer."""
    state = 7
    for token in context:
        state = (state * 31 + int(token) + 1) % 1_000_003
    return state % (VOCAB - 1)


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


class FakeCache:
    """Token ids in the place of keys and values."""

    bytes_per_token = 10
    state_bytes = 0

    def __init__(self, slots: int) -> None:
        self.tokens = np.zeros((slots, MAX_LENGTH), np.int64)
        self.released: list[int] = []
        self.was_released = threading.Event()

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self.tokens[target, :num_tokens] = self.tokens[source, :num_tokens]

    def copy_tokens(self, source: int, target: int, start: int, num_tokens: int) -> None:
        end = start + num_tokens
        self.tokens[target, start:end] = self.tokens[source, start:end]

    def read(self, slot: int, start: int, num_tokens: int) -> NDArray[np.generic]:
        return self.tokens[slot, start : start + num_tokens].copy()

    def write(self, slot: int, start: int, block: NDArray[np.generic]) -> None:
        self.tokens[slot, start : start + len(block)] = block

    def read_states(self, slot: int) -> NDArray[np.float32]:
        raise NotImplementedError(slot)

    def write_states(self, slot: int, snapshot: NDArray[np.float32]) -> None:
        raise NotImplementedError(slot)

    def forget(self, slot: int, num_tokens: int) -> None:
        pass

    def release_pages(self, slot: int) -> None:
        self.tokens[slot] = 0
        self.released.append(slot)
        self.was_released.set()


class FakeRunner:
    """Keeps token ids where a model keeps keys, and counts its passes.

    ``on_pass`` is called before each one, with its kind, and may raise or block. As with a real
    runner, the logits are views of two buffers, one of the decode steps and one of other passes,
    and the next pass of the kind writes over them.
    """

    def __init__(
        self,
        slots: int,
        *,
        eos_after: int | None = None,
        nan_after: int | None = None,
        shares_passes: bool = False,
    ) -> None:
        self.cache = FakeCache(slots)
        self.adapters: NDArray[np.int64] | None = None
        self.eos_after = eos_after
        self.nan_after = nan_after
        self.passes: list[str] = []
        self.num_read = 0
        self.period = 0  # with one, the model soon repeats itself
        self.on_pass: Callable[[str], None] = lambda kind: None
        self.decode_and_prefill = self._decode_and_prefill if shares_passes else None
        self._decode_logits = np.empty((slots, VOCAB), np.float32)
        self._prefill_logits = np.empty((slots * MAX_LENGTH, VOCAB), np.float32)

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> NDArray[np.float32]:
        self._begin("prefill")
        end = start + len(token_ids)
        self.num_read += len(token_ids)
        self.cache.tokens[slot, start:end] = token_ids
        rows = [self._logits(slot, end - i) for i in reversed(range(num_logits))]
        return _written(self._prefill_logits, rows)

    def prefill_together(
        self, slot: int, prompts: Sequence[NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        self._begin("prefill together")
        for row, prompt in enumerate(prompts):
            self.cache.tokens[slot + row, : len(prompt)] = prompt
        rows = [self._logits(slot + row, len(p)) for row, p in enumerate(prompts)]
        return _written(self._prefill_logits, rows)

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        self._begin("decode")
        self.cache.tokens[np.arange(len(token_ids)), lengths] = token_ids
        logits = [self._logits(row, lengths[row] + 1) for row in rows]
        return _written(self._decode_logits, logits)

    def _decode_and_prefill(
        self,
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        pieces: Sequence[Piece],
    ) -> NDArray[np.float32]:
        self._begin("shared")
        logits = []
        for row in rows:
            self.cache.tokens[row, lengths[row]] = token_ids[row]
            logits.append(self._logits(row, lengths[row] + 1))
        for piece in pieces:
            size = len(piece.token_ids)
            self.num_read += size
            self.cache.tokens[piece.slot, piece.start : piece.start + size] = piece.token_ids
            logits += [self._logits(piece.slot, piece.start + row + 1) for row in piece.rows]
        return _written(self._prefill_logits, logits)

    def warm_up(self) -> None:
        self.prefill(0, np.zeros(1, np.int64), 0)
        self.decode(*np.array([[0], [1], [0]], np.int64))

    def _begin(self, kind: str) -> None:
        self.passes.append(kind)
        self.on_pass(kind)

    def _logits(self, slot: int, length: int) -> NDArray[np.float32]:
        logits = np.zeros(VOCAB, np.float32)
        if length == self.nan_after:
            logits[3] = np.nan
        context = self.cache.tokens[slot, :length]
        if self.period:
            context = context[-1:] % self.period
        logits[EOS if self.eos_after == length else next_token(context)] = 5
        return logits


def _written(
    buffer: NDArray[np.float32], rows: Sequence[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """A pass's rows in a buffer, in which nothing is left of earlier passes."""
    buffer.fill(np.nan)
    buffer[: len(rows)] = rows
    return buffer[: len(rows)]


class SourceCache(FakeCache):
    """Token ids of source texts as well."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.sources: list[tuple[int, ...]] = [()] * slots

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        super().copy(source, target, num_tokens)
        self.sources[target] = self.sources[source]


class SourceRunner(FakeRunner):
    """An encoder-decoder model: what it says also depends on its source text, and is less sure."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.cache: SourceCache = SourceCache(slots)

    def encode(self, slots: Sequence[int], sources: Sequence[NDArray[np.int64]]) -> None:
        self._begin(f"encode {len(sources)}")
        for slot, source in zip(slots, sources, strict=True):
            self.cache.sources[slot] = tuple(source.tolist())

    def _logits(self, slot: int, length: int) -> NDArray[np.float32]:
        context = (*self.cache.sources[slot], *self.cache.tokens[slot, :length].tolist())
        logits = np.random.default_rng(context).standard_normal(VOCAB).astype(np.float32)
        logits[EOS] -= 100
        return logits


class Gate:
    """Lets the engine's thread into a pass only when it is told to."""

    def __init__(self, runner: FakeRunner) -> None:
        self.reached = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self.error: BaseException | None = None
        runner.on_pass = self._wait

    def _wait(self, kind: str) -> None:
        self.reached.release()
        self.open.acquire()
        if self.error is not None:
            raise self.error


class LetterDetokenizer:
    """Token n is one letter, and special tokens are silent."""

    special_ids = frozenset({EOS})

    def decoder(self, prompt_ids: Sequence[int]) -> "LetterDetokenizer":
        return self

    def push(self, token_id: int) -> str:
        return "" if token_id in self.special_ids else letters([token_id])

    def flush(self) -> str:
        return ""


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + token) for token in token_ids)


def make_sequence(
    prompt: Sequence[int], max_new_tokens: int = 5, *, seed: int | None = None, **params: Any
) -> Generated:
    return Generated(prompt, SamplingParams(max_new_tokens=max_new_tokens, **params), seed=seed)


class Reader:
    """Reads a stream in a task of its own."""

    def __init__(self, stream: TokenStream) -> None:
        self.events: list[TokenEvent] = []
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: TokenStream) -> None:
        async for event in stream:
            self.events.append(event)

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for event in self.events]

    @property
    def finish(self) -> Finish:
        finish = self.events[-1].finish
        assert finish is not None
        return finish


class Bench(EngineMetrics):
    """An engine over the scripted model. Without its thread, tests count steps, not seconds."""

    def __init__(
        self,
        runner: FakeRunner,
        *,
        overlaps: bool,
        max_queue: int = 100,
        chunk: int = 8,
        prefix_cache: PrefixCache | None = None,
        prefix_disk: DiskTier | None = None,
        max_drafts: int = 0,
        detokenizer: LetterDetokenizer | None = None,
        encoder: SourceRunner | None = None,
        generation_tokens: Counter | None = None,
        reported: Metrics | None = None,
    ) -> None:
        self.runner = runner
        reported = reported or Metrics()
        super().__init__(reported, NAME)
        metrics = reported.declare(NAME)
        if generation_tokens is not None:
            metrics = replace(metrics, generation_tokens=generation_tokens)
        self.engine = CausalEngine(
            runner,
            detokenizer or LetterDetokenizer(),
            slots=len(runner.cache.tokens),
            max_length=MAX_LENGTH,
            vocab_size=VOCAB,
            prefill_chunk_tokens=chunk,
            block_tokens=BLOCK,
            max_queue=max_queue,
            eos_token_ids=[EOS],
            prefix_cache=prefix_cache,
            prefix_disk=prefix_disk,
            speculation=Speculation(
                (ForcedText(), Prediction(), PromptLookup()),
                max_drafts=max_drafts,
                max_length=MAX_LENGTH,
                together=runner.decode_and_prefill is not None,
                metrics=metrics,
                costs=SteadyCosts(),
            )
            if max_drafts
            else None,
            overlaps=overlaps,
            metrics=metrics,
            name=NAME,
            encoder=encoder,
        )

    def read(self, sequence: Generated, timeout: float | None = None) -> Reader:
        return Reader(self.engine.stream(sequence, timeout))

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()
            await settle()

    async def run_dry(self) -> None:
        while self.num_running or self.num_waiting:
            await self.step()
        await settle()


async def settle() -> None:
    """Lets the event loop deliver what was published."""
    for _ in range(3):
        await asyncio.sleep(0)
