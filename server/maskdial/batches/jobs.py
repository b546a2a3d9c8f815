"""JobStore: OpenAI's batches, as what they are asked for and how far they are."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from maskdial.batches.folder import own_names
from maskdial.batches.output import Journal, journal_path
from maskdial.batches.storage import Storage, records
from maskdial.errors import ConfigError, NotFoundError

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

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._clock = clock
        try:
            found = [Job(**record) for record in records(storage.batches)]
        except TypeError as error:
            raise ConfigError(f"a record in {storage.batches} is of another version") from error
        self._jobs = {job.id: job for job in found}
        for job in self.unfinished():
            if (journal := Journal.read(journal_path(self.results(job)))) is not None:
                job.count(journal)

    def __len__(self) -> int:
        return len(self._jobs)

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
        """Takes a batch; it is on the disk then."""
        self._jobs[job.id] = job
        try:
            await self.save(job)
        except BaseException:
            del self._jobs[job.id]
            raise

    async def move(self, job: Job, status: Status) -> None:
        """Changes a batch's status."""
        job.status = status
        job.times[f"{status}_at"] = int(self._clock())
        await self.save(job)

    async def save(self, job: Job) -> None:
        """Writes what is known of a batch."""
        await self._storage.save(self._path(job), asdict(job))

    async def forget(self, job: Job) -> None:
        """Removes a batch that has ended."""
        await self._storage.run(lambda: self._path(job).unlink(missing_ok=True))
        del self._jobs[job.id]

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
