"""Flight's RPCs on asyncio.

    DoExchange    rows in, rows of what is made of them out exchange.py
    DoPut         a table of rows in, a ticket out          table.py, results.py
    DoGet         a ticket in, the table of results out
    ListFlights, GetFlightInfo, GetSchema                   what is served
    DoAction, ListActions                                   actions.py

Calls that compute take a place of ``calls``; the others answer always.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias

import grpc
import pyarrow as pa
from pyarrow import flight

from jserve.errors import DeadlineExceeded, InvalidRequest, MessageTooLarge
from jserve.serving.calls import Calls, Place, deadline_of
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.serving.flight import outgoing
from jserve.serving.flight.actions import Actions
from jserve.serving.flight.command import Command, read_descriptor, read_table, read_ticket, ticket_of
from jserve.serving.flight.embed import EmbedVerb
from jserve.serving.flight.errors import abort
from jserve.serving.flight.exchange import Exchange
from jserve.serving.flight.generate import GenerateVerb
from jserve.serving.flight.info import table_info
from jserve.serving.flight.intake import Intake, Received
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.flight.results import ResultStore
from jserve.serving.flight.table import Table
from jserve.serving.flight.verb import Runner, Verb
from jserve.serving.frontends import AnyFrontend
from jserve.wire.flight import FLIGHT_SERVICE, put_result

__all__ = ["FlightService"]

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_BATCH_OVERHEAD_BYTES = 4096
"""What a batch costs in memory besides its message: arrays and buffers as objects."""


class FlightService(grpc.GenericRpcHandler):
    """The handlers of ``arrow.flight.protocol.FlightService``. Belongs to its event loop."""

    def __init__(
        self,
        frontend: AnyFrontend,
        calls: Calls,
        store: ResultStore,
        *,
        limits: FlightLimits,
        health: Callable[[], str],
    ) -> None:
        self._calls = calls
        self._store = store
        self._limits = limits
        self._verb: Verb = (
            EmbedVerb(frontend, limits) if isinstance(frontend, EmbedFrontend) else GenerateVerb(frontend, limits)
        )
        self._runners: dict[str, Runner] = {}
        self._actions = Actions(frontend, store, self._runners, health=health)
        self._handlers = {
            f"/{FLIGHT_SERVICE}/{name}": handler
            for name, handler in {
                "DoExchange": grpc.stream_stream_rpc_method_handler(self._do_exchange),
                "DoPut": grpc.stream_stream_rpc_method_handler(self._do_put),
                "DoGet": grpc.unary_stream_rpc_method_handler(self._do_get),
                "ListFlights": grpc.unary_stream_rpc_method_handler(self._answering(self._list_flights)),
                "GetFlightInfo": grpc.unary_unary_rpc_method_handler(self._answering_once(self._get_flight_info)),
                "GetSchema": grpc.unary_unary_rpc_method_handler(self._answering_once(self._get_schema)),
                "DoAction": grpc.unary_stream_rpc_method_handler(self._answering(self._actions.do)),
                "ListActions": grpc.unary_stream_rpc_method_handler(self._answering(self._actions.listing)),
            }.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)

    # Calls that compute

    async def _do_exchange(self, messages: AsyncIterator[bytes], context: Context) -> None:
        async with self._calls.place(context) as place, self._intake(messages) as intake:
            with _resting(place):
                descriptor = await intake.descriptor()
            command = self._command(descriptor)
            call_id = _call_id()
            runner = self._verb.runner(command, call_id, deadline=deadline_of(context), patient=False)
            exchange = Exchange(
                self._verb, intake, runner, context.write, call_id=call_id, place=place, limits=self._limits
            )
            self._runners[call_id] = runner
            try:
                await exchange.run(command)
            except ExceptionGroup as group:
                raise _first(group) from group
            finally:
                del self._runners[call_id]

    async def _do_put(self, messages: AsyncIterator[bytes], context: Context) -> None:
        async with self._calls.place(context) as place, self._intake(messages) as intake:
            with _resting(place):
                command = self._command(await intake.descriptor())
                columns = await intake.columns(self._verb.columns)
            if columns is None:
                raise InvalidRequest("the upload ended before its schema; send a table")
            table = Table(
                self._verb.runner(command, _call_id(), deadline=None, patient=True),
                self._verb.rows(columns, command),
                self._verb.output,
                about_input=columns.about_ignored(),
                window_bytes=self._limits.table_window_bytes,
                budget=self._store.budget,
                clock=time.monotonic,
            )
            token = self._store.add(table)
            try:
                await context.write(put_result(ticket_of(token)))
                await self._upload(intake, table, place)
            except BaseException:
                await self._store.drop(token, "is void: its upload did not end well")
                raise

    async def _upload(self, intake: Intake, table: Table, place: Place) -> None:
        total = 0
        batches = intake.batches()
        while (received := await self._next_batch(batches, place)) is not None:
            size = received.size + _BATCH_OVERHEAD_BYTES
            total += size
            if total > self._limits.message_bytes:
                raise MessageTooLarge(
                    f"the table has more than {self._limits.message_bytes} bytes; split it, or stream it with "
                    "DoExchange"
                )
            self._store.check_room(size)
            await table.add(received.batch, size)
        await table.end_upload()

    async def _next_batch(self, batches: AsyncIterator[Received], place: Place) -> Received | None:
        """None after the last. DeadlineExceeded where none comes for too long."""
        limit = self._limits.upload_stall_s
        # A drain may cut an upload between two batches: once it has begun, nobody may come for the table.
        with _resting(place):
            try:
                async with asyncio.timeout(limit):
                    return await anext(batches, None)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the upload brought no batch for {limit:g} s; upload the table again, without such pauses"
                ) from None

    async def _do_get(self, ticket: bytes, context: Context) -> None:
        async with self._calls.place(context) as place:
            token = read_ticket(_ticket_bytes(ticket))
            table = self._store.claim(token)
            why = "was used: its results were fetched, in whole or in part, and are given out once"
            rest = partial(setattr, place, "resting")
            try:
                await context.write(outgoing.schema_bytes(table.schema))
                async for rows in table.results(max_bytes=self._limits.output_bytes, on_starved=rest):
                    # On a worker thread, for one row's results may be far larger than a batch of others.
                    await context.write(await asyncio.to_thread(outgoing.rows_message, self._verb.output, rows))
            finally:
                await self._store.drop(token, why)

    def _intake(self, messages: AsyncIterator[bytes]) -> Intake:
        return Intake(messages, limits=self._limits)

    def _command(self, descriptor: bytes) -> Command:
        command = read_descriptor(descriptor)
        self._verb.check(command)
        return command

    # What is served

    async def _list_flights(self, criteria: bytes) -> AsyncIterator[bytes]:
        yield _serialized(self._verb.info())

    async def _get_flight_info(self, descriptor: bytes) -> bytes:
        token = read_table(descriptor)
        if token is not None:
            return _serialized(table_info(token, self._store.find(token)))
        self._command(descriptor)
        return _serialized(self._verb.info())

    async def _get_schema(self, descriptor: bytes) -> bytes:
        if read_table(descriptor) is None:
            self._command(descriptor)
        return _serialized(flight.SchemaResult(self._verb.output.schema))

    # Calls that only answer

    def _answering(
        self, method: Callable[[bytes], AsyncIterator[bytes]]
    ) -> Callable[[bytes, Context], Awaitable[None]]:
        async def handler(request: bytes, context: Context) -> None:
            try:
                async for answer in method(request):
                    await context.write(answer)
            except grpc.aio.BaseError:
                raise
            except Exception as error:
                await abort(context, error)

        return handler

    def _answering_once(
        self, method: Callable[[bytes], Awaitable[bytes]]
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def handler(request: bytes, context: Context) -> bytes:
            try:
                return await method(request)
            except Exception as error:
                await abort(context, error)

        return handler


class _Serializable(Protocol):
    def serialize(self) -> bytes: ...


def _serialized(message: _Serializable) -> bytes:
    return message.serialize()


@contextmanager
def _resting(place: Place) -> Iterator[None]:
    """While the call waits for its client to send something."""
    place.resting = True
    try:
        yield
    finally:
        place.resting = False


def _ticket_bytes(serialized: bytes) -> bytes:
    try:
        ticket: bytes = flight.Ticket.deserialize(serialized).ticket
    except (pa.ArrowException, OSError):
        raise InvalidRequest("the ticket cannot be read") from None
    return ticket


def _call_id() -> str:
    """Nobody else can guess it, so nobody else can cancel the call's rows."""
    return f"flight-{secrets.token_hex(8)}"


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """One of the errors of a call's tasks; mostly there is but one."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
