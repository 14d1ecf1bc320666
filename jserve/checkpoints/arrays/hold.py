"""Arrays that lie in few stored ones, such as all layers in one: an order of reading in which each is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

from jserve.checkpoints.arrays.lazy import LazyArray, Source

__all__ = ["Holder", "by_source"]

T = TypeVar("T")


def by_source(items: Iterable[T], array: Callable[[T], LazyArray]) -> list[T]:
    """``items`` with those of one stored array one after the other, and else in their order."""
    groups: dict[int, list[T]] = {}
    for item in items:
        source = array(item).source
        groups.setdefault(id(item if source is None else source), []).append(item)
    return [item for group in groups.values() for item in group]


class Holder:
    """Keeps what one stored array has unpacked in memory, as long as parts of it are read."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self._stack = ExitStack()

    def turn_to(self, array: LazyArray) -> None:
        """Before ``array`` is read: hold its source if a piece of that is more than the array, and let go of others."""
        source = array.source
        if source is not None and source.piece_nbytes <= array.nbytes:
            source = None
        if source is not self._source:
            self._stack.close()
            self._source = source
            if source is not None:
                self._stack.enter_context(source.held())

    def __enter__(self) -> Holder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
