"""Embedding: texts in, one vector a text out, in the order of the texts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import flight

from jserve.errors import InvalidRequest, JserveError, RequestError
from jserve.request import Embedding
from jserve.serving.embed_frontend import EmbedFrontend
from jserve.serving.embed_texts import MAX_TEXT_BYTES
from jserve.serving.flight.command import Command
from jserve.serving.flight.embed_runner import EmbedRunner, Result, TextRow
from jserve.serving.flight.info import verb_info
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.flight.schema import Column, Columns, is_null, read_text_schema
from jserve.serving.flight.verb import Output, Parts, Rows, Runner
from jserve.serving.frontends import need_generator
from jserve.wire.embeddings import embeddings_schema, embeddings_to_batch

__all__ = ["EmbedVerb"]

_NUMBERS_BYTES = 128
"""What a row takes besides its id, its words and its vector: offsets, bitmaps, numbers."""


class EmbedVerb:
    """Implements ``jserve.serving.flight.verb.Verb``."""

    def __init__(self, frontend: EmbedFrontend, limits: FlightLimits) -> None:
        self._frontend = frontend
        self._limits = limits
        self.output: Output[Result] = EmbeddingOutput(frontend.model.dimensions)

    def check(self, command: Command) -> None:
        if command.verb != "embed":
            need_generator(self._frontend)
        self._frontend.check_model(command.model)

    def columns(self, schema: pa.Schema) -> Columns:
        return read_text_schema(schema, max_bytes=MAX_TEXT_BYTES)

    def rows(self, columns: Columns, command: Command) -> Rows:
        del command
        return TextRows(columns)

    def runner(self, command: Command, call_id: str, *, deadline: float | None, patient: bool) -> Runner:
        del call_id  # the rows' ids in the engine are the frontend's own
        return EmbedRunner(
            self._frontend, model=command.model, width=self._limits.texts_in_flight, deadline=deadline, patient=patient
        )

    def info(self) -> flight.FlightInfo:
        about = {
            "model": dataclasses.asdict(self._frontend.model),
            "methods": ["DoExchange", "DoPut"],
            "input_columns": {"text": "string", "id": "string"},
        }
        return verb_info("embed", self._frontend.model, self.output.schema, about)


class TextRows:
    """Turns one call's batches into rows."""

    def __init__(self, columns: Columns) -> None:
        # Batches hold the known columns only, in the order of the client's schema.
        order = {index: place for place, index in enumerate(columns.indices)}
        places = {name: (order[column.index], column) for name, column in columns.known.items()}
        self._text, self._id = places.get("text"), places.get("id")
        self._count = 0

    def of(self, batch: pa.RecordBatch) -> Iterator[TextRow]:
        arrays = batch.columns
        for at in range(batch.num_rows):
            number, self._count = self._count, self._count + 1
            yield self._row(arrays, at, number)

    def _row(self, arrays: list[pa.Array], at: int, number: int) -> TextRow:
        row_id = str(number)
        try:
            row_id = _cell(self._id, arrays, at) or row_id
            text = _cell(self._text, arrays, at)
            if text is None:
                raise InvalidRequest("text is null; the row has nothing to embed")
        except RequestError as error:
            return TextRow(number=number, id=row_id, error=error)
        return TextRow(number=number, id=row_id, text=text)


def _cell(place: tuple[int, Column] | None, arrays: list[pa.Array], at: int) -> str | None:
    if place is None:
        return None
    cell = arrays[place[0]][at]
    return None if is_null(cell) else place[1].value(cell)


class EmbeddingOutput:
    """Implements ``jserve.serving.flight.verb.Output``: one item a row, never cut."""

    def __init__(self, dimensions: int) -> None:
        self.schema = embeddings_schema(dimensions)
        self._dimensions = dimensions

    def held_bytes(self, item: Result) -> int:
        return _NUMBERS_BYTES + (
            item.values.nbytes + sys.getsizeof(item) if isinstance(item, Embedding) else sys.getsizeof(item.message)
        )

    def message_bytes(self, row_id: str, item: Result) -> int:
        words = len(row_id) + (len(item.message) if isinstance(item, JserveError) else 0)
        return _NUMBERS_BYTES + 4 * (words + self._dimensions)

    def pieces(self, row_id: str, item: Result, max_bytes: int) -> Iterator[Result]:
        del row_id, max_bytes
        yield item

    def batch(self, rows: Sequence[tuple[str, Result]]) -> pa.RecordBatch:
        return embeddings_to_batch(rows, dimensions=self._dimensions)

    def parts(self, row_id: str) -> Parts[Result]:
        return _Whole(row_id, self)


@dataclass(kw_only=False)
class _Whole:
    """A row's one item."""

    row_id: str
    output: EmbeddingOutput
    item: Result | None = None
    held: int = 0

    @property
    def whole(self) -> bool:
        return self.item is not None

    def add(self, item: Result) -> None:
        self.item = item
        self.held = self.output.held_bytes(item)

    def joined(self) -> list[tuple[str, Result]]:
        return [] if self.item is None else [(self.row_id, self.item)]
