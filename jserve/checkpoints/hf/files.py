"""The small JSON files of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jserve.checkpoints.sources.names import resolve_member
from jserve.errors import CheckpointError

__all__ = ["CONFIG_NAME", "read_json", "read_json_as"]

CONFIG_NAME = "config.json"
"""What a model is, in such a folder."""
_MAX_JSON_BYTES = 16 << 20
T = TypeVar("T")


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The object in the file ``name`` of ``folder``; None where there is no such file.

    Raises CheckpointError where it is damaged, and SourceError for a name that leads out of the folder.
    """
    return read_json_as(folder, name, dict[str, Any])


def read_json_as(folder: Path, name: str, kind: type[T]) -> T | None:
    """As ``read_json``, for what is no object."""
    path = resolve_member(folder, name)
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes; it is no file of settings")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link to a file that is not there", fix="fetch it again") from None
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
