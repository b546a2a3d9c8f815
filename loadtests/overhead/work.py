"""Work: what is asked of a model, over HTTP and of its engine."""

import json
from typing import Protocol

from loadtests.connection import Reply, post
from loadtests.errors import LoadTestError
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.masked.request import MaskedInput
from maskdial.models.bundle import Bundle
from maskdial.models.registry import CausalModel, MaskedModel, ServedModel

EVENT = b'data: {"index"'
"""How the event of a token begins."""

_OK = 200


class Work(Protocol):
    """One text is one request; ``unit`` is what throughput counts."""

    unit: str

    def request(self, text: str) -> bytes:
        """The request over HTTP."""
        ...

    def count(self, reply: Reply) -> int:
        """The units in its reply; LoadTestError if some are missing."""
        ...

    async def run(self, model: ServedModel, text: str) -> int:
        """The same work by the engine of a model in this process; the units of its result."""
        ...


class Generation(Work):
    """Streams of a fixed number of tokens, greedy."""

    unit = "tokens"

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def request(self, text: str) -> bytes:
        parameters = {"max_new_tokens": self._num_tokens, "ignore_eos": True}
        body = {"inputs": text, "parameters": parameters, "stream": True}
        return post("/generate", json.dumps(body).encode())

    def count(self, reply: Reply) -> int:
        num_events = reply.body.count(EVENT)
        if reply.status != _OK or num_events != self._num_tokens:
            raise LoadTestError(f"a stream ended after {num_events} tokens: {_end(reply)}")
        return num_events

    async def run(self, model: ServedModel, text: str) -> int:
        assert isinstance(model, CausalModel)
        params = SamplingParams(max_new_tokens=self._num_tokens, ignore_eos=True)
        sequence = Sequence(model.tokenizer.encode(text).ids, params)
        async with model.engine.stream(sequence) as stream:
            return len([event async for event in stream])


class Classification(Work):
    """One text a request."""

    unit = "requests"

    def request(self, text: str) -> bytes:
        return post("/classify", json.dumps({"inputs": text}).encode())

    def count(self, reply: Reply) -> int:
        if reply.status != _OK:
            raise LoadTestError(f"a request failed: {_end(reply)}")
        return 1

    async def run(self, model: ServedModel, text: str) -> int:
        assert isinstance(model, MaskedModel)
        encoding = model.tokenizer.encode(text)
        given = MaskedInput(tuple(encoding.ids), (), tuple(encoding.type_ids))
        return len(await model.engine.submit_many([given]))


def work_of(bundle: Bundle, num_tokens: int) -> Work:
    """What a model is asked for: texts of ``num_tokens``, or labels.

    Raises:
        LoadTestError: it neither generates nor classifies.
    """
    task = bundle.manifest.task
    if task == "generate":
        return Generation(num_tokens)
    if task == "classify":
        return Classification()
    raise LoadTestError(
        f"{bundle.path} does {task}; this measures models that generate or classify"
    )


def _end(reply: Reply) -> str:
    return f"{reply.status} {reply.body[-200:].decode(errors='replace')}"
