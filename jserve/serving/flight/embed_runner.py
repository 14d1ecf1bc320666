"""Runs a call's texts on the frontend of an encoder.

    rows -> groups of what is at hand -> EmbedFrontend -> sink(row, [vector]), in the order of the rows

A row that is refused, or fails, has its error for an item, and the others go on. Where the engine's queue is full the
call waits, which holds up its client and nobody else; only a call that has not begun is refused, so that it may go
elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from jserve.errors import Cancelled, Draining, JserveError, QueueFull, RequestError
from jserve.request import Embedding
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.serving.flight.verb import Sink
from jserve.serving.incident import public

__all__ = ["EmbedRunner", "Result", "TextRow"]

_GROUP = 64
"""Most rows that go to the frontend together."""
_ROW_BYTES = 512
"""What a waiting row costs in memory besides its text, rounded up."""


@dataclass(frozen=True, kw_only=True)
class TextRow:
    """One text of a call, or what is wrong with it."""

    number: int
    id: str
    text: str = ""
    error: RequestError | None = None

    @property
    def size(self) -> int:
        return _ROW_BYTES + 4 * len(self.text)


Result: TypeAlias = Embedding | JserveError
"""What comes of one row."""
Outcome: TypeAlias = list[Result] | RequestError
"""One result a row of a group; or why the whole call is refused."""


class EmbedRunner:
    """Implements ``jserve.serving.flight.verb.Runner``. ``width``: most rows begun and not delivered."""

    def __init__(
        self, frontend: EmbedFrontend, *, model: str, width: int, deadline: float | None, patient: bool
    ) -> None:
        self._frontend = frontend
        self._model = model
        self._deadline = deadline
        self._patient = patient
        self._slots = asyncio.Semaphore(width)
        self._gathered: list[TextRow] = []
        """Rows of the group that forms."""
        self._groups: asyncio.Queue[tuple[list[TextRow], asyncio.Task[Outcome]] | None] = asyncio.Queue()
        """Groups in order; None after the last. Bounded by the slots of their rows."""
        self._running: set[asyncio.Task[Outcome]] = set()
        self._begun: set[int] = set()
        self._unwanted: set[int] = set()
        self._cancelled = False
        self._on_idle: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        return not self._begun

    def on_idle(self, callback: Callable[[], None]) -> None:
        self._on_idle = callback

    async def run(self, rows: AsyncIterable[TextRow], sink: Sink) -> None:
        """Raises QueueFull where not even the first row found room, and Draining where the server shuts down: what
        was begun before that is delivered first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._deliver(sink))
                await self._begin(rows, tasks)
        except BaseExceptionGroup as group:
            refusals, rest = group.split(RequestError)
            if refusals is None or rest is not None:
                raise
            raise refusals.exceptions[0] from None

    def cancel(self, number: int | None = None) -> bool:
        """Rows that are not delivered end with Cancelled; without a number all of them, and each that comes later."""
        if number is None:
            self._cancelled = True
            for task in self._running:
                task.cancel()
            return True
        if number in self._begun:
            self._unwanted.add(number)
            return True
        return False

    async def _begin(self, rows: AsyncIterable[TextRow], tasks: asyncio.TaskGroup) -> None:
        """Rows into groups of what is at hand."""
        soon: asyncio.Handle | None = None
        try:
            async for row in rows:
                await self._slots.acquire()
                self._begun.add(row.number)
                self._gathered.append(row)
                if len(self._gathered) == 1:
                    # Called when this task waits next, for then nothing more is at hand.
                    soon = asyncio.get_running_loop().call_soon(self._launch, tasks)
                elif len(self._gathered) == _GROUP:
                    self._launch(tasks)
            self._launch(tasks)
            self._groups.put_nowait(None)
        finally:
            if soon is not None:
                soon.cancel()

    def _launch(self, tasks: asyncio.TaskGroup) -> None:
        group, self._gathered = self._gathered, []
        if group:
            task = tasks.create_task(self._embed(group, patient=self._patient))
            self._patient = True  # the call has begun
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            self._groups.put_nowait((group, task))

    async def _embed(self, group: list[TextRow], *, patient: bool) -> Outcome:
        """Never raises, so that the groups before are delivered whatever befalls this one."""
        good = [row for row in group if row.error is None]
        found: list[Embedding | RequestError] = []
        if good and not self._cancelled:
            try:
                found = await self._frontend.embed_each(
                    [row.text for row in good], model=self._model, deadline=self._deadline, patient=patient
                )
            except (QueueFull, Draining) as error:
                return error
            except Exception as error:  # rows must not take their neighbours down, whatever befalls them
                shown = public(error)
                return [row.error or shown for row in group]
        results = iter(found)
        return [row.error or next(results, _CANCELLED) for row in group]

    async def _deliver(self, sink: Sink) -> None:
        while (taken := await self._groups.get()) is not None:
            group, task = taken
            await asyncio.wait([task])
            outcome = [_CANCELLED] * len(group) if task.cancelled() else task.result()
            if isinstance(outcome, RequestError):
                raise outcome
            for row, result in zip(group, outcome, strict=True):
                await sink(row, [_CANCELLED if row.number in self._unwanted else result])
                self._unwanted.discard(row.number)
                self._begun.discard(row.number)
                self._slots.release()
            if self.idle:
                self._on_idle()


_CANCELLED: Result = Cancelled("the request was cancelled")
