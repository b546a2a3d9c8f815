"""RpcServer: the listener for gRPC, in the event loop of the server."""

import logging
from pathlib import Path

import grpc
import grpc.aio

from maskdial.config import Config
from maskdial.errors import ConfigError
from maskdial.http.in_process import InProcess
from maskdial.rpc.service import InferenceService

_MESSAGE_BYTES = 65_536  # of a message beside its tensors
_log = logging.getLogger("maskdial")


class RpcServer:
    """Serves ``GRPCInferenceService`` until it is stopped.

    Args:
        application: answers the calls.
        config: has the address, the port, the certificate and the limit of bodies.
    """

    def __init__(self, application: InProcess, config: Config) -> None:
        self._config = config
        self._service = InferenceService(application)
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """Which it listens on, once it does."""

    async def start(self) -> None:
        """Begins to listen.

        Raises:
            ConfigError: it cannot, at this address.
        """
        config = self._config
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", config.max_body_bytes + _MESSAGE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=config.max_connections,
        )
        self._server.add_generic_rpc_handlers((self._service.handler(),))
        host, port = config.host, config.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if config.ssl_certfile is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._credentials())
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"cannot listen for gRPC on {address}: {error}") from error
        await self._server.start()
        _log.info("listening on grpc://%s:%d", host, self.port)

    async def stop(self, grace: float) -> None:
        """Refuses new calls, and ends the others after some seconds."""
        if self._server is not None:
            await self._server.stop(grace)

    def _credentials(self) -> grpc.ServerCredentials:
        assert self._config.ssl_certfile is not None
        return grpc.dynamic_ssl_server_credentials(self._certificate(), self._certificate_now)

    def _certificate(self) -> "grpc.ServerCertificateConfiguration":
        certificate = self._config.ssl_certfile
        assert certificate is not None
        key = self._config.ssl_keyfile or certificate
        return grpc.ssl_server_certificate_configuration(
            [(Path(key).read_bytes(), Path(certificate).read_bytes())]
        )

    def _certificate_now(self) -> "grpc.ServerCertificateConfiguration | None":
        """The files as they are for a new connection; None if they cannot be read."""
        try:
            return self._certificate()
        except (OSError, ValueError):
            return None
