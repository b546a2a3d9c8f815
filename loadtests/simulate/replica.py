"""Replica: one simulated server with one causal model, step by step."""

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from loadtests.simulate.prefix_cache import PrefixCache
from loadtests.simulate.request import Outcome, Request
from loadtests.simulate.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings of a server: ``--slots``, ``--max-queue``, ``--prefill-chunk-tokens``.

    ``prefix_cache_tokens`` is what ``--prefix-cache-bytes`` amounts to for the model.
    """

    slots: int = 8
    max_queue: int = 1024
    chunk_tokens: int = 256
    prefix_cache_tokens: int = 0


class Replica:
    """Runs requests as the server's scheduler does: a step decodes a token of every running text,
    and reads one chunk of a prompt, or several short prompts together.

    Steps in which nothing else can happen are one event: those until the first text ends, or until
    a request arrives for which there is a slot.

    ``num_open`` requests wait or run; ``on_end`` is called with each that is answered or refused.
    """

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        times: StepTimes,
        limits: Limits,
        on_end: Callable[[Request], None],
    ) -> None:
        self.number = number
        self.num_open = 0
        self._env = env
        self._times = times
        self._limits = limits
        self._on_end = on_end
        self._cache = PrefixCache(times.block_tokens, limits.prefix_cache_tokens)
        self._waiting: deque[Request] = deque()
        self._slots: list[Request | None] = [None] * limits.slots
        self._prefilling: list[Request] = []
        self._num_read = 0  # tokens in the cache of the first of them
        self._decoding: list[tuple[int, int, Request]] = []  # a heap by the step that ends them
        self._num_steps = 0
        self._num_started = 0
        self._context = 0  # tokens in the cache of all that decode
        self._interruptible = False
        self._process = env.process(self._run())

    def submit(self, request: Request) -> None:
        """Queues a request, or refuses it: as the server, also if slots are free."""
        self.num_open += 1
        if len(self._waiting) >= self._limits.max_queue:
            self.num_open -= 1
            request.end(Outcome.REFUSED, self._env.now)
            self._on_end(request)
        else:
            self._waiting.append(request)
        self._interrupt()

    def _interrupt(self) -> None:
        if self._interruptible:
            self._interruptible = False
            self._process.interrupt()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._admit()
            if self._prefilling:
                yield from self._step()
            elif self._decoding:
                yield from self._decode()
            else:
                yield from self._wait(self._env.event())

    def _wait(self, event: simpy.Event) -> Generator[simpy.Event, Any, bool]:
        """Waits for an event; returns whether something came between."""
        self._interruptible = True
        try:
            yield event
        except simpy.Interrupt:
            return True
        self._interruptible = False
        return False

    def _admit(self) -> None:
        """Starts what the scheduler would start: one prompt, or short ones that go together."""
        while self._waiting and None in self._slots:
            request, slot = self._waiting[0], self._slots.index(None)
            num_cached = self._cache.match(request)
            if self._prefilling and (num_cached or not self._joins(request, slot)):
                break
            self._waiting.popleft()
            request.num_cached = num_cached
            if not self._prefilling:
                self._num_read = num_cached
            self._prefilling.append(request)
            self._slots[slot] = request
        self._fill_holes()

    def _joins(self, request: Request, slot: int) -> bool:
        together = [*self._prefilling, request]
        padded = len(together) * max(each.num_prompt for each in together)
        return (
            self._num_read == 0
            and slot == self._slots.index(self._prefilling[-1]) + 1
            and padded <= self._limits.chunk_tokens
            and all(2 <= each.num_prompt <= self._times.block_tokens for each in together)
        )

    def _fill_holes(self) -> None:
        """Moves the texts that decode to the lowest slots; their order decides which text
        joins.
        """
        while None in self._slots:
            hole = self._slots.index(None)
            last = next(
                (
                    slot
                    for slot in range(len(self._slots) - 1, hole, -1)
                    if self._slots[slot] is not None and self._slots[slot] not in self._prefilling
                ),
                None,
            )
            if last is None:
                return
            self._slots[hole], self._slots[last] = self._slots[last], None

    def _step(self) -> Generator[simpy.Event, Any, None]:
        """A step that reads a chunk, or short prompts, and decodes the rows that there are."""
        chunk = self._limits.chunk_tokens
        num_left = max(each.num_prompt for each in self._prefilling) - self._num_read
        # As in the scheduler: no last chunk of one token.
        num_tokens = num_left if num_left <= chunk + 1 else chunk
        is_last = num_tokens == num_left
        num_to_read = num_tokens
        if len(self._prefilling) > 1:
            num_to_read = self._times.read_tokens([each.num_prompt for each in self._prefilling])
        rows = len(self._decoding)
        seconds = self._times.mixed_seconds(rows, self._context, num_to_read, self._num_read)
        yield self._env.timeout(seconds)
        self._advance(1)
        self._num_read += num_tokens
        if is_last:
            for request in self._prefilling:
                self._start(request)
            self._prefilling.clear()

    def _start(self, request: Request) -> None:
        """The prompt has been read, and with it the first token is there."""
        request.first_token = self._env.now
        self._cache.put(request)
        if request.num_generated == 1:
            self._end(request)
            return
        self._num_started += 1  # makes heap entries that end together comparable
        last_step = self._num_steps + request.num_generated - 1
        heapq.heappush(self._decoding, (last_step, self._num_started, request))
        self._context += request.num_prompt

    def _decode(self) -> Generator[simpy.Event, Any, None]:
        """Steps that decode only, as many as nothing can come between."""
        rows, context, start = len(self._decoding), self._context, self._env.now
        num_steps = self._decoding[0][0] - self._num_steps
        done = self._env.timeout(self._times.decode_seconds(rows, context, num_steps))
        if rows == self._limits.slots:
            yield done  # a new request would have to wait for it
        elif (yield from self._wait(done)):
            # It joins after the step that is under way.
            elapsed = self._env.now - start
            num_steps = min(num_steps, self._times.decode_steps(rows, context, elapsed))
            end = start + self._times.decode_seconds(rows, context, num_steps)
            yield self._env.timeout(max(end - self._env.now, 0.0))
        self._advance(num_steps)

    def _advance(self, num_steps: int) -> None:
        """Notes that all rows have so many tokens more, none beyond its last."""
        self._num_steps += num_steps
        self._context += num_steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            _, _, request = heapq.heappop(self._decoding)
            self._context -= request.num_prompt + request.num_generated - 1
            self._end(request)

    def _end(self, request: Request) -> None:
        self.num_open -= 1
        self._slots[self._slots.index(request)] = None
        request.end(Outcome.ANSWERED, self._env.now)
        self._on_end(request)
