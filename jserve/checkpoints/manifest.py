"""``jserve.json``: what stands beside the arrays of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from jserve.checkpoints.digests import FileRecord, file_record
from jserve.checkpoints.encoder import EncoderSettings
from jserve.checkpoints.sources.names import resolve_member
from jserve.errors import CheckpointError

__all__ = ["ARRAYS_FOLDER", "FORMAT", "MANIFEST_NAME", "TOKENIZER_NAME", "Manifest", "read_manifest"]

FORMAT = 1
MANIFEST_NAME = "jserve.json"
TOKENIZER_NAME = "tokenizer.json"
ARRAYS_FOLDER = "params"
_MAX_BYTES = 16 << 20
_HASHED_BYTES = 8 << 20


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a checkpoint but its arrays and its tokenizer's tables."""

    format: int = FORMAT
    name: str
    family: str
    config: dict[str, Any]
    """The family's configuration, as its ``to_dict`` gives it."""
    dtype: str
    """What most of the bytes are stored as. Every leaf's own type is in the arrays' metadata."""
    chat_template: str | None = None
    generation: dict[str, Any]
    """As of a Checkpoint."""
    eos_ids: list[int]
    bos_id: int | None = None
    add_bos: bool = False
    encoder: EncoderSettings | None = None
    """Of an encoder."""
    source: str
    """The MODEL that this was converted from."""
    source_sha256: str
    files: dict[str, FileRecord]
    """Every other file of the checkpoint, by its name relative to the folder."""

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def read_manifest(folder: Path, *, without: str | None = None) -> Manifest:
    """Read and check the manifest of ``folder``; every file that it names must be there with its size, but for those
    whose names begin with ``without``.

    Raises CheckpointError that names the file at fault. Files of up to 8 MiB are hashed as well: all that describes
    the arrays is among them. Hashing the arrays themselves is ``jserve inspect --check``.
    """
    path = folder / MANIFEST_NAME
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_BYTES} bytes; it is not a manifest")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise CheckpointError(
                f"{path} has format {version}; this jserve reads format {FORMAT}",
                fix="convert the checkpoint again, or use the jserve that wrote it",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}", fix="convert the checkpoint again") from None
    for name, record in manifest.files.items():
        if without is not None and name.startswith(without):
            continue
        problem = _problem(resolve_member(folder, name), record)
        if problem:
            raise CheckpointError(problem, fix=f"delete {folder} and convert it again from {manifest.source}")
    return manifest


def _problem(file: Path, record: FileRecord) -> str | None:
    try:
        size = file.stat().st_size if file.is_file() else None
        if size != record.size:
            found = "is missing" if size is None else f"has {size} bytes"
            return f"{file} {found}; the manifest says {record.size} bytes"
        if size <= _HASHED_BYTES and file_record(file) != record:
            return f"{file} has other contents than the manifest says"
    except OSError as error:
        return f"cannot read {file}: {error.strerror}"
    return None


class _Version(msgspec.Struct):
    format: int
