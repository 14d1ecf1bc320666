"""A source -> an Orbax checkpoint with its manifest and tokenizer beside the arrays."""

from __future__ import annotations

from pathlib import Path

from jserve.checkpoints.cache import make_new
from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.digests import file_identity, file_record, file_records
from jserve.checkpoints.fetch import LocalFile, fetch
from jserve.checkpoints.manifest import ARRAYS_FOLDER, MANIFEST_NAME, TOKENIZER_NAME, Manifest
from jserve.checkpoints.open import as_it_is
from jserve.checkpoints.orbax.write import write_arrays
from jserve.checkpoints.tree import main_dtype
from jserve.checkpoints.uri import parse_source
from jserve.errors import SourceError, UnsupportedModel
from jserve.progress import SILENT, Progress

__all__ = ["convert", "write_converted"]


def convert(src: str, dst: Path, *, progress: Progress | None = None) -> None:
    """Convert the MODEL ``src`` to the new folder ``dst``, which appears only when it is whole.

    Raises CheckpointError where ``dst`` exists, and for sources that are damaged; SourceError and UnsupportedModel
    (both CheckpointErrors) for ones that cannot be had and that are not built.
    """
    progress = progress or SILENT
    found = fetch(parse_source(src), progress=progress)
    if not isinstance(found, LocalFile):
        raise UnsupportedModel(f"{src} is an Orbax checkpoint already", fix=f"serve it as it is: jserve serve {src}")
    dst = dst.absolute()
    make_new(dst, make=lambda scratch: write_converted(found, src, scratch, progress=progress), progress=progress)


def write_converted(found: LocalFile, source: str, folder: Path, *, progress: Progress) -> None:
    """Convert the GGUF file ``found`` into the empty ``folder``. ``source`` is written into the manifest.

    Raises SourceError where the file is not, or does not stay, the one whose digest ``found`` holds.
    """
    before = file_identity(found.path)
    if file_record(found.path).sha256 != found.sha256:
        raise SourceError(
            f"{found.path} is not what it was when it was fetched", fix=f"delete {found.path} and start again"
        )
    with as_it_is(found, source) as checkpoint:
        _write(checkpoint, folder, source_sha256=found.sha256, progress=progress)
    if file_identity(found.path) != before:
        raise SourceError(f"{found.path} changed while it was converted", fix="run the command again")


def _write(checkpoint: Checkpoint, folder: Path, *, source_sha256: str, progress: Progress) -> None:
    progress.start(f"convert {checkpoint.path.name}", sum(leaf.nbytes for leaf in checkpoint.leaves.values()), "B")
    write_arrays(folder / ARRAYS_FOLDER, checkpoint.leaves, progress=progress)
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
