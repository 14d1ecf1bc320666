"""The GGUF container: a header of typed key-value pairs, a directory of tensors, then their bytes.

The header is read here and not by the gguf package's reader, which takes seconds for a real vocabulary and trusts
every length that it finds. Here nothing is believed: each length is checked against the bytes that are left and
against a budget before anything is allocated. What the bytes of a tensor mean is the gguf package's business (see
``jserve.checkpoints.gguf.tensors``).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jserve.errors import CheckpointError, UnsupportedModel

__all__ = ["GgufFile", "GgufTensor"]

MAX_HEADER_BYTES = 256 << 20
"""Far above any real vocabulary; below what would hurt."""
MAX_ELEMENTS = 1 << 23
"""Most pairs, tensors and array elements of a header, all together."""
MAX_DIMENSIONS = 4
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""The file's number of each scalar type, and its struct code."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One entry of the directory."""

    name: str
    shape: tuple[int, ...]
    """Row-major: the last axis is contiguous. (The file itself lists axes the other way around.)"""
    kind: GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GgufFile:
    """An open GGUF file: ``version``, ``metadata``, ``tensors``, and the bytes of each tensor.

    Opening raises CheckpointError, which names the file, where it is cut short, damaged or no GGUF file, and
    UnsupportedModel for versions, byte orders and block types that are not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from None
        try:
            header = _Header(self._file, path)
            self.version = header.version
            self.metadata: dict[str, Any] = header.metadata
            self.tensors: dict[str, GgufTensor] = header.tensors
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, tensor: GgufTensor, start: int, nbytes: int) -> np.ndarray:
        """``nbytes`` raw bytes of ``tensor`` from its byte ``start``: uint8 ``[nbytes]``."""
        data = bytearray(nbytes)
        at = 0
        try:
            # By position, so that several threads may read; one call gives 2 GiB at most.
            while at < nbytes and (
                got := os.preadv(self._file.fileno(), [memoryview(data)[at:]], tensor.offset + start + at)
            ):
                at += got
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from None
        if at != nbytes:
            raise CheckpointError(f"{self.path} ended within tensor {tensor.name}; was it changed while being read?")
        return np.frombuffer(data, np.uint8)


class _Header:
    """Everything before the tensors' bytes, read once, front to back."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = os.fstat(file.fileno()).st_size
        self._at = 0
        self._elements = 0
        self.version, tensor_count, pair_count = self._preamble()
        self._spend(tensor_count + pair_count)
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            if key in self.metadata:
                self._damaged(f"names the key {key!r} twice")
            self.metadata[key] = self._value(self._scalar("I"))
        entries = [self._entry() for _ in range(tensor_count)]
        self.tensors = self._place(entries)

    def _preamble(self) -> tuple[int, int, int]:
        magic = self._take(4) if self._size >= 4 else b""
        if magic != b"GGUF":
            found = f"begins with {magic!r}, not b'GGUF'" if magic else "is empty"
            raise CheckpointError(f"{self._path} is not a GGUF file: it {found}")
        version = self._scalar("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = (
                f"is a big-endian GGUF file of version {swapped}" if swapped in _VERSIONS else f"has version {version}"
            )
            raise UnsupportedModel(f"{self._path} {what}; little-endian versions 2 and 3 are read")
        return version, self._scalar("Q"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(self._code(kind))

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        self._spend(count)
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            self._damaged("has an array of arrays, which no model's metadata uses")
        code = self._code(kind)
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._damaged(f"gives tensor {name!r} {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._damaged(f"has general.alignment {alignment!r}; it must be a power of two")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        unknown: list[str] = []
        for name, shape, number, offset in entries:
            if name in tensors:
                self._damaged(f"names the tensor {name!r} twice")
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                unknown.append(f"{name} (type {number})")
                continue
            block, block_bytes = GGML_QUANT_SIZES[kind]
            elements = math.prod(shape)
            if elements == 0 or shape[-1] % block or offset % alignment:
                self._damaged(
                    f"places tensor {name!r} of shape {list(shape)} at offset {offset}; {kind.name} wants rows of "
                    f"whole blocks of {block}, at least one, aligned to {alignment} bytes"
                )
            nbytes = elements // block * block_bytes
            end = start + offset + nbytes
            if end > self._size:
                raise CheckpointError(
                    f"{self._path} is cut short: it has {self._size} bytes, and tensor {name!r} ends at byte {end}",
                    fix="fetch the file again",
                )
            tensors[name] = GgufTensor(name=name, shape=shape, kind=kind, offset=start + offset, nbytes=nbytes)
        if unknown:
            raise UnsupportedModel(f"{self._path} has tensors of types that are not known: {', '.join(unknown[:8])}")
        return tensors

    def _string(self) -> str:
        length = self._scalar("Q")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            return self._damaged(f"has text that is not UTF-8 before byte {self._at}")

    def _code(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        return code if code is not None else self._damaged(f"has a value of unknown type {kind} at byte {self._at}")

    def _scalar(self, code: str) -> Any:
        return _UNPACK[code](self._take(_SIZES[code]))[0]

    def _take(self, n: int) -> bytes:
        if n > self._size - self._at:
            raise CheckpointError(
                f"{self._path} is cut short or damaged: its header wants {n} bytes at byte {self._at}, "
                f"and {self._size - self._at} are left",
                fix="fetch the file again",
            )
        self._at += n
        if self._at > MAX_HEADER_BYTES:
            self._damaged(f"has a header of more than {MAX_HEADER_BYTES} bytes")
        data = self._file.read(n)
        if len(data) != n:
            self._damaged("changed while it was read")
        return data

    def _spend(self, elements: int) -> None:
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            self._damaged(f"announces {self._elements} entries in its header; at most {MAX_ELEMENTS} are read")

    def _damaged(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} {what}", fix="fetch the file again")


_UNPACK: Mapping[str, Callable[[bytes], tuple[Any, ...]]] = {
    code: struct.Struct(f"<{code}").unpack for code in _SCALARS.values()
}
_SIZES: Mapping[str, int] = {code: struct.calcsize(f"<{code}") for code in _SCALARS.values()}
