"""BatchService: OpenAI's files and batches of one server."""

import asyncio
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from fastapi import FastAPI, Request

from maskdial.batches.files import (
    EXPIRY_SECONDS,
    FileStore,
    StoredFile,
    new_file_id,
)
from maskdial.batches.jobs import Job, JobStore
from maskdial.batches.requests import Admission, BackgroundRequests
from maskdial.batches.room import LEAST_BYTES, Room
from maskdial.batches.storage import Storage, new_id
from maskdial.batches.worker import Worker
from maskdial.errors import ForbiddenError, OverloadedError, ValidationError
from maskdial.http.context import ServerContext

_MAX_UNFINISHED = 100
"""Batches of an owner; each of them costs a client nothing."""


class BatchService:
    """The files and batches in a folder.

    Args:
        app: the application, which has its context.
        folder: the folder.
        clock: gives seconds since 1970.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, app: FastAPI, folder: Path, clock: Callable[[], float] = time.time) -> None:
        context: ServerContext = app.state.context
        self._clock = clock
        self.room = Room(context.config.batch_max_dir_bytes, lambda: len(context.keys.names) > 1)
        self.storage = Storage(folder)
        self.files = FileStore(self.storage, self.room, clock)
        self.jobs = JobStore(self.storage, self.room, clock)
        admission = Admission(context.lifecycle)
        requests = lru_cache(maxsize=None)(lambda owner: BackgroundRequests(app, owner, admission))
        self.task_paths = requests("").task_paths
        self.worker = Worker(self.storage, self.files, self.jobs, context, requests, clock)
        self.worker.remove_strays()
        self._working: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to work on the batches."""
        self._working = asyncio.create_task(self.worker.run())

    async def stop(self) -> None:
        """Leaves the batches as they are."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        await asyncio.to_thread(self.storage.close)

    async def add_file(
        self, source: Path, file_id: str, owner: str, filename: str, expiry: int | None
    ) -> StoredFile:
        """Takes an uploaded file, which is in the folder already."""
        keep = self.files.keep(
            source,
            file_id,
            owner=owner,
            filename=filename,
            purpose="batch",
            expiry=EXPIRY_SECONDS if expiry is None else expiry,
        )

        async def take() -> StoredFile:
            file = await self.storage.run(keep)
            self.files.note(file)
            return file

        # A client that leaves meanwhile has it kept, so it counts as well.
        return await asyncio.shield(asyncio.ensure_future(take()))

    async def delete_file(self, file: StoredFile) -> None:
        """Removes a file.

        Raises:
            ValidationError: a batch needs it that has not ended.
        """
        for job in self.jobs.unfinished():
            if job.input_file_id == file.id:
                raise ValidationError(
                    f"the file is the input of batch {job.id}, which has not ended; cancel that "
                    "first",
                    field="id",
                )
        await self.files.delete(file)

    async def create(
        self,
        owner: str,
        *,
        file_id: str,
        endpoint: str,
        window: str,
        seconds: int,
        metadata: dict[str, str] | None,
        output_expiry: int | None,
        prefix: str = "batch_",
    ) -> Job:
        """Begins a batch, whose id has this prefix.

        Raises:
            NotFoundError: there is no such file.
            ValidationError: it, or the endpoint, cannot be used.
            OverloadedError: there are too many batches, or files.
        """
        if endpoint not in self.task_paths:
            raise ValidationError(
                'endpoint: must be the path of a task of this server, such as "/v1/embeddings"',
                field="endpoint",
            )
        file = self.files.get(file_id, owner, "input_file_id")
        if file.purpose != "batch":
            raise ValidationError(
                'input_file_id: the file must have been uploaded with the purpose "batch"',
                field="input_file_id",
            )
        if sum(job.owner == owner for job in self.jobs.unfinished()) >= _MAX_UNFINISHED:
            raise OverloadedError(
                f"{_MAX_UNFINISHED} batches have not ended; wait for one, or cancel one",
                retry_after=60,
            )
        self.room.check(owner, LEAST_BYTES)
        now = int(self._clock())
        job = Job(
            id=new_id(prefix),
            owner=owner,
            input_file_id=file.id,
            endpoint=endpoint,
            completion_window=window,
            created_at=now,
            expires_at=now + seconds,
            output_id=new_file_id(),
            error_id=new_file_id(),
            output_expiry=EXPIRY_SECONDS if output_expiry is None else output_expiry,
            metadata=metadata,
        )
        await self.jobs.add(job)
        self.worker.notice()
        return job

    async def cancel(self, job: Job) -> None:
        """Ends a batch early; its results so far are kept. One that has ended stays as it is.

        Raises:
            ValidationError: it has ended in another way.
        """
        if job.status in ("cancelling", "cancelled"):
            return
        if job.status not in ("validating", "in_progress"):
            raise ValidationError(
                f"the batch cannot be cancelled any more: it is {job.status}", field="id"
            )
        await self.jobs.move(job, "cancelling")
        self.worker.interrupt(job)


def service_of(request: Request) -> BatchService:
    """That of the server which a request came to.

    Raises:
        ForbiddenError: it has none.
    """
    service: BatchService | None = request.app.state.batches
    if service is None:
        raise ForbiddenError(
            "this server was started without a folder for files and batches; start it with "
            "--batch-dir or MASKDIAL_BATCH_DIR"
        )
    return service


def owner_of(request: Request) -> str:
    """Whose files and batches a request is about: the name of its key, empty without keys."""
    return str(request.state.key)
