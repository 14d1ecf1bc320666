"""The arrays of an Orbax checkpoint, through TensorStore: any region of any of them, and nothing else.

Orbax itself restores trees as they were saved. What a model wants is often a part of that tree, in another layout and
dtype, on a mesh of another shape; so arrays are opened one by one, by the names and in the formats that Orbax's own
metadata gives. How the tree was sharded when it was saved is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from jserve.checkpoints.orbax.peel import KEPT_OUT
from jserve.checkpoints.problems import raise_all
from jserve.errors import CheckpointError

__all__ = [
    "INLINE_NAME",
    "METADATA_NAME",
    "OCDBT_MANIFEST",
    "Kvstore",
    "StoredTree",
    "inner_kvstore",
    "read_folders",
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


class _TreeMetadata(msgspec.Struct):
    """What ``_METADATA`` says."""

    tree_metadata: Mapping[str, _Leaf]
    use_ocdbt: bool | None = None
    """None in files of an Orbax that did not tell."""
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False
    """Every chunk was written: one that is not there is lost, and not equal to the fill value."""
    custom_metadata: Any = None

    def paths(self) -> list[Path]:
        """Of the arrays, in order."""
        return [
            tuple(str(part.key) for part in leaf.key_metadata)
            for leaf in self.tree_metadata.values()
            if not leaf.value_metadata.skip_deserialize and leaf.value_metadata.value_type not in _NO_ARRAYS
        ]


@dataclass(frozen=True, kw_only=True)
class StoredTree:
    """A tree of arrays, none of them read yet."""

    arrays: dict[Path, LazyArray]
    """By their paths."""
    form: str
    """How they are stored, in words: "OCDBT, zarr", "zarr3 in a folder each"."""
    absent: tuple[Path, ...] = ()
    """Arrays that lack pieces which are read as a fill value: their writer left them out, or they were lost."""
    custom: Mapping[str, Any] = field(default_factory=dict)
    """``custom_metadata`` of the tree."""


def _file_kvstore(folder: FilePath) -> Kvstore:
    """A folder of this machine."""
    return {"driver": "file", "path": f"{folder.resolve()}/"}  # TensorStore takes no .. in it


def inner_kvstore(base: Kvstore, name: str) -> Kvstore:
    """The folder ``name`` (relative, with slashes) in ``base``. Raises SourceError for names that lead out of it."""
    inner = member_path(name, of=_said(base), may_be_folder=True)
    return {**base, "path": f"{base.get('path', '')}{inner}/"}


def _said(store: Kvstore) -> str:
    """``store`` as users write it."""
    scheme = {"gcs": "gs", "file": "file"}.get(store["driver"], store["driver"])
    return f"{scheme}://{store.get('bucket', '')}/{store.get('path', '')}".removesuffix("/")


def read_tree(folder: FilePath, *, base: Kvstore | None = None) -> StoredTree:
    """The tree saved in ``folder``.

    ``base`` is where the arrays themselves are, if only the metadata is in ``folder``. Raises CheckpointError where
    the metadata is missing or damaged, an array cannot be opened or files of it are lost; SourceError for names that
    lead out of it.
    """
    metadata = _read_metadata(folder)
    paths = metadata.paths()
    ocdbt = metadata.use_ocdbt
    if ocdbt is None:
        ocdbt = (folder / OCDBT_MANIFEST).exists()
    if ocdbt and not (folder / OCDBT_MANIFEST).exists():
        raise CheckpointError(f"{folder} is damaged: {OCDBT_MANIFEST}, the index of its arrays, is missing")
    where = str(folder)
    is_here = base is None
    if base is None:
        _refuse_links(folder, [OCDBT_MANIFEST, "d"] if ocdbt else [".".join(path) for path in paths])
        base = _file_kvstore(folder)
        if ocdbt:
            try:
                broken = broken_database(folder, ts.Context(CONTEXT))
            except (ValueError, OSError):
                broken = []  # each array says so, when it is opened
            raise_all(f"{folder} is damaged:", broken, fix=COPY_FIX)
    else:
        where = _said(base)
    driver = "zarr3" if metadata.use_zarr3 else "zarr"
    arrays, absent = _open_arrays(
        where,
        {path: ".".join(path) for path in paths},
        {"driver": "ocdbt", "base": dict(base), "cache_pool": "cache_pool#index"} if ocdbt else base,
        driver=driver,
        every_piece=metadata.store_array_data_equal_to_fill_value,
        counted_in=folder if is_here and not ocdbt else None,
    )
    custom = metadata.custom_metadata if isinstance(metadata.custom_metadata, dict) else {}
    form = f"OCDBT, {driver}" if ocdbt else f"{driver} in a folder each"
    return StoredTree(arrays=arrays, form=form, absent=absent, custom=custom)


def read_folders(folder: FilePath, *, base: Kvstore | None = None) -> StoredTree:
    """A tree without metadata: a folder an array, named after its path with dots.

    Old Orbax keeps small arrays in a msgpack file beside them. Raises as ``read_tree`` does.
    """
    inline = folder / INLINE_NAME
    arrays = read_msgpack(resolve_member(folder, INLINE_NAME)) if inline.is_file() else {}
    absent: tuple[Path, ...] = ()
    drivers = []
    for file, driver in ((".zarray", "zarr"), ("zarr.json", "zarr3")):
        names = sorted(child.name for child in folder.iterdir() if (child / file).is_file())
        if base is None:
            _refuse_links(folder, names)
        opened, lacking = _open_arrays(
            str(folder) if base is None else _said(base),
            {tuple(name.split(".")): name for name in names},
            base or _file_kvstore(folder),
            driver=driver,
            every_piece=False,
            counted_in=folder if base is None else None,
        )
        arrays |= opened
        absent += lacking
        drivers += [driver] if opened else []
    return StoredTree(arrays=arrays, form=f"{' and '.join(drivers)} in a folder each", absent=absent)


def _open_arrays(
    where: str,
    names: Mapping[Path, str],
    store: Kvstore,
    *,
    driver: str,
    every_piece: bool,
    counted_in: FilePath | None,
) -> tuple[dict[Path, LazyArray], tuple[Path, ...]]:
    """The arrays at ``names`` of ``store``, and those of them that lack pieces which are read as the fill value.

    ``driver`` is TensorStore's name of their format, ``where`` stands in errors. ``every_piece``: the writer says that
    it wrote all of them. ``counted_in``: a folder of this machine that their files are in. Raises CheckpointError that
    lists all that cannot be opened or have lost files, SourceError where the store cannot be asked.
    """
    in_database = store["driver"] == "ocdbt"  # names are its keys then, and no paths
    specs = {
        path: {
            "driver": driver,
            "kvstore": {**store, "path": f"{name}/"} if in_database else inner_kvstore(store, name),
            "fill_missing_data_reads": False,
        }
        for path, name in names.items()
    }
    # All at once: an object store answers each after a while.
    context = ts.Context(CONTEXT)
    wrong: dict[str, list[str]] = {}

    def results(futures: Mapping[Path, Any]) -> dict[Path, Any]:
        found = {}
        for path, future in futures.items():
            try:
                found[path] = future.result()
            except (ValueError, OSError, TypeError) as error:
                raise_store_failure(where, error)
                wrong.setdefault(reason(error), []).append(".".join(path))
        return found

    opened = results({path: ts.open(spec, open=True, read=True, context=context) for path, spec in specs.items()})
    # Without a fill value TensorStore writes every piece; with one it left out those that are equal to it, unless told.
    sparse = {path: array for path, array in opened.items() if not every_piece and array.fill_value is not None}
    stored = results({path: array.storage_statistics(query_fully_stored=True) for path, array in sparse.items()})
    absent = tuple(path for path, statistics in stored.items() if not statistics.fully_stored)
    for path in absent:
        specs[path]["fill_missing_data_reads"] = True
    opened |= results({path: ts.open(specs[path], open=True, read=True, context=context) for path in absent})
    arrays: dict[Path, LazyArray] = {}
    for path, array in opened.items():
        try:
            arrays[path] = StoredArray(specs[path], array, where=where, name=".".join(path)).lazy()
        except TypeError as error:
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
        # TensorStore of before 2022 left out zeros without a word: an optimizer's, which nobody reads, may lack them.
        counted = {p: a for p, a in opened.items() if every_piece or (p not in sparse and not KEPT_OUT.intersection(p))}
        lost = broken_folders(counted_in, {names[path]: array for path, array in counted.items()})
        raise_all(f"{where} is damaged:", lost, fix=COPY_FIX)
    return arrays, absent


def _read_metadata(folder: FilePath) -> _TreeMetadata:
    """``_METADATA`` of ``folder``. Raises CheckpointError where it is missing or damaged."""
    path = resolve_member(folder, METADATA_NAME)
    metadata = read_json_file(path, _TreeMetadata, what="metadata of Orbax's", max_bytes=_MAX_METADATA_BYTES)
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
    """Files and folders of arrays may not be links out of ``folder``, nor names lead out of it."""
    for name in names:
        resolve_member(folder, name, may_be_folder=True)
