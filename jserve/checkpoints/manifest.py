"""``jserve.json``: what stands beside the arrays of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from jserve.checkpoints.digests import FileRecord, looks_the_same
from jserve.checkpoints.encoder import EncoderSettings
from jserve.checkpoints.json_file import read_json_file
from jserve.checkpoints.names import resolve_member
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.config import ModelConfig

__all__ = [
    "ARRAYS_FOLDER",
    "FORMAT",
    "MANIFEST_NAME",
    "TOKENIZER_NAME",
    "Manifest",
    "check_ids",
    "parse_manifest",
    "read_manifest",
]

FORMAT = 1
MANIFEST_NAME = "jserve.json"
TOKENIZER_NAME = "tokenizer.json"
ARRAYS_FOLDER = "params"


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

    def model_config(self, path: Path) -> ModelConfig:
        """``config`` as the family has it. Raises UnsupportedModel that names ``path``, the manifest's file, for a
        family or settings that are not built."""
        from jserve.models.registry import family

        try:
            return family(self.family).config_type.from_dict(self.config)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error.message}", fix=error.fix) from None


def read_manifest(folder: Path, *, without: str | None = None) -> Manifest:
    """Read and check the manifest of ``folder``; every file that it names must be there with its size, but for those
    whose names begin with ``without``.

    Raises CheckpointError that names the file at fault. Files of up to 8 MiB are hashed as well: all that describes
    the arrays is among them. Hashing the arrays themselves is ``jserve inspect --check``.
    """
    manifest = parse_manifest(folder / MANIFEST_NAME)
    for name, record in manifest.files.items():
        if without is not None and name.startswith(without):
            continue
        problem = _problem(resolve_member(folder, name), record)
        if problem:
            raise CheckpointError(problem, fix=f"delete {folder} and convert it again from {manifest.source}")
    return manifest


def parse_manifest(path: Path) -> Manifest:
    """What the manifest ``path`` says; the files that it names are not asked for.

    Raises CheckpointError where it is missing, damaged or of another format.
    """
    again = "convert the checkpoint again"
    version = read_json_file(path, _Version, what="manifest", fix=again).format
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}; this jserve reads format {FORMAT}",
            fix=f"{again}, or use the jserve that wrote it",
        )
    return read_json_file(path, Manifest, what="manifest", fix=again)


def _problem(file: Path, record: FileRecord) -> str | None:
    try:
        size = file.stat().st_size if file.is_file() else None
        if size != record.size:
            found = "is missing" if size is None else f"has {size} bytes"
            return f"{file} {found}; the manifest says {record.size} bytes"
        if not looks_the_same(file, record):
            return f"{file} has other contents than the manifest says"
    except OSError as error:
        return f"cannot read {file}: {error.strerror}"
    return None


def check_ids(eos_ids: Iterable[int], bos_id: int | None, *, vocab_size: int) -> None:
    """Raise ValueError that lists those ids that a tokenizer of ``vocab_size`` tokens does not have."""
    named = [*eos_ids, *([] if bos_id is None else [bos_id])]
    if strange := [i for i in named if not 0 <= i < vocab_size]:
        raise ValueError(f"eos_ids or bos_id name {strange}; its ids go from 0 to {vocab_size - 1}")


class _Version(msgspec.Struct):
    format: int
