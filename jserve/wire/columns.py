"""The columns of Arrow Flight: prompts in, rows of deltas or results out. Used by the server and by the client.

In: exactly one of ``prompt`` (text), ``token_ids`` (list of ints) and ``messages`` (list of role and content)
is set in a row; ``id`` and one column per field of SamplingParams are optional, and null means absent.

Out: see ``OUTPUT``. A stream of deltas has a row for each Delta; a table of results has a row for each prompt
and choice.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from jserve.errors import InvalidRequest
from jserve.request import Delta, FinishReason, Prompt, SamplingParams, Timings, TokenLogprob, Usage

__all__ = ["OUTPUT", "PROMPT_COLUMNS", "SAMPLING_COLUMNS", "deltas_from_batch", "deltas_to_batch", "prompts_to_batch"]

_TOP = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
_LOGPROBS = pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("top", pa.list_(_TOP))]))
_USAGE = pa.struct([("prompt_tokens", pa.int32()), ("output_tokens", pa.int32()), ("cached_tokens", pa.int32())])
_TIMINGS = pa.struct([("queue", pa.float64()), ("ttft", pa.float64()), ("total", pa.float64())])

OUTPUT = pa.schema(
    [
        # The row's own id, else its number in the call, from 0.
        pa.field("id", pa.utf8(), nullable=False),
        # The choice, 0..n-1.
        pa.field("index", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("text", pa.utf8()),
        # Only where asked for: one for each of token_ids.
        pa.field("logprobs", _LOGPROBS),
        # stop | length | cancelled | deadline | error; null until the choice ends.
        pa.field("finish_reason", pa.utf8()),
        pa.field("error", pa.utf8()),
        pa.field("error_code", pa.utf8()),
        # Once a request: on its last delta, or in a table of results on its choice 0. Timings are seconds.
        pa.field("usage", _USAGE),
        pa.field("timings", _TIMINGS),
    ]
)

PROMPT_COLUMNS = ("prompt", "token_ids", "messages")

SAMPLING_COLUMNS: dict[str, pa.DataType] = {
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "top_k": pa.int64(),
    "min_p": pa.float64(),
    "seed": pa.uint64(),
    "n": pa.int32(),
    "max_tokens": pa.int64(),
    "min_tokens": pa.int64(),
    "stop": pa.list_(pa.utf8()),
    "include_stop": pa.bool_(),
    "stop_token_ids": pa.list_(pa.int64()),
    "ignore_eos": pa.bool_(),
    "logprobs": pa.int32(),
}
"""One column per field of SamplingParams, with the type that the client sends. The server takes others too."""

_MESSAGES = pa.list_(pa.struct([("role", pa.utf8()), ("content", pa.utf8())]))

_KINDS: dict[str, pa.DataType] = {
    "id": pa.utf8(),
    "prompt": pa.utf8(),
    "token_ids": pa.list_(pa.int64()),
    "messages": _MESSAGES,
    **SAMPLING_COLUMNS,
}


def deltas_to_batch(rows: Sequence[tuple[str, Delta]]) -> pa.RecordBatch:
    """Deltas with the ids that their rows are known by, one row each."""
    deltas = [delta for _, delta in rows]
    failed = [delta.finish_reason is FinishReason.ERROR for delta in deltas]
    columns = [
        pa.array([row_id for row_id, _ in rows], pa.utf8()),
        pa.array([delta.index for delta in deltas], pa.int32()),
        pa.array([_or_none(d.token_ids, gone=f) for d, f in zip(deltas, failed, strict=True)], pa.list_(pa.int32())),
        pa.array([_or_none(d.text, gone=f) for d, f in zip(deltas, failed, strict=True)], pa.utf8()),
        _logprobs([delta.logprobs for delta in deltas]),
        pa.array([delta.finish_reason for delta in deltas], pa.utf8()),
        pa.array([delta.error for delta in deltas], pa.utf8()),
        pa.array([delta.error_code for delta in deltas], pa.utf8()),
        _sparse([delta.usage and dataclasses.asdict(delta.usage) for delta in deltas], _USAGE),
        _sparse([delta.timings and dataclasses.asdict(delta.timings) for delta in deltas], _TIMINGS),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=OUTPUT)


def _or_none(value: Any, *, gone: bool) -> Any:
    """What SQL expects of a failed row that has nothing to show: null."""
    return None if gone and not value else value


def _logprobs(lists: Sequence[Sequence[TokenLogprob] | None]) -> pa.Array:
    """One list of logprobs a row. Built from flat columns: as Python dicts it would take ten times as long."""
    if not any(lists):
        return pa.array([None if entries is None else [] for entries in lists], _LOGPROBS)
    flat = [entry for entries in lists for entry in entries or ()]
    tops = [choice for entry in flat for choice in entry.top]
    top = pa.StructArray.from_arrays(
        [pa.array([token for token, _ in tops], pa.int32()), pa.array([logprob for _, logprob in tops], pa.float32())],
        fields=list(_TOP),
    )
    entries = pa.StructArray.from_arrays(
        [
            pa.array([entry.token_id for entry in flat], pa.int32()),
            pa.array([entry.logprob for entry in flat], pa.float32()),
            pa.ListArray.from_arrays(_offsets([entry.top for entry in flat]), top),
        ],
        fields=list(_LOGPROBS.value_type),
    )
    return pa.ListArray.from_arrays(_offsets(lists), entries)


def _offsets(lists: Sequence[Sequence[Any] | None]) -> pa.Array:
    """Where each list begins, and the end; null where a list is null."""
    ends = list(itertools.accumulate((len(items or ()) for items in lists), initial=0))
    starts = [None if items is None else start for items, start in zip(lists, ends, strict=False)]
    return pa.array([*starts, ends[-1]], pa.int32())


def _sparse(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Mostly there is nothing: converting nested values is slow, nulls cost nothing."""
    return pa.array(values, kind) if any(value is not None for value in values) else pa.nulls(len(values), kind)


