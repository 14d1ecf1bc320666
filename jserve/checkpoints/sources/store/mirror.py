"""A checkpoint in an object store as a folder on disk: its small files, and where its arrays are.

The folder is in the cache, named after all that is in it: of another state of the bucket another one is made, and one
that is there does not change. Below it names are as in the bucket, so that what is looked for above a checkpoint is
found above the folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jserve.checkpoints.cache import make_once
from jserve.checkpoints.names import refuse_pickle
from jserve.checkpoints.orbax.read import Kvstore
from jserve.checkpoints.sources.store.bucket import Bucket, StoredObject
from jserve.checkpoints.sources.store.in_words import InWords, store_cache
from jserve.checkpoints.sources.store.plan import Plan, make_plan
from jserve.checkpoints.sources.uri import StoreSource
from jserve.errors import CheckpointError, SourceError
from jserve.progress import Progress

__all__ = ["Mirror", "copy_object", "mirror"]

_MAX_ARRAY_OBJECTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """What a URI of an object store is on this machine."""

    source: StoreSource
    bucket: Bucket
    root: Path
    """Of the copy; the bucket's keys are in the folder ``root / source.bucket``."""

    @property
    def folder(self) -> Path:
        """The checkpoint's."""
        return self.root / self.source.bucket / self.source.path

    @property
    def base(self) -> Kvstore:
        """Where the arrays of ``folder`` are."""
        return {**self.bucket.access.kvstore, "path": f"{self.source.path}/" if self.source.path else ""}

    def key(self, path: Path) -> str:
        """Of the object that ``path``, in the copy, stands for."""
        return path.relative_to(self.root / self.source.bucket).as_posix()

    @property
    def words(self) -> InWords:
        """How its files are called."""
        return InWords.of(self.source, self.root)

    def array_objects(self, arrays: Path) -> list[StoredObject]:
        """Every object of the arrays in the folder ``arrays`` of the copy."""
        return self.bucket.inside(self.key(arrays), limit=_MAX_ARRAY_OBJECTS)


def mirror(source: StoreSource, *, progress: Progress) -> Mirror | Path:
    """Copy the small files of the folder ``source``; of a single object the path of its copy.

    Raises SourceError where nothing is there, or it cannot be had.
    """
    bucket = Bucket(source)
    progress.note(f"looking into {source} as {bucket.access.identity}")
    top = bucket.children(source.path)
    if not top.files and not top.folders:
        found = bucket.look([source.path]) if source.path else {}
        if not found:
            raise SourceError(f"{source} does not exist: no key begins with {source.path or 'anything'}{_at(bucket)}")
        refuse_pickle(str(source))
        return copy_object(bucket, found[source.path], progress=progress)
    plan = make_plan(bucket, source.path, top)
    for note in plan.notes:
        progress.note(note)
    root = store_cache() / f"{source.scheme}.{_digest(bucket, plan)}"

    def check(folder: Path) -> None:
        for key, stored in plan.copied.items():
            path = folder / source.bucket / key
            if not path.is_file() or path.stat().st_size != stored.size:
                raise CheckpointError(f"{path}, a copy, is damaged")

    def make(scratch: Path) -> None:
        home = scratch / source.bucket
        for key in ("", *plan.folders, *(str(PurePosixPath(key).parent) for key in (*plan.copied, *plan.seen))):
            (home / key).mkdir(parents=True, exist_ok=True)
        for key in plan.seen:
            (home / key).touch()
        progress.start(f"copy small files of {source}", sum(stored.size for stored in plan.copied.values()), "B")
        bucket.copy({stored: home / key for key, stored in plan.copied.items()}, progress.advance)
        progress.done()

    make_once(root, check=check, make=make, progress=progress)
    return Mirror(source=source, bucket=bucket, root=root)


def copy_object(bucket: Bucket, stored: StoredObject, *, progress: Progress) -> Path:
    """The whole of one object in the cache, under its own name."""
    name = PurePosixPath(stored.key).name
    what = f"{bucket.access.endpoint} {bucket.uri(stored.key)} {stored.size} {stored.tag}"
    final = store_cache() / f"object.{hashlib.sha256(what.encode()).hexdigest()[:24]}"

    def check(folder: Path) -> Path:
        if not (folder / name).is_file() or (folder / name).stat().st_size != stored.size:
            raise CheckpointError(f"{folder / name}, a copy, is damaged")
        return folder / name

    def make(scratch: Path) -> None:
        progress.start(f"copy {bucket.uri(stored.key)}", stored.size, "B")
        bucket.copy({stored: scratch / name}, progress.advance)
        progress.done()

    return make_once(final, check=check, make=make, progress=progress)


def _digest(bucket: Bucket, plan: Plan) -> str:
    whole = hashlib.sha256(f"{bucket.access.endpoint} {bucket.uri('')}\n".encode())
    for kind, found in (("copied", plan.copied), ("seen", plan.seen)):
        for key, stored in sorted(found.items()):
            whole.update(f"{kind} {key}\0{stored.size} {stored.tag}\n".encode())
    for key in sorted(plan.folders):
        whole.update(f"folder {key}\n".encode())
    return whole.hexdigest()[:24]


def _at(bucket: Bucket) -> str:
    return f" at {bucket.access.endpoint}" if bucket.access.endpoint else ""
