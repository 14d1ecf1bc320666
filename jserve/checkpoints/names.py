"""Names that come from outside: which ones may be followed.

Every check here looks at the name alone, before the disk is asked, so that a refusal is the same whether or not the
thing is there. Only a folder may be called as pickles are, where whoever asks knows that it is one.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path, PurePosixPath

from jserve.errors import SourceError
from jserve.shown import shown

__all__ = ["PICKLES", "called", "member_path", "refuse_pickle", "resolve_member"]

PICKLES = frozenset({".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"})
"""Suffixes of files that run code when they are loaded."""


def refuse_pickle(name: str) -> None:
    """Raise SourceError where ``name`` ends as pickles do."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in PICKLES:
        raise SourceError(
            f"{name} is a pickle by its name ({suffix}); pickles run code when they are loaded and are never read",
            fix="take the model as GGUF or Orbax",
        )


def member_path(name: str, *, of: str, may_be_folder: bool = False) -> PurePosixPath:
    """``name`` as a path that stays inside ``of`` (a wheel, a repository, a checkpoint's folder).

    Raises SourceError for absolute names, drive letters, backslashes, control characters, empty, "." and ".."
    parts, and for pickles, unless it ``may_be_folder``: then whoever learns that it is a file refuses those.
    """
    parts = name.split("/")
    unsafe = any(part in ("", ".", "..") for part in parts) or any(c in "\\:" or ord(c) < 32 for c in name)
    if unsafe:
        raise SourceError(f"{name!r} is not a name inside {of}: names are relative, with / and without . and .. parts")
    if not may_be_folder:
        refuse_pickle(name)
    return PurePosixPath(*parts)


def resolve_member(folder: Path, name: str, *, may_be_folder: bool = False) -> Path:
    """The file ``name`` of a checkpoint's ``folder``; it need not exist. Links may not lead out of the folder.

    ``may_be_folder``: see ``member_path``.

    Files in the Hub's cache (``models--org--name/snapshots/<revision>/...``) are links to ``blobs`` of the repository,
    or through it to those that all repositories share; such links work.
    """
    path = folder.joinpath(member_path(name, of=str(folder), may_be_folder=may_be_folder))
    leads_nowhere = SourceError(f"{path} is a link that leads nowhere", fix="copy the file itself there")
    try:
        real, home = path.resolve(), folder.resolve()
    except (RuntimeError, OSError):  # of a loop; newer Pythons leave it as it is
        raise leads_nowhere from None
    roots = [home]
    snapshots = next((parent for parent in home.parents if parent.name == "snapshots"), None)
    if snapshots is not None and snapshots.parent.name.startswith("models--"):
        roots += [snapshots.parent / "blobs", snapshots.parent.parent / "blobs"]
    if not any(real.is_relative_to(root) for root in roots):
        raise SourceError(
            f"{path} is a link that leads out of the checkpoint's folder", fix="copy the file itself there"
        )
    try:
        mode = real.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise leads_nowhere from None
        raise SourceError(f"{shown(str(path))} is no name of a file: {error.strerror}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe, which would be waited for
        raise SourceError(f"{path} is neither a file nor a folder", fix="copy the file itself there")
    return path


def called(folder: Path) -> str:
    """The name of ``folder``, which is an absolute path; of a snapshot in the Hub's cache the repository's."""
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.parent.parent.name.split("--")[-1] if is_snapshot else folder.name
