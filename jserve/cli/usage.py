"""The error of a command line that cannot be understood, and the hint that mends it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UsageError", "did_you_mean"]


class UsageError(Exception):
    """Ends the program with exit status 2. ``usage`` is the line that shows how the command is written."""

    def __init__(self, message: str, *, usage: str = "jserve COMMAND [options]; see jserve --help") -> None:
        super().__init__(message)
        self.usage = usage


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` for the nearest known word: the one it begins, else the most alike; else nothing."""
    names = list(known)
    begun = [name for name in names if name.startswith(word)]
    near = begun[:1] if len(begun) == 1 else difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
