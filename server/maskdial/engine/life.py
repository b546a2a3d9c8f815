"""Engine: the life of a model's thread, which both engines share.

starting   from the constructor on; requests wait until the model is warm
serving    from the end of the first pass on; requests run
draining   from `Engine.stop` on; new requests are refused, those accepted may finish
dead       after the first pass, or code around a later one, has failed, or `Engine.fail` was
           called; all requests fail

A later pass that fails itself fails its own requests only, as does whatever else is done for
some of them (`failure_of`), and the engine goes on, unless its device is lost.
"""

import asyncio
import contextlib
import enum
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, TypeVar

from maskdial.engine.thread import in_thread
from maskdial.errors import DeviceLostError, MaskdialError, UnavailableError
from maskdial.metrics import PassMetrics

_log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")
ReplyT_contra = TypeVar("ReplyT_contra", contravariant=True)

# How long `stop` waits, after its grace, for the pass under way, which cannot be interrupted.
_LAST_PASS_SECONDS = 10.0
_MAX_DESCRIPTION = 200


class Inbox(Protocol[ReplyT_contra]):
    """Where a request's replies go."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop in which the reader waits."""

    def put(self, reply: ReplyT_contra) -> None:
        """Takes a reply; called in ``loop`` only."""


def publish(replies: Iterable[tuple[Inbox[ReplyT], ReplyT]]) -> None:
    """Delivers replies from any thread, with one ``call_soon_threadsafe`` per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Inbox[ReplyT], ReplyT]]] = defaultdict(list)
    for inbox, reply in replies:
        by_loop[inbox.loop].append((inbox, reply))
    for loop, batch in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: list[tuple[Inbox[ReplyT], ReplyT]]) -> None:
    for inbox, reply in batch:
        inbox.put(reply)


def describe(error: BaseException) -> str:
    """An exception in one line for a client: its type and the first line of its message."""
    first_line = (str(error).splitlines() or [""])[0].strip()
    name = type(error).__name__
    return f"{name}: {first_line[:_MAX_DESCRIPTION]}" if first_line else name


def failure_of(error: Exception, failure: type[MaskdialError], what: str) -> MaskdialError:
    """What the requests get for which something failed; the engine goes on.

    An error of ours is that itself. Any other exception, of NumPy, ONNX Runtime or a library, is
    logged, and described. Call it where the exception is handled.

    Raises:
        DeviceLostError: it is one, which no later pass survives: let it end the engine.
    """
    if isinstance(error, DeviceLostError):
        raise error
    if isinstance(error, MaskdialError):
        return error
    _log.error("%s failed", what, exc_info=error)
    return failure(f"{what} failed ({describe(error)})")


class Rate:
    """How many things happen in a second, on average over the last ten or so. Not thread-safe."""

    _SECONDS = 10.0

    def __init__(self) -> None:
        self._count = 0.0
        self._updated = time.monotonic()

    def add(self, number: int) -> None:
        """Notes that so many have just happened."""
        self._count = self._decayed() + number

    def seconds_for(self, number: int) -> int:
        """About how long so many will take: between a second and a minute."""
        per_second = self._decayed() / self._SECONDS
        return min(max(math.ceil(number / per_second), 1), 60) if per_second else 1

    def _decayed(self) -> float:
        now = time.monotonic()
        elapsed, self._updated = now - self._updated, now
        self._count *= math.exp(-elapsed / self._SECONDS)
        return self._count


class EngineState(enum.Enum):
    """Where an engine is in its life."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    DEAD = enum.auto()


