"""Which columns a client may send, in which types, and how a cell becomes a Python value.

A cell's size is looked at before it is converted: a view column may name the same megabytes in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import types

from jserve.errors import InvalidRequest, MessageTooLarge, PromptTooLong, Unsupported
from jserve.request import MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKENS
from jserve.serving.limits import MAX_MESSAGES
from jserve.wire.columns import PROMPT_COLUMNS, SAMPLING_COLUMNS

__all__ = ["CellLimits", "Column", "Columns", "is_null", "read_schema", "read_text_schema"]

_ID_BYTES = 128
"""Longest id of a row."""


@dataclass(frozen=True, kw_only=True)
class CellLimits:
    """What a prompt can have at most, so that a longer one is refused before it is copied."""

    prompt_tokens: int
    prompt_bytes: int


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    index: int
    """In the client's schema."""
    value: Callable[[pa.Scalar], Any]
    """A valid cell's value. Raises InvalidRequest with the column's name."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    known: Mapping[str, Column]
    ignored: tuple[str, ...]
    """Columns that the door does not know; they are neither read nor answered."""

    def about_ignored(self) -> dict[str, list[str]]:
        """For metadata: some of their names, where there are any."""
        return {"ignored_columns": [name[:80] for name in self.ignored[:32]]} if self.ignored else {}

    @property
    def indices(self) -> list[int]:
        """In the order of the client's schema."""
        return sorted(column.index for column in self.known.values())


def read_schema(schema: pa.Schema, *, limits: CellLimits) -> Columns:
    """The columns of prompts to generate from.

    Raises InvalidRequest where none holds prompts or a name stands twice, Unsupported where a known column has a
    type that is not allowed.
    """
    columns = _known_columns(schema, _READERS, limits)
    if not any(name in columns.known for name in PROMPT_COLUMNS):
        raise InvalidRequest(
            f"no column holds prompts; send one of {', '.join(PROMPT_COLUMNS)} (got {_names(schema.names)})"
        )
    return columns


def read_text_schema(schema: pa.Schema, *, max_bytes: int) -> Columns:
    """The columns of texts to embed: ``text``, and perhaps ``id``. ``max_bytes``: of a text. Raises as read_schema."""
    readers: dict[str, Reader] = {"id": _id, "text": _text}
    columns = _known_columns(schema, readers, CellLimits(prompt_tokens=0, prompt_bytes=max_bytes))
    if "text" not in schema.names:
        raise InvalidRequest(f"no column holds texts; send one called text (got {_names(schema.names)})")
    return columns


def _known_columns(schema: pa.Schema, readers: Mapping[str, Reader], limits: CellLimits) -> Columns:
    known: dict[str, Column] = {}
    ignored = []
    for index, field in enumerate(schema):
        if field.name not in readers:
            ignored.append(field.name)
        elif schema.names.count(field.name) > 1:
            raise InvalidRequest(f"the schema has two columns {field.name}; keep one")
        else:
            value = readers[field.name](field.name, field.type, limits)
            if value is not None:
                known[field.name] = Column(name=field.name, index=index, value=value)
    return Columns(known=known, ignored=tuple(ignored))


def _names(names: list[str]) -> str:
    shown = ", ".join(name[:40] for name in names[:12]) or "no columns"
    return f"{shown}, ..." if len(names) > 12 else shown


Value = Callable[[pa.Scalar], Any]
Reader = Callable[[str, pa.DataType, CellLimits], Value | None]
"""Name, type and limits of a column to its cells' conversion; None for the null type: absent in every row."""


def is_null(cell: pa.Scalar) -> bool:
    """Null, or naming a null of its dictionary."""
    return not cell.is_valid or (isinstance(cell, pa.DictionaryScalar) and not cell.value.is_valid)


def _text_size(cell: pa.Scalar) -> int:
    """Bytes of a text cell, without copying it."""
    text = cell.value if isinstance(cell, pa.DictionaryScalar) else cell
    buffer = text.as_buffer()
    return 0 if buffer is None else int(buffer.size)


def _is_text(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind))


def _wrong(name: str, kind: pa.DataType, allowed: str) -> Unsupported:
    ids = "; token ids go in a column token_ids" if name == "prompt" and _is_list(kind) else ""
    return Unsupported(f"column {name} has type {str(kind)[:80]}; allowed: {allowed}{ids}")


