"""What a client sends over one DoExchange or DoPut: a descriptor, a schema, then batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType

import pyarrow as pa

from jserve.errors import InvalidRequest, MessageTooLarge
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.flight.schema import Columns
from jserve.wire.flight import FlightData
from jserve.wire.ipc import BatchReader

__all__ = ["Intake", "Received"]

_INLINE_BYTES = 64 << 10
"""Larger messages are decoded on a worker thread, so that the door's loop goes on."""


@dataclass(frozen=True, kw_only=True)
class Received:
    batch: pa.RecordBatch
    size: int
    """Bytes of the messages that the batch's buffers keep alive: its own, and the dictionaries that came before it."""


class Intake:
    """Reads one call's messages, in this order: ``descriptor``, ``columns``, ``batches``.

    Raises InvalidRequest, MessageTooLarge and Unsupported for what a client may not send; a bad message ends
    the call. Use it as a context manager.
    """

    def __init__(self, messages: AsyncIterator[bytes], *, limits: FlightLimits) -> None:
        self._messages = messages
        self._limits = limits
        self._reader = BatchReader(max_rows=limits.batch_rows, max_dictionary_bytes=limits.dictionary_bytes)
        self._first: FlightData | None = None
        self._reading: asyncio.Future[bytes | None] | None = None
        """The read under way. Whoever waits for it may be cancelled; gRPC's stream would not outlive that."""

    async def __aenter__(self) -> Intake:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def descriptor(self) -> bytes:
        """The serialized descriptor, from the first message; empty where the client sent none."""
        self._first, _ = await self._next() or (FlightData(), 0)
        return self._first.descriptor

    async def columns(self, read: Callable[[pa.Schema], Columns]) -> Columns | None:
        """The schema's columns that ``read`` knows; None where the client ended without a schema.

        Messages with metadata only may come before.
        """
        message = self._first
        while message is not None and not message.header:
            if message.body:
                raise InvalidRequest("a message has a body and no Arrow header")
            message, _ = await self._next() or (None, 0)
        if message is None:
            return None
        schema = self._reader.schema(message)
        if len(schema) > self._limits.columns:
            raise InvalidRequest(f"the schema has {len(schema)} columns; at most {self._limits.columns} are allowed")
        columns = read(schema)
        self._reader.open(message, columns.indices)
        return columns

    async def batches(self) -> AsyncIterator[Received]:
        """Validated batches of the known columns."""
        size = 0
        while received := await self._next():
            message, message_bytes = received
            if not message.header:
                continue
            size += message_bytes
            if size > _INLINE_BYTES:
                batch = await asyncio.to_thread(self._reader.read, message)
            else:
                batch = self._reader.read(message)
            if batch is not None:
                yield Received(batch=batch, size=size)
                size = 0

    async def discard(self) -> None:
        """Read to the end and keep nothing."""
        while await self._read() is not None:
            pass

    async def _next(self) -> tuple[FlightData, int] | None:
        """The next message and its size in bytes."""
        message = await self._read()
        if message is None:
            return None
        if len(message) > self._limits.message_bytes:
            raise MessageTooLarge(
                f"a message has {len(message)} bytes; at most {self._limits.message_bytes} are taken: send smaller "
                "batches"
            )
        return FlightData.parse(message), len(message)

    async def _read(self) -> bytes | None:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._anext())
        message = await asyncio.shield(self._reading)
        self._reading = None
        return message

    async def _anext(self) -> bytes | None:
        return await anext(self._messages, None)
