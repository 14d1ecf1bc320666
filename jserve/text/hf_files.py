"""The small files of a Hugging Face style folder, read within bounds, with every problem collected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from jserve.errors import CheckpointError
from jserve.shown import shown

__all__ = ["MAX_SETTINGS_BYTES", "MAX_VOCABULARY_BYTES", "HfFiles", "Member"]

Member: TypeAlias = Callable[[Path, str], Path]
"""A folder and a file's name in it -> the file's path. It may refuse one that is a link out of the folder."""

MAX_VOCABULARY_BYTES = 200_000_000
MAX_SETTINGS_BYTES = 16_000_000
_MAX_LISTED = 20


class HfFiles:
    """Typed reads of one folder. A problem is noted, with its file and entry, and ``finish`` raises all at once.

    Every file is found through ``member``, and what that raises goes through.
    """

    def __init__(self, folder: Path, member: Member = Path.joinpath) -> None:
        self.folder = folder
        self._member = member
        self.problems: list[str] = []
        self._settings: dict[str, dict[str, Any]] = {}

    def has(self, name: str) -> bool:
        return self._member(self.folder, name).is_file()

    def note(self, name: str, problem: str) -> None:
        self.problems.append(f"{name}: {problem}")

    def finish(self) -> None:
        """Raises CheckpointError where anything was noted."""
        if self.problems:
            raise self._error()

    def fail(self, name: str, problem: str) -> NoReturn:
        """Note what nothing can be built without, and raise everything."""
        self.note(name, problem)
        raise self._error()

    def _error(self) -> CheckpointError:
        more = [f"and {len(self.problems) - _MAX_LISTED} more"] if len(self.problems) > _MAX_LISTED else []
        return CheckpointError(
            "\n  ".join([f"the tokenizer in {self.folder} is damaged:", *self.problems[:_MAX_LISTED], *more])
        )

    def read(self, name: str, *, limit: int) -> bytes:
        """The bytes of a file that must be there, its size checked first."""
        path = self._member(self.folder, name)
        try:
            size = path.stat().st_size
            if size > limit:
                self.fail(name, f"it has {size} bytes; at most {limit} are read")
            return path.read_bytes()
        except OSError as error:
            self.fail(name, f"it cannot be read: {error.strerror or error}")

    def text(self, name: str, *, limit: int) -> str:
        try:
            return self.read(name, limit=limit).decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(name, f"it is not UTF-8 at byte {error.start}")

    def parsed(self, name: str, text: str) -> dict[str, Any]:
        """A JSON object out of the text of a file."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.fail(name, f"it is not JSON: {error}")
        if not isinstance(value, dict):
            self.fail(name, f"it is a {type(value).__name__}; it must be an object")
        return value

    def settings(self, name: str) -> dict[str, Any]:
        """A small JSON object, read once; empty where there is no such file."""
        if name not in self._settings:
            text = self.text(name, limit=MAX_SETTINGS_BYTES) if self.has(name) else "{}"
            self._settings[name] = self.parsed(name, text)
        return self._settings[name]

    def flag(self, name: str, entry: str, *, default: bool) -> bool:
        value = self.settings(name).get(entry)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.note(name, f"{entry} is {shown(value)}; it must be true or false")
            return default
        return value
