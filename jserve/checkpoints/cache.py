"""Folders on disk that are whole or not there: made aside under a lock, then renamed into place.

Whatever kills the maker, half a folder never carries its final name. The lock is the kernel's and dies with its
process; the next maker clears away what a dead one left, or goes on from there if it makes the same.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import filelock

from jserve.config import cache_dir
from jserve.errors import CheckpointError
from jserve.progress import Progress

__all__ = ["make_new", "make_once", "sync_tree"]

T = TypeVar("T")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of writing alone. Such an error need not name a file."""


def make_once(
    final: Path,
    *,
    check: Callable[[Path], T],
    make: Callable[[Path], None],
    progress: Progress,
    resume: str | None = None,
) -> T:
    """What ``check(final)`` returns, ``final`` being made by ``make`` where it is not there or not whole.

    ``check`` raises CheckpointError for a folder that is damaged. ``make(scratch)`` fills an empty folder, a sibling
    of ``final``; what it raises passes through and nothing stays behind. Of several processes one makes it, and the
    others wait. An OSError becomes a CheckpointError that says whether it could not be written, as on a full disk, or
    what ``make`` reads could not be read.

    ``resume`` names all that decides what is made, and fits a file's name. Where it is given, a maker that was killed
    or interrupted leaves its folder for the next with the same name: ``make`` finds there what was finished.
    """
    if final.is_dir():
        try:
            return check(final)
        except CheckpointError as error:
            progress.note(f"{error.message}; making it again")
    with _only_maker(final, final.with_name(f".{final.name}.lock"), progress):
        if final.is_dir():
            try:
                return check(final)  # Another process made it in the meantime.
            except CheckpointError:
                _discard(final)
        elif final.is_symlink() or final.exists():
            progress.note(f"{final} is no folder; making it again")
            _discard(final)
        _make(final, make, resume)
        return check(final)


def make_new(final: Path, *, make: Callable[[Path], None], progress: Progress, resume: str | None = None) -> None:
    """Make ``final`` as ``make_once`` does. Raises CheckpointError where it is there already."""
    # The lock is kept out of a folder that is not ours.
    name = hashlib.sha256(str(final.absolute()).encode()).hexdigest()[:16]
    with _only_maker(final, cache_dir() / "locks" / f"{name}.lock", progress):
        if final.exists() or final.is_symlink():
            raise CheckpointError(
                f"{final} is there already; nothing was written", fix="name a folder that does not exist"
            )
        _make(final, make, resume)


@contextmanager
def _only_maker(final: Path, lock_path: Path, progress: Progress) -> Iterator[None]:
    try:
        for folder in (final.parent, lock_path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(lock_path)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            progress.note(f"another process is making {final.name}; waiting for it")
            lock.acquire()
    except OSError as error:
        raise _unwritable(final.parent, error) from None
    try:
        yield
    finally:
        lock.release()


def _make(final: Path, make: Callable[[Path], None], resume: str | None) -> None:
    """Runs under the lock, so every scratch folder of this name was left by a maker that is dead."""
    scratch = final.with_name(f".{final.name}.scratch-{resume or os.getpid()}")
    try:
        for stale in final.parent.glob(f".{_glob_safe(final.name)}.scratch-*"):
            if resume is None or stale != scratch:
                shutil.rmtree(stale, ignore_errors=True)
        scratch.mkdir(exist_ok=resume is not None)
        try:
            _fill(scratch, final, make)
            sync_tree(scratch)
            scratch.rename(final)
        except BaseException as error:
            if resume is None or isinstance(error, Exception):  # else the user interrupted it, and may go on
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        _sync(final.parent)
    except OSError as error:
        raise _unwritable(final, error) from error


def _fill(scratch: Path, final: Path, make: Callable[[Path], None]) -> None:
    """Run ``make``; what it cannot read is told apart from what it cannot write."""
    try:
        make(scratch)
    except OSError as error:
        names = [Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        if error.errno in _NO_ROOM or any(name.is_relative_to(scratch) for name in names):
            raise
        what = f"read {names[0]}" if names else f"make {final}"
        raise CheckpointError(f"cannot {what}: {error.strerror or error}") from error


def _discard(final: Path) -> None:
    """Remove ``final`` in one step as seen from outside: renamed first, so that no half of it keeps its name."""
    try:
        if final.is_symlink() or final.is_file():
            final.unlink()
        elif final.exists():
            grave = final.with_name(f".{final.name}.scratch-old-{os.getpid()}")
            final.rename(grave)
            shutil.rmtree(grave)
    except OSError as error:
        raise _unwritable(final, error) from error


def _glob_safe(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def sync_tree(folder: Path) -> None:
    """Hand every file and folder under ``folder`` to the disk, so that the rename cannot outlive the contents."""
    paths = [folder, *folder.rglob("*")]
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write {path}: {error.strerror or error}",
        fix="free space there, or point XDG_CACHE_HOME to a folder that can be written"
        if path.is_relative_to(cache_dir())
        else "free space there, or name a folder elsewhere",
    )
