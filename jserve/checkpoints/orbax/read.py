"""The arrays of an Orbax checkpoint, through TensorStore: any region of any of them, and nothing else.

Orbax itself restores trees as they were saved. What a model wants is often a part of that tree, in another layout and
dtype, on a mesh of another shape; so arrays are opened one by one, by the names and in the formats that Orbax's own
metadata gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tensorstore as ts

from jserve.checkpoints.lazy import LazyArray, Region
from jserve.errors import CheckpointError

__all__ = ["METADATA_NAME", "read_tree"]

METADATA_NAME = "_METADATA"
_MAX_METADATA_BYTES = 64 << 20
_BOUNDS = {
    "cache_pool": {"total_bytes_limit": 0},
    "data_copy_concurrency": {"limit": 2},
    "file_io_concurrency": {"limit": 8},
}
"""What TensorStore may hold and do at once. A context a checkpoint: a context remembers the folders that it saw."""


def read_tree(folder: Path) -> dict[tuple[str, ...], LazyArray]:
    """Every array of the tree saved in ``folder``, by its path, not read yet.

    Raises CheckpointError where the metadata is missing or damaged, or an array cannot be opened.
    """
    metadata = _metadata(folder / METADATA_NAME)
    paths = [
        tuple(str(part.key) for part in leaf.key_metadata)
        for leaf in metadata.tree_metadata.values()
        if not leaf.value_metadata.skip_deserialize and leaf.value_metadata.value_type != "None"
    ]
    # All at once: an object store answers each after a while.
    context = ts.Context(_BOUNDS)
    futures = {path: _open(folder, path, metadata, context) for path in paths}
    arrays: dict[tuple[str, ...], LazyArray] = {}
    wrong: list[str] = []
    for path, future in futures.items():
        try:
            arrays[path] = _lazy(folder, path, future.result())
        except (ValueError, OSError) as error:
            wrong.append(f"{'.'.join(path)}: {_first_line(error)}")
    if wrong:
        raise CheckpointError("\n  ".join([f"{folder} is damaged; arrays that cannot be opened:", *wrong[:20]]))
    return arrays


def _lazy(folder: Path, path: tuple[str, ...], array: Any) -> LazyArray:
    def read(region: Region) -> np.ndarray:
        try:
            values: np.ndarray = array[region].read().result()
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{folder} is damaged at {'.'.join(path)}: {_first_line(error)}") from None
        return values

    return LazyArray(shape=tuple(array.shape), dtype=np.dtype(array.dtype.numpy_dtype), read_region=read)


def _open(folder: Path, path: tuple[str, ...], metadata: _Metadata, context: ts.Context) -> Any:
    base = f"file://{folder.absolute()}/"
    name = ".".join(path)
    kvstore: Any = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if metadata.use_ocdbt else f"{base}{name}/"
    driver = "zarr3" if metadata.use_zarr3 else "zarr"
    return ts.open({"driver": driver, "kvstore": kvstore}, open=True, read=True, context=context)


def _metadata(path: Path) -> _Metadata:
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_METADATA_BYTES} bytes; it is not Orbax's metadata")
        return msgspec.json.decode(path.read_bytes(), type=_Metadata)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


class _Key(msgspec.Struct):
    key: str | int


class _Value(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False


class _Leaf(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Value


class _Metadata(msgspec.Struct):
    tree_metadata: Mapping[str, _Leaf]
    use_ocdbt: bool = True
    use_zarr3: bool = False
