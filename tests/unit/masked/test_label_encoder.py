"""The vectors of labels: which are computed, and which are kept."""

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.config import Config
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.engine.timing import Deadline
from maskdial.errors import ValidationError
from maskdial.masked.label_encoder import LabelEncoder
from maskdial.masked.request import MaskedInput, MaskedResult
from tests.unit.scripted_session import CLASSIFY_INPUTS, ScriptedSession, serving, until

LETTERS = "abcdefgh"


class Doubling:
    """An engine whose vector of a label is twice its tokens' sum; ``passes`` are what it read."""

    max_queue = 3

    def __init__(self) -> None:
        self.passes: list[int] = []

    async def submit_many(
        self, inputs: list[MaskedInput], _timeout: float | None
    ) -> list[MaskedResult]:
        assert len(inputs) <= self.max_queue
        self.passes.append(len(inputs))
        sums = [2 * sum(each.input_ids) for each in inputs]
        return [MaskedResult(np.full(4, total, np.float32), 0, 0, 1, 1) for total in sums]


def encoder(engine: Any, num_kept: int = 100) -> LabelEncoder:
    backend = Backend(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend, SpecialTokens())
    return LabelEncoder(engine, tokenizer, max_length=4, cache_bytes=16 * num_kept)


def vectors(encoder: LabelEncoder, *labels: str) -> list[float]:
    async def found() -> NDArray[np.float32]:
        return await encoder.vectors(labels, Deadline(None, Config()))

    return [float(value) for value in asyncio.run(found())[:, 0]]


def test_a_label_is_read_once() -> None:
    engine = Doubling()
    labels = encoder(engine)
    assert vectors(labels, "b", "c d", "b") == [2, 10, 2]
    assert vectors(labels, "c d", "e", "b") == [10, 8, 2]
    assert engine.passes == [2, 1]


def test_more_labels_than_the_queue_holds() -> None:
    engine = Doubling()
    assert vectors(encoder(engine), *LETTERS) == [2.0 * i for i in range(8)]
    assert engine.passes == [3, 3, 2]


def test_labels_that_have_begun_are_not_refused_for_other_texts() -> None:
    async def main() -> None:
        session = ScriptedSession(CLASSIFY_INPUTS, gated=True)
        with serving(session, max_queue=3, max_batch_tokens=2) as bench:
            submit, others = bench.engine.submit_many, list[asyncio.Task[Any]]()

            async def submit_when_full(*arguments: Any) -> list[MaskedResult]:
                if session.passes and not others:
                    token = usage_of_request.set(ClientUsage("another"))
                    for _ in range(4):
                        others.append(asyncio.create_task(submit([MaskedInput((8, 8))])))
                        await until(lambda: len(session.passes) == 3)
                        # One runs, the others wait
                        await until(lambda: bench.num_waiting == len(others) - 1)
                    usage_of_request.reset(token)
                    session.release(99)
                return await submit(*arguments)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(bench.engine, "submit_many", submit_when_full)
                usage_of_request.set(ClientUsage("a client"))
                session.release(2)
                found = await encoder(bench.engine).vectors(LETTERS, Deadline(None, Config()))
            assert found[:, 0].tolist() == list(range(8))
            await asyncio.gather(*others)

    asyncio.run(main())


def test_the_labels_that_were_used_last_are_kept() -> None:
    engine = Doubling()
    labels = encoder(engine, num_kept=2)
    vectors(labels, "a", "b")
    vectors(labels, "a")
    vectors(labels, "c")  # b goes
    engine.passes.clear()
    vectors(labels, "a", "c")
    assert engine.passes == []
    assert vectors(labels, "b") == [2]
    assert engine.passes == [1]
    # More at once than are kept
    assert vectors(labels, *LETTERS) == [2.0 * i for i in range(8)]
    assert vectors(labels, "g", "h", "a") == [12, 14, 0]
    assert engine.passes[-1] == 1


def test_a_label_longer_than_the_encoder_reads() -> None:
    with pytest.raises(ValidationError, match="'a a a a a' has 5 tokens, and the model reads at"):
        vectors(encoder(Doubling()), "a", "a a a a a")


def test_no_key_learns_which_labels_another_has_asked_for() -> None:
    engine = Doubling()
    labels = encoder(engine)

    def asked(key: str, *texts: str) -> list[float]:
        token = usage_of_request.set(ClientUsage("client", key))
        try:
            return vectors(labels, *texts)
        finally:
            usage_of_request.reset(token)

    assert asked("alice", "b", "c") == asked("bob", "b", "c") == [2, 4]
    assert engine.passes == [2, 2]
    assert (asked("alice", "c"), asked("bob", "b")) == ([4], [2])
    assert engine.passes == [2, 2]
