"""A validated batch's rows as requests.

A row that cannot be one (no prompt, two of them, a value that does not fit its column) becomes a row with an
error; the others go on. Bounds of the values themselves are the frontend's, as for every door.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from jserve.errors import InvalidRequest, RequestError
from jserve.request import Prompt, SamplingParams
from jserve.serving.flight.schema import Column, Columns, is_null
from jserve.wire.columns import PROMPT_COLUMNS, SAMPLING_COLUMNS

__all__ = ["PromptRow", "PromptRows", "sampling_from_json"]

_ROW_BYTES = 1024
"""What a waiting row costs in memory besides its prompt, rounded up."""

_ID_BYTES = 8
"""What one prompt token id costs; small ints are shared."""


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt of a call, or what is wrong with it."""

    number: int
    """In the call, from 0, over all batches."""
    id: str
    """What the client calls it; else its number."""
    prompt: Prompt = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    error: RequestError | None = None

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        if isinstance(self.prompt, str):
            return _ROW_BYTES + 4 * len(self.prompt)
        return _ROW_BYTES + sum(_ID_BYTES if isinstance(item, int) else _turn_size(item) for item in self.prompt)


def _turn_size(turn: Mapping[str, str]) -> int:
    return _ROW_BYTES + 4 * sum(map(len, turn.values()))


class PromptRows:
    """Turns one call's batches into rows. ``defaults`` stand for what a row leaves out."""

    def __init__(self, columns: Columns, *, defaults: SamplingParams) -> None:
        # Batches hold the known columns only, in the order of the client's schema.
        order = {index: place for place, index in enumerate(columns.indices)}
        places = {name: (order[column.index], column) for name, column in columns.known.items()}
        self._prompts = [places[name] for name in PROMPT_COLUMNS if name in places]
        self._sampling = [places[name] for name in SAMPLING_COLUMNS if name in places]
        self._id = places.get("id")
        self._defaults = defaults
        self._count = 0

    def of(self, batch: pa.RecordBatch) -> Iterator[PromptRow]:
        """The batch's rows, each converted when it is asked for."""
        arrays = batch.columns
        for at in range(batch.num_rows):
            number, self._count = self._count, self._count + 1
            yield self._row(arrays, at, number)

    def _row(self, arrays: list[pa.Array], at: int, number: int) -> PromptRow:
        row_id = str(number)
        try:
            row_id = self._cell(self._id, arrays, at) or row_id if self._id else row_id
            prompt = self._prompt(arrays, at)
            given = {}
            for place in self._sampling:
                value = self._cell(place, arrays, at)
                if value is not None:
                    given[place[1].name] = value
            params = dataclasses.replace(self._defaults, **given) if given else self._defaults
        except RequestError as error:
            return PromptRow(number=number, id=row_id, error=error)
        return PromptRow(number=number, id=row_id, prompt=prompt, params=params)

    def _prompt(self, arrays: list[pa.Array], at: int) -> Prompt:
        given = [place for place in self._prompts if not is_null(arrays[place[0]][at])]
        if len(given) != 1:
            names = " and ".join(place[1].name for place in given) or "none"
            raise InvalidRequest(f"exactly one of {', '.join(PROMPT_COLUMNS)} must be set; the row has {names}")
        prompt: Prompt = self._cell(given[0], arrays, at)
        return prompt

    @staticmethod
    def _cell(place: tuple[int, Column], arrays: list[pa.Array], at: int) -> Any:
        cell = arrays[place[0]][at]
        return None if is_null(cell) else place[1].value(cell)


def sampling_from_json(fields: Mapping[str, Any]) -> SamplingParams:
    """Sampling fields of a command descriptor; null means absent.

    Raises InvalidRequest that names an unknown field or one of the wrong type.
    """
    for name in fields:
        if name not in SAMPLING_COLUMNS:
            raise InvalidRequest(f"unknown field {name[:40]!r}; known are model, {', '.join(SAMPLING_COLUMNS)}")
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(present, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the descriptor's sampling fields are wrong: {error}") from None
