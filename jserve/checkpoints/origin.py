"""The files that a conversion reads: what they are called together, and whether they stay as they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jserve.checkpoints.digests import file_identity, file_record, remembered_sha256
from jserve.checkpoints.manifest import ARRAYS_FOLDER
from jserve.checkpoints.sources.local import LocalFile, LocalFolder
from jserve.config import cache_dir
from jserve.errors import SourceError
from jserve.progress import Progress

if TYPE_CHECKING:
    from jserve.checkpoints.sources.store.mirror import Mirror

__all__ = ["Origin", "read_origin"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A source's files as they were when they were looked at."""

    sha256: str
    """Of a file; of a folder, of the names and digests of all files that are read."""
    identities: Mapping[Path, tuple[int, ...]]
    stored: Callable[[], Mapping[str, str]] | None = None
    """What the objects of the arrays are now, by their URIs, where they are in an object store."""
    stored_then: Mapping[str, str] = field(default_factory=dict)

    def check_unchanged(self) -> None:
        """Raise SourceError that names every file that is not the one that it was."""
        now = {} if self.stored is None else self.stored()
        changed = [uri for uri in {**self.stored_then, **now} if self.stored_then.get(uri) != now.get(uri)][:5]
        changed += [str(path) for path, identity in self.identities.items() if _identity(path) != identity]
        if changed:
            raise SourceError(f"{', '.join(changed)} changed while it was converted", fix="run the command again")


def read_origin(found: LocalFile | LocalFolder, *, progress: Progress) -> Origin:
    """Read every byte of ``found``, or what is remembered of it.

    Raises SourceError where a file cannot be read, or is not what it was when it was fetched.
    """
    try:
        if isinstance(found, LocalFile):
            identities = {found.path: file_identity(found.path)}
            if file_record(found.path).sha256 != found.sha256:
                ours = found.path.absolute().is_relative_to(cache_dir())
                raise SourceError(
                    f"{found.path} is not what it was when it was fetched",
                    fix=f"delete {found.path} and start again" if ours else "run the command again",
                )
            return Origin(sha256=found.sha256, identities=identities)
        if found.mirror is not None:
            return _read_mirrored(found, found.mirror, progress)
        files = _files(found)
        identities = {path: file_identity(path) for path in files}
        return Origin(sha256=_together(found.path, identities, progress), identities=identities)
    except OSError as error:
        raise SourceError(f"cannot read {error.filename or found.path}: {error.strerror}") from None


def _read_mirrored(found: LocalFolder, mirror: Mirror, progress: Progress) -> Origin:
    """The copied files by their contents, and the arrays by what the store says of them: they are not read."""
    if found.kind == "written":
        arrays = found.path / ARRAYS_FOLDER
    else:
        from jserve.checkpoints.orbax.saved import open_saved

        with mirror.words.errors():
            arrays = open_saved(found.path, base=mirror.base, step=found.step).layout.arrays

    def stored() -> dict[str, str]:
        objects = mirror.array_objects(arrays)
        return {mirror.bucket.uri(each.key): f"{each.size} {each.tag}" for each in objects}

    identities = {path: file_identity(path) for path in sorted(mirror.root.rglob("*")) if path.is_file()}
    then = stored()
    whole = hashlib.sha256(_together(mirror.root, identities, progress).encode())
    for uri, what in sorted(then.items()):
        whole.update(f"{uri}\0{what}\n".encode())
    return Origin(sha256=whole.hexdigest(), identities=identities, stored=stored, stored_then=then)


def _files(found: LocalFolder) -> list[Path]:
    from jserve.checkpoints.hf.sentence_transformer import module_files

    folder = found.path
    if found.kind == "written":
        return sorted(path for path in folder.rglob("*") if path.is_file())
    if found.kind == "orbax":
        from jserve.checkpoints.orbax.beside import CONFIG_NAME, find_beside, places
        from jserve.checkpoints.orbax.saved import open_saved

        arrays = open_saved(folder, step=found.step).layout.arrays
        inside = sorted(path for path in arrays.rglob("*") if path.is_file()) if arrays.is_dir() else [arrays]
        where = places(folder, arrays)
        config = find_beside(where, CONFIG_NAME)
        modules = [] if config is None else module_files(config.parent)
        return list(dict.fromkeys([*inside, *(path for place in where for path in _texts(place)), *modules]))
    from jserve.checkpoints.hf.shards import weight_files

    return list(dict.fromkeys([*_texts(folder), *module_files(folder), *weight_files(folder)]))


def _texts(folder: Path) -> list[Path]:
    """What may be read beside the weights."""
    from jserve.checkpoints.hf.folder import TEXT_SUFFIXES

    return [path for path in sorted(folder.iterdir()) if path.suffix in TEXT_SUFFIXES and path.is_file()]


def _together(folder: Path, identities: Mapping[Path, tuple[int, ...]], progress: Progress) -> str:
    sizes = [path.stat().st_size for path in identities]
    memory = cache_dir() / "digests"
    whole = hashlib.sha256()
    progress.start("hash the source", sum(sizes), "B")
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda path: remembered_sha256(path, memory), identities)
        for path, size, digest in zip(identities, sizes, digests, strict=True):
            whole.update(f"{os.path.relpath(path, folder)}\0{digest}\n".encode())
            progress.advance(size)
    progress.done()
    return whole.hexdigest()


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        return file_identity(path)
    except OSError:
        return None
