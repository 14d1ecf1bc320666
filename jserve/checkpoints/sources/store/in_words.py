"""What is said of a copy in the cache, with the names that its files have in the object store."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jserve.checkpoints.sources.uri import StoreSource
from jserve.config import cache_dir
from jserve.errors import CheckpointError
from jserve.progress import Progress

__all__ = ["InWords", "store_cache"]

T = TypeVar("T")

_OBJECT = "object."


def store_cache() -> Path:
    """The folder of all copies: of single objects in folders called ``object.*``, of others below their bucket."""
    return cache_dir() / "object-stores"


@dataclass(frozen=True, kw_only=True)
class InWords:
    """The names of one copy."""

    copy: Path
    uri: str
    """What ``copy`` and a slash stand for."""

    @classmethod
    def of(cls, source: StoreSource, path: Path) -> InWords:
        """Of the copy that ``path`` is, or lies in; it was made of ``source``."""
        copy = store_cache() / path.relative_to(store_cache()).parts[0]
        is_object = copy.name.startswith(_OBJECT)
        return cls(copy=copy, uri=f"{str(source).rpartition('/')[0]}/" if is_object else f"{source.scheme}://")

    def said(self, value: T) -> T:
        """``value``, a text or anything plain made of texts, in which the store's names stand for those of the copy."""
        return _said(value, self)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Errors that are raised inside name the store's files."""
        try:
            yield
        except CheckpointError as error:
            raise type(error)(self.said(error.message), fix=self.said(error.fix)) from error

    def progress(self, progress: Progress) -> Progress:
        """``progress``, told with the store's names."""
        return _Said(progress, self)


class _Said:
    def __init__(self, progress: Progress, words: InWords) -> None:
        self._progress, self._words = progress, words

    def note(self, message: str) -> None:
        self._progress.note(self._words.said(message))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._progress, name)


def _said(value: Any, words: InWords) -> Any:
    if isinstance(value, str):
        value = value.replace(f"{words.copy}/", words.uri)
        # Folders above the bucket are looked into as above any other; they are nothing of the store's.
        above = "|".join(re.escape(str(path)) for path in (words.copy, words.copy.parent))
        return re.sub(rf"(?:, )?(?:{above})(?![\w./-])", "", value)
    if isinstance(value, list | tuple):
        return type(value)(_said(inner, words) for inner in value)
    if isinstance(value, dict):
        return {key: _said(inner, words) for key, inner in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: _said(getattr(value, name), words) for name in fields})
    return value
