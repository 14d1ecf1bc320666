"""Deltas as rows of Arrow: what small clients take, and what a table keeps."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from jserve.request import Delta, TokenLogprob
from jserve.serving.flight.verb import Parts
from jserve.serving.outbox import delta_bytes, token_bytes
from jserve.wire.columns import OUTPUT, deltas_to_batch

__all__ = ["DeltaOutput"]

Part = TypeVar("Part", str, tuple[int, ...], tuple[TokenLogprob, ...])

_FIXED_BYTES = 128
"""A row's offsets, bitmaps, usage and timings."""
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 12
_TOP_BYTES = 8
_END_BYTES = 300
"""What usage and timings take in memory, as measured."""


class DeltaOutput:
    """Implements ``jserve.serving.flight.verb.Output``."""

    schema = OUTPUT

    def held_bytes(self, item: Delta) -> int:
        return _held_bytes(item)

    def message_bytes(self, row_id: str, item: Delta) -> int:
        return _message_bytes(row_id, item)

    def pieces(self, row_id: str, item: Delta, max_bytes: int) -> Iterator[Delta]:
        return _pieces(row_id, item, max_bytes)

    def batch(self, rows: Sequence[tuple[str, Delta]]) -> pa.RecordBatch:
        return deltas_to_batch(rows)

    def parts(self, row_id: str) -> Parts[Delta]:
        return _DeltaParts(row_id)


def _held_bytes(delta: Delta) -> int:
    """What a row takes in memory, about: with logprobs 16 times what it takes in a message."""
    text = sys.getsizeof(delta.text) + len(delta.error or "")
    return delta_bytes(delta) + text + (0 if delta.usage is None else _END_BYTES)


def _message_bytes(row_id: str, delta: Delta) -> int:
    """What a row takes in a message, at most (text: 4 bytes a character)."""
    text = len(row_id) + len(delta.text) + len(delta.error or "")
    return _FIXED_BYTES + 4 * text + _TOKEN_BYTES * len(delta.token_ids) + _logprob_bytes(delta.logprobs or ())


def _logprob_bytes(entries: Sequence[TokenLogprob]) -> int:
    return sum(_LOGPROB_BYTES + _TOP_BYTES * len(entry.top) for entry in entries)


def _pieces(row_id: str, delta: Delta, max_bytes: int) -> Iterator[Delta]:
    """The delta, or several that say the same joined, each a row of at most ``max_bytes``.

    What tells the end (finish_reason, error, usage, timings) stands on the last one.
    """
    size = _message_bytes(row_id, delta)
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


class _DeltaParts:
    """What came of one prompt so far, choice by choice."""

    def __init__(self, row_id: str) -> None:
        self._id = row_id
        self._choices: dict[int, _Choice] = {}
        self._last: Delta | None = None
        self.held = 0
        """Bytes in memory."""

    @property
    def whole(self) -> bool:
        return self._last is not None

    def add(self, delta: Delta) -> None:
        self._choices.setdefault(delta.index, _Choice()).add(delta)
        self.held += token_bytes(delta) + sys.getsizeof(delta.text)
        if delta.usage is not None:
            self._last = delta

    def joined(self) -> list[tuple[str, Delta]]:
        """One delta a choice; usage and timings, which are the prompt's, on the first."""
        whole = [self._choices[index].joined() for index in sorted(self._choices)]
        if self._last is not None:
            whole[0] = dataclasses.replace(whole[0], usage=self._last.usage, timings=self._last.timings)
        return [(self._id, delta) for delta in whole]


class _Choice:
    """One choice's deltas. Taken apart at once, for a delta with one token is mostly something else."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._last = Delta(request_id="", index=0)

    def add(self, delta: Delta) -> None:
        self._token_ids += delta.token_ids
        self._text.append(delta.text)
        if delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += delta.logprobs
        self._last = delta

    def joined(self) -> Delta:
        return dataclasses.replace(
            self._last,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            usage=None,
            timings=None,
        )
