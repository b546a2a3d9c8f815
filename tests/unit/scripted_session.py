"""A masked model that answers with what it was fed, and an engine over it."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.masked.answer_cache import AnswerCache
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.metrics import Metrics
from maskdial.runtime.session import PassStop

FILL_MASK_INPUTS = frozenset({"input_ids", "lengths", "token_type_ids", "rows"})
CLASSIFY_INPUTS = frozenset({"input_ids", "lengths"})
PAD = 9
WAIT = 30.0  # seconds until a test gives up; nothing passes by waiting
NAME = "tiny"


class ScriptedSession:
    """Answers each row with what it was fed, so that a row in the wrong place shows.

    A row of logits is [the token at the row, its text's length, the sum of its text's ids, the sum
    of its text's type ids]. ``failures`` maps a token id to what a pass that meets it raises.

    From `arm` on it keeps what its passes were fed, and with ``gated`` each of them waits for a
    `release`.
    """

    def __init__(
        self,
        input_names: frozenset[str] = FILL_MASK_INPUTS,
        *,
        gated: bool = False,
        failures: Mapping[int, BaseException] | None = None,
    ) -> None:
        self.input_names = input_names
        self.passes: list[dict[str, NDArray[Any]]] = []
        self._armed = False
        self._gated = gated
        self._failures = failures or {}
        self._started = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)

    def arm(self) -> None:
        """Ends the warm-up, of which no test wants to know."""
        self._armed = True

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        if self._armed:
            self.passes.append(dict(feeds))
            self._started.release()
            if self._gated:
                assert self._gate.acquire(timeout=WAIT)
        ids, lengths = feeds["input_ids"], feeds["lengths"]
        for token_id, error in self._failures.items():
            if (ids == token_id).any():
                raise error
        valid = np.arange(ids.shape[1]) < lengths[:, None]
        types = feeds.get("token_type_ids", np.zeros_like(ids))
        rows = feeds.get("rows", np.arange(len(ids)) * ids.shape[1])
        texts = rows // ids.shape[1]
        columns = [
            ids.reshape(-1)[rows],
            lengths[texts],
            (ids * valid).sum(1)[texts],
            (types * valid).sum(1)[texts],
        ]
        return np.stack(columns, axis=1).astype(np.float32)

    def run_until(
        self, feeds: Mapping[str, NDArray[Any]], stop: PassStop
    ) -> NDArray[np.float32] | None:
        logits = self.run(feeds)
        return None if stop.is_set else logits

    async def pass_started(self) -> None:
        assert await asyncio.to_thread(self._started.acquire, timeout=WAIT)

    def release(self, num_passes: int = 1) -> None:
        self._gate.release(num_passes)

    def lengths(self) -> list[list[int]]:
        return [feeds["lengths"].tolist() for feeds in self.passes]


class Bench:
    """An engine over a scripted session, and what it reports."""

    def __init__(
        self,
        session: ScriptedSession,
        *,
        max_batch_tokens: int = 256,
        max_queue: int = 64,
        pad_multiple: int = 1,
        soft_columns: int = 0,
        answers: AnswerCache | None = None,
    ) -> None:
        self.session = session
        self._metrics = Metrics()
        self.engine = MaskedEngine(
            session,
            max_batch_tokens=max_batch_tokens,
            max_queue=max_queue,
            pad_token_id=PAD,
            free_padding=16,
            pad_multiple=pad_multiple,
            max_length=20,
            soft_columns=soft_columns,
            answers=answers,
            metrics=self._metrics.declare_masked(NAME),
            name=NAME,
        )

    def submit(self, *inputs: MaskedInput) -> "asyncio.Task[list[MaskedResult]]":
        return asyncio.create_task(self.engine.submit_many(inputs))

    @property
    def num_waiting(self) -> int:
        return self.value("queue_size")

    @property
    def cancelled(self) -> dict[str, int]:
        """How many texts were dropped unfinished, by reason."""
        reasons = ("disconnect", "timeout", "shutdown")
        counts = {reason: self.value("cancelled_total", reason=reason) for reason in reasons}
        return {reason: count for reason, count in counts.items() if count}

    def value(self, name: str, **labels: str) -> int:
        labels["model"] = NAME
        value = self._metrics.registry.get_sample_value(f"maskdial_{name}", labels)
        assert value is not None, name
        return int(value)


@contextlib.contextmanager
def serving(session: ScriptedSession, **settings: Any) -> Iterator[Bench]:
    """A warm engine on its thread."""
    bench = Bench(session, **settings)
    bench.engine.start()
    try:
        deadline = time.monotonic() + WAIT
        while not bench.engine.ready:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        session.arm()
        yield bench
    finally:
        session.release(1000)
        bench.engine.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks and threads work until the condition is true."""
    async with asyncio.timeout(WAIT):
        for _ in itertools.takewhile(lambda _: not condition(), itertools.count()):
            await asyncio.sleep(0)