def deltas_from_batch(batch: pa.RecordBatch) -> list[Delta]:
    """The deltas of a batch of the server's; ``request_id`` is the row's id."""
    return [_delta(row) for row in batch.to_pylist()]


def _delta(row: dict[str, Any]) -> Delta:
    logprobs = row["logprobs"]
    return Delta(
        request_id=row["id"],
        index=row["index"],
        token_ids=tuple(row["token_ids"] or ()),
        text=row["text"] or "",
        logprobs=None if logprobs is None else tuple(map(_logprob, logprobs)),
        finish_reason=FinishReason(row["finish_reason"]) if row["finish_reason"] else None,
        error=row["error"],
        error_code=row["error_code"],
        usage=Usage(**row["usage"]) if row["usage"] else None,
        timings=Timings(**row["timings"]) if row["timings"] else None,
    )


def _logprob(entry: dict[str, Any]) -> TokenLogprob:
    top = tuple((choice["token_id"], choice["logprob"]) for choice in entry["top"])
    return TokenLogprob(token_id=entry["token_id"], logprob=entry["logprob"], top=top)


def prompts_to_batch(rows: Iterable[tuple[str, Prompt, SamplingParams]]) -> pa.RecordBatch:
    """Requests as a batch for the server; columns that no row needs are left out.

    Raises InvalidRequest where a value does not fit its column, such as a negative seed.
    """
    listed = list(rows)
    columns: dict[str, list[Any]] = {"id": [row_id for row_id, _, _ in listed]}
    for row, (_, prompt, params) in enumerate(listed):
        name, value = _prompt(prompt)
        columns.setdefault(name, [None] * len(listed))[row] = value
        for field in dataclasses.fields(SamplingParams):
            value = getattr(params, field.name)
            if value is not field.default and value != field.default:
                _refuse_stand_ins(field.name, value)
                columns.setdefault(field.name, [None] * len(listed))[row] = value
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values, _KINDS[name])
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} cannot be sent: {error}") from None
    return pa.RecordBatch.from_pydict(arrays)


def _refuse_stand_ins(name: str, value: Any) -> None:
    """Arrow would cut a float to a whole number without a word, and read bytes as numbers."""
    if pa.types.is_list(kind := _KINDS[name]):
        kind = kind.value_type
        values = value if isinstance(value, (list, tuple)) else [value]
    else:
        values = [value]
    if pa.types.is_integer(kind):
        for number in values:
            if isinstance(number, (bool, float, str, bytes)):
                raise InvalidRequest(f"{name} cannot be sent: {str(number)[:40]!r} is not a whole number")


def _prompt(prompt: Prompt) -> tuple[str, Any]:
    """The column that a prompt belongs in, and its value there."""
    if isinstance(prompt, str):
        return "prompt", prompt
    if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray, Mapping)):
        raise InvalidRequest(
            f"the prompt is no text, no chat and no list of token ids: it is of type {type(prompt).__name__}"
        )
    turns = [item for item in prompt if isinstance(item, Mapping)]
    if not turns:
        ids = list(prompt)
        _refuse_stand_ins("token_ids", ids)
        return "token_ids", ids
    for turn in turns:
        if len(turns) != len(prompt) or set(turn) != {"role", "content"}:
            raise InvalidRequest("messages cannot be sent: each must have exactly role and content")
    return "messages", [dict(turn) for turn in turns]
