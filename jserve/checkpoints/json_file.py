"""A JSON file of a checkpoint, which anybody may have written: bounded, read, and what is wrong with it said."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from jserve.errors import CheckpointError

__all__ = ["read_json_file"]

T = TypeVar("T")


def read_json_file(path: Path, kind: type[T], *, what: str, max_bytes: int = 16 << 20, fix: str | None = None) -> T:
    """The file ``path`` as ``kind``. ``what`` stands in errors: such a file is no index, no manifest, ...

    Raises CheckpointError where it cannot be read, is larger than ``max_bytes``, or is damaged, and then with ``fix``.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path} is larger than {max_bytes} bytes; it is no {what}")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", fix=fix) from None
