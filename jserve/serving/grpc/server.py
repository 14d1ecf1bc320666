"""The gRPC door."""

from __future__ import annotations

import logging
from dataclasses import replace

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jserve.config import ServeConfig
from jserve.errors import ConfigError
from jserve.serving.address import parse_address
from jserve.serving.frontend import Frontend
from jserve.serving.grpc.calls import Calls
from jserve.serving.grpc.decoding import DecodingInterceptor
from jserve.serving.grpc.health import HealthServicer
from jserve.serving.grpc.servicer import InferenceServicer
from jserve.serving.loop import LoopThread
from jserve.v1 import inference_pb2_grpc
from jserve.wire import SERVICE

__all__ = ["GrpcDoor", "server_options"]

log = logging.getLogger(__name__)

MAX_WATCHES = 1024
"""Most health watches at once; they take no places of other calls."""

_LAST_WORDS_S = 1.0
"""How long statuses of ended calls may take to leave."""


def server_options(*, max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Without it a second server on the port would silently take half of the connections.
        ("grpc.so_reuseport", 0),
        # Clients may ping every 10 s through a long prefill, with and without open calls (5 s leaves them slack).
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # And a client that vanished without a word is noticed, so that its requests end.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


class GrpcDoor:
    """jserve.v1.Inference, health and reflection. Its methods are called from any thread but ``loop``'s.

    ``start``, then ``set_serving`` as often as the health changes, then ``stop`` once. Health is NOT_SERVING
    until told. Raises ConfigError for an address that may not be opened.
    """

    def __init__(self, frontend: Frontend, config: ServeConfig, *, loop: LoopThread) -> None:
        self._frontend = frontend
        self._address = parse_address(config.grpc_address, setting="grpc_address", insecure=config.insecure)
        self._max_message_bytes = config.max_message_mb << 20
        self._calls = Calls(config.max_streams)
        self._watches = Calls(MAX_WATCHES)
        self._health = HealthServicer(self._watches)
        self._loop = loop

    def start(self) -> str:
        """Open the door; returns the address with its real port. ConfigError where it cannot be opened."""
        return self._loop.run(self._start())

    def set_serving(self, *, serving: bool) -> None:
        """Tell Check and Watch at once."""
        self._loop.run(self._health.set_serving(serving=serving))

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, let the open ones end within ``grace_s`` seconds, cut the rest, close."""
        self._loop.run(self._stop(grace_s))

    def cut(self) -> None:
        """End the grace of a ``stop`` under way."""
        self._loop.run(self._cut())

    # On the loop's thread

    async def _start(self) -> str:
        options = server_options(max_message_bytes=self._max_message_bytes)
        self._server = server = grpc.aio.server(interceptors=[DecodingInterceptor()], options=options)
        servicer = InferenceServicer(self._frontend, self._calls, max_message_bytes=self._max_message_bytes)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._health.set_serving(serving=False)
        try:
            port = server.add_insecure_port(str(self._address))
        except RuntimeError:
            await server.stop(None)
            raise ConfigError(
                f"grpc_address {self._address} cannot be opened: another program uses it, or this machine lacks it",
                fix="stop that program, or choose another port with --grpc-address (port 0 takes a free one)",
            ) from None
        await server.start()
        return str(self._address if self._address.path else replace(self._address, port=port))

    async def _stop(self, grace_s: float) -> None:
        self._calls.refuse()
        if not await self._calls.wait_quiet(grace_s):
            log.warning("open calls did not end within the grace of %g s and are cut", grace_s)
            self._frontend.abort_all("the server is shutting down and its grace has ended; ask another one")
            await self._calls.wait_quiet(_LAST_WORDS_S)
        await self._cut()
        await self._server.stop(_LAST_WORDS_S)

    async def _cut(self) -> None:
        self._calls.cut()
        self._watches.cut()