class Engine(ABC):
    """One model's queue, and the thread that runs its passes.

    The lock of ``self._changed`` guards the queue and the state. It is reentrant, and never held
    during a pass.

    Args:
        name: the model's, for messages and the thread.
        metrics: the model's instruments.
    """

    failure: ClassVar[type[MaskdialError]]
    """What requests fail with when a pass fails or the engine dies."""

    def __init__(self, name: str, metrics: PassMetrics) -> None:
        self._name = name
        self._metrics = metrics
        self._changed = threading.Condition()  # a request arrived, or the state changed
        self._finished = Rate()  # requests
        self._step_began: float | None = None
        self._state = EngineState.STARTING
        self._cause_of_death = ""
        self._is_up = False
        self._started = threading.Event()  # the first pass is over, or will not be
        self._thread = threading.Thread(target=self._main, name=f"maskdial-{name}", daemon=True)

    @property
    def name(self) -> str:
        """The name under which the engine's model is served, as metrics and logs have it."""
        return self._name

    @property
    def step_seconds(self) -> float:
        """For how long the present step has run; 0 between two steps."""
        begun = self._step_began
        return 0.0 if begun is None else time.monotonic() - begun

    @property
    def state(self) -> EngineState:
        """Where it is in its life."""
        return self._state

    @property
    def cause_of_death(self) -> str:
        """Why it is dead, in a sentence; empty while it is not."""
        return self._cause_of_death

    @property
    def ready(self) -> bool:
        """Whether the model has run a pass and new requests are accepted."""
        return self._state is EngineState.SERVING

    def start(self) -> None:
        """Starts the thread, which warms the model up and then turns ``ready`` on.

        Raises:
            RuntimeError: the engine was started or stopped before.
        """
        with self._changed:
            if self._state is not EngineState.STARTING:
                raise RuntimeError(f"the engine of model {self._name!r} cannot start again")
            self._thread.start()

    async def warm_up(self) -> None:
        """Waits until a started engine has run its first pass. No metric counts that pass.

        Raises:
            InferenceError, GenerationError: the pass failed; the engine is dead.
            UnavailableError: the engine was stopped.
        """
        await in_thread(self._started.wait)
        if self._state is EngineState.DEAD:
            raise self.failure(self._cause_of_death)
        self._check_accepting()

    def stop(self, grace: float) -> None:
        """Refuses new requests, lets those accepted finish, and ends the thread.

        Those that take longer than ``grace`` seconds fail with `UnavailableError`. The call blocks
        while event loops read the replies, so make it in another thread (`in_thread`).
        """
        with self._changed:
            if self._state is not EngineState.DEAD:
                self._state = EngineState.DRAINING
            self._changed.notify_all()
        self._started.set()
        runs = self._thread.ident is not None
        if runs:
            self._thread.join(grace)
        num_failed = self._fail_all(
            UnavailableError, f"model {self._name!r} shut down before this request was finished"
        )
        self._metrics.cancelled["shutdown"].inc(num_failed)
        if runs:
            self._thread.join(_LAST_PASS_SECONDS)
        self._count_down()

    def fail(self, cause: str) -> None:
        """Ends the engine, as if it had died: its requests fail with ``cause``, a sentence.

        A pass under way is finished, and its results are dropped.
        """
        with self._changed:
            if self._state is EngineState.DEAD:
                return
            self._cause_of_death = cause
            self._state = EngineState.DEAD
            self._changed.notify_all()
        self._count_down()
        self._started.set()
        self._fail_all(self.failure, cause)

    @abstractmethod
    def step(self) -> None:
        """One iteration of the thread's loop. Without a thread, callers may drive the engine."""

    @abstractmethod
    def _warm_up(self) -> None:
        """Runs a first pass, in the engine's thread."""

    @property
    @abstractmethod
    def _has_work(self) -> bool:
        """Whether requests wait or run. The caller holds the lock."""

    @abstractmethod
    def _abandon(self) -> Sequence[Inbox[MaskdialError]]:
        """Drops all requests and returns their inboxes. The caller holds the lock."""

    def _maintain(self) -> float | None:
        """Does what is due between two steps.

        Returns:
            After how many seconds without work it is due again; None: never.
        """
        return None

    def _check_accepting(self) -> None:
        """Refuses a request to an engine that drains or is dead.

        Raises:
            UnavailableError: it does, or is.
        """
        if self._state is EngineState.DEAD:
            raise UnavailableError(f"{self._cause_of_death}; load it again or restart the server")
        if self._state is EngineState.DRAINING:
            raise UnavailableError(f"model {self._name!r} is shutting down")

    def _main(self) -> None:
        """The thread: warm up, then step while there is work."""
        try:
            self._warm_up()
            self._serve()
            while self._wait_for_work():
                self._step_began = time.monotonic()
                self.step()
                self._step_began = None
        except BaseException as error:
            _log.critical("the engine of model %r died", self._name, exc_info=True)
            self.fail(f"the engine of model {self._name!r} died ({describe(error)})")

    def _serve(self) -> None:
        with self._changed:
            if self._state is EngineState.STARTING:
                self._state = EngineState.SERVING
                self._is_up = True
                self._metrics.engine_up.inc()
        self._started.set()

    def _wait_for_work(self) -> bool:
        """Blocks until there is something to do; False when the thread is to end."""
        while True:
            due = self._maintain()  # without the lock, for which the event loop would wait
            with self._changed:
                if self._has_work:
                    return True
                if self._state in (EngineState.DRAINING, EngineState.DEAD):
                    return False
                self._changed.wait(due)

    def _count_down(self) -> None:
        """Two engines of one name may be up at a time, so the gauge counts them."""
        with self._changed:
            was_up, self._is_up = self._is_up, False
        if was_up:
            self._metrics.engine_up.dec()

    def _fail_all(self, error: type[MaskdialError], message: str) -> int:
        """Fails every request that waits or runs; returns how many those are."""
        with self._changed:
            inboxes = self._abandon()
        publish((inbox, error(message)) for inbox in inboxes)
        return len(inboxes)
