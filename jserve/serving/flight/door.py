"""The Flight door: opens a port for the Flight service and closes it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import grpc

from jserve.config import ServeConfig
from jserve.errors import ConfigError
from jserve.serving.address import parse_address
from jserve.serving.flight.errors import abort
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.flight.results import ResultStore
from jserve.serving.flight.service import FlightService
from jserve.serving.frontend import Frontend
from jserve.serving.grpc.calls import Calls
from jserve.serving.grpc.server import server_options
from jserve.serving.loop import LoopThread

__all__ = ["FlightDoor"]

log = logging.getLogger(__name__)

_SWEEP_S = 5.0
"""How often expired tables are looked for, at most."""

_LAST_WORDS_S = 1.0
"""How long statuses of ended calls may take to leave."""


class FlightDoor:
    """Arrow Flight on gRPC. Its methods are called from any thread but ``loop``'s: ``start`` once, ``stop`` once.

    ``health`` is asked for the action of that name; such as "serving". Raises ConfigError for an address that may
    not be opened.
    """

    def __init__(
        self,
        frontend: Frontend,
        config: ServeConfig,
        *,
        loop: LoopThread,
        health: Callable[[], str],
        limits: FlightLimits | None = None,
    ) -> None:
        self._address = parse_address(config.flight_address, setting="flight_address", insecure=config.insecure)
        self._limits = limits or FlightLimits.from_config(config)
        self._calls = Calls(self._limits.max_calls, abort=abort)
        self._store = ResultStore(self._limits, clock=time.monotonic)
        self._service = FlightService(frontend, self._calls, self._store, limits=self._limits, health=health)
        self._frontend = frontend
        self._loop = loop

    def start(self) -> str:
        """Open the door; returns its location, such as grpc://127.0.0.1:7471. ConfigError where it cannot be."""
        return self._loop.run(self._start())

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, let the open ones end within ``grace_s`` seconds, cut the rest, close.

        Tables whose results nobody fetched are dropped.
        """
        self._loop.run(self._stop(grace_s))

    def cut(self) -> None:
        """End the grace of a ``stop`` under way."""
        self._loop.run(self._cut())

    # On the loop's thread

    async def _start(self) -> str:
        # Twice the limit, so that a message over it is mostly still read, and refused in words; beyond that gRPC ends
        # the call by itself. What is sent has no limit: a table's row is never split, however long.
        options = dict(server_options(max_message_bytes=2 * self._limits.message_bytes))
        options["grpc.max_send_message_length"] = -1
        self._server = server = grpc.aio.server(options=list(options.items()))
        server.add_generic_rpc_handlers((self._service,))
        address = self._address
        try:
            port = server.add_insecure_port(str(address))
        except RuntimeError:
            await server.stop(None)
            raise ConfigError(
                f"flight_address {address} cannot be opened: another program uses it, or this machine lacks it",
                fix="stop that program, or choose another port with --flight-address (port 0 takes a free one)",
            ) from None
        await server.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="jserve-flight-sweep")
        return f"grpc+unix://{address.path}" if address.path else f"grpc://{replace(address, port=port)}"

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._limits.table_ttl_s / 4))
            await self._store.sweep()

    async def _stop(self, grace_s: float) -> None:
        self._calls.refuse()
        if not await self._calls.wait_quiet(grace_s):
            log.warning("open Flight calls did not end within the grace of %g s and are cut", grace_s)
            self._frontend.abort_all("the server is shutting down and its grace has ended; ask another one")
            await self._calls.wait_quiet(_LAST_WORDS_S)
        await self._cut()
        self._sweeper.cancel()
        await asyncio.wait([self._sweeper])
        await self._store.close()
        await self._server.stop(_LAST_WORDS_S)

    async def _cut(self) -> None:
        self._calls.cut()
