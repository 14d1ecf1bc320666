"""The Flight door."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc

from jserve.address import Address
from jserve.config import ServeConfig
from jserve.serving.calls import Calls
from jserve.serving.door import Door, server_options
from jserve.serving.flight.errors import abort
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.flight.results import ResultStore
from jserve.serving.flight.service import FlightService
from jserve.serving.frontends import AnyFrontend
from jserve.serving.loop import LoopThread

__all__ = ["FlightDoor"]

_SWEEP_S = 5.0
"""How often expired tables are looked for, at most."""

_GRPC_BYTES = 2**31 - 1
"""Largest message that gRPC may be asked for."""


class FlightDoor(Door):
    """Arrow Flight on gRPC. ``stop`` drops tables whose results nobody fetched.

    ``health`` is asked for the action of that name; such as "serving".
    """

    def __init__(
        self,
        frontend: AnyFrontend,
        config: ServeConfig,
        *,
        loop: LoopThread,
        health: Callable[[], str],
        limits: FlightLimits | None = None,
    ) -> None:
        self._limits = limits or FlightLimits.from_config(config)
        calls = Calls(self._limits.max_calls, abort=abort)
        super().__init__(frontend, config, setting="flight_address", calls=calls, loop=loop)
        self._store = ResultStore(self._limits, clock=time.monotonic)
        self._service = FlightService(frontend, calls, self._store, limits=self._limits, health=health)

    # On the loop's thread

    async def _serve(self) -> grpc.aio.Server:
        # Twice the limit, so that a message over it is mostly still read, and refused in words; beyond that gRPC ends
        # the call by itself. What is sent has no limit: a table's row is never split, however long.
        options = server_options(max_message_bytes=min(2 * self._limits.message_bytes, _GRPC_BYTES))
        options["grpc.max_send_message_length"] = -1
        server = grpc.aio.server(options=list(options.items()))
        server.add_generic_rpc_handlers((self._service,))
        self._sweeper = asyncio.create_task(self._sweep(), name="jserve-flight-sweep")
        return server

    def _shown(self, address: Address) -> str:
        """A Flight location, such as grpc://127.0.0.1:7471."""
        return f"grpc+unix://{address.path}" if address.path else f"grpc://{address}"

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._limits.table_ttl_s / 4))
            await self._store.sweep()

    async def _end(self) -> None:
        self._sweeper.cancel()
        await asyncio.wait([self._sweeper])
        await self._store.close()
