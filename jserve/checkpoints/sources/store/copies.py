"""What a URI of an object store holds: a checkpoint whose arrays are read where they are, or files that are copied.

Copied are those that cannot be read in parts over a network: safetensors, GGUF and Flax's msgpack files. Each is kept
by itself, so that a copy that was broken off goes on with the next file.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from jserve.checkpoints.cache import make_once
from jserve.checkpoints.hf.shards import weight_files
from jserve.checkpoints.orbax.layout import find_layouts
from jserve.checkpoints.sources.fetch import LocalFile, LocalFolder, local
from jserve.checkpoints.sources.store.mirror import Mirror, copy_object, mirror
from jserve.checkpoints.sources.uri import StoreSource
from jserve.config import cache_dir
from jserve.errors import CheckpointError
from jserve.progress import Progress

__all__ = ["fetch_checkpoint", "fetch_from_store"]


def fetch_from_store(source: StoreSource, *, progress: Progress) -> LocalFile | LocalFolder:
    """Bring ``source`` onto this machine, but for arrays that are read where they are.

    Raises SourceError where it is not there or cannot be had, and as ``local`` does.
    """
    found = mirror(source, progress=progress)
    if isinstance(found, Path):
        return local(found)
    with found.in_words():
        kind = local(found.folder)
        assert isinstance(kind, LocalFolder)
        if kind.kind == "hf":
            return LocalFolder(path=_with_weights(found, progress), kind="hf")
        if kind.kind == "orbax" and (file := _msgpack(found)) is not None:
            return LocalFolder(path=_whole(found, [file], progress), kind="orbax")
    return LocalFolder(path=found.folder, kind=kind.kind, mirror=found)


def fetch_checkpoint(source: StoreSource, *, progress: Progress) -> Mirror | Path:
    """The same for arrays of Orbax or Flax, whatever lies beside them; a path where they were copied."""
    found = mirror(source, progress=progress)
    if isinstance(found, Path):
        return found
    with found.in_words():
        file = _msgpack(found)
    return found if file is None else _whole(found, [file], progress)


def _msgpack(found: Mirror) -> Path | None:
    """Flax's msgpack file, if that is what would be read."""
    layout = find_layouts(found.folder)[0]
    return layout.arrays if layout.kind == "msgpack" else None


def _with_weights(found: Mirror, progress: Progress) -> Path:
    return _whole(found, [path for path in weight_files(found.folder) if path.suffix == ".safetensors"], progress)


def _whole(found: Mirror, files: list[Path], progress: Progress) -> Path:
    """A folder like that of ``found``, in which ``files`` have their contents, those that are there."""
    keys = {path: found.key(path) for path in files}
    objects = found.bucket.look(keys.values())
    there = {path: objects[key] for path, key in keys.items() if key in objects}
    total = sum(stored.size for stored in there.values())
    progress.note(f"copying {len(there)} files of {found.source}, {total / 1e6:,.1f} MB, into the cache")
    copies = {path: copy_object(found.bucket, stored, progress=progress) for path, stored in there.items()}
    what = "\n".join([found.root.name, *(f"{path.name} {copy}" for path, copy in copies.items())])
    root = cache_dir() / "object-stores" / f"whole.{hashlib.sha256(what.encode()).hexdigest()[:24]}"
    wanted = {path.relative_to(found.root): copy for path, copy in copies.items()}
    wanted |= {
        path.relative_to(found.root): path
        for path in found.root.rglob("*")
        if path.is_file() and path.relative_to(found.root) not in wanted
    }

    def check(folder: Path) -> None:
        for name, copy in wanted.items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != copy.stat().st_size:
                raise CheckpointError(f"{folder / name}, a copy, is damaged")

    def make(scratch: Path) -> None:
        for name, copy in wanted.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(copy, scratch / name)

    make_once(root, check=check, make=make, progress=progress)
    return root / found.folder.relative_to(found.root)
