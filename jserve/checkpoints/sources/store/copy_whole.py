"""What a URI of an object store holds: a checkpoint whose arrays are read where they are, or files that are copied.

Copied are those that cannot be read in parts over a network: safetensors, GGUF and msgpack files. Each is kept by
itself, so that a copy that was broken off goes on with the next file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from jserve.checkpoints.cache import make_once
from jserve.checkpoints.hf.shards import weight_files
from jserve.checkpoints.orbax.layout import find_layouts
from jserve.checkpoints.orbax.read import INLINE_NAME
from jserve.checkpoints.sources.local import LocalFile, LocalFolder, local
from jserve.checkpoints.sources.store.in_words import InWords, store_cache
from jserve.checkpoints.sources.store.mirror import Mirror, copy_object, mirror
from jserve.checkpoints.sources.uri import StoreSource
from jserve.errors import CheckpointError
from jserve.progress import Progress

__all__ = ["fetch_checkpoint", "fetch_from_store"]


def fetch_from_store(source: StoreSource, *, progress: Progress) -> LocalFile | LocalFolder:
    """Bring ``source`` onto this machine, but for arrays that are read where they are.

    Raises SourceError where it is not there or cannot be had, and as ``local`` does.
    """
    found = mirror(source, progress=progress)
    if isinstance(found, Path):
        words = InWords.of(source, found)
        with words.errors():
            return replace(local(found), words=words)
    with found.words.errors():
        kind = local(found.folder)
        assert isinstance(kind, LocalFolder)
        if kind.kind == "hf":
            got: Mirror | Path = _with_weights(found, progress)
        else:
            got = _with_msgpack(found, progress) if kind.kind == "orbax" else found
    if isinstance(got, Path):
        return LocalFolder(path=got, kind=kind.kind, words=InWords.of(source, got))
    return LocalFolder(path=got.folder, kind=kind.kind, mirror=got, words=got.words)


def fetch_checkpoint(source: StoreSource, *, progress: Progress) -> Mirror | Path:
    """The same for arrays of Orbax or Flax, whatever lies beside them; a path where they were copied."""
    found = mirror(source, progress=progress)
    if isinstance(found, Path):
        return found
    with found.words.errors():
        return _with_msgpack(found, progress)


def _with_msgpack(found: Mirror, progress: Progress) -> Mirror | Path:
    """``found`` with the msgpack files that are read: a path where such a file is all, and no arrays lie elsewhere."""
    layouts = find_layouts(found.folder)
    if layouts[0].kind == "msgpack":
        return _whole(found, [layouts[0].arrays], progress).folder
    beside = [layout.arrays / INLINE_NAME for layout in layouts if layout.kind == "zarr"]
    beside = [file for file in beside if file.is_file()]
    return _whole(found, beside, progress) if beside else found


def _with_weights(found: Mirror, progress: Progress) -> Path:
    files = [path for path in weight_files(found.folder) if path.suffix == ".safetensors"]
    return _whole(found, files, progress).folder


def _whole(found: Mirror, files: list[Path], progress: Progress) -> Mirror:
    """``found`` in another folder, in which ``files`` have their contents, those that are there."""
    keys = {path: found.key(path) for path in files}
    objects = found.bucket.look(keys.values())
    there = {path: objects[key] for path, key in keys.items() if key in objects}
    total = sum(stored.size for stored in there.values())
    progress.note(f"copying {len(there)} files of {found.source}, {total / 1e6:,.1f} MB, into the cache")
    copies = {path: copy_object(found.bucket, stored, progress=progress) for path, stored in there.items()}
    what = "\n".join([found.root.name, *(f"{path.name} {copy}" for path, copy in copies.items())])
    root = store_cache() / f"whole.{hashlib.sha256(what.encode()).hexdigest()[:24]}"
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
            _link(copy, scratch / name)

    make_once(root, check=check, make=make, progress=progress)
    return replace(found, root=root)


def _link(file: Path, name: Path) -> None:
    """Give ``file`` another ``name``, or copy it where the file system has no such thing."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
