"""Whether the files of arrays are all there, told by their names and sizes: nothing of the arrays is read.

A copy that was cut off, or a disk that lost a file, is found before a start, when an older step can still be taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from jserve.checkpoints.names import resolve_member
from jserve.checkpoints.orbax.array import COPY_FIX
from jserve.errors import CheckpointError

__all__ = ["broken_database", "broken_folders"]

_MAX_NODES = 10_000
"""Of the index: a node holds thousands of entries."""


def broken_database(folder: Path, context: ts.Context) -> list[str]:
    """Files that the OCDBT database in ``folder`` points to and that are missing or too short, with what they hold.

    Raises ValueError or OSError where the database's own index cannot be read, SourceError where it leads out of the
    folder, CheckpointError where it is larger than that of any checkpoint.
    """
    store = ts.KvStore.open({"driver": "file", "path": f"{folder.resolve()}/"}, context=context).result()
    ends: dict[str, int] = {}
    holds: dict[str, list[str]] = {}
    for key, file, end in _values(folder, store, context):
        ends[file] = max(ends.get(file, 0), end)
        holds.setdefault(file, []).append(key)
    broken = []
    for file, end in ends.items():
        path = resolve_member(folder, file)
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            names = list(dict.fromkeys(key.rpartition("/")[0] for key in holds[file]))
            broken.append(
                f"{file} {'is missing' if size is None else f'has {size} bytes of at least {end}'}; in it lie "
                + ", ".join(names[:3])
                + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            )
    return broken


def broken_folders(folder: Path, arrays: Mapping[str, Any]) -> list[str]:
    """Arrays in a folder each (opened, by the folders' names) that have fewer files than pieces, or an empty one.

    Each piece must have been written, be it zeros.
    """
    broken = []
    for name, array in arrays.items():
        pieces = array.chunk_layout.write_chunk.shape or ()
        wanted = math.prod(-(-size // piece) for size, piece in zip(array.shape, pieces, strict=True))
        found = [
            path
            for path in (folder / name).rglob("*")
            if path.is_file() and not path.name.startswith(".") and path.name != "zarr.json"
        ]
        empty = [path for path in found if path.stat().st_size == 0]
        if len(found) < wanted:
            broken.append(f"{name} has {len(found)} of its {wanted} files")
        elif empty:
            broken.append(f"{name}/{empty[0].relative_to(folder / name)} is empty")
    return broken


def _values(folder: Path, store: Any, context: ts.Context) -> Iterator[tuple[str, str, int]]:
    """Every value that lies in a file: its key, the file below the folder, and where in it the value ends."""
    manifest = ts.ocdbt.dump(store, context=context).result()
    versions = manifest.get("versions") or []
    root = versions[-1]["root"].get("location") if versions else None
    nodes: list[tuple[str, str]] = [] if root is None else [(root, "")]
    for node, prefix in nodes:
        if len(nodes) > _MAX_NODES:
            raise CheckpointError(
                f"{folder} is damaged: the index of its arrays has more than {_MAX_NODES} nodes", fix=COPY_FIX
            )
        for entry in ts.ocdbt.dump(store, node, context=context).result()["entries"]:
            if "location" in entry:
                nodes.append((entry["location"], prefix + _text(entry.get("subtree_common_prefix", b""))))
            elif "indirect_value" in entry:
                file, offset, length = entry["indirect_value"].removeprefix("value:").rsplit(":", 2)
                end = int(offset) + int(length)
                yield prefix + _text(entry["key"]), unquote(file.replace(":", "", 1)), end


def _text(key: Any) -> str:
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
