"""Worker: carries out the batches of a server, step by step, while it has nothing else to do."""

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from maskdial.batches.answers import Answers, Expired
from maskdial.batches.batch import Batch
from maskdial.batches.files import FileStore, StoredFile
from maskdial.batches.folder import own_names
from maskdial.batches.jobs import Job, JobStore
from maskdial.batches.lines import open_input
from maskdial.batches.output import Files, Journal, errors_path, journal_path
from maskdial.batches.requests import BackgroundRequests
from maskdial.batches.storage import Storage
from maskdial.batches.validation import Findings, validate
from maskdial.engine.thread import in_thread
from maskdial.errors import ConfigError, MaskdialError, NotFoundError, UnavailableError
from maskdial.http.context import ServerContext
from maskdial.http.lifecycle import Phase
from maskdial.registry.choice import ModelChoice

_WAIT_SECONDS = 1.0
_LOADING_SECONDS = 0.1
_RETRY_SECONDS = 15.0
_MAX_FAILURES = 5  # of a batch's steps, by exceptions that nobody foresaw
_STATES = ("validating", "in_progress", "finalizing", "cancelling")

_log = logging.getLogger("maskdial.batches")


class Worker:
    """Takes each batch from status to status: one step is one task, and may be repeated.

    A status is on the disk before the step that it asks for begins. So a server that was killed
    goes on with that step, and each of them can: validation begins anew, answers go on where the
    journal is, and files that were taken into the folder are there already. Of each owner, one
    batch is answered at a time, the oldest; files are validated one at a time.

    Args:
        storage: the folder.
        files: in it.
        jobs: in it.
        context: of the server.
        requests: how to ask the models for an owner.
        clock: gives seconds since 1970.
    """

    def __init__(
        self,
        storage: Storage,
        files: FileStore,
        jobs: JobStore,
        context: ServerContext,
        requests: Callable[[str], BackgroundRequests],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._files = files
        self._jobs = jobs
        self._context = context
        self._requests = requests
        self._clock = clock
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._retry_at: dict[Job, float] = {}
        self._num_failures: Counter[Job] = Counter()
        self._changed = asyncio.Event()

    def notice(self) -> None:
        """Says that there is a new batch, or one with another status."""
        self._changed.set()

    async def run(self) -> None:
        """Works until it is cancelled; what is done by then is on the disk."""
        try:
            while True:
                self._changed.clear()
                await self._expire()
                self._begin()
                loading = self._context.lifecycle.phase is Phase.LOADING
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOADING_SECONDS if loading else _WAIT_SECONDS):
                        await self._changed.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self) -> None:
        """Begins the steps that are due, and interrupts those that are out of date."""
        if self._context.lifecycle.phase is not Phase.SERVING:
            return
        now = time.monotonic()
        unfinished = self._jobs.unfinished()
        counts = dict.fromkeys(_STATES, 0)
        for job in unfinished:
            counts[job.status] += 1
        self._context.metrics.set_batches(counts)
        busy = {_lane(job) for job in self._tasks}
        for job in unfinished:
            if job in self._tasks or self._jobs.is_moving(job):
                continue
            if self._retry_at.get(job, now) > now or _lane(job) in busy:
                continue
            busy.add(_lane(job))
            task = asyncio.create_task(self._step(job))
            self._tasks[job] = task
            task.add_done_callback(partial(self._end, job))

    def _end(self, job: Job, _: object) -> None:
        del self._tasks[job]
        if job.has_ended:
            self._retry_at.pop(job, None)
            self._num_failures.pop(job, None)
        self._changed.set()

    def interrupt(self, job: Job) -> None:
        """Ends the step of a batch whose status has changed; the next one begins after it."""
        if (task := self._tasks.get(job)) is not None:
            task.cancel()
        self._retry_at.pop(job, None)
        self._changed.set()

    async def _step(self, job: Job) -> None:
        try:
            try:
                await self._carry_out(job)
            except ConfigError as error:
                if _passes(error):
                    raise UnavailableError(error.message) from error
                _log.error("batch %s failed: %s", job.id, error.message)
                await self._fail(job, "its files on the server were lost or changed; begin it anew")
            except MaskdialError:
                raise
            except Exception:
                _log.exception("a step of batch %s failed", job.id)
                self._num_failures[job] += 1
                if self._num_failures[job] < _MAX_FAILURES:
                    raise
                await self._fail(job, "internal error; search the server log for it")
        except Exception as error:
            why = error.message if isinstance(error, MaskdialError) else "its step will be repeated"
            if self._context.lifecycle.phase is Phase.SERVING:
                _log.warning("batch %s waits: %s", job.id, why)
            self._retry_at[job] = time.monotonic() + _RETRY_SECONDS
        else:
            self._retry_at.pop(job, None)

    async def _fail(self, job: Job, why: str) -> None:
        """Ends a batch that cannot go on; what was answered is kept."""
        job.errors = [
            {
                "code": "server_error",
                "line": None,
                "message": f"the batch cannot go on: {why}",
                "param": None,
            }
        ]
        await self._finish(job)
        await self._jobs.move(job, "failed")
        await self._clean(job)

    async def _carry_out(self, job: Job) -> None:
        if job.status == "validating":
            await self._validate(job)
        elif job.status == "in_progress":
            await self._answer(job, Answers(self._requests(job.owner), None, None))
            if job.status == "in_progress":
                await self._jobs.move(job, "finalizing")
        elif job.status == "cancelling":
            await self._finish(job)
            await self._jobs.move(job, "cancelled")
        else:
            journal = Journal.read(journal_path(self._jobs.results(job)))
            if job.is_expired and not (journal is not None and journal.complete):
                await self._answer(job, Expired(self._requests(job.owner)))
            await self._finish(job)
            await self._jobs.move(job, "expired" if job.is_expired else "completed")
        if job.has_ended:
            _log.info("batch %s: %s", job.id, job.status)
            await self._clean(job)

    async def _validate(self, job: Job) -> None:
        answers = Answers(self._requests(job.owner), None, None)
        stop = threading.Event()

        def read() -> Findings:
            with contextlib.closing(self._input(job)) as lines:
                return validate(lines, answers, job.endpoint, stop, mixes_models=job.mixes_models)

        try:
            found = await in_thread(read)
        finally:
            stop.set()
        job.total, job.errors = found.num_lines, found.errors
        if not job.errors:
            try:
                if (name := ModelChoice.of(found.model).name) is not None:
                    self._context.models.entry(name)
                job.model = found.model  # one that is served, so no longer than names are
            except NotFoundError as error:
                job.errors.append(
                    {
                        "code": "model_not_found",
                        "line": found.first,
                        "message": error.message,
                        "param": "body.model",
                    }
                )
        if job.status == "validating":
            await self._jobs.move(job, "failed" if job.errors else "in_progress")

    async def _answer(self, job: Job, answers: Answers) -> None:
        """Answers the lines that are not done."""
        results = self._jobs.results(job)

        def open_files() -> Files:
            results.parent.mkdir(exist_ok=True)
            begun = journal_path(results).exists()
            return Files(results, {"input": job.input_file_id}, resume=begun, overwrite=not begun)

        opening = asyncio.create_task(self._storage.run(open_files))
        try:
            files = await asyncio.shield(opening)
            with contextlib.closing(self._input(job)) as lines:
                batch = Batch(
                    lines, "the file", answers, files, lambda *_: job.count(files.journal)
                )
                await batch.run()
        finally:
            await asyncio.wait({opening})
            if opening.exception() is None:
                opening.result().close()
                job.count(opening.result().journal)

    async def _finish(self, job: Job) -> None:
        """Takes the results into the files."""
        results = self._jobs.results(job)
        for path, file_id, kind in (
            (results, job.output_id, "output"),
            (errors_path(results), job.error_id, "error"),
        ):
            keep = self._files.keep(
                path,
                file_id,
                owner=job.owner,
                filename=f"{job.id}_{kind}.jsonl",
                purpose="batch_output",
                expiry=job.output_expiry,
            )

            def take(path: Any = path, file_id: str = file_id, keep: Any = keep) -> Any:
                is_there = path.exists() and path.stat().st_size > 0
                return keep() if is_there or self._files.path(file_id).exists() else None

            file: StoredFile | None = await self._storage.run(take)
            if file is None:
                continue
            self._files.note(file)
            if kind == "output":
                job.output_file_id = file.id
            else:
                job.error_file_id = file.id

    async def _clean(self, job: Job) -> None:
        """Removes what only a batch that goes on needs."""
        folder = self._jobs.results(job).parent
        await self._storage.run(lambda: shutil.rmtree(folder, ignore_errors=True))

    async def _expire(self) -> None:
        """Ends the time of batches and files that is over."""
        now = self._clock()
        for job in self._jobs.unfinished():
            if job.expires_at <= now and job.status in ("validating", "in_progress"):
                job.is_expired = True
                with contextlib.suppress(UnavailableError):  # tried again with the next step
                    await self._jobs.move(job, "finalizing")
                self.interrupt(job)
        inputs = {job.input_file_id for job in self._jobs.unfinished()}
        with contextlib.suppress(UnavailableError):
            for file in self._files.expired():
                if file.id not in inputs:
                    await self._files.delete(file)
            for job in list(self._jobs.forgettable()):
                await self._jobs.forget(job)

    def _input(self, job: Job) -> Any:
        path = self._files.path(job.input_file_id)
        return open_input(str(path), "jsonl", self._context.config.max_body_bytes, None, None)

    def remove_strays(self) -> None:
        """Removes what a server that was killed has left and nobody needs; before the start."""
        unfinished = self._jobs.unfinished()
        num_removed = self._files.remove_strays(
            file_id for job in unfinished for file_id in (job.output_id, job.error_id)
        )
        num_removed += self._jobs.remove_strays()
        wanted = {job.id for job in unfinished}
        for folder in own_names(self._storage.work):
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)
                num_removed += 1
        if num_removed:
            _log.info("removed %d files and folders that a server had not finished", num_removed)


def _passes(error: ConfigError) -> bool:
    """Whether a batch can go on after an error: the disk is full, and not its input lost."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


def _lane(job: Job) -> tuple[str, str]:
    """Batches of the same one take their steps one after the other."""
    if job.status == "validating":
        return "validating", ""
    return ("answering", job.owner) if job.status == "in_progress" else ("ending", job.id)
