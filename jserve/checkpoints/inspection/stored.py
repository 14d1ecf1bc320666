"""What lies in a folder or a file, whether or not its model is known: arrays, files, steps. Nothing is converted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jserve.checkpoints.arrays.key_map import Path as LeafPath
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import is_number
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.model import gguf_checkpoint
from jserve.checkpoints.hf.folder import layout_words, open_hf
from jserve.checkpoints.hf.shards import INDEX_NAME, open_tensors, weight_files
from jserve.checkpoints.inspection.report import ArrayReport, FileReport
from jserve.checkpoints.orbax.open import orbax_checkpoint
from jserve.checkpoints.orbax.peel import peel
from jserve.checkpoints.orbax.read import Kvstore
from jserve.checkpoints.orbax.saved import Saved, open_saved
from jserve.checkpoints.sources.local import LocalFile, LocalFolder
from jserve.checkpoints.written import open_written
from jserve.progress import Progress
from jserve.shown import shown

__all__ = ["Stored", "saved_arrays", "stored"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint that was looked at, and not understood yet."""

    path: Path
    layout: str
    """What it is stored as, in words."""
    arrays: list[ArrayReport]
    """All of them, in the order of reading."""
    lazy: Mapping[str, LazyArray]
    """The same, still to be read, by their names. Empty where their types are known to the model's reader alone."""
    files: list[FileReport]
    understand: Callable[[], Checkpoint]
    """As a model of a known family. Raises CheckpointError where it is none."""
    saved: Saved | None = None
    """What Orbax or Flax saved."""
    uri: str | None = None
    """Of an object store, where the arrays are."""
    is_ours: bool = False
    """Whether jserve wrote it: what cannot be understood of it is damage."""


@contextmanager
def stored(found: LocalFile | LocalFolder, model: str, *, progress: Progress) -> Iterator[Stored]:
    """Look at ``found``; it can be read until the context ends. ``model`` is what was asked for.

    Raises CheckpointError, SourceError and UnsupportedModel where the files are damaged or cannot be told.
    """
    if isinstance(found, LocalFile):
        with GgufFile(found.path) as file:
            yield _gguf(file, model)
    elif found.mirror is not None:
        base = found.mirror.base
        if found.kind == "written":
            files = _written(found.path, base=base)
        else:
            files = _orbax(open_saved(found.path, base=base, progress=progress), model, progress)
        yield replace(files, uri=str(found.mirror.source))
    elif found.kind == "written":
        yield _written(found.path)
    elif found.kind == "hf":
        yield _hf(found.path, model)
    else:
        yield _orbax(open_saved(found.path, progress=progress), model, progress)


def saved_arrays(saved: Saved, read: Collection[LeafPath] | None = None) -> list[ArrayReport]:
    """Everything that Orbax or Flax saved. ``read`` are the paths of the parameters; None: names tell them apart from
    the rest."""
    if read is None:
        params = {id(array) for array in peel(saved.tree).params.values()}
        read = {path for path, array in saved.tree.items() if id(array) in params}
    return [
        _array(".".join(path), array, parameter=path in read)
        for path, array in sorted(saved.tree.items(), key=lambda item: _order(item[0]))
    ]


def _orbax(saved: Saved, model: str, progress: Progress) -> Stored:
    layout = saved.layout
    return Stored(
        path=layout.folder,
        layout=f"{layout.writer}, {saved.form}",
        arrays=saved_arrays(saved),
        lazy={".".join(path): array for path, array in saved.tree.items()},
        files=[],
        saved=saved,
        understand=partial(orbax_checkpoint, saved, source=model, progress=progress),
    )


def _written(folder: Path, *, base: Kvstore | None = None) -> Stored:
    """``base`` is where the arrays are, if ``folder`` is a copy without them."""
    checkpoint = open_written(folder, base=base)
    tree = dict(sorted(checkpoint.leaves.items(), key=lambda item: _order(item[0])))
    lazy = {".".join(path): array for path, array in tree.items()}
    return Stored(
        path=folder,
        layout=checkpoint.layout,
        arrays=[_array(name, array) for name, array in lazy.items()],
        lazy=lazy,
        files=[],
        is_ours=True,
        understand=lambda: checkpoint,
    )


def _hf(folder: Path, model: str) -> Stored:
    tensors = dict(sorted(open_tensors(folder).items(), key=lambda item: _order(tuple(item[0].split(".")))))
    shards = [path for path in weight_files(folder) if path.name != INDEX_NAME]
    return Stored(
        path=folder,
        layout=layout_words(tensors.values()),
        # torch's counters and tables of positions; quantized weights are of narrower types.
        arrays=[_array(name, array, parameter=array.dtype.name != "int64") for name, array in tensors.items()],
        lazy=tensors,
        files=[FileReport(name=path.name, nbytes=path.stat().st_size) for path in shards],
        understand=partial(open_hf, folder, source=model),
    )


def _gguf(file: GgufFile, model: str) -> Stored:
    tensors = file.tensors.values()
    kinds = sorted({tensor.kind.name for tensor in tensors})
    parts, place = file.metadata.get("split.count"), file.metadata.get("split.no")
    part = ""
    if isinstance(parts, int) and parts > 1:
        part = f", part {place + 1 if isinstance(place, int) else shown(place)} of {parts}"
    return Stored(
        path=file.path,
        layout=f"GGUF file (version {file.version}, {', '.join(kinds)}{part})",
        arrays=[
            ArrayReport(name=tensor.name, shape=list(tensor.shape), dtype=tensor.kind.name, nbytes=tensor.nbytes)
            for tensor in sorted(tensors, key=lambda tensor: _order(tuple(tensor.name.split("."))))
        ],
        lazy={},
        files=[FileReport(name=file.path.name, nbytes=file.path.stat().st_size)],
        understand=partial(gguf_checkpoint, file, source=model),
    )


def _array(name: str, array: LazyArray, *, parameter: bool = True) -> ArrayReport:
    shape = list(array.shape)
    return ArrayReport(name=name, shape=shape, dtype=array.dtype.name, nbytes=array.nbytes, parameter=parameter)


def _order(path: tuple[str, ...]) -> list[tuple[str, int]]:
    """Layer 10 comes after layer 9."""
    return [("", int(part)) if is_number(part) else _numbered(part) for part in path]


def _numbered(part: str) -> tuple[str, int]:
    name, _, number = part.rpartition("_")
    return (name, int(number)) if is_number(number) else (part, -1)
