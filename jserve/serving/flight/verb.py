"""What a Flight call of one kind of model is made of, so that streams and tables are written once.

generate.py   prompts in, deltas out
embed.py      texts in, vectors out
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import pyarrow as pa
from pyarrow import flight

from jserve.serving.flight.command import Command
from jserve.serving.flight.schema import Columns

__all__ = ["Output", "Parts", "Row", "Rows", "Runner", "Sink", "Verb"]

Item = TypeVar("Item")


class Row(Protocol):
    """One row of a call's input, or what is wrong with it."""

    @property
    def number(self) -> int:
        """In the call, from 0, over all batches."""
        ...

    @property
    def id(self) -> str:
        """What the client calls it; else its number."""
        ...

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        ...


class Rows(Protocol):
    """Turns one call's batches into rows."""

    def of(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """The batch's rows, each converted when it is asked for."""
        ...


Sink: TypeAlias = Callable[[Any, Sequence[Any]], Awaitable[None]]
"""Takes a row's items as they are made; while it waits no more are made of it."""


class Runner(Protocol):
    """Runs a call's rows on the frontend, several at once."""

    @property
    def idle(self) -> bool:
        """No row runs or is about to."""
        ...

    def on_idle(self, callback: Callable[[], None]) -> None:
        """Call this whenever the last row that runs has ended."""
        ...

    async def run(self, rows: AsyncIterable[Any], sink: Sink) -> None:
        """Until every row has had its last item. Leaving it early cancels what runs. A row that fails has an item
        that says so; what is raised befell the call."""
        ...

    def cancel(self, number: int | None = None) -> bool:
        """End one row, or the call's rows. False where the one row neither runs nor is about to."""
        ...


class Parts(Protocol[Item]):
    """What came of one row so far."""

    held: int
    """Bytes in memory."""

    @property
    def whole(self) -> bool: ...
    def add(self, item: Item) -> None: ...
    def joined(self) -> list[tuple[str, Item]]:
        """As the rows of a table of results."""
        ...


class Output(Protocol[Item]):
    """Items as rows of Arrow."""

    schema: pa.Schema

    def held_bytes(self, item: Item) -> int:
        """What an item takes in memory, about."""
        ...

    def message_bytes(self, row_id: str, item: Item) -> int:
        """What an item takes in a message, at most."""
        ...

    def pieces(self, row_id: str, item: Item, max_bytes: int) -> Iterator[Item]:
        """The item, or several that say the same joined, each of at most ``max_bytes`` where it can be cut."""
        ...

    def batch(self, rows: Sequence[tuple[str, Item]]) -> pa.RecordBatch:
        """Items with the ids of their rows."""
        ...

    def parts(self, row_id: str) -> Parts[Item]: ...


class Verb(Protocol):
    """What is done with rows. Belongs to one frontend."""

    output: Output[Any]

    def check(self, command: Command) -> None:
        """Raise NotFound, Unsupported or InvalidRequest for what is not done here."""
        ...

    def columns(self, schema: pa.Schema) -> Columns:
        """The columns that are known, of a client's schema."""
        ...

    def rows(self, columns: Columns, command: Command) -> Rows: ...

    def runner(self, command: Command, call_id: str, *, deadline: float | None, patient: bool) -> Runner:
        """``patient``: wait for a full queue from the first row on."""
        ...

    def info(self) -> flight.FlightInfo:
        """The one flight. How to call it stands in its metadata; there is no endpoint before a DoPut."""
        ...
