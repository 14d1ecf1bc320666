"""The arrays of an Orbax checkpoint, through TensorStore: any region of any of them, and nothing else.

Orbax itself restores trees as they were saved. What a model wants is often a part of that tree, in another layout and
dtype, on a mesh of another shape; so arrays are opened one by one, by the names and in the formats that Orbax's own
metadata gives. How the tree was sharded when it was saved is not asked.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import msgspec
import numpy as np
import tensorstore as ts

from jserve.checkpoints.key_map import Path, raise_all
from jserve.checkpoints.lazy import LazyArray, Region, aligned_empty
from jserve.checkpoints.names import resolve_member
from jserve.checkpoints.orbax.msgpack import read_msgpack
from jserve.checkpoints.orbax.whole import broken_database, broken_folders
from jserve.errors import CheckpointError

__all__ = ["METADATA_NAME", "Kvstore", "TreeMetadata", "file_kvstore", "read_folders", "read_metadata", "read_tree"]

METADATA_NAME = "_METADATA"
MANIFEST_NAME = "manifest.ocdbt"
_MAX_METADATA_BYTES = 64 << 20
_MAX_ARRAYS = 200_000
_MAX_DEPTH = 64
_CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},
    "data_copy_concurrency": {"limit": min(16, max(2, os.cpu_count() or 2))},
    "file_io_concurrency": {"limit": 8},
    "s3_request_concurrency": {"limit": 16},
    "gcs_request_concurrency": {"limit": 16},
}
"""What TensorStore may hold and do at once. A context a checkpoint: a context remembers the folders that it saw."""
_COPY = "copy it anew from where it was made, or give an older step"
_NO_ARRAYS = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple", "string"})
"""Values of a tree that are empty, or lie elsewhere than in arrays."""

Kvstore = Mapping[str, Any]
"""A folder as TensorStore's specification of a key-value store; its ``path`` ends with a slash."""


class _Key(msgspec.Struct):
    key: str | int


