"""JobStore: OpenAI's batches, as what they are asked for and how far they are."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from maskdial.batches.folder import own_names
from maskdial.batches.output import Journal, journal_path
from maskdial.batches.room import Room, counted
from maskdial.batches.storage import Storage, encode_record, records
from maskdial.errors import ConfigError, NotFoundError, UnavailableError

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = ("failed", "completed", "expired", "cancelled")
KEPT_SECONDS = 30 * 86_400
"""For so long a batch is known that has ended."""


class LineError(TypedDict):
    """What is wrong with a line of an input file, or with the file."""

    code: str
    line: int | None
    message: str
    param: str | None


MESSAGES_PREFIX = "msgbatch_"
"""What the ids of Anthropic's batches begin with."""


@dataclass(slots=True, eq=False)
class Job:
    """One batch.

    Attributes:
        owner: the name of the key that it belongs to; empty without keys.
        output_id: of the file of results, which there may never be.
        error_id: likewise, of failures.
        output_expiry: seconds after which both are removed.
        times: when its status changed, in seconds since 1970, as on the wire: ``in_progress_at``.
        total: lines.
        num_answered: of them.
        num_failed: likewise.
        is_expired: whether it had no time left, so that the rest is not answered any more.
    """

    id: str
    owner: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    output_expiry: int
    metadata: dict[str, str] | None
    status: Status = "validating"
    times: dict[str, int] = field(default_factory=dict)
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    num_answered: int = 0
    num_failed: int = 0
    is_expired: bool = False

    @property
    def mixes_models(self) -> bool:
        """Whether its lines may name different models, as Anthropic's may."""
        return self.id.startswith(MESSAGES_PREFIX)

    @property
    def has_ended(self) -> bool:
        """Whether nothing happens to it any more."""
        return self.status in ENDED

    def count(self, journal: Journal) -> None:
        """Takes over how many lines are done."""
        self.num_answered, self.num_failed = journal.num_answered, journal.num_failed


class JobStore:
    """The batches of a folder. On the event loop only.

    Raises:
        ConfigError: a record cannot be read.
    """

    def __init__(
        self, storage: Storage, room: Room, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._room = room
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._counted: dict[str, int] = {}
        self._num_moves: Counter[Job] = Counter()  # that are under way
        try:
            for record, num_bytes in records(storage.batches):
                job = Job(**record)
                self._jobs[job.id] = job
                self._count(job, num_bytes)
        except TypeError as error:
            raise ConfigError(f"a record in {storage.batches} is of another version") from error
        for job in self.unfinished():
            if (journal := Journal.read(journal_path(self.results(job)))) is not None:
                job.count(journal)

    def results(self, job: Job) -> Path:
        """Where the results of a batch are written."""
        return self._storage.work / job.id / "results.jsonl"

    def get(self, job_id: str, owner: str) -> Job:
        """A batch of an owner.

        Raises:
            NotFoundError: there is none, or it is another one's.
        """
        job = self._jobs.get(job_id)
        if job is None or job.owner != owner:
            raise NotFoundError("there is no batch with this id", field="id")
        return job

    def of(self, owner: str) -> list[Job]:
        """All batches of an owner, the oldest first."""
        return [job for job in self._jobs.values() if job.owner == owner]

    def unfinished(self) -> list[Job]:
        """Those that have not ended, the oldest first."""
        return [job for job in self._jobs.values() if not job.has_ended]

    def forgettable(self) -> Iterator[Job]:
        """Those that ended long ago."""
        before = self._clock() - KEPT_SECONDS
        for job in self._jobs.values():
            if job.has_ended and max(job.times.values()) < before:
                yield job

    async def add(self, job: Job) -> None:
        """Takes a batch; it is on the disk then, also if the caller is cancelled.

        Raises:
            UnavailableError: it cannot be written.
        """
        self._jobs[job.id] = job
        try:
            await self._save(job)
        except UnavailableError:
            del self._jobs[job.id]
            self._room.give_back(job.owner, self._counted.pop(job.id))
            raise

    async def move(self, job: Job, status: Status) -> None:
        """Changes a batch's status.

        Raises:
            UnavailableError: it cannot be written, and so is not changed.
        """
        before = job.status
        job.status = status
        job.times[f"{status}_at"] = int(self._clock())
        self._num_moves[job] += 1
        try:
            await self._save(job)
        except UnavailableError:
            if job.status == status:  # it was not changed again meanwhile
                job.status = before
                del job.times[f"{status}_at"]
            raise
        finally:
            self._num_moves[job] -= 1
            if not self._num_moves[job]:
                del self._num_moves[job]

    def is_moving(self, job: Job) -> bool:
        """Whether its status is not on the disk yet."""
        return job in self._num_moves

    async def forget(self, job: Job) -> None:
        """Removes a batch that has ended."""
        await self._storage.run(lambda: self._path(job).unlink(missing_ok=True))
        if self._jobs.pop(job.id, None) is not None:  # nobody else has removed it meanwhile
            self._room.give_back(job.owner, self._counted.pop(job.id))

    async def _save(self, job: Job) -> None:
        content = encode_record(asdict(job))
        self._count(job, len(content))
        await self._storage.save(self._path(job), content)

    def _count(self, job: Job, num_bytes: int) -> None:
        self._room.give_back(job.owner, self._counted.get(job.id, 0))
        self._counted[job.id] = counted(0, num_bytes)
        self._room.take(job.owner, self._counted[job.id])

    def remove_strays(self) -> int:
        """Removes records that were not written to their end; returns how many there were."""
        strays = [path for path in own_names(self._storage.batches) if path.suffix == ".partial"]
        for path in strays:
            path.unlink()
        return len(strays)

    def _path(self, job: Job) -> Path:
        return self._storage.batches / f"{job.id}.json"


def wire(job: Job) -> dict[str, Any]:
    """A batch as OpenAI writes it."""
    statuses = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
    times = {f"{status}_at": None for status in (*statuses, "cancelled")}
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model,
        "errors": {"object": "list", "data": job.errors} if job.errors else None,
        "input_file_id": job.input_file_id,
        "completion_window": job.completion_window,
        "status": job.status,
        "output_file_id": job.output_file_id,
        "error_file_id": job.error_file_id,
        "created_at": job.created_at,
        "expires_at": job.expires_at,
        **times,
        **job.times,
        "request_counts": {
            "total": job.total,
            "completed": job.num_answered,
            "failed": job.num_failed,
        },
        "metadata": job.metadata,
    }
