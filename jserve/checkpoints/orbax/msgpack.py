"""Flax's msgpack checkpoints (``flax.training.checkpoints``, ``flax_model.msgpack``): arrays where they lie in a file.

The format (flax.serialization): nested maps with text keys; an array is extension 1, a scalar of numpy extension 3,
both around the msgpack array [shape, name of the dtype, bytes]; an array of more than 1 GiB is a map of chunks. Only
headers are looked at here; values are read when they are asked for, and nothing is executed.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path as FilePath
from typing import Any

import ml_dtypes
import numpy as np

from jserve.checkpoints.arrays.key_map import Path
from jserve.checkpoints.arrays.lazy import LazyArray, Region
from jserve.errors import CheckpointError, UnsupportedModel

__all__ = ["read_msgpack"]

_MAX_DEPTH = 64
_MAX_ENTRIES = 1_000_000
_NDARRAY, _NPSCALAR = 1, 3
_CHUNKED = "__msgpack_chunked_array__"
_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_DTYPES = ("bool", *_INTEGERS, "float16", "float32", "float64")


def read_msgpack(path: FilePath) -> dict[Path, LazyArray]:
    """Every array of the file at ``path``, by its path, not read yet; what is no array is left out.

    Raises CheckpointError where the file is damaged or no Flax checkpoint, UnsupportedModel for unknown dtypes.
    """
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise CheckpointError(f"{path} is empty") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    walker = _Walker(data, path, start=0)
    try:
        tree = walker.value(0)
    except (IndexError, struct.error, ValueError):
        raise CheckpointError(f"{path} is damaged or cut off: no Flax checkpoint in msgpack") from None
    if not isinstance(tree, dict) or walker.at != len(data):
        raise CheckpointError(f"{path} is no Flax checkpoint: it is not one map of msgpack")
    arrays: dict[Path, LazyArray] = {}
    _collect(tree, (), arrays, path)
    return arrays


def _collect(node: Any, at: Path, arrays: dict[Path, LazyArray], file: FilePath) -> None:
    if isinstance(node, LazyArray):
        arrays[at] = node
    elif isinstance(node, dict):
        if _CHUNKED in node:
            arrays[at] = _whole(node, file)
            return
        for key, child in node.items():
            _collect(child, (*at, str(key)), arrays, file)
    elif isinstance(node, list):
        for i, child in enumerate(node):
            _collect(child, (*at, str(i)), arrays, file)


def _whole(node: dict[Any, Any], file: FilePath) -> LazyArray:
    """An array that was written as flat chunks."""
    try:
        shape = tuple(int(node["shape"][str(i)]) for i in range(len(node["shape"])))
        chunks = [node["chunks"][str(i)] for i in range(len(node["chunks"]))]
        sizes = [chunk.size for chunk in chunks]
        if not chunks or not shape or min(shape) < 0 or math.prod(shape) != sum(sizes):
            raise ValueError
        if len({chunk.dtype for chunk in chunks}) != 1 or any(len(chunk.shape) != 1 for chunk in chunks):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise CheckpointError(f"{file} is damaged: the chunks of a large array do not make up its shape") from None
    return LazyArray.concatenated(chunks, 0).split(0, shape)


def _in_file(path: FilePath, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> LazyArray:
    """An array whose bytes begin at ``offset``. Read, and not mapped: pages of a map count as memory until the end."""
    row = dtype.itemsize * math.prod(shape[1:])

    def read(region: Region) -> np.ndarray:
        first = region[0].start if shape else 0
        rows = (region[0].stop - first,) if shape else ()
        try:
            count = math.prod((*rows, *shape[1:]))
            values = np.fromfile(path, dtype, count, offset=offset + first * row)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        if values.size != count:
            raise CheckpointError(f"{path} became shorter while it was read")
        return values.reshape(*rows, *shape[1:])[(slice(None), *region[1:])] if shape else values.reshape(())

    return LazyArray(shape=shape, dtype=dtype, read_region=read)


class _Walker:
    """Goes once through the bytes; keeps maps, lists, numbers and text, and arrays as views of the file."""

    def __init__(self, data: memoryview, path: FilePath, *, start: int) -> None:
        self._data = data
        self._path = path
        self._start = start
        self._entries = 0
        self.at = 0

    def value(self, depth: int) -> Any:
        self._entries += 1
        if depth > _MAX_DEPTH or self._entries > _MAX_ENTRIES:
            raise CheckpointError(
                f"{self._path} nests deeper than {_MAX_DEPTH} or has more than {_MAX_ENTRIES} entries"
            )
        kind = self._number("B")
        if kind <= 0x7F:
            return kind
        if kind <= 0x8F:
            return self._map(kind & 0x0F, depth)
        if kind <= 0x9F:
            return self._list(kind & 0x0F, depth)
        if kind <= 0xBF:
            return str(self._bytes(kind & 0x1F), "utf-8")
        if kind >= 0xE0:
            return kind - 0x100
        return self._long(kind, depth)

    def _long(self, kind: int, depth: int) -> Any:
        match kind:
            case 0xC0 | 0xC2 | 0xC3:
                return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
            case 0xC4 | 0xC5 | 0xC6:
                return self._bytes(self._number("BHI"[kind - 0xC4]))
            case 0xC7 | 0xC8 | 0xC9:
                return self._extension(self._number("BHI"[kind - 0xC7]))
            case 0xCA | 0xCB:
                return self._number("fd"[kind - 0xCA])
            case 0xD4 | 0xD5 | 0xD6 | 0xD7 | 0xD8:
                return self._extension(1 << (kind - 0xD4))
            case 0xD9 | 0xDA | 0xDB:
                return str(self._bytes(self._number("BHI"[kind - 0xD9])), "utf-8")
            case 0xDC | 0xDD:
                return self._list(self._number("HI"[kind - 0xDC]), depth)
            case 0xDE | 0xDF:
                return self._map(self._number("HI"[kind - 0xDE]), depth)
            case 0xC1:
                raise ValueError("no such type")
        return self._number("BHIQbhiq"[kind - 0xCC])

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        node: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise ValueError("no key")
            node[key] = self.value(depth + 1)
        return node

    def _list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def _extension(self, length: int) -> Any:
        code = self._number("b")
        start = self._start + self.at
        body = self._bytes(length)
        if code not in (_NDARRAY, _NPSCALAR):
            return None  # a complex number of Python
        inner = _Walker(body, self._path, start=start)
        parts = inner.value(_MAX_DEPTH - 2)
        if not isinstance(parts, list) or list(map(type, parts))[::2] != [list, memoryview]:
            raise ValueError("no array")
        shape, dtype, values = tuple(parts[0]), self._dtype(parts[1]), parts[2]
        if not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(values):
            raise ValueError("an array's bytes do not fit its shape")
        return _in_file(self._path, start + inner.at - len(values), shape, dtype)

    def _dtype(self, name: Any) -> np.dtype:
        text = str(name, "ascii", "replace") if isinstance(name, memoryview) else str(name)
        if text == "bfloat16":
            return np.dtype(ml_dtypes.bfloat16)
        if text not in _DTYPES:
            raise UnsupportedModel(f"{self._path} holds an array of type {text[:40]!r}, which is not read")
        return np.dtype(text)

    def _number(self, form: str) -> Any:
        size = struct.calcsize(f">{form}")
        return struct.unpack(f">{form}", self._bytes(size))[0]

    def _bytes(self, count: int) -> memoryview:
        found = self._data[self.at : self.at + count]
        if len(found) != count:
            raise ValueError("cut off")
        self.at += count
        return found