class _Value(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False


class _Leaf(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Value


class TreeMetadata(msgspec.Struct):
    """What ``_METADATA`` says."""

    tree_metadata: Mapping[str, _Leaf]
    use_ocdbt: bool | None = None
    """None in files of an Orbax that did not tell."""
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False
    """Every chunk was written: one that is not there is lost, and not zero."""
    custom_metadata: Any = None

    def paths(self) -> list[Path]:
        """Of the arrays, in order."""
        return [
            tuple(str(part.key) for part in leaf.key_metadata)
            for leaf in self.tree_metadata.values()
            if not leaf.value_metadata.skip_deserialize and leaf.value_metadata.value_type not in _NO_ARRAYS
        ]


def file_kvstore(folder: FilePath) -> Kvstore:
    """A folder of this machine."""
    return {"driver": "file", "path": f"{folder.absolute()}/"}


def read_tree(folder: FilePath, *, base: Kvstore | None = None) -> dict[Path, LazyArray]:
    """Every array of the tree saved in ``folder``, by its path, not read yet.

    ``base`` is where the arrays themselves are, if only the metadata is in ``folder``. Raises CheckpointError where
    the metadata is missing or damaged, or an array cannot be opened; SourceError for names that lead out of it.
    """
    metadata = read_metadata(folder)
    paths = metadata.paths()
    ocdbt = metadata.use_ocdbt
    if ocdbt is None:
        ocdbt = (folder / MANIFEST_NAME).exists()
    if ocdbt and not (folder / MANIFEST_NAME).exists():
        raise CheckpointError(f"{folder} is damaged: {MANIFEST_NAME}, the index of its arrays, is missing")
    every_piece = metadata.store_array_data_equal_to_fill_value
    local = base is None
    if base is None:
        _refuse_links(folder, [MANIFEST_NAME, "d"] if ocdbt else [".".join(path) for path in paths])
        base = file_kvstore(folder)
    if local and ocdbt:
        try:
            broken = broken_database(folder, ts.Context(_CONTEXT))
        except (ValueError, OSError):
            broken = []  # each array says so, when it is opened
        raise_all(f"{folder} is damaged:", broken, fix=_COPY)
    return _open_arrays(
        folder,
        {path: ".".join(path) for path in paths},
        {"driver": "ocdbt", "base": dict(base)} if ocdbt else base,
        driver="zarr3" if metadata.use_zarr3 else "zarr",
        missing_is_zero=not every_piece,
        counted=local and not ocdbt and every_piece,
    )


def read_folders(folder: FilePath, *, base: Kvstore | None = None) -> dict[Path, LazyArray]:
    """Every array of a tree without metadata: a folder each, named after its path with dots.

    Old Orbax keeps small arrays in a msgpack file beside them. Raises as ``read_tree`` does.
    """
    inline = folder / "checkpoint"
    arrays = read_msgpack(resolve_member(folder, inline.name)) if inline.is_file() else {}
    for file, driver in ((".zarray", "zarr"), ("zarr.json", "zarr3")):
        names = sorted(child.name for child in folder.iterdir() if (child / file).is_file())
        if base is None:
            _refuse_links(folder, names)
        arrays |= _open_arrays(
            folder,
            {tuple(name.split(".")): name for name in names},
            base or file_kvstore(folder),
            driver=driver,
            missing_is_zero=True,
        )
    return arrays


def _open_arrays(
    folder: FilePath,
    names: Mapping[Path, str],
    store: Kvstore,
    *,
    driver: str,
    missing_is_zero: bool,
    counted: bool = False,
) -> dict[Path, LazyArray]:
    """The arrays at ``names`` of ``store``; ``driver`` is TensorStore's name of their format, ``folder`` stands in
    errors. ``counted``: their files are in ``folder``, and all must be there. Raises CheckpointError that lists all
    that cannot be opened."""
    specs = {
        path: {
            "driver": driver,
            "kvstore": {**store, "path": f"{store.get('path', '')}{name}/"},
            "fill_missing_data_reads": missing_is_zero,
        }
        for path, name in names.items()
    }
    # All at once: an object store answers each after a while.
    context = ts.Context(_CONTEXT)
    futures = {path: ts.open(spec, open=True, read=True, context=context) for path, spec in specs.items()}
    opened: dict[Path, Any] = {}
    arrays: dict[Path, LazyArray] = {}
    wrong: dict[str, list[str]] = {}
    for path, future in futures.items():
        try:
            opened[path] = future.result()
            stored = _Stored(specs[path], opened[path], name=f"{folder} is damaged at {'.'.join(path)}")
            arrays[path] = stored.lazy()
        except (ValueError, OSError, TypeError) as error:
            wrong.setdefault(_reason(error), []).append(".".join(path))
    raise_all(
        f"{folder} is damaged; arrays that cannot be opened:",
        [
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {reason}"
            for reason, names in wrong.items()
        ],
        fix=_COPY,
    )
    if counted:
        lost = broken_folders(folder, {names[path]: array for path, array in opened.items()})
        raise_all(f"{folder} is damaged:", lost, fix=_COPY)
    return arrays


def read_metadata(folder: FilePath) -> TreeMetadata:
    """``_METADATA`` of ``folder``. Raises CheckpointError where it is missing or damaged."""
    path = resolve_member(folder, METADATA_NAME)
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_METADATA_BYTES} bytes; it is not Orbax's metadata")
        metadata = msgspec.json.decode(path.read_bytes(), type=TreeMetadata)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    paths = metadata.paths()
    if len(paths) > _MAX_ARRAYS or any(len(name) > _MAX_DEPTH for name in paths):
        raise CheckpointError(
            f"{path} names {len(paths)} arrays, up to {max(map(len, paths))} levels deep; "
            f"allowed are {_MAX_ARRAYS} and {_MAX_DEPTH}"
        )
    if len(set(paths)) != len(paths):
        raise CheckpointError(f"{path} is damaged: it names the same array twice")
    return metadata


def _refuse_links(folder: FilePath, names: Iterable[str]) -> None:
    """Files of arrays may not be links out of ``folder``, nor names lead out of it."""
    for name in names:
        resolve_member(folder, name)


class _Stored:
    """One array in TensorStore; the ``Source`` of its LazyArray."""

    def __init__(self, spec: Mapping[str, Any], array: Any, *, name: str) -> None:
        self._spec = spec
        self._array = array
        self._name = name
        self._dtype = np.dtype(array.dtype.numpy_dtype)
        size = math.prod(array.shape) * self._dtype.itemsize
        self.piece_nbytes = math.prod(array.chunk_layout.read_chunk.shape or ()) * self._dtype.itemsize
        self.nbytes = size + self.piece_nbytes  # a piece as it is stored, and unpacked

    def lazy(self) -> LazyArray:
        return LazyArray(
            shape=tuple(self._array.shape),
            dtype=self._dtype,
            read_region=self._read,
            source=self if self._array.shape else None,
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        before = self._array
        context = ts.Context({**_CONTEXT, "cache_pool": {"total_bytes_limit": 2 * self.nbytes}})
        self._array = self._await(ts.open(dict(self._spec), open=True, read=True, context=context))
        try:
            yield
        finally:
            self._array = before  # what was held goes with the other

    def _read(self, region: Region) -> np.ndarray:
        values = aligned_empty([s.stop - s.start for s in region], self._dtype)
        self._await(ts.array(values).write(self._array[region]))
        return values

    def _await(self, future: Any) -> Any:
        try:
            return future.result()
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self._name}: {_reason(error)}", fix=_COPY) from None


def _reason(error: Exception) -> str:
    """What TensorStore says, without the specification and without the layers that the error came through: its status,
    and from the innermost ``Error ...`` on that names a file."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = re.split(r" \[(?:tensorstore_spec|source locations|os_error_code)", line)[0]
    status = re.match(r"[A-Z_]+: ", line)
    begins = [match.start() for match in re.finditer("Error ", line)]
    start = max((at for at in begins if 'file "' in line[at:]), default=max(begins, default=-1))
    return (line if start < 0 else f"{status[0] if status else ''}{line[start:]}")[:300]
