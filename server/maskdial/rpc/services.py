"""Services: everything that can be called."""

from collections.abc import Awaitable, Callable, Mapping

from maskdial.errors import UnauthorizedError, shortened
from maskdial.http.in_process import InProcess, scope_of
from maskdial.http.keys import Keys
from maskdial.rpc.asker import Asker, error_of, headers
from maskdial.rpc.call import Call
from maskdial.rpc.calls import CallError
from maskdial.rpc.health import CHECK, HealthService
from maskdial.rpc.reflection import ReflectionService
from maskdial.rpc.service import InferenceService
from maskdial.rpc.tei import EmbeddingsService

_METADATA = "/v2"

Method = Callable[[Call], Awaitable[None]]


class Services:
    """The services over an application: KServe's and text-embeddings-inference's, and gRPC's own of
    health and reflection.

    Args:
        application: answers the requests.
        keys: which are asked for before a message is taken.
        max_bytes: of the messages of a stream that are held at once.
    """

    def __init__(self, application: InProcess, keys: Keys, max_bytes: int) -> None:
        self._keys = keys
        self._asker, reflection = Asker(application), ReflectionService()
        self._methods: Mapping[str, Method] = {
            **InferenceService(self._asker).methods,
            **EmbeddingsService(self._asker, max_bytes).methods,
            **HealthService(self._asker, reflection.services).methods,
            **reflection.methods,
        }

    async def check(self, call: Call) -> None:
        """Refuses a call without a key, unless it asks for the server's health.

        Raises:
            CallError: it has none, or a wrong one.
        """
        if call.path == CHECK:
            return
        try:
            self._keys.check(scope_of("POST", _METADATA, headers(call)), _METADATA)
        except UnauthorizedError:  # which the application counts, logs and words
            raise error_of(await self._asker.get(_METADATA, call)) from None

    async def answer(self, call: Call) -> None:
        """Answers a call.

        Raises:
            CallError: it cannot be answered.
        """
        method = self._methods.get(call.path)
        if method is None:
            raise CallError(501, f"there is no method {shortened(call.path)}")
        await method(call)
