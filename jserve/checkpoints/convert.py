"""A source -> a new folder: an Orbax checkpoint with its manifest, or safetensors as on the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jserve.checkpoints.arrays.key_map import Leaves
from jserve.checkpoints.arrays.lazy import LazyArray, Region
from jserve.checkpoints.arrays.tree import main_dtype
from jserve.checkpoints.as_it_is import as_it_is, choose_step
from jserve.checkpoints.cache import make_new
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.digests import file_records
from jserve.checkpoints.manifest import ARRAYS_FOLDER, MANIFEST_NAME, TOKENIZER_NAME, Manifest
from jserve.checkpoints.origin import Origin, read_origin
from jserve.checkpoints.sources.fetch import fetch
from jserve.checkpoints.sources.local import LocalFile, LocalFolder
from jserve.checkpoints.sources.uri import parse_source
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.progress import SILENT, Progress

__all__ = ["CONVERTER_VERSION", "Form", "convert", "resume_name", "write_converted"]

CONVERTER_VERSION = 3
"""Raised whenever the same source would give another checkpoint, so that cached ones are made anew."""
Form: TypeAlias = Literal["orbax", "safetensors"]
_PARTS_FOLDER = ".parts"
"""Finished parts of the arrays, while they are under way."""


def convert(src: str, dst: Path, *, to: Form = "orbax", progress: Progress | None = None) -> None:
    """Convert the MODEL ``src`` to the new folder ``dst``, which appears only when it is whole.

    A conversion that was killed or interrupted goes on where it stopped, when it is started again with the same
    ``dst`` and the same contents of ``src``. Raises CheckpointError where ``dst`` exists, and for sources that are
    damaged or hold values that are not finite; SourceError and UnsupportedModel (both CheckpointErrors) for ones that
    cannot be had and that are not built.
    """
    progress = progress or SILENT
    found = fetch(parse_source(src), progress=progress)
    _refuse_what_it_is(found, src, to)
    dst = dst.absolute()
    if dst.exists():  # told before anything is read, and looked at again under the lock
        raise CheckpointError(f"{dst} is there already; nothing was written", fix="name a folder that does not exist")
    found = choose_step(found)
    origin = read_origin(found, progress=progress)
    make_new(
        dst,
        make=lambda scratch: write_converted(found, origin, src, scratch, to=to, progress=progress),
        progress=progress,
        resume=resume_name(origin.sha256, to),
    )


def resume_name(source_sha256: str, to: Form) -> str:
    """What a conversion is called: all that decides what is written."""
    what = f"{source_sha256} {to} {CONVERTER_VERSION} {version('jserve')}"
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def write_converted(
    found: LocalFile | LocalFolder, origin: Origin, source: str, folder: Path, *, to: Form, progress: Progress
) -> None:
    """Convert ``found``, which ``origin`` tells of, into ``folder``: empty, or left by a run that was killed.

    ``source`` is written into the manifest. Raises SourceError where the files do not stay what they were.
    """
    with as_it_is(found, source, progress=progress) as checkpoint:
        if isinstance(found, LocalFolder):
            checkpoint = replace(checkpoint, leaves=_finite(checkpoint))
        if to == "orbax":
            _write_orbax(checkpoint, folder, source_sha256=origin.sha256, progress=progress)
        else:
            from jserve.checkpoints.hf.write import write_hf

            write_hf(checkpoint, folder, progress=progress)
    origin.check_unchanged()


def _refuse_what_it_is(found: LocalFile | LocalFolder, src: str, to: Form) -> None:
    if not isinstance(found, LocalFolder):
        return
    serve = f"serve it as it is: jserve serve {src}"
    if found.kind == "written" and to == "orbax":
        raise UnsupportedModel(f"{src} is an Orbax checkpoint already", fix=f"{serve}; or --to safetensors")
    if found.kind == "hf" and to == "safetensors":
        raise UnsupportedModel(f"{src} is a folder of safetensors already", fix=f"{serve}; or --to orbax")


def _write_orbax(checkpoint: Checkpoint, folder: Path, *, source_sha256: str, progress: Progress) -> None:
    from jserve.checkpoints.orbax.write import write_arrays

    for path in folder.iterdir():
        if path.name not in (ARRAYS_FOLDER, _PARTS_FOLDER):  # whatever else a killed run left is quickly made again
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    progress.start(f"convert {checkpoint.path.name}", sum(leaf.nbytes for leaf in checkpoint.leaves.values()), "B")
    write_arrays(folder / ARRAYS_FOLDER, checkpoint.leaves, parts=folder / _PARTS_FOLDER, progress=progress)
    progress.done()
    tokenizer = checkpoint.tokenizer
    if tokenizer is not None:
        (folder / TOKENIZER_NAME).write_text(tokenizer.to_json(), encoding="utf-8")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    manifest = Manifest(
        name=checkpoint.name,
        family=checkpoint.family,
        config=checkpoint.config.to_dict(),
        dtype=main_dtype(checkpoint.leaves.values()),
        chat_template=checkpoint.chat_template,
        generation=dict(checkpoint.generation),
        eos_ids=list(checkpoint.eos_ids),
        bos_id=None if tokenizer is None else tokenizer.bos_id,
        add_bos=tokenizer is not None and tokenizer.add_bos,
        encoder=checkpoint.encoder,
        source=checkpoint.source,
        source_sha256=source_sha256,
        files=file_records(folder, sizes, progress=progress),
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())


def _finite(checkpoint: Checkpoint) -> Leaves:
    """The parameters, looked through as they are read. (GGUF's are already.)"""

    def read(name: str, leaf: LazyArray, region: Region) -> np.ndarray:
        values = leaf.read_region(region)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{checkpoint.path}: {name} holds values that are not finite numbers",
                fix=f"see all that do: jserve inspect --check {checkpoint.source}",
            )
        return values

    return {
        path: replace(leaf, read_region=partial(read, ".".join(path), leaf)) for path, leaf in checkpoint.leaves.items()
    }
