"""Rows of deltas as messages that small clients take."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from jserve.request import Delta, TokenLogprob
from jserve.serving.outbox import delta_bytes
from jserve.wire.columns import OUTPUT, deltas_to_batch
from jserve.wire.ipc import batch_message, schema_message

__all__ = ["Rows", "held_bytes", "message_bytes", "pieces", "rows_message", "schema_bytes"]

Rows = Sequence[tuple[str, Delta]]
"""Each delta with its row's id."""

Part = TypeVar("Part", str, tuple[int, ...], tuple[TokenLogprob, ...])

_FIXED_BYTES = 128
"""A row's offsets, bitmaps, usage and timings."""
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 12
_TOP_BYTES = 8


_END_BYTES = 300
"""What usage and timings take in memory, as measured."""


def held_bytes(delta: Delta) -> int:
    """What a row takes in memory, about: with logprobs 16 times what it takes in a message."""
    text = sys.getsizeof(delta.text) + len(delta.error or "")
    return delta_bytes(delta) + text + (0 if delta.usage is None else _END_BYTES)


def message_bytes(row_id: str, delta: Delta) -> int:
    """What a row takes in a message, at most (text: 4 bytes a character)."""
    text = len(row_id) + len(delta.text) + len(delta.error or "")
    return _FIXED_BYTES + 4 * text + _TOKEN_BYTES * len(delta.token_ids) + _logprob_bytes(delta.logprobs or ())


def _logprob_bytes(entries: Sequence[TokenLogprob]) -> int:
    return sum(_LOGPROB_BYTES + _TOP_BYTES * len(entry.top) for entry in entries)


def pieces(row_id: str, delta: Delta, max_bytes: int) -> Iterator[Delta]:
    """The delta, or several that say the same joined, each a row of at most ``max_bytes``.

    What tells the end (finish_reason, error, usage, timings) stands on the last one.
    """
    size = message_bytes(row_id, delta)
    count = -(-size // max(max_bytes - 2 * _FIXED_BYTES, 1))
    if size <= max_bytes:
        yield delta
        return
    for i in range(count):
        part = dataclasses.replace(
            delta,
            token_ids=_part(delta.token_ids, i, count),
            text=_part(delta.text, i, count),
            logprobs=None if delta.logprobs is None else _part(delta.logprobs, i, count),
        )
        last = i == count - 1
        yield (
            part
            if last
            else dataclasses.replace(part, finish_reason=None, error=None, error_code=None, usage=None, timings=None)
        )


def _part(whole: Part, i: int, count: int) -> Part:
    return whole[len(whole) * i // count : len(whole) * (i + 1) // count]


def schema_bytes() -> bytes:
    """The first message of every stream of rows."""
    return schema_message(OUTPUT).serialize()


def rows_message(rows: Rows, *, metadata: bytes = b"") -> bytes:
    return batch_message(deltas_to_batch(rows), metadata=metadata).serialize()
