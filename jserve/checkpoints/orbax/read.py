"""The arrays of an Orbax checkpoint, through TensorStore: any region of any of them, and nothing else.

Orbax itself restores trees as they were saved. What a model wants is often a part of that tree, in another layout and
dtype, on a mesh of another shape; so arrays are opened one by one, by the names and in the formats that Orbax's own
metadata gives. How the tree was sharded when it was saved is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import msgspec
import tensorstore as ts

from jserve.checkpoints.arrays.key_map import Path
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.json_file import read_json_file
from jserve.checkpoints.names import member_path, resolve_member
from jserve.checkpoints.orbax.array import CONTEXT, COPY_FIX, StoredArray, raise_store_failure, reason
from jserve.checkpoints.orbax.integrity import broken_database, broken_folders
from jserve.checkpoints.orbax.msgpack import read_msgpack
from jserve.checkpoints.problems import raise_all
from jserve.errors import CheckpointError

__all__ = [
    "INLINE_NAME",
    "METADATA_NAME",
    "OCDBT_MANIFEST",
    "Kvstore",
    "TreeMetadata",
    "file_kvstore",
    "inner_kvstore",
    "read_folders",
    "read_metadata",
    "read_tree",
]

METADATA_NAME = "_METADATA"
INLINE_NAME = "checkpoint"
"""The msgpack file of small arrays that old Orbax wrote beside the folders of others."""
OCDBT_MANIFEST = "manifest.ocdbt"
_MAX_METADATA_BYTES = 64 << 20
_MAX_ARRAYS = 200_000
_MAX_DEPTH = 64
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
    return {"driver": "file", "path": f"{folder.resolve()}/"}  # TensorStore takes no .. in it


def inner_kvstore(base: Kvstore, name: str) -> Kvstore:
    """The folder ``name`` (relative, with slashes) in ``base``. Raises SourceError for names that lead out of it."""
    inner = member_path(name, of=_said(base))
    return {**base, "path": f"{base.get('path', '')}{inner}/"}


def _said(store: Kvstore) -> str:
    """``store`` as users write it."""
    scheme = {"gcs": "gs", "file": "file"}.get(store["driver"], store["driver"])
    return f"{scheme}://{store.get('bucket', '')}/{store.get('path', '')}".removesuffix("/")


def read_tree(folder: FilePath, *, base: Kvstore | None = None) -> dict[Path, LazyArray]:
    """Every array of the tree saved in ``folder``, by its path, not read yet.

    ``base`` is where the arrays themselves are, if only the metadata is in ``folder``. Raises CheckpointError where
    the metadata is missing or damaged, or an array cannot be opened; SourceError for names that lead out of it.
    """
    metadata = read_metadata(folder)
    paths = metadata.paths()
    ocdbt = metadata.use_ocdbt
    if ocdbt is None:
        ocdbt = (folder / OCDBT_MANIFEST).exists()
    if ocdbt and not (folder / OCDBT_MANIFEST).exists():
        raise CheckpointError(f"{folder} is damaged: {OCDBT_MANIFEST}, the index of its arrays, is missing")
    every_piece = metadata.store_array_data_equal_to_fill_value
    counted_in = None
    if base is None:
        _refuse_links(folder, [OCDBT_MANIFEST, "d"] if ocdbt else [".".join(path) for path in paths])
        base = file_kvstore(folder)
        where = str(folder)
        if ocdbt:
            try:
                broken = broken_database(folder, ts.Context(CONTEXT))
            except (ValueError, OSError):
                broken = []  # each array says so, when it is opened
            raise_all(f"{folder} is damaged:", broken, fix=COPY_FIX)
        elif every_piece:
            counted_in = folder
    else:
        where = _said(base)
    return _open_arrays(
        where,
        {path: ".".join(path) for path in paths},
        {"driver": "ocdbt", "base": dict(base), "cache_pool": "cache_pool#index"} if ocdbt else base,
        driver="zarr3" if metadata.use_zarr3 else "zarr",
        missing_is_zero=not every_piece,
        counted_in=counted_in,
    )


def read_folders(folder: FilePath, *, base: Kvstore | None = None) -> dict[Path, LazyArray]:
    """Every array of a tree without metadata: a folder each, named after its path with dots.

    Old Orbax keeps small arrays in a msgpack file beside them. Raises as ``read_tree`` does.
    """
    inline = folder / INLINE_NAME
    arrays = read_msgpack(resolve_member(folder, INLINE_NAME)) if inline.is_file() else {}
    for file, driver in ((".zarray", "zarr"), ("zarr.json", "zarr3")):
        names = sorted(child.name for child in folder.iterdir() if (child / file).is_file())
        if base is None:
            _refuse_links(folder, names)
        arrays |= _open_arrays(
            str(folder) if base is None else _said(base),
            {tuple(name.split(".")): name for name in names},
            base or file_kvstore(folder),
            driver=driver,
            missing_is_zero=True,
        )
    return arrays


def _open_arrays(
    where: str,
    names: Mapping[Path, str],
    store: Kvstore,
    *,
    driver: str,
    missing_is_zero: bool,
    counted_in: FilePath | None = None,
) -> dict[Path, LazyArray]:
    """The arrays at ``names`` of ``store``; ``driver`` is TensorStore's name of their format, ``where`` stands in
    errors. ``counted_in``: a folder that all of their files must be in. Raises CheckpointError that lists all that
    cannot be opened, SourceError where the store cannot be asked."""
    in_database = store["driver"] == "ocdbt"  # names are its keys then, and no paths
    specs = {
        path: {
            "driver": driver,
            "kvstore": {**store, "path": f"{name}/"} if in_database else inner_kvstore(store, name),
            "fill_missing_data_reads": missing_is_zero,
        }
        for path, name in names.items()
    }
    # All at once: an object store answers each after a while.
    context = ts.Context(CONTEXT)
    futures = {path: ts.open(spec, open=True, read=True, context=context) for path, spec in specs.items()}
    opened: dict[Path, Any] = {}
    arrays: dict[Path, LazyArray] = {}
    wrong: dict[str, list[str]] = {}
    for path, future in futures.items():
        try:
            opened[path] = future.result()
            stored = StoredArray(specs[path], opened[path], where=where, name=".".join(path))
            arrays[path] = stored.lazy()
        except (ValueError, OSError, TypeError) as error:
            raise_store_failure(where, error)
            wrong.setdefault(reason(error), []).append(".".join(path))
    raise_all(
        f"{where} is damaged; arrays that cannot be opened:",
        [
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {reason}"
            for reason, names in wrong.items()
        ],
        fix=COPY_FIX,
    )
    if counted_in is not None:
        lost = broken_folders(counted_in, {names[path]: array for path, array in opened.items()})
        raise_all(f"{where} is damaged:", lost, fix=COPY_FIX)
    return arrays


def read_metadata(folder: FilePath) -> TreeMetadata:
    """``_METADATA`` of ``folder``. Raises CheckpointError where it is missing or damaged."""
    path = resolve_member(folder, METADATA_NAME)
    metadata = read_json_file(path, TreeMetadata, what="metadata of Orbax's", max_bytes=_MAX_METADATA_BYTES)
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
