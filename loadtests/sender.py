"""Sender: one job, sent as a real request through maskdial_client."""

from collections.abc import Callable

from loadtests.samples import Failure, Kind
from loadtests.scenarios import Job
from maskdial_client import NO_RETRIES, AsyncClient
from maskdial_client.errors import ApiError, ConnectionFailedError, ProtocolError, StreamEndedError

_TEMPERATURE = 0.8


def load_client(url: str) -> AsyncClient:
    """A client that neither retries nor queues: either would hide what the server does."""
    return AsyncClient(url, timeout=None, retry=NO_RETRIES, max_connections=None)


class Sender:
    """Sends jobs; generation is always streamed and sampled with the job's own seed."""

    def __init__(self, client: AsyncClient, *, model: str | None, max_new_tokens: int) -> None:
        self._client = client
        self._model = model
        self._max_new_tokens = max_new_tokens

    async def __call__(self, job: Job, on_token: Callable[[], None]) -> None:
        """Sends a job and waits for all of its reply, calling ``on_token`` as each token comes."""
        if job.kind is Kind.FILL_MASK:
            await self._client.fill_mask(job.text, model=self._model)
        elif job.kind is Kind.CLASSIFY:
            await self._client.classify(job.text, model=self._model)
        else:
            async with self._client.stream(
                job.text,
                model=self._model,
                max_new_tokens=self._max_new_tokens,
                temperature=_TEMPERATURE,
                seed=job.seed,
            ) as stream:
                async for _ in stream:
                    on_token()


def failure_of(error: Exception) -> Failure:
    """What an exception of a request is counted as."""
    if isinstance(error, ApiError):
        return Failure(error.error_type or "unknown", error.status, error.message)
    names: dict[type[Exception], str] = {
        ConnectionFailedError: "connection_failed",
        StreamEndedError: "stream_ended",
        ProtocolError: "bad_reply",
    }
    return Failure(names.get(type(error), type(error).__name__), None, str(error))
