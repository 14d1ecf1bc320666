"""An uploaded table of rows on its way to a table of results.

    DoPut -> batches -> Runner -> finished rows -> DoGet, in the order of the upload

It is computed in the background, from the first batch on. When as many results are held as the table's window
allows, or all tables together may, it begins no more rows until some are fetched. The row that a fetch waits for is
never held up by that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from jserve.errors import JserveError
from jserve.serving.flight.budget import ResultsBudget
from jserve.serving.flight.verb import Output, Parts, Row, Rows, Runner
from jserve.serving.incident import public

__all__ = ["Table"]


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What came of an uploaded row."""

    rows: list[tuple[str, Any]]
    size: int
    """Bytes in a message."""
    held: int
    """Bytes in memory."""

    @classmethod
    def of(cls, rows: list[tuple[str, Any]], output: Output[Any]) -> _Result:
        size = sum(output.message_bytes(row_id, item) for row_id, item in rows)
        return cls(rows=rows, size=size, held=sum(output.held_bytes(item) for _, item in rows))


class Table:
    """Belongs to its event loop. ``touched_at`` is when something last happened to it, in monotonic seconds."""

    def __init__(
        self,
        runner: Runner,
        rows: Rows,
        output: Output[Any],
        *,
        about_input: Mapping[str, object],
        window_bytes: int,
        budget: ResultsBudget,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._output = output
        self.about_input = about_input
        """What the table's info says of the columns that came."""
        self._window_bytes = window_bytes
        self._budget = budget
        self._clock = clock
        self._changed = asyncio.Condition()
        self._batches: deque[tuple[pa.RecordBatch, int]] = deque()
        self._uploading = True
        self._parts: dict[int, Parts[Any]] = {}
        self._results: dict[int, _Result] = {}
        self._held_bytes = 0
        """Of results, and of parts of them, in memory."""
        self._begun = 0
        """Rows given to the runner."""
        self._fetched = 0
        """Rows whose results were given out."""
        self._computed = False
        self._failure: JserveError | None = None
        self.touched_at = clock()
        self.given_at: float | None = None
        """When the results were given out that the fetch still writes; None while it waits for more."""
        self.input_bytes = 0
        """Messages kept for rows that have not begun."""
        self.total_rows = 0
        """Rows uploaded so far."""

    @property
    def schema(self) -> pa.Schema:
        """Of the results."""
        return self._output.schema

    @property
    def uploading(self) -> bool:
        return self._uploading

    async def add(self, batch: pa.RecordBatch, size: int) -> None:
        """Append a batch that keeps ``size`` bytes alive."""
        self._batches.append((batch, size))
        self.input_bytes += size
        self.total_rows += batch.num_rows
        await self._touch()

    async def end_upload(self) -> None:
        self._uploading = False
        await self._touch()

    async def compute(self) -> None:
        """Run every row. Cancelling it cancels what runs; ``discard`` must follow."""
        try:
            await self._runner.run(self._next_rows(), self._take)
        except Exception as error:
            self._failure = public(error)
        self._computed = True
        await self._touch()

    async def discard(self, error: JserveError) -> None:
        """Hold nothing any more. What is computed of it must have ended; a fetch under way ends with ``error``."""
        self._batches.clear()
        self._parts.clear()
        self._results.clear()
        self.input_bytes = 0
        self._computed, self._failure = True, error
        await self._hold(-self._held_bytes)
        await self._touch()

    async def results(
        self, max_bytes: int, *, on_starved: Callable[[bool], None]
    ) -> AsyncIterator[list[tuple[str, Any]]]:
        """Each row's results, in the order of the upload, as soon as they and all before them are done.

        Each item is what is ready, of at most ``max_bytes`` or of one row. ``on_starved`` hears whether the fetch
        waits for nothing but more of the upload. Raises what ended the computing early, after the results before it.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(partial(self._is_next_done, on_starved))
                ready: list[tuple[str, Any]] = []
                size = held = 0
                while (result := self._results.get(self._fetched)) is not None:
                    if ready and size + result.size > max_bytes:
                        break
                    del self._results[self._fetched]
                    self._fetched += 1
                    ready += result.rows
                    size += result.size
                    held += result.held
                self._changed.notify_all()
            await self._hold(-held)
            if not ready:
                break
            self.given_at = self._clock()
            yield ready
            self.given_at = None
        if self._failure is not None:
            raise self._failure

    def _is_next_done(self, on_starved: Callable[[bool], None]) -> bool:
        on_starved(self._uploading and self._fetched == self.total_rows)
        return self._fetched in self._results or self._computed

    async def _next_rows(self) -> AsyncIterator[Row]:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._batches or not self._uploading)
                if not self._batches:
                    return
                batch, size = self._batches[0]
            for row in self._rows.of(batch):
                async with self._changed:
                    await self._changed.wait_for(self._may_begin)
                self._begun += 1
                yield row
            self._batches.popleft()
            self.input_bytes -= size

    def _may_begin(self) -> bool:
        if self._begun == self._fetched:
            return True
        if self._budget.full:
            self._budget.wait(self._notify)
            return False
        return self._held_bytes < self._window_bytes

    async def _take(self, row: Row, items: Sequence[Any]) -> None:
        parts = self._parts.get(row.number)
        if parts is None:
            parts = self._parts[row.number] = self._output.parts(row.id)
        before = parts.held
        for item in items:
            parts.add(item)
        if not parts.whole:
            await self._hold(parts.held - before)
            return
        del self._parts[row.number]
        result = self._results[row.number] = _Result.of(parts.joined(), self._output)
        await self._hold(result.held - before)
        await self._touch()

    async def _hold(self, size: int) -> None:
        """Count ``size`` bytes more of results; less where it is negative."""
        self._held_bytes += size
        await self._budget.add(size)

    async def _touch(self) -> None:
        self.touched_at = self._clock()
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
