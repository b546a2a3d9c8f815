"""Cluster: a gateway, a router and replicas, under the load of conversations."""

import random
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import simpy

from loadtests.simulate.replica import Limits, Replica
from loadtests.simulate.request import Outcome, Request
from loadtests.simulate.router import Router
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Conversation

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster consists of: ``replicas`` with the same limits, behind a router that goes by
    one of `router.POLICIES` and a gateway. ``seed`` draws what the router leaves to chance.
    """

    replicas: int = 1
    limits: Limits = field(default_factory=Limits)
    routing: str = "two-choices"
    gateway_seconds: float = 0.0
    seed: int = 0


class Gateway:
    """A queue before one worker, which takes as many ``seconds`` for each request and its reply."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free_at = 0.0

    def delay(self, now: float) -> float:
        """Takes a request; returns the seconds after which it leaves. Times must not decrease."""
        self._free_at = max(now, self._free_at) + self._seconds
        return self._free_at - now


class Cluster:
    """Runs until every conversation has ended."""

    def __init__(self, shape: Shape, times: StepTimes) -> None:
        self._env = simpy.Environment()
        self._gateway = Gateway(shape.gateway_seconds)
        self._requests: list[Request] = []
        self._replies: dict[Request, simpy.Event] = {}
        self._replicas = [
            Replica(self._env, number, times, shape.limits, self._reply)
            for number in range(shape.replicas)
        ]
        rng = random.Random(shape.seed)
        self._router = Router(shape.routing, rng, self._replicas, shape.limits.slots)

    def run(self, conversations: Iterable[Conversation]) -> tuple[Request, ...]:
        """Holds the conversations, given in the order of their start.

        All requests are returned, each with an outcome, in the order of their arrival.
        """
        self._env.process(self._begin(conversations))
        self._env.run()
        return tuple(self._requests)

    def _begin(self, conversations: Iterable[Conversation]) -> Process:
        for conversation in conversations:
            yield self._env.timeout(conversation.start - self._env.now)
            self._env.process(self._talk(conversation))

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
            self._replicas[self._router.choose(request)].submit(request)
            yield reply
            if request.outcome is not Outcome.ANSWERED:
                break
            num_tokens = request.num_prompt + request.num_generated

    def _reply(self, request: Request) -> None:
        self._replies.pop(request).succeed()
