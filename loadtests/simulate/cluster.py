"""Cluster: a gateway, a router, replicas and an autoscaler, under the load of conversations."""

import heapq
import random
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import simpy

from loadtests.simulate.autoscaler import Autoscaler, Scaling
from loadtests.simulate.replica import Limits, Replica
from loadtests.simulate.request import Outcome, Request
from loadtests.simulate.router import Router
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Conversation

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster consists of.

    Attributes:
        replicas: at the start.
        limits: the settings of each.
        routing: one of `router.POLICIES`.
        spread, load_age: of the `Router`.
        gateway_seconds, gateway_workers: of the `Gateway`.
        scaling: of the autoscaler; None for a fixed number of replicas.
        seed: draws what the router leaves to chance.
    """

    replicas: int = 1
    limits: Limits = field(default_factory=Limits)
    routing: str = "two-choices"
    spread: float = 1.25
    load_age: float = 0.0
    gateway_seconds: float = 0.0
    gateway_workers: int = 1
    scaling: Scaling | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """What happened. Times in seconds since the start.

    Attributes:
        requests: all of them, each with an outcome, in the order of their arrival.
        sizes: how many replicas there were from when on, those that start or drain included.
        gateway_busy: seconds of all the gateway's workers together.
    """

    requests: tuple[Request, ...]
    sizes: tuple[tuple[float, int], ...]
    gateway_busy: float

    def replica_seconds(self, start: float, end: float) -> float:
        """For how long replicas existed between two times, added up."""
        times = [time for time, _ in self.sizes[1:]]
        return sum(
            size * max(min(until, end) - max(since, start), 0.0)
            for (since, size), until in zip(self.sizes, [*times, end], strict=True)
        )


class Gateway:
    """A queue before workers that each handle one request at a time, all in the same time.

    Args:
        seconds: that a request takes, the relaying of its reply included.
        workers: processes or threads that work at the same time.
    """

    def __init__(self, seconds: float, workers: int = 1) -> None:
        self.busy_seconds = 0.0
        """Of all workers together."""
        self._seconds = seconds
        self._free_at = [0.0] * workers  # a heap

    def delay(self, now: float) -> float:
        """Takes a request; returns the seconds after which it leaves. Times must not decrease."""
        if not self._seconds:
            return 0.0
        start = max(now, self._free_at[0])
        heapq.heapreplace(self._free_at, start + self._seconds)
        self.busy_seconds += self._seconds
        return start + self._seconds - now


class Cluster:
    """Runs until every conversation has ended.

    Args:
        shape: what it consists of.
        times: how long the replicas' steps take.
    """

    def __init__(self, shape: Shape, times: StepTimes) -> None:
        self._shape = shape
        self._times = times
        self._env = simpy.Environment()
        self._gateway = Gateway(shape.gateway_seconds, shape.gateway_workers)
        self._router = Router(
            shape.routing,
            random.Random(shape.seed),
            slots=shape.limits.slots,
            spread=shape.spread,
            load_age=shape.load_age,
        )
        self._requests: list[Request] = []
        self._replies: dict[Request, simpy.Event] = {}
        self._ready: list[Replica] = []
        self._numbers = count()
        self._num_starting = 0
        self._sizes: list[tuple[float, int]] = [(0.0, 0)]
        self._num_talking = 0
        self._all_begun = False

    def run(self, conversations: Iterable[Conversation]) -> History:
        """Holds the conversations, given in the order of their start."""
        self._ready = [self._new_replica() for _ in range(self._shape.replicas)]
        self._router.update(self._ready)
        self._resize(self._shape.replicas)
        self._env.process(self._begin(conversations))
        if self._shape.scaling is not None:
            self._env.process(self._scale(self._shape.scaling))
        self._env.run()
        return History(tuple(self._requests), tuple(self._sizes), self._gateway.busy_seconds)

    def _begin(self, conversations: Iterable[Conversation]) -> Process:
        for conversation in conversations:
            yield self._env.timeout(conversation.start - self._env.now)
            self._num_talking += 1
            self._env.process(self._talk(conversation))
        self._all_begun = True

    def _talk(self, conversation: Conversation) -> Process:
        """Sends a turn when the one before it is answered, and gives up after a refusal."""
        num_tokens = conversation.num_instructions
        for turn in conversation.turns:
            yield self._env.timeout(turn.pause)
            request = Request(
                conversation=conversation.number,
                instructions=conversation.instructions,
                num_instructions=conversation.num_instructions,
                num_prompt=num_tokens + turn.num_new,
                num_generated=turn.num_generated,
                arrived=self._env.now,
            )
            self._requests.append(request)
            yield self._env.timeout(self._gateway.delay(self._env.now))
            reply = self._replies[request] = self._env.event()
            self._ready[self._router.choose(request, self._env.now)].submit(request)
            yield reply
            if request.outcome is not Outcome.ANSWERED:
                break
            num_tokens = request.num_prompt + request.num_generated
        self._num_talking -= 1

    def _reply(self, request: Request) -> None:
        self._replies.pop(request).succeed()

    def _new_replica(self) -> Replica:
        number = next(self._numbers)
        return Replica(self._env, number, self._times, self._shape.limits, self._reply)

    def _scale(self, scaling: Scaling) -> Process:
        autoscaler = Autoscaler(scaling)
        waiting, running = self._load()
        while self._num_talking or not self._all_begun:
            yield self._env.timeout(scaling.interval)
            size = len(self._ready) + self._num_starting
            wanted = autoscaler.decide(self._env.now, size, waiting, running)
            waiting, running = self._load()
            for _ in range(wanted - size):
                self._env.process(self._start_replica(scaling.start_delay))
            if wanted < size and len(self._ready) > 1:
                self._env.process(self._stop_replica())

    def _load(self) -> tuple[int, int]:
        """Requests that wait, and that run, in all replicas."""
        waiting = sum(replica.num_waiting for replica in self._ready)
        return waiting, sum(replica.num_open for replica in self._ready) - waiting

    def _start_replica(self, delay: float) -> Process:
        self._num_starting += 1
        self._resize(1)
        yield self._env.timeout(delay)
        self._num_starting -= 1
        self._ready.append(self._new_replica())
        self._router.update(self._ready)

    def _stop_replica(self) -> Process:
        replica = self._ready.pop()
        self._router.update(self._ready)
        yield replica.drain()
        self._resize(-1)

    def _resize(self, change: int) -> None:
        self._sizes.append((self._env.now, self._sizes[-1][1] + change))
