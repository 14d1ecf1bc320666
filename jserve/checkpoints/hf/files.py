"""The small JSON files of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from jserve.checkpoints.json_file import read_json_file
from jserve.checkpoints.names import resolve_member
from jserve.errors import CheckpointError

__all__ = ["CONFIG_NAME", "read_json", "read_json_as"]

CONFIG_NAME = "config.json"
"""What a model is, in such a folder."""
T = TypeVar("T")


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The object in the file ``name`` of ``folder``; None where there is no such file.

    Raises CheckpointError where it is damaged, and SourceError for a name that leads out of the folder.
    """
    return read_json_as(folder, name, dict[str, Any])


def read_json_as(folder: Path, name: str, kind: type[T]) -> T | None:
    """As ``read_json``, for what is no object."""
    path = resolve_member(folder, name)
    if path.exists():
        return read_json_file(path, kind, what="file of settings")
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link to a file that is not there", fix="fetch it again")
    return None
