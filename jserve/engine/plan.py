"""What one dispatch does, in numpy: all that the device needs to know from the host. No JAX.

Every array leads with ``[data, microbatch]``, both 1 until meshes use them; inside the compiled step the two are
gone. Letters: ``S`` rows (choices), ``T`` tokens, ``W`` pages a table row, ``N`` MAX_STOP_TOKENS. A row of padding has
``slot == num_slots``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Int32, Shaped, UInt32

from jserve.engine.choice import Choice
from jserve.request import MAX_STOP_TOKENS

__all__ = ["DecodeArrays", "MixedArrays", "PlanRow", "RowArrays", "StepPlan", "decode_arrays", "mixed_arrays"]


Leaf: TypeAlias = Any
"""A numpy array on the host; the same place holds a tracer inside the compiled step."""


class RowArrays(NamedTuple):
    """One row a choice: where it lies and how it samples. An option that is off has its neutral value."""

    slot: Int32[Leaf, "*lead S"]  # num_slots for padding
    page_table: Int32[Leaf, "*lead S W"]  # -1 where no page is
    key: UInt32[Leaf, "*lead S 2"]  # the seed's high and low half
    choice: Int32[Leaf, "*lead S"]
    temperature: Float32[Leaf, "*lead S"]  # 0 is greedy
    top_p: Float32[Leaf, "*lead S"]  # 1 is off
    min_p: Float32[Leaf, "*lead S"]  # 0 is off
    top_k: Int32[Leaf, "*lead S"]  # 0 is off
    min_tokens: Int32[Leaf, "*lead S"]
    max_tokens: Int32[Leaf, "*lead S"]
    stop_ids: Int32[Leaf, "*lead S N"]  # -1 where none is
    logprobs: Bool[Leaf, "*lead S"]


class DecodeArrays(NamedTuple):
    rows: RowArrays
    steps: Int32[Leaf, "*lead"]  # most steps of the loop
    leave_early: Bool[Leaf, "*lead"]  # leave the loop as soon as a row has ended


class MixedArrays(NamedTuple):
    rows: RowArrays
    tokens: Int32[Leaf, "*lead T"]  # prompt tokens; 0 for the token of a decode row, which the device knows
    cu_q_lens: Int32[Leaf, "*lead S+1"]
    distribution: Int32[Leaf, "*lead 3"]
    start: Int32[Leaf, "*lead S"]  # tokens already in the cache; -1 for a decode row, which the device knows
    generated: Int32[Leaf, "*lead S"]  # output tokens before this step; -1 for a decode row
    samples: Bool[Leaf, "*lead S"]  # whether the row's last token leads to a new one


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One choice's part in a plan. ``q_len`` tokens from ``start`` on (decode: 1 token, start -1)."""

    choice: Choice
    start: int = -1
    q_len: int = 1
    samples: bool = True
    tokens: int = 1
    """Most output tokens that the plan may bring this choice."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    kind: Literal["decode", "mixed"]
    bucket: int
    """Rows of a decode program, tokens of a mixed one."""
    rows: tuple[PlanRow, ...]
    arrays: DecodeArrays | MixedArrays

    @property
    def wants_logprobs(self) -> bool:
        return any(row.choice.request.sampling.logprobs is not None for row in self.rows)


def decode_arrays(
    rows: Sequence[PlanRow], *, size: int, width: int, num_slots: int, steps: int, leave_early: bool
) -> DecodeArrays:
    """The arrays of a decode plan of at most ``size`` rows, with ``width`` pages a table row."""
    return DecodeArrays(
        rows=_row_arrays(rows, size=size, width=width, num_slots=num_slots),
        steps=_lead(np.int32(steps)),
        leave_early=_lead(np.bool_(leave_early)),
    )


def mixed_arrays(rows: Sequence[PlanRow], *, bucket: int, size: int, width: int, num_slots: int) -> MixedArrays:
    """The arrays of a mixed plan: ``rows`` has the decode rows first, ``bucket`` tokens in all at most."""
    tokens = np.zeros(bucket, np.int32)
    cu_q_lens = np.zeros(size + 1, np.int32)
    start = np.full(size, -1, np.int32)
    generated = np.full(size, -1, np.int32)
    samples = np.zeros(size, bool)
    decode_rows = 0
    at = 0
    for r, row in enumerate(rows):
        if row.start >= 0:
            tokens[at : at + row.q_len] = row.choice.prefill_ids[row.start : row.start + row.q_len]
            start[r] = row.start
            generated[r] = len(row.choice.tokens)
        else:
            decode_rows += 1
        at += row.q_len
        cu_q_lens[r + 1] = at
        samples[r] = row.samples
    cu_q_lens[len(rows) + 1 :] = at
    return MixedArrays(
        rows=_row_arrays(rows, size=size, width=width, num_slots=num_slots),
        tokens=_lead(tokens),
        cu_q_lens=_lead(cu_q_lens),
        distribution=_lead(np.array([decode_rows, len(rows), len(rows)], np.int32)),
        start=_lead(start),
        generated=_lead(generated),
        samples=_lead(samples),
    )


def _lead(array: np.ndarray | np.generic) -> Shaped[np.ndarray, "1 1 ..."]:
    return np.asarray(array)[None, None]


def _row_arrays(rows: Sequence[PlanRow], *, size: int, width: int, num_slots: int) -> RowArrays:
    arrays = RowArrays(
        slot=np.full(size, num_slots, np.int32),
        page_table=np.full((size, width), -1, np.int32),
        key=np.zeros((size, 2), np.uint32),
        choice=np.zeros(size, np.int32),
        temperature=np.zeros(size, np.float32),
        top_p=np.ones(size, np.float32),
        min_p=np.zeros(size, np.float32),
        top_k=np.zeros(size, np.int32),
        min_tokens=np.zeros(size, np.int32),
        max_tokens=np.zeros(size, np.int32),
        stop_ids=np.full((size, MAX_STOP_TOKENS), -1, np.int32),
        logprobs=np.zeros(size, bool),
    )
    for r, row in enumerate(rows):
        choice, sampling = row.choice, row.choice.request.sampling
        arrays.slot[r] = choice.slot
        arrays.page_table[r, : len(choice.pages)] = choice.pages
        arrays.key[r] = (sampling.seed >> 32, sampling.seed & 0xFFFFFFFF)
        arrays.choice[r] = choice.index
        arrays.temperature[r] = sampling.temperature
        arrays.top_p[r] = sampling.top_p
        arrays.min_p[r] = sampling.min_p
        arrays.top_k[r] = sampling.top_k
        arrays.min_tokens[r] = sampling.min_tokens
        arrays.max_tokens[r] = sampling.max_tokens
        arrays.stop_ids[r, : len(sampling.stop_ids)] = sampling.stop_ids
        arrays.logprobs[r] = sampling.logprobs is not None
    return RowArrays(*(_lead(array) for array in arrays))
