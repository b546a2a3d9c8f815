"""Request: one text on its way through the masked engine, from its token ids to its logits."""

import asyncio
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from maskdial.engine.fairness import ClientUsage
from maskdial.engine.trace import Timeline
from maskdial.errors import MaskdialError
from maskdial.runtime.adapter import Adapter

_DIGEST_BYTES = 32


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

    def digest(self, *beside: str) -> bytes:
        """Equal for inputs of which a pass computes the same, and for no others: 32 bytes of
        BLAKE2b over all that a pass is fed, and the strings ``beside``.
        """
        parts = [name.encode() for name in beside]
        parts += _bytes(self.input_ids), _bytes(self.rows), _bytes(self.token_type_ids or ())
        parts.append(_bytes((self.num_unattended, self.num_labels)))
        if self.canvas is not None:
            parts.append(self.canvas.soft.tobytes() + str(self.canvas.temperature).encode())
        # Their lengths first, so that no part can end where that of another input goes on.
        lengths = _bytes((len(parts), *map(len, parts)))
        return blake2b(b"".join((lengths, *parts)), digest_size=_DIGEST_BYTES).digest()


def _bytes(numbers: Iterable[int]) -> bytes:
    return array("q", numbers).tobytes()


@dataclass(frozen=True, slots=True)
class MaskedResult:
    """The model's output for one text, or what its input's ``reduce`` has made of it.

    ``logits`` are float32: (num_rows, columns) in the order of the input's rows, (num_pairs,
    columns) in that of its pairs, or (num_labels,) from a classifier. The text waited
    ``queue_seconds``. Its pass took ``inference_seconds`` for ``batch_size`` texts of
    ``batch_tokens`` tokens, padding included; a text whose answer was kept (``is_cached``) had
    none. They are read-only: equal texts have the same array.
    """

    logits: NDArray[np.float32]
    queue_seconds: float
    inference_seconds: float
    batch_size: int
    batch_tokens: int
    is_cached: bool = False


Reply = MaskedResult | MaskdialError


@dataclass(frozen=True, slots=True, eq=False)
class MaskedWork:
    """An input in the engine, whose it is, its adapter, and the future that its caller awaits.

    ``key`` is that of its pass, equal only where one answer serves both. ``arrived_at`` is in
    `time.perf_counter` seconds.
    """

    input: MaskedInput
    key: bytes
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
    def may_be_kept(self) -> bool:
        """Whether an answer is that of its ``key``: not what a request's own labels make of it. A
        canvas is never the same again.
        """
        head = None if self.adapter is None else self.adapter.head
        return self.input.reduce is head and self.input.canvas is None

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
