"""One DoExchange: rows in, rows of what is made of them out, both at the same time.

    messages -> read -> waiting rows -> Runner -> outbox -> write
                        (bounded)                    (bounded)

A client may write many batches before it reads any: they wait as rows. When those are full it is held up; when
it does not read, its rows are. A client that does neither for too long has stopped both for ever, and is told.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from jserve.errors import RequestError, SlowReader
from jserve.serving.calls import Place
from jserve.serving.flight import outgoing
from jserve.serving.flight.command import Command
from jserve.serving.flight.intake import Intake
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.flight.queue import BoundedQueue
from jserve.serving.flight.verb import Row, Runner, Verb

__all__ = ["Exchange", "Write"]

Write = Callable[[bytes], Coroutine[Any, Any, None]]
"""Writes one message; waits while the client is far behind."""

_OUTBOX_ROWS = 65_536
_ROWS_A_TURN = 64
"""Rows converted before other calls get their turn on the loop."""


class Exchange:
    def __init__(
        self,
        verb: Verb,
        intake: Intake,
        runner: Runner,
        write: Write,
        *,
        call_id: str,
        place: Place,
        limits: FlightLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verb = verb
        self._output = verb.output
        self._intake = intake
        self._runner = runner
        self._write_message = write
        self._call_id = call_id
        self._place = place
        self._limits = limits
        self._clock = clock
        self._waiting: BoundedQueue[Row] = BoundedQueue(
            max_bytes=limits.waiting_bytes, max_items=limits.waiting_rows, clock=clock
        )
        self._outbox: BoundedQueue[tuple[str, Any]] = BoundedQueue(
            max_bytes=limits.outbox_bytes, max_items=_OUTBOX_ROWS, clock=clock
        )
        self._pending: asyncio.Future[None] | None = None
        """The write under way, which waits while the client is far behind."""
        self._input_ended = False
        self._about_input: dict[str, list[str]] = {}
        self._refusal: RequestError | None = None

    async def run(self, command: Command) -> None:
        """Until the client has ended its input and has every row's last item.

        Raises what ends the call early, as an ExceptionGroup. Leaving it cancels every row.
        """
        # At once, not with the first row: a client may read the schema before it writes anything.
        await self._write_message(outgoing.schema_bytes(self._output.schema))
        self._runner.on_idle(self._note_rest)
        self._note_rest()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(command))
                tasks.create_task(self._run_rows())
                watch = tasks.create_task(self._watch_stall())
                await self._write()
                watch.cancel()
        except ExceptionGroup:
            await self._let_write_to_its_end()
            raise
        finally:
            if self._pending is not None:
                self._pending.cancel()
                await asyncio.gather(self._pending, return_exceptions=True)

    async def _read(self, command: Command) -> None:
        columns = await self._intake.columns(self._verb.columns)
        if columns is not None:
            self._about_input = columns.about_ignored()
            rows = self._verb.rows(columns, command)
            async for received in self._intake.batches():
                for row in rows.of(received.batch):
                    self._place.resting = False
                    await self._waiting.put(row, row.size)
                    if row.number % _ROWS_A_TURN == 0:
                        await asyncio.sleep(0)
        self._input_ended = True
        self._note_rest()
        await self._waiting.close()

    async def _run_rows(self) -> None:
        try:
            await self._runner.run(self._next_rows(), self._sink)
        except RequestError as refusal:
            self._refusal = refusal
        await self._outbox.close()

    async def _next_rows(self) -> AsyncIterator[Row]:
        while taken := await self._waiting.take(0):
            for row in taken:
                yield row

    async def _sink(self, row: Row, items: Sequence[Any]) -> None:
        output = self._output
        for item in items:
            for piece in output.pieces(row.id, item, self._limits.output_bytes):
                weight = output.message_bytes(row.id, piece)
                await self._outbox.put((row.id, piece), output.held_bytes(piece), weight=weight)

    async def _write(self) -> None:
        """All rows that are there in one batch, as often as the client takes one."""
        metadata: dict[str, object] = {"call": self._call_id}
        while rows := await self._outbox.take(self._limits.output_bytes):
            about = json.dumps(metadata | self._about_input).encode() if metadata else b""
            message = outgoing.rows_message(self._output, rows, metadata=about)
            self._pending = asyncio.ensure_future(self._write_message(message))
            await asyncio.shield(self._pending)
            metadata = {}
            self._note_rest()
        if self._refusal is not None:
            raise self._refusal

    async def _let_write_to_its_end(self) -> None:
        """Before an error: its status goes out behind what is written.

        A client that reads takes both. One that wants to write everything first reads only when that is taken from
        it: until it reads, or has ended, what it writes is thrown away.
        """
        if self._pending is not None and not self._pending.done():
            self._place.resting = True
            discarding = asyncio.create_task(self._intake.discard())
            try:
                await asyncio.wait([self._pending, discarding], return_when=asyncio.FIRST_COMPLETED)
            finally:
                discarding.cancel()
                await asyncio.gather(discarding, return_exceptions=True)

    def _note_rest(self) -> None:
        """A call that waits for its client to send more need not hold up a drain."""
        self._place.resting = not (self._input_ended or self._waiting or self._outbox) and self._runner.idle

    async def _watch_stall(self) -> None:
        limit = self._limits.stall_s
        while True:
            await asyncio.sleep(limit / 4)
            # Rows wait to be written since long, and the client waits to write: neither will ever move.
            if self._waiting.blocked and self._outbox.blocked and self._clock() - self._outbox.taken_at > limit:
                raise SlowReader(
                    f"nothing was read for {limit:g} s while {len(self._waiting)} rows wait to be run: read the "
                    "results while you write, or write fewer rows a call"
                )
