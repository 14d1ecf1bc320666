"""One .safetensors file: its header checked, its tensors still to be read, and the writing of one.

The format is a length, a header in JSON, and bytes. It is read here and not through the safetensors package for two
reasons: what is wrong with a file is to be said in names and sizes, and the package copies one tensor at a time,
holding Python's lock, where a start reads several at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import msgspec
import numpy as np

from jserve.checkpoints.arrays.hold import Holder, by_source
from jserve.checkpoints.arrays.lazy import LazyArray, Region
from jserve.errors import CheckpointError
from jserve.progress import Progress
from jserve.shown import shown

__all__ = ["TensorFile", "read_tensor_file", "write_tensor_file"]

_DTYPES: Mapping[str, np.dtype] = {
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""In the order in which the package writes tensors: wide ones first, so that every one is aligned."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""As in the format's own description."""
_MAX_TENSORS = 200_000
_MAX_AXES = 32
"""numpy has no more than 64."""
_MAX_BYTES = 2**63 - 1
"""Of a tensor; where an axis has no length, without that axis, as numpy counts."""
_METADATA = "__metadata__"
_ALIGNMENT = 8
_PIECE_BYTES = 32 << 20
"""Host memory that writing holds."""
_SPAN_BYTES = 1 << 19
"""Read at once where only some columns are wanted: fewer calls than one a row, and memory that caches hold."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """What a file holds, as far as it is whole."""

    tensors: Mapping[str, LazyArray]
    problems: tuple[str, ...]
    """What is wrong with it, each a sentence that begins with its path; ``tensors`` is empty then."""


def read_tensor_file(path: Path) -> TensorFile:
    """Read the header of ``path`` and hold it against the file's size. No tensor is read.

    Reading one raises CheckpointError where the file has changed meanwhile, or cannot be read. Beside what it gives it
    holds ``_SPAN_BYTES``.
    """
    try:
        with path.open("rb") as file:
            stamp = _stamp(file)
            size = stamp[0]
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                return _broken(path, f"has {size} bytes and no header of safetensors")
            header = file.read(length)
    except OSError as error:
        return _broken(path, f"cannot be read: {error.strerror}")
    try:
        listed = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        if len(listed) > _MAX_TENSORS:
            return _broken(path, f"names {len(listed)} tensors; allowed are {_MAX_TENSORS}")
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in listed.items() if name != _METADATA}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _broken(path, f"has a damaged header: {error}")
    begin = 8 + length
    problems = list(_problems(entries, size, begin))
    if problems:
        return _broken(path, *problems)
    tensors = {}
    for name, entry in entries.items():
        dtype, shape = _DTYPES[entry.dtype], entry.shape
        tensor = _Tensor(path=path, stamp=stamp, dtype=dtype, shape=shape, begin=begin + entry.data_offsets[0])
        tensors[name] = LazyArray(shape=shape, dtype=dtype, read_region=tensor.read)
    return TensorFile(tensors=tensors, problems=())


def _broken(path: Path, *what: str) -> TensorFile:
    return TensorFile(tensors={}, problems=tuple(f"{path} {problem}" for problem in what))


def _problems(entries: Mapping[str, _Entry], size: int, begin: int) -> Iterator[str]:
    """Tensors must follow one another, each as long as its shape and type say, up to the end of the file."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            yield f"holds {name} as {entry.dtype}; types that are known: {', '.join(_DTYPES)}"
            return
        first, last = entry.data_offsets
        nbytes = math.prod(entry.shape) * dtype.itemsize
        if min(entry.shape, default=0) < 0 or first != end or last - first != nbytes:
            yield (
                f"is damaged: {name} {list(entry.shape)} {entry.dtype} takes bytes {first} to {last} in its header; "
                f"wanted {end} to {end + nbytes}"
            )
            return
        if len(entry.shape) > _MAX_AXES or math.prod(filter(None, entry.shape)) * dtype.itemsize > _MAX_BYTES:
            yield (
                f"holds {name} in the shape {shown(entry.shape)}; allowed are {_MAX_AXES} axes and {_MAX_BYTES} bytes"
            )
            return
        end = last
    if begin + end != size:
        yield f"has {size} bytes; its header says {begin + end}"


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """Where one tensor lies."""

    path: Path
    stamp: tuple[int, ...]
    """``_stamp`` of the file whose header was read."""
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    """Bytes from the start of the file."""

    def read(self, region: Region) -> np.ndarray:
        """By position and not through a mapping, where a disk's error, or a file cut short, ends the process."""
        out = np.empty([part.stop - part.start for part in region], self.dtype)
        if out.size == 0:
            return out
        try:
            # Opened for this read only: a model may have more files than a process may hold open.
            with self.path.open("rb") as file:
                _fill(file.fileno(), out, self.begin, self.shape, region)
                changed = _stamp(file) != self.stamp
        except (EOFError, FileNotFoundError):
            changed = True
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from None
        if changed:
            raise CheckpointError(f"{self.path} has changed since it was opened", fix="start again")
        return out


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    """What changes when a file's contents do, and not with its links or rights; no inode: mounted object stores number
    files anew."""
    stat = os.fstat(file.fileno())
    return (stat.st_size, stat.st_mtime_ns)


