"""Arrays of a checkpoint that are still to be read, and views of them that stay unread.

Every source (Orbax, safetensors, GGUF) is named LazyArrays; what a model wants of them is views; and only the regions
that a device holds, or a file takes, are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from jserve.errors import CheckpointError

__all__ = ["LazyArray", "Region", "Source", "aligned_empty"]

Region: TypeAlias = tuple[slice, ...]
"""A box of an array: one slice an axis, with start and stop given and no step."""


_ALIGNMENT = 64


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """As ``numpy.empty``, at an address from where JAX's CPU devices take an array without copying it."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether arrays of one shape and dtype are equal; NaN equals itself."""
    left, right = (np.ascontiguousarray(values).reshape(-1).view(np.uint8) for values in (one, other))
    return bool(np.array_equal(left, right))


class Source(Protocol):
    """What an array is stored in, where a part of it costs as much as a larger piece does."""

    nbytes: int
    """Host memory that ``held`` takes at most."""
    piece_nbytes: int
    """The least that can be read: a compressed piece is unpacked as a whole."""

    def held(self) -> AbstractContextManager[None]:
        """While the context lasts, pieces stay in memory once they are read. One inside of another changes nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class LazyArray:
    """An array that is read, a region at a time, when somebody asks for it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read_region: Callable[[Region], np.ndarray]
    """Gives the values of a region, in ``dtype``. May raise CheckpointError, where the file turns out to be damaged."""
    source: Source | None = None
    """The same for all views of one stored array. None where any region can be read by itself."""

    @classmethod
    def of(cls, array: Any) -> LazyArray:
        """One that is in memory already: what is read of it is a copy."""
        return cls(
            shape=tuple(array.shape),
            dtype=np.dtype(array.dtype),
            read_region=lambda region: np.array(array[region]),
        )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def read(self, region: Region | None = None) -> np.ndarray:
        """The values of ``region`` (None: all), in ``dtype``. Slices may leave start and stop open."""
        given = (slice(None),) * len(self.shape) if region is None else region
        return self.read_region(tuple(slice(*s.indices(n)[:2]) for s, n in zip(given, self.shape, strict=True)))

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """All values in their order, some rows at a time: of at most ``nbytes``, unless one row has more."""
        if not self.shape or self.nbytes <= nbytes:
            yield self.read()
            return
        rows = max(1, nbytes // (self.nbytes // self.shape[0]))
        source = self.source
        with source.held() if source is not None and source.piece_nbytes > nbytes else nullcontext():
            for first in range(0, self.shape[0], rows):
                yield self.read((slice(first, first + rows), *(slice(None) for _ in self.shape[1:])))

    def held_against(self, twin: LazyArray, message: str, *, fix: str) -> LazyArray:
        """This array; reading it raises CheckpointError with ``message`` where ``twin``, of its shape, differs."""

        def read(region: Region) -> np.ndarray:
            values = self.read_region(region)
            others = twin.read_region(region).astype(values.dtype, copy=False)
            if not _same_bits(values, others):
                raise CheckpointError(message, fix=fix)
            return values

        return self._view(self.shape, read)

    def transposed(self, axes: Sequence[int]) -> LazyArray:
        """As ``numpy.transpose``: axis j of the view is axis ``axes[j]``."""

        def read(region: Region) -> np.ndarray:
            asked = dict(zip(axes, region, strict=True))
            return self.read_region(tuple(asked[axis] for axis in range(len(axes)))).transpose(axes)

        return self._view(tuple(self.shape[axis] for axis in axes), read)

    def part(self, axis: int, start: int, stop: int) -> LazyArray:
        """Entries start..stop-1 of one axis."""

        def read(region: Region) -> np.ndarray:
            moved = slice(region[axis].start + start, region[axis].stop + start)
            return self.read_region((*region[:axis], moved, *region[axis + 1 :]))

        return self._view((*self.shape[:axis], stop - start, *self.shape[axis + 1 :]), read)

    def at(self, axis: int, index: int) -> LazyArray:
        """One entry of one axis, which is gone from the view."""

        def read(region: Region) -> np.ndarray:
            return self.read_region((*region[:axis], slice(index, index + 1), *region[axis:])).squeeze(axis)

        return self._view((*self.shape[:axis], *self.shape[axis + 1 :]), read)

    def split(self, axis: int, sizes: Sequence[int]) -> LazyArray:
        """One axis as several, outermost first; the product of ``sizes`` is its length."""
        sizes = tuple(sizes)
        inner = math.prod(sizes[1:])

        def read(region: Region) -> np.ndarray:
            outer, rest = region[axis], region[axis + 1 : axis + len(sizes)]
            tail = region[axis + len(sizes) :]
            box = self.read_region((*region[:axis], slice(outer.start * inner, outer.stop * inner), *tail))
            box = box.reshape(*box.shape[:axis], outer.stop - outer.start, *sizes[1:], *box.shape[axis + 1 :])
            return box[(slice(None),) * (axis + 1) + rest]

        return self._view((*self.shape[:axis], *sizes, *self.shape[axis + 1 :]), read)

    def merged(self, axis: int, count: int) -> LazyArray:
        """The inverse of ``split``: ``count`` axes from ``axis`` on as one."""
        sizes = self.shape[axis : axis + count]
        inner = math.prod(sizes[1:])

        def read(region: Region) -> np.ndarray:
            asked = region[axis]
            first, last = asked.start // inner, -(-asked.stop // inner)
            within = tuple(slice(0, size) for size in sizes[1:])
            box = self.read_region((*region[:axis], slice(first, last), *within, *region[axis + 1 :]))
            box = box.reshape(*box.shape[:axis], (last - first) * inner, *box.shape[axis + count :])
            kept = slice(asked.start - first * inner, asked.stop - first * inner)
            return box[(slice(None),) * axis + (kept,)]

        return self._view((*self.shape[:axis], math.prod(sizes), *self.shape[axis + count :]), read)

    def paired(self, axis: int) -> LazyArray:
        """An axis whose neighbours (0, 1), (2, 3), ... become pairs (0, n/2), (1, n/2 + 1), ...: the order of rotary
        dimensions in GGUF's "llama", as rotary embedding wants them here."""
        half = self.shape[axis] // 2

        def read(region: Region) -> np.ndarray:
            box = self.read_region((*region[:axis], slice(0, 2 * half), *region[axis + 1 :]))
            pairs = box.reshape(*box.shape[:axis], half, 2, *box.shape[axis + 1 :])
            return pairs.swapaxes(axis, axis + 1).reshape(box.shape)[(slice(None),) * axis + (region[axis],)]

        return self._view(self.shape, read)

    def times(self, number: float) -> LazyArray:
        """Every value times ``number``, in float32: narrower floats would be rounded."""
        if np.can_cast(self.dtype, np.float32) or self.dtype.name == "bfloat16":
            dtype = np.dtype(np.float32)
        else:
            dtype = self.dtype
        return LazyArray(
            shape=self.shape,
            dtype=dtype,
            read_region=lambda region: self.read_region(region).astype(dtype) * dtype.type(number),
            source=self.source,
        )

    def plus(self, number: float) -> LazyArray:
        """Every value plus ``number``, in ``dtype``."""
        return self._view(self.shape, lambda region: self.read_region(region) + self.dtype.type(number))

    @staticmethod
    def stack(arrays: Sequence[LazyArray]) -> LazyArray:
        """Arrays of one shape and dtype on a new first axis."""
        first = arrays[0]

        def read(region: Region) -> np.ndarray:
            shape = tuple(s.stop - s.start for s in region)
            out = np.empty(shape, first.dtype)
            for i, array in enumerate(arrays[region[0]]):
                out[i] = array.read_region(region[1:])
            return out

        return LazyArray(shape=(len(arrays), *first.shape), dtype=first.dtype, read_region=read)

    @staticmethod
    def concatenated(arrays: Sequence[LazyArray], axis: int) -> LazyArray:
        """Arrays of one dtype, and of one shape but for ``axis``, one after the other on it."""
        first = arrays[0]
        ends = list(itertools.accumulate(array.shape[axis] for array in arrays))

        def read(region: Region) -> np.ndarray:
            asked, parts = region[axis], []
            for array, end in zip(arrays, ends, strict=True):
                begin = end - array.shape[axis]
                part = slice(max(asked.start, begin) - begin, min(asked.stop, end) - begin)
                if part.start < part.stop:
                    parts.append(array.read_region((*region[:axis], part, *region[axis + 1 :])))
            return np.concatenate(parts, axis) if parts else np.empty([s.stop - s.start for s in region], first.dtype)

        shape = (*first.shape[:axis], ends[-1], *first.shape[axis + 1 :])
        return LazyArray(shape=shape, dtype=first.dtype, read_region=read)

    def _view(self, shape: tuple[int, ...], read: Callable[[Region], np.ndarray]) -> LazyArray:
        return LazyArray(shape=shape, dtype=self.dtype, read_region=read, source=self.source)
