"""An uploaded table of prompts on its way to a table of results.

    DoPut -> batches -> RowRunner -> finished rows -> DoGet, in the order of the prompts

It is computed in the background, from the first batch on. When as many results are ready as the table's window
holds, it pauses until they are fetched.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import pyarrow as pa

from jserve.errors import Cancelled, JserveError
from jserve.request import Delta, TokenLogprob
from jserve.serving.flight import outgoing
from jserve.serving.flight.batch import Row, Rows
from jserve.serving.flight.rows import RowRunner
from jserve.serving.grpc.status import public

__all__ = ["Table"]

Result = list[tuple[str, Delta]]
"""A prompt's finished choices, each with the row's id."""


class Table:
    """Belongs to its event loop. ``touched_at`` is when something last happened to it, in monotonic seconds."""

    def __init__(self, runner: RowRunner, rows: Rows, *, window_bytes: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._rows = rows
        self._window_bytes = window_bytes
        self._clock = clock
        self._changed = asyncio.Condition()
        self._batches: deque[tuple[pa.RecordBatch, int]] = deque()
        self._uploading = True
        self._parts: dict[int, _Parts] = {}
        self._results: dict[int, Result] = {}
        self._result_bytes = 0
        self._computed = False
        self._failure: JserveError | None = None
        self.touched_at = clock()
        self.input_bytes = 0
        """Messages kept for rows that have not begun."""
        self.total_rows = 0
        """Rows uploaded so far."""

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
        """Run every row. Cancelling it cancels what runs."""
        self._failure = Cancelled("the table was dropped before all of it was computed")
        try:
            await self._runner.run(self._next_rows(), self._take)
            self._failure = None
        except Exception as error:
            self._failure = public(error)
        finally:
            self._computed = True
            await self._touch()

    def cancel(self) -> bool:
        """End the rows that run now; False where none does."""
        return self._runner.cancel()

    async def results(self, max_bytes: int) -> AsyncIterator[outgoing.Rows]:
        """Each prompt's choices, in the order of the prompts, as soon as they and all before them are done.

        Each item is what is ready, of at most ``max_bytes`` or one prompt. Raises what ended the computing early,
        after the results before it.
        """
        number = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: number in self._results or self._computed)  # noqa: B023
                ready: Result = []
                size = 0
                while (result := self._results.get(number)) is not None:
                    if ready and size + _size(result) > max_bytes:
                        break
                    del self._results[number]
                    number += 1
                    ready += result
                    size += _size(result)
                self._result_bytes -= size
                self._changed.notify_all()
            if not ready:
                break
            yield ready
        if self._failure is not None:
            raise self._failure

    async def _next_rows(self) -> AsyncIterator[Row]:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._batches or not self._uploading)
                if not self._batches:
                    return
                batch, size = self._batches[0]
            for row in self._rows.of(batch):
                async with self._changed:
                    await self._changed.wait_for(lambda: self._result_bytes < self._window_bytes)
                yield row
            self._batches.popleft()
            self.input_bytes -= size

    async def _take(self, row: Row, deltas: Sequence[Delta]) -> None:
        parts = self._parts.setdefault(row.number, _Parts())
        for delta in deltas:
            parts.add(delta)
        if parts.whole:
            result = [(row.id, delta) for delta in self._parts.pop(row.number).joined()]
            self._results[row.number] = result
            self._result_bytes += _size(result)
            await self._touch()

    async def _touch(self) -> None:
        self.touched_at = self._clock()
        async with self._changed:
            self._changed.notify_all()


def _size(result: Result) -> int:
    return sum(outgoing.row_bytes(row_id, delta) for row_id, delta in result)


class _Parts:
    """The deltas of one prompt, choice by choice."""

    def __init__(self) -> None:
        self._choices: dict[int, list[Delta]] = {}
        self._last: Delta | None = None

    @property
    def whole(self) -> bool:
        return self._last is not None

    def add(self, delta: Delta) -> None:
        self._choices.setdefault(delta.index, []).append(delta)
        if delta.usage is not None:
            self._last = delta

    def joined(self) -> list[Delta]:
        """One delta a choice; usage and timings, which are the prompt's, on the first."""
        whole = [_join(self._choices[index]) for index in sorted(self._choices)]
        if self._last is not None:
            whole[0] = dataclasses.replace(whole[0], usage=self._last.usage, timings=self._last.timings)
        return whole


def _join(deltas: Sequence[Delta]) -> Delta:
    logprobs: list[TokenLogprob] | None = None
    for delta in deltas:
        if delta.logprobs is not None:
            logprobs = [*(logprobs or ()), *delta.logprobs]
    return dataclasses.replace(
        deltas[-1],
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=None if logprobs is None else tuple(logprobs),
        usage=None,
        timings=None,
    )
