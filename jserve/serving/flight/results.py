"""The tables that wait to be fetched: few, bounded in bytes, each for one DoGet and a limited time."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable

from jserve.errors import NotFound, QueueFull
from jserve.serving.flight.budget import ResultsBudget
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.flight.table import Table

__all__ = ["ResultStore"]

log = logging.getLogger(__name__)

_REMEMBERED = 1024
"""Tickets that are gone and of which it is still known why."""


class ResultStore:
    """Tables by token. A token is 256 random bits: who has it may fetch the results, once.

    Belongs to its event loop. ``clock`` is monotonic seconds.
    """

    def __init__(self, limits: FlightLimits, *, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._tables: dict[str, Table] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._fetching: set[str] = set()
        self._gone: OrderedDict[str, str] = OrderedDict()
        self.budget = ResultsBudget(limits.results_bytes)
        """Of the tables' results; every table that is added must count in it."""

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def input_bytes(self) -> int:
        return sum(table.input_bytes for table in self._tables.values())

    def add(self, table: Table) -> str:
        """Keep a table and begin to compute it; returns its token. QueueFull where too many are kept."""
        if len(self._tables) >= self._limits.max_tables:
            raise QueueFull(
                f"{len(self._tables)} tables wait to be fetched and no more may; fetch them, or try again later",
                retry_after_s=10.0,
            )
        token = secrets.token_urlsafe(32)
        self._tables[token] = table
        self._tasks[token] = asyncio.create_task(table.compute(), name="jserve-flight-table")
        return token

    def check_room(self, size: int) -> None:
        """QueueFull where so many bytes more would be too many over all tables."""
        if self.input_bytes + size > self._limits.tables_bytes:
            raise QueueFull(
                f"uploaded tables may have {self._limits.tables_bytes} bytes together and this one would exceed it; "
                "try again later",
                retry_after_s=10.0,
            )

    def claim(self, token: str) -> Table:
        """The table, for its one DoGet. NotFound says why there is none."""
        table = self.find(token)
        if token in self._fetching:
            raise NotFound("this ticket is being fetched by another call; a ticket is good for one DoGet")
        self._fetching.add(token)
        return table

    def find(self, token: str) -> Table:
        """The table, to describe it. NotFound says why there is none."""
        table = self._tables.get(token)
        if table is None:
            why = self._gone.get(token, "is not known here: it is wrong, or long gone")
            raise NotFound(_gone_words(why))
        return table

    async def drop(self, token: str, why: str) -> None:
        """Forget a table and end what it computes. ``why`` completes "this ticket ..."."""
        table = self._tables.pop(token, None)
        self._fetching.discard(token)
        task = self._tasks.pop(token, None)
        if table is None or task is None:
            return
        self._gone[token] = why
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            log.error("computing a table failed", exc_info=task.exception())
        await table.discard(NotFound(_gone_words(why)))

    async def sweep(self) -> None:
        """Drop the tables to which nothing happened for too long. Uploads have a limit of their own."""
        ttl = self._limits.table_ttl_s
        for token, table in list(self._tables.items()):
            if token in self._fetching:
                since, what = table.given_at, "reads nothing of what it fetches"
            else:
                since, what = None if table.uploading else table.touched_at, "does not fetch it"
            if since is not None and self._clock() - since > ttl:
                log.info("a table of %d rows is dropped: for %g s its client %s", table.total_rows, ttl, what)
                await self.drop(token, f"has expired: for {ttl:g} s its client {what}")

    async def close(self) -> None:
        for token in list(self._tables):
            await self.drop(token, "is gone: the server shut down")


def _gone_words(why: str) -> str:
    return f"this ticket {why}; upload the table again with DoPut"
