"""Runs a call's rows on the frontend, several at once.

    rows -> open (one after the other) -> at most ``width`` Streams -> sink(row, deltas)

A row that is refused, or fails, gets one last delta with the error, and the others go on. Where the engine's
queue is full the call waits, which holds up its client and nobody else; only a call that has not begun is
refused, so that it may go elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from functools import partial

from jserve.errors import Cancelled, Draining, JserveError, QueueFull, RequestError
from jserve.request import Delta, FinishReason, Timings, Usage
from jserve.serving.flight.batch import PromptRow
from jserve.serving.frontend import Frontend
from jserve.serving.incident import public
from jserve.serving.room import until_room
from jserve.serving.stream import Stream

__all__ = ["RowRunner", "Sink"]

Sink = Callable[[PromptRow, Sequence[Delta]], Awaitable[None]]
"""Takes a row's deltas as they are made; while it waits the row's stream is not read."""


class RowRunner:
    """Implements ``jserve.serving.flight.verb.Runner``.

    ``call_id`` makes the rows' request ids: ``<call_id>-<row>``. ``deadline`` is in monotonic seconds.

    ``patient``: wait for a full queue from the first row on.
    """

    def __init__(
        self, frontend: Frontend, *, call_id: str, model: str, width: int, deadline: float | None, patient: bool
    ) -> None:
        self._frontend = frontend
        self._call_id = call_id
        self._model = model
        self._deadline = deadline
        self._admitted = patient
        self._slots = asyncio.Semaphore(width)
        self._streams: dict[int, Stream] = {}
        self._opening: int | None = None
        """The row whose turn it is, until it runs."""
        self._unwanted: int | None = None
        """The opening row, where it is cancelled."""
        self._cancelled = False
        self._on_idle: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        """No row runs or is about to."""
        return not self._streams and self._opening is None

    def on_idle(self, callback: Callable[[], None]) -> None:
        """Call this whenever the last row that runs has ended."""
        self._on_idle = callback

    def request_id(self, row: PromptRow) -> str:
        return f"{self._call_id}-{row.number}"

    async def run(self, rows: AsyncIterable[PromptRow], sink: Sink) -> None:
        """Until every row has had its last delta. Leaving it early cancels what runs.

        Raises QueueFull where not even the first row found room, and Draining where the server shuts down before
        all rows are begun: those that run are finished first.
        """
        refusal: RequestError | None = None
        async with asyncio.TaskGroup() as tasks:
            async for row in rows:
                self._opening = row.number
                await self._slots.acquire()
                try:
                    stream = await self._open(row)
                except (QueueFull, Draining) as error:
                    refusal = error
                    break
                if isinstance(stream, JserveError):
                    await sink(row, [_failed(row, stream)])
                    self._slots.release()
                else:
                    self._streams[row.number] = stream
                    tasks.create_task(self._pump(row, stream, sink))
                self._opening = None
                # A row that fails at once waits for nothing; 65,000 of them would keep everybody else waiting.
                await asyncio.sleep(0)
        if refusal is not None:
            raise refusal

    def cancel(self, number: int | None = None) -> bool:
        """End one row, or the call's rows: those that run, and each that comes later, with finish_reason cancelled.

        False where the one row neither runs nor is about to.
        """
        if number is None:
            self._cancelled = True
            for stream in self._streams.values():
                stream.cancel()
            return True
        if number in self._streams:
            self._streams[number].cancel()
            return True
        if number == self._opening:
            self._unwanted = number
            return True
        return False

    def _check_wanted(self, row: PromptRow) -> None:
        if self._is_cancelled(row):
            raise Cancelled("the request was cancelled")

    def _is_cancelled(self, row: PromptRow) -> bool:
        return self._cancelled or row.number == self._unwanted

    async def _open(self, row: PromptRow) -> Stream | JserveError:
        """The row's stream, or why it has none. Raises QueueFull and Draining, which are the call's."""
        if row.error is not None:
            return row.error
        submit = partial(
            self._frontend.open,
            row.prompt,
            row.params,
            request_id=self.request_id(row),
            model=self._model,
            deadline=self._deadline,
        )
        check = partial(self._check_wanted, row)
        try:
            check()
            stream = await (until_room(submit, check=check) if self._admitted else submit())
        except (QueueFull, Draining):
            raise
        except Exception as error:  # a row must not take its neighbours down, whatever befalls it
            return public(error)
        self._admitted = True
        if self._is_cancelled(row):
            stream.cancel()
        return stream

    async def _pump(self, row: PromptRow, stream: Stream, sink: Sink) -> None:
        try:
            async for deltas in stream:
                await sink(row, deltas)
        finally:
            stream.cancel()
            del self._streams[row.number]
            self._slots.release()
            if self.idle:
                self._on_idle()


def _failed(row: PromptRow, error: JserveError) -> Delta:
    """The one and last delta of a row that never ran."""
    return Delta(
        request_id=row.id,
        index=0,
        finish_reason=FinishReason.CANCELLED if isinstance(error, Cancelled) else FinishReason.ERROR,
        error=error.message,
        error_code=error.code,
        usage=Usage(prompt_tokens=0, output_tokens=0),
        timings=Timings(queue=0.0, ttft=0.0, total=0.0),
    )
