"""The engine on its own thread under 64 clients that come, wait, read and leave as they like.

TESTS_SOAK_SECONDS says for how long; 60 shows more than the suite has time for.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from maskdial.causal.events import TokenEvent
from maskdial.causal.model import CausalModel
from maskdial.causal.sequence import SharedPrompt
from maskdial.config import Config
from maskdial.errors import DeadlineError, OverloadedError
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.loading import load_model
from tests.held import held

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("TESTS_SOAK_SECONDS", "6"))
NUM_CLIENTS = 64
LENGTHS = (1, 6, 50)
SLOTS = 8
MAX_QUEUE = 30


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def model(metrics: Metrics) -> Iterator[CausalModel]:
    config = Config(
        slots=SLOTS, max_queue=MAX_QUEUE, prefill_chunk_tokens=64, prefix_cache_bytes=12_000_000
    )
    served = load_model("starter", STARTER_FOLDER / "hybrid", config, metrics)
    assert isinstance(served, CausalModel)
    yield served
    served.engine.stop(grace=0)
    served.grammars.close()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"maskdial_{name}", {"model": "starter", **labels})
    assert found is not None
    return found


class Clients:
    """Clients of one engine, and how their requests ended.

    Their plans: to stay until the end, to give the engine little time, to leave after some tokens,
    or to hang up at any time.
    """

    def __init__(self, model: CausalModel, requests: list[Any], wanted: list[Any]) -> None:
        self.engine = model.engine
        self.requests = requests
        self.wanted = wanted
        self.outcomes: Counter[str] = Counter()
        self.num_sent = 0
        self.num_tokens = 0

    async def come_and_go(self, rng: random.Random, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(rng.expovariate(8))
            number = rng.randrange(len(self.requests))
            shared = SharedPrompt() if rng.random() < 0.2 else None
            copies = [self.send(rng, number, shared) for _ in range(1 if shared is None else 3)]
            await asyncio.gather(*copies)

    async def send(
        self,
        rng: random.Random,
        number: int,
        shared: SharedPrompt | None = None,
        plan: str | None = None,
    ) -> None:
        self.num_sent += 1
        plan = plan or rng.choices(("stay", "hurry", "leave", "hang up"), (6, 2, 2, 2))[0]
        sequence = self.requests[number].sequence(shared)
        sequence.priority = rng.randint(0, 3)
        timeout = rng.expovariate(10) if plan == "hurry" else None
        try:
            stream = self.engine.stream(sequence, timeout)
        except OverloadedError:
            self.outcomes["refused"] += 1
            return
        most = rng.randint(0, 8) if plan == "leave" else None
        reading = asyncio.create_task(self.read(stream, number, most))
        if plan == "hang up":
            await asyncio.wait([reading], timeout=rng.expovariate(10))
            reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            outcome = await reading
            if outcome != "left":
                self.outcomes[outcome] += 1
                assert sequence.cancelled == (outcome == "late")
                return
        await stream.aclose()  # a task that was cancelled before it began closed nothing
        self.outcomes["left" if sequence.cancelled else "left after the end"] += 1

    async def read(self, stream: Any, number: int, most: int | None) -> str:
        """Reads to the end, or ``most`` tokens; whatever comes is what comes to one alone."""
        wanted = self.wanted[number]
        events: list[TokenEvent] = []
        async with stream:
            try:
                while most is None or len(events) < most:
                    event = await anext(stream)
                    index = len(events)
                    assert event.token_id == wanted.token_ids[index]
                    assert event.logprob == wanted.logprobs[index]
                    assert event.text == wanted.texts[index]
                    events.append(event)
                    self.num_tokens += 1
                    if event.finish is not None:
                        break
                else:
                    return "left"
            except DeadlineError:
                return "late"
            finish = events[-1].finish
            assert finish is not None
            assert (finish.generated_text, finish.reason) == (wanted.text, wanted.reason)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        return "finished"


def test_64_clients(starter: Any, model: CausalModel, metrics: Metrics) -> None:
    rng = random.Random(13)
    requests = [
        starter.request(
            starter.random_prompt(rng, rng.choice((1, 2, 20, 100, rng.randint(2, 300)))),
            max_new_tokens=length,
        )
        for _ in range(10)
        for length in LENGTHS
    ]
    wanted = starter.bench().run_alone(requests)
    clients = Clients(model, requests, wanted)

    async def main() -> None:
        await model.engine.warm_up()
        async with asyncio.TaskGroup() as group:
            with held(model.engine) as go_on:
                waiting = [
                    group.create_task(clients.send(rng, number % len(requests), plan=plan))
                    for plan, count in (("hurry", 5), ("hang up", 5), ("stay", MAX_QUEUE - 9))
                    for number in range(count)
                ]
                # However fast the engine is, some are late, some leave, and the last is refused.
                await asyncio.wait([*waiting[:10], waiting[-1]])
                assert clients.outcomes == {"late": 5, "left": 5, "refused": 1}
                go_on()
        until = time.monotonic() + SECONDS
        seeds = [random.Random(seed) for seed in range(NUM_CLIENTS)]
        async with asyncio.TaskGroup() as group:
            for client in seeds:
                group.create_task(clients.come_and_go(client, until))
        # Two more, so that the engine has made a plan after the last one left, and has found one's
        # prompt in the cache.
        longest = max(range(len(requests)), key=lambda number: len(requests[number].prompt))
        for _ in range(2):
            await clients.send(rng, longest, plan="stay")

    asyncio.run(main())
    outcomes = clients.outcomes
    print(dict(outcomes), clients.num_tokens, "tokens")
    assert outcomes.total() == clients.num_sent
    assert outcomes["finished"] >= MAX_QUEUE - 10
    assert model.engine.ready
    assert value(metrics, "kv_cache_bytes") == value(metrics, "kv_cache_usage_ratio") == 0
    assert value(metrics, "queue_size") == value(metrics, "requests_running") == 0
    assert value(metrics, "cancelled_total", reason="timeout") == outcomes["late"]
    assert value(metrics, "cancelled_total", reason="disconnect") == outcomes["left"]
    assert value(metrics, "cancelled_total", reason="shutdown") == 0
    assert value(metrics, "generation_tokens_total") >= clients.num_tokens
    assert value(metrics, "prefix_cache_hits_total") > 0
