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
from functools import partial
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from jserve.checkpoints.arrays.hold import Holder, by_source
from jserve.checkpoints.arrays.lazy import LazyArray, Region
from jserve.errors import CheckpointError
from jserve.progress import Progress

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
_METADATA = "__metadata__"
_ALIGNMENT = 8
_PIECE_BYTES = 32 << 20
"""Host memory that writing holds."""


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

    Reading one raises CheckpointError where the file has changed meanwhile.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
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
    return TensorFile(tensors={name: _lazy(path, entry, begin) for name, entry in entries.items()}, problems=())


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
        end = last
    if begin + end != size:
        yield f"has {size} bytes; its header says {begin + end}"


def _lazy(path: Path, entry: _Entry, begin: int) -> LazyArray:
    dtype, shape = _DTYPES[entry.dtype], entry.shape
    read = partial(_read, path, dtype, shape, begin + entry.data_offsets[0])
    return LazyArray(shape=shape, dtype=dtype, read_region=read)


def _read(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, region: Region) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return np.empty(shape, dtype)[region]
    try:
        # Mapped for this read only: pages of files that stay mapped count as the process's memory.
        mapped = np.memmap(path, np.uint8, "r", offset=offset, shape=(nbytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} has changed since it was opened: {error}", fix="start again") from None
    return np.array(mapped.view(dtype).reshape(shape)[region])


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
