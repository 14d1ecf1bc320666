"""What was fetched, as a checkpoint: opened as it is, converted never."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.sources.local import LocalFile, LocalFolder
from jserve.checkpoints.written import open_written
from jserve.progress import SILENT, Progress

__all__ = ["as_it_is", "choose_step", "open_folder"]


@contextmanager
def as_it_is(found: LocalFile | LocalFolder, model: str, *, progress: Progress = SILENT) -> Iterator[Checkpoint]:
    """What was fetched for ``model``; it can be read until the context ends."""
    with nullcontext() if found.words is None else found.words.errors():
        if isinstance(found, LocalFolder):
            yield open_folder(found, model, progress=progress)
            return
        from jserve.checkpoints.gguf.file import GgufFile
        from jserve.checkpoints.gguf.model import gguf_checkpoint

        with GgufFile(found.path) as file:
            yield gguf_checkpoint(file, source=model)


def choose_step(found: LocalFile | LocalFolder) -> LocalFile | LocalFolder:
    """``found`` with the step that is taken now, for whoever opens it more than once: a trainer may save others in the
    meantime. Raises as ``open_folder`` does where nothing can be read."""
    if not isinstance(found, LocalFolder) or found.kind != "orbax":
        return found
    from jserve.checkpoints.orbax.saved import open_saved

    with nullcontext() if found.words is None else found.words.errors():
        saved = open_saved(found.path, base=None if found.mirror is None else found.mirror.base)
    return replace(found, step=saved.layout.step)


def open_folder(found: LocalFolder, model: str, *, progress: Progress) -> Checkpoint:
    """Open what was fetched for ``model``. Raises as the reader of its kind does; of an object store, in its names."""
    if found.words is None:
        return _open(found, model, progress)
    with found.words.errors():
        return replace(_open(found, model, found.words.progress(progress)), words=found.words)


def _open(found: LocalFolder, model: str, progress: Progress) -> Checkpoint:
    base = None if found.mirror is None else found.mirror.base
    if found.kind == "written":
        return open_written(found.path, base=base)
    if found.kind == "orbax":
        from jserve.checkpoints.orbax.open import open_orbax

        return open_orbax(found.path, source=model, base=base, step=found.step, progress=progress)
    from jserve.checkpoints.hf.folder import open_hf

    return open_hf(found.path, source=model)