def _prompt(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    if not _is_text(kind):
        raise _wrong(name, kind, "string, large_string, string_view, or a dictionary of them")

    def value(cell: pa.Scalar) -> str:
        size = _text_size(cell)
        if size > limits.prompt_bytes:
            raise PromptTooLong(
                f"the prompt has {size} bytes; the limit of {limits.prompt_tokens} tokens holds at most "
                f"{limits.prompt_bytes}"
            )
        return str(cell.as_py())

    return value


def _text(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    if not _is_text(kind):
        raise _wrong(name, kind, "string, large_string, string_view, or a dictionary of them")

    def value(cell: pa.Scalar) -> str:
        size = _text_size(cell)
        if size > limits.prompt_bytes:
            raise MessageTooLarge(f"the text has {size} bytes; at most {limits.prompt_bytes} are taken")
        return str(cell.as_py())

    return value


def _token_ids(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    if not (_is_list(kind) and types.is_integer(kind.value_type)):
        raise _wrong(name, kind, "a list or large_list of integers")

    def value(cell: pa.Scalar) -> list[int]:
        if len(cell.values) > limits.prompt_tokens:
            raise PromptTooLong(f"the prompt has {len(cell.values)} tokens; the limit is {limits.prompt_tokens}")
        return _no_nulls(name, cell.values)

    return value


def _messages(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    fields = list(kind.value_type) if _is_list(kind) and types.is_struct(kind.value_type) else []
    if sorted(field.name for field in fields) != ["content", "role"] or not all(_is_text(f.type) for f in fields):
        raise _wrong(name, kind, "a list of struct<role: string, content: string>")

    def value(cell: pa.Scalar) -> list[dict[str, str]]:
        if len(cell.values) > MAX_MESSAGES:
            raise InvalidRequest(f"the prompt has {len(cell.values)} messages; at most {MAX_MESSAGES} are allowed")
        left = limits.prompt_bytes
        for turn in cell.values:
            for part in ("role", "content"):
                if not turn.is_valid or is_null(turn[part]):
                    raise InvalidRequest(f"{name} has a null inside; leave it out")
                left -= _text_size(turn[part])
        if left < 0:
            raise PromptTooLong(
                f"the messages have {limits.prompt_bytes - left} bytes; the limit of {limits.prompt_tokens} tokens "
                f"holds at most {limits.prompt_bytes}"
            )
        return _no_nulls(name, cell.values)

    return value


def _no_nulls(name: str, values: pa.Array) -> list[Any]:
    if values.null_count:
        raise InvalidRequest(f"{name} has a null inside; leave it out")
    listed: list[Any] = values.to_pylist()
    return listed


def _id(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    if types.is_integer(kind):
        return lambda cell: str(cell.as_py())
    if not _is_text(kind):
        raise _wrong(name, kind, "string, large_string, string_view, a dictionary of them, or an integer")

    def value(cell: pa.Scalar) -> str:
        size = _text_size(cell)
        if size > _ID_BYTES:
            raise InvalidRequest(f"id has {size} bytes; at most {_ID_BYTES} are allowed")
        return str(cell.as_py())

    return value


def _integer(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    if types.is_integer(kind):
        return lambda cell: cell.as_py()
    if not types.is_floating(kind):
        raise _wrong(name, kind, "an integer, or a float with whole values")

    def value(cell: pa.Scalar) -> int:
        number = float(cell.as_py())
        if not number.is_integer():
            raise InvalidRequest(f"{name} is {number:g}; it must be a whole number")
        return int(number)

    return value


def _real(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    if not (types.is_integer(kind) or types.is_floating(kind)):
        raise _wrong(name, kind, "a float or an integer")
    return lambda cell: float(cell.as_py())


def _flag(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    if not types.is_boolean(kind):
        raise _wrong(name, kind, "bool")
    return lambda cell: cell.as_py()


def _stop(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    single = _is_text(kind)
    if not (single or (_is_list(kind) and _is_text(kind.value_type))):
        raise _wrong(name, kind, "string or a list of strings")

    def value(cell: pa.Scalar) -> tuple[str, ...]:
        cells = [cell] if single else cell.values
        if len(cells) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"{name} has {len(cells)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for i, text in enumerate(cells):
            if is_null(text):
                raise InvalidRequest(f"{name} has a null inside; leave it out")
            if _text_size(text) > MAX_STOP_STRING_BYTES:
                raise InvalidRequest(
                    f"{name}[{i}] has {_text_size(text)} bytes; allowed are 1 to {MAX_STOP_STRING_BYTES}"
                )
        return tuple(text.as_py() for text in cells)

    return value


def _stop_token_ids(name: str, kind: pa.DataType, limits: CellLimits) -> Value | None:
    if types.is_null(kind):
        return None
    if not (_is_list(kind) and types.is_integer(kind.value_type)):
        raise _wrong(name, kind, "a list of integers")

    def value(cell: pa.Scalar) -> tuple[int, ...]:
        if len(cell.values) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"{name} has {len(cell.values)} ids; at most {MAX_STOP_TOKENS} are allowed")
        return tuple(_no_nulls(name, cell.values))

    return value


_SPECIAL: dict[str, Reader] = {
    "id": _id,
    "prompt": _prompt,
    "token_ids": _token_ids,
    "messages": _messages,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
}


def _reader(kind: pa.DataType) -> Reader:
    if types.is_boolean(kind):
        return _flag
    return _real if types.is_floating(kind) else _integer


_READERS: dict[str, Reader] = {name: _reader(kind) for name, kind in SAMPLING_COLUMNS.items()} | _SPECIAL
