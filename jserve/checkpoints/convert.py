"""A source -> an Orbax checkpoint with its manifest and tokenizer beside the arrays."""

from __future__ import annotations

from pathlib import Path

from jserve.checkpoints.arrays import write_arrays
from jserve.checkpoints.cache import make_new
from jserve.checkpoints.digests import file_identity, file_record, file_records
from jserve.checkpoints.fetch import LocalFile, fetch
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.model import load_model
from jserve.checkpoints.manifest import ARRAYS_FOLDER, MANIFEST_NAME, TOKENIZER_NAME, Manifest
from jserve.checkpoints.tree import main_dtype
from jserve.checkpoints.uri import parse_source
from jserve.errors import SourceError, UnsupportedModel
from jserve.progress import SILENT, Progress

__all__ = ["convert", "write_checkpoint"]


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
    make_new(dst, make=lambda scratch: write_checkpoint(found, src, scratch, progress=progress), progress=progress)


def write_checkpoint(found: LocalFile, source: str, folder: Path, *, progress: Progress) -> None:
    """Convert the GGUF file ``found`` into the empty ``folder``. ``source`` is written into the manifest.

    Raises SourceError where the file is not, or does not stay, the one whose digest ``found`` holds.
    """
    before = file_identity(found.path)
    if file_record(found.path).sha256 != found.sha256:
        raise SourceError(
            f"{found.path} is not what it was when it was fetched", fix=f"delete {found.path} and start again"
        )
    with GgufFile(found.path) as file:
        model = load_model(file)
        progress.start(f"convert {found.path.name}", sum(leaf.nbytes for leaf in model.leaves.values()), "B")
        write_arrays(folder / ARRAYS_FOLDER, model.leaves, progress=progress)
        progress.done()
    if file_identity(found.path) != before:
        raise SourceError(f"{found.path} changed while it was converted", fix="run the command again")
    (folder / TOKENIZER_NAME).write_text(model.tokenizer.to_json(), encoding="utf-8")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    manifest = Manifest(
        name=found.path.name.removesuffix(".gguf"),
        family=model.family,
        config=model.config.to_dict(),
        dtype=main_dtype(model.leaves.values()),
        chat_template=model.chat_template,
        generation=model.generation,
        eos_ids=list(model.tokenizer.eos_ids),
        bos_id=model.tokenizer.bos_id,
        add_bos=model.tokenizer.add_bos,
        source=source,
        source_sha256=found.sha256,
        files=file_records(folder, sizes, progress=progress),
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