def _fill(fd: int, out: np.ndarray, begin: int, shape: tuple[int, ...], region: Region) -> None:
    """Read ``region`` of the array of ``shape`` at byte ``begin`` into ``out``, which is contiguous and not empty.

    What lies between the rows of a region is read along, at most ``_SPAN_BYTES`` at once. Raises EOFError, OSError.
    """
    row_bytes = math.prod(shape[1:]) * out.itemsize
    at = begin + region[0].start * row_bytes if region else begin
    if region[1:] == tuple(slice(0, size) for size in shape[1:]):
        _read_into(fd, out, at)
        return
    step = _SPAN_BYTES // row_bytes
    if step == 0:
        for i in range(len(out)):
            _fill(fd, out[i], at + i * row_bytes, shape[1:], region[1:])
        return
    span = np.empty((min(step, len(out)), *shape[1:]), out.dtype)
    for first in range(0, len(out), step):
        rows = span[: len(out) - first]
        _read_into(fd, rows, at + first * row_bytes)
        out[first : first + step] = rows[(slice(None), *region[1:])]


def _read_into(fd: int, out: np.ndarray, at: int) -> None:
    left = out.reshape(-1).view(np.uint8).data
    while left:
        # Several threads may read, and one call gives 2 GiB at most.
        got = os.preadv(fd, [left], at)
        if got == 0:
            raise EOFError
        left, at = left[got:], at + got


def write_tensor_file(path: Path, tensors: Mapping[str, LazyArray], *, progress: Progress) -> None:
    """Write ``tensors`` to the new file ``path``, reading a piece of one at a time, and each stored array once.

    The bytes are those that the safetensors package writes for the same tensors with the metadata
    ``{"format": "pt"}``, which its readers in transformers ask for. Raises OSError.
    """
    order = {dtype: place for place, dtype in enumerate(_NAMES)}
    names = sorted(tensors, key=lambda name: (order[tensors[name].dtype], name))
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        offsets = (end, end + tensor.nbytes)
        header[name] = _Entry(dtype=_NAMES[tensor.dtype], shape=tensor.shape, data_offsets=offsets)
        starts[name] = end
        end += tensor.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file, Holder() as holder:
        begin = file.write(len(text).to_bytes(8, "little") + text)
        for name in by_source(names, tensors.__getitem__):
            holder.turn_to(tensors[name])
            file.seek(begin + starts[name])
            for piece in tensors[name].pieces(_PIECE_BYTES):
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                progress.advance(piece.nbytes)
        file.flush()
        os.fsync(file.fileno())
