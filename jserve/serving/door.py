"""What both doors are: a port of gRPC's asyncio server, open calls that a drain waits for, and an end."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace

import grpc

from jserve.address import Address
from jserve.config import ServeConfig
from jserve.serving.address import cannot_open, door_address
from jserve.serving.calls import Calls
from jserve.serving.frontends import AnyFrontend
from jserve.serving.loop import LoopThread

__all__ = ["Door", "server_options"]

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""How long statuses of ended calls may take to leave."""


def server_options(*, max_message_bytes: int) -> dict[str, int]:
    return {
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.max_send_message_length": max_message_bytes,
        # Without it a second server on the port would silently take half of the connections.
        "grpc.so_reuseport": 0,
        # Clients may ping every 10 s through a long prefill, with and without open calls (5 s leaves them slack).
        "grpc.http2.min_ping_interval_without_data_ms": 5_000,
        "grpc.keepalive_permit_without_calls": 1,
        # And a client that vanished without a word is noticed, so that its requests end.
        "grpc.keepalive_time_ms": 60_000,
        "grpc.keepalive_timeout_ms": 20_000,
    }


class Door(ABC):
    """Its methods are called from any thread but ``loop``'s: ``start`` once, ``stop`` once.

    ``setting`` is the config's name for its address, such as "grpc_address". Raises ConfigError for an address that
    may not be opened.
    """

    def __init__(
        self, frontend: AnyFrontend, config: ServeConfig, *, setting: str, calls: Calls, loop: LoopThread
    ) -> None:
        self._frontend = frontend
        self._setting = setting
        self._address = door_address(config, setting)
        self._calls = calls
        self._loop = loop

    def start(self) -> str:
        """Open the door; returns its address with its real port. ConfigError where it cannot be opened."""
        return self._loop.run(self._start())

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, let the open ones end within ``grace_s`` seconds, cut the rest, close."""
        self._loop.run(self._stop(grace_s))

    def cut(self) -> None:
        """End the grace of a ``stop`` under way."""
        self._loop.run(self._cut())

    # On the loop's thread

    @abstractmethod
    async def _serve(self) -> grpc.aio.Server:
        """A server with the services of this door, without a port."""

    @abstractmethod
    def _shown(self, address: Address) -> str:
        """An address as the clients of this door take it."""

    async def _end(self) -> None:  # noqa: B027  (most doors have nothing)
        """Let go of what outlives calls, after the last one."""

    async def _start(self) -> str:
        self._server = server = await self._serve()
        address = self._address
        try:
            port = server.add_insecure_port(str(address))
        except RuntimeError:
            await self._end()
            await server.stop(None)
            raise cannot_open(self._setting, address) from None
        await server.start()
        return self._shown(address if address.path else replace(address, port=port))

    async def _stop(self, grace_s: float) -> None:
        self._calls.refuse()
        if not await self._calls.wait_quiet(grace_s):
            log.warning("%s: open calls did not end within the grace of %g s and are cut", self._setting, grace_s)
            self._frontend.abort_all("the server is shutting down and its grace has ended; ask another one")
            await self._calls.wait_quiet(_LAST_WORDS_S)
        await self._cut()
        await self._end()
        await self._server.stop(_LAST_WORDS_S)

    async def _cut(self) -> None:
        self._calls.cut()
