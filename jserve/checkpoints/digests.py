"""SHA-256 of files: of downloads, of checkpoints' files, and of local files that may be too large to read each time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jserve.progress import Progress

__all__ = [
    "FileRecord",
    "file_identity",
    "file_record",
    "file_records",
    "looks_the_same",
    "remembered_sha256",
]

_REMEMBER_FROM_BYTES = 64 << 20
"""Smaller files are read each time: that is quicker than the doubt is worth."""
_HASHED_BYTES = 8 << 20
"""Larger files are not read at each start."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the checkpoint."""

    size: int
    """Bytes."""
    sha256: str


def file_record(path: Path) -> FileRecord:
    """Size and SHA-256 of the file at ``path``."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size=os.fstat(file.fileno()).st_size, sha256=digest)


def looks_the_same(path: Path, record: FileRecord) -> bool:
    """Whether the file at ``path`` has the size of ``record`` and, up to 8 MiB, its contents. Raises OSError."""
    if path.stat().st_size != record.size:
        return False
    return record.size > _HASHED_BYTES or file_record(path) == record


def file_records(folder: Path, names: Mapping[str, int], *, progress: Progress) -> dict[str, FileRecord]:
    """``file_record`` of each name in ``folder``, several at a time. ``names`` gives their sizes."""
    ordered = sorted(names)
    records: dict[str, FileRecord] = {}
    progress.start("hash", sum(names.values()), "B")
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        hashed = pool.map(lambda name: file_record(folder / name), ordered)
        for name, record in zip(ordered, hashed, strict=True):
            records[name] = record
            progress.advance(record.size)
    progress.done()
    return records


def file_identity(path: Path) -> tuple[int, ...]:
    """What changes when a file's contents do: device, inode, size, and times of change of content and of inode."""
    stat = path.stat()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    path: str
    identity: tuple[int, ...]
    sha256: str


def remembered_sha256(path: Path, memory: Path) -> str:
    """SHA-256 of a local file, remembered in the folder ``memory`` while path and ``file_identity`` stay the same.

    Raises OSError where the file cannot be read. A memory that cannot be written costs only the time of reading anew.
    """
    identity = file_identity(path)
    if path.stat().st_size < _REMEMBER_FROM_BYTES:
        return file_record(path).sha256
    real = str(path.resolve())
    note = memory / f"{hashlib.sha256(real.encode()).hexdigest()[:32]}.json"
    try:
        seen = msgspec.json.decode(note.read_bytes(), type=_Seen)
        if seen.path == real and seen.identity == identity:
            return seen.sha256
    except (OSError, msgspec.DecodeError):
        pass  # Nothing remembered, or half of it: read the file.
    digest = file_record(path).sha256
    with suppress(OSError):
        memory.mkdir(parents=True, exist_ok=True)
        scratch = note.with_name(f".{note.name}.{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(_Seen(path=real, identity=identity, sha256=digest)))
        scratch.replace(note)
    return digest
