"""Request: one text on its way through the masked engine, from its token ids to its logits."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from maskdial.engine.fairness import ClientUsage
from maskdial.engine.trace import Timeline
from maskdial.errors import MaskdialError
from maskdial.runtime.adapter import Adapter


@dataclass(frozen=True, slots=True, eq=False)
class CanvasInput:
    """What a model that writes canvases reads beside a text's tokens.

    ``soft`` is what the pass before made of each token of the canvas, float32 (num_rows,
    hidden_size); zeros in a first pass. ``temperature`` divides the logits of which the pass makes
    the same for the next one.
    """

    soft: NDArray[np.float32]
    temperature: float


@dataclass(frozen=True, slots=True)
class MaskedInput:
    """One tokenized text or pair.

    ``rows`` are the token positions whose logits are wanted, for a graph that gathers rows
    (fill-mask). A classifier has one row per text and ignores them. The first ``num_labels`` rows
    are labels, for a graph that scores pairs: of each other row with each label, in this order.
    ``token_type_ids`` default to zeros. The last ``num_unattended`` tokens attend to the others,
    but no token to them. ``reduce`` makes of the rows what is kept of them, on the engine's thread,
    where they are larger than what is needed; if it raises an error, that is the text's reply.
    ``canvas`` is for a graph that writes canvases: ``rows`` are then the text's last tokens.

    Raises:
        ValueError: no tokens, or none to attend to; type ids of another length, or a row outside
            the text.
    """

    input_ids: tuple[int, ...]
    rows: tuple[int, ...] = ()
    token_type_ids: tuple[int, ...] | None = None
    num_unattended: int = 0
    num_labels: int = 0
    reduce: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None
    canvas: CanvasInput | None = None

    def __post_init__(self) -> None:
        if not self.length:
            raise ValueError("a text has at least one token")
        if self.token_type_ids is not None and len(self.token_type_ids) != self.length:
            raise ValueError(f"{len(self.token_type_ids)} token type ids for {self.length} tokens")
        if not 0 <= self.num_unattended < self.length:
            raise ValueError(f"{self.num_unattended} of {self.length} tokens are not attended to")
        if self.rows and not (min(self.rows) >= 0 and max(self.rows) < self.length):
            raise ValueError(f"rows {self.rows} do not all lie in a text of {self.length} tokens")

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.input_ids)

    @property
    def num_pairs(self) -> int:
        """The number of pairs of a row and a label."""
        return self.num_labels * (len(self.rows) - self.num_labels)


@dataclass(frozen=True, slots=True)
class MaskedResult:
    """The model's output for one text, or what its input's ``reduce`` has made of it.

    ``logits`` are float32: (num_rows, columns) in the order of the input's rows, (num_pairs,
    columns) in that of its pairs, or (num_labels,) from a classifier. The text waited
    ``queue_seconds``. Its pass took ``inference_seconds`` for ``batch_size`` texts of
    ``batch_tokens`` tokens, padding included.
    """

    logits: NDArray[np.float32]
    queue_seconds: float
    inference_seconds: float
    batch_size: int
    batch_tokens: int


Reply = MaskedResult | MaskdialError


@dataclass(frozen=True, slots=True, eq=False)
class MaskedWork:
    """An input in the engine, whose it is, its adapter, and the future that its caller awaits.

    ``arrived_at`` is in `time.perf_counter` seconds.
    """

    input: MaskedInput
    future: asyncio.Future[MaskedResult]
    arrived_at: float
    usage: ClientUsage = field(default_factory=ClientUsage)
    adapter: Adapter | None = None

    @property
    def client(self) -> str:
        """Who sent it."""
        return self.usage.client

    @property
    def length(self) -> int:
        """In tokens."""
        return self.input.length

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop in which the caller waits."""
        return self.future.get_loop()

    @property
    def timeline(self) -> Timeline:
        """For the span of its request."""
        started_at = ended_at = 0.0
        if self.future.done() and not self.future.cancelled() and not self.future.exception():
            result = self.future.result()
            started_at = self.arrived_at + result.queue_seconds
            ended_at = started_at + result.inference_seconds
        return Timeline(self, self.length, self.arrived_at, started_at, ended_at)

    def put(self, reply: Reply) -> None:
        """Resolves the future; called in ``loop`` only."""
        if self.future.done():  # the caller has left
            return
        if isinstance(reply, MaskdialError):
            self.future.set_exception(reply)
        else:
            self.future.set_result(reply)
