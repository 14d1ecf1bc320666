"""How long work tells of itself: downloads and conversions report here, and the command line draws it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SILENT", "Progress"]


class Progress(Protocol):
    """One task at a time. Calls come from one thread; an implementation must not raise."""

    def start(self, task: str, total: int | None, unit: str) -> None:
        """A task begins, of ``total`` units ("B" for bytes); None where the total is not known."""
        ...

    def advance(self, n: int) -> None:
        """``n`` more units are done."""
        ...

    def note(self, message: str) -> None:
        """One line for the reader, with or without a task under way, such as a hint on a stalled download."""
        ...

    def done(self) -> None:
        """The task has ended well. One that fails is not told of: the exception says more."""
        ...


class _Silent:
    def start(self, task: str, total: int | None, unit: str) -> None:
        del task, total, unit

    def advance(self, n: int) -> None:
        del n

    def note(self, message: str) -> None:
        del message

    def done(self) -> None:
        pass


SILENT: Progress = _Silent()
"""Tells nobody."""
