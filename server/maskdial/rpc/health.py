"""HealthService: gRPC's health checks, as Kubernetes' probes make them
(https://github.com/grpc/grpc/blob/master/doc/health-checking.md).
"""

from collections.abc import Awaitable, Callable, Collection, Mapping

from maskdial.errors import shortened
from maskdial.rpc.asker import Asker
from maskdial.rpc.call import Call
from maskdial.rpc.calls import CallError
from maskdial.rpc.schema import Schema

HEALTH = "grpc.health.v1.Health"
CHECK = f"/{HEALTH}/Check"
"""The method that needs no key, as the routes of health."""
_SERVING, _NOT_SERVING = 1, 2

SCHEMA = Schema(
    "grpc.health.v1",
    {
        "HealthCheckRequest": {"service": (1, "string")},
        "HealthCheckResponse": {"status": (1, "ServingStatus")},
    },
    enumerations={"ServingStatus": ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")},
)


class HealthService:
    """``Health``, without `Watch`: a client takes that for a service that is well, as the protocol
    says, and a stream without a key would hold a place of the server for as long as it likes.

    Args:
        asker: asks the application.
        services: those that may be asked about by name; all are as the server is.
    """

    def __init__(self, asker: Asker, services: Collection[str]) -> None:
        self._asker = asker
        self._services = frozenset(services)

    @property
    def methods(self) -> Mapping[str, Callable[[Call], Awaitable[None]]]:
        """What answers a call, by its path."""
        return {CHECK: self._check}

    async def _check(self, call: Call) -> None:
        asked = SCHEMA.read(await call.read_only(), "HealthCheckRequest").service
        if asked and asked not in self._services:
            raise CallError(404, f"there is no service {shortened(asked)}")
        reply = await self._asker.get("/health/ready", call)
        status = _SERVING if reply.status == 200 else _NOT_SERVING
        await call.write(SCHEMA.message("HealthCheckResponse")(status=status).SerializeToString())
