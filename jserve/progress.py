"""How long work tells of itself: downloads, conversions and compilations report here, and a terminal draws it."""

from __future__ import annotations

import re
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

__all__ = ["SILENT", "ConsoleProgress", "Progress", "printable"]

_QUIET_S = 5.0
"""Without a terminal: seconds between two lines on the same task."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys, or what turns the order of characters around; but for tabs and ends of lines."""


def printable(text: str) -> str:
    """``text`` with escapes such as ``\\x1b`` for control characters: names out of files may hold any."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


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


class ConsoleProgress:
    """Tells of tasks on stderr. A context manager.

    One line a task, ``compile 7/23, 48 s left (5 from the cache)``: beside a bar on a terminal, else anew every
    few seconds. A note on the task under way stands in the parentheses; any other is a line of its own.
    """

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._task: str | None = None
        self._unit = ""
        self._total: int | None = None
        self._count = 0
        self._remark = ""
        self._begun = self._spoken = 0.0

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def start(self, task: str, total: int | None, unit: str) -> None:
        self._close()
        self._task, self._total, self._unit = task, total, unit
        self._count, self._remark = 0, ""
        self._begun = self._spoken = time.monotonic()
        if sys.stderr.isatty():
            self._draw()
        else:
            _say(f"{task} ...")

    def advance(self, n: int) -> None:
        self._count += n
        self._show()

    def note(self, message: str) -> None:
        if self._task is None:
            _say(message)
        else:
            self._remark = f" ({message})"
            self._show()

    def done(self) -> None:
        if self._task is None:
            return
        line = f"{self._task} {self._amount()} in {time.monotonic() - self._begun:.1f} s{self._remark}"
        self._close()
        _say(line)

    def _show(self) -> None:
        now = time.monotonic()
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self._count, detail=printable(self._detail(now)))
        elif now - self._spoken >= _QUIET_S and self._count != self._total:
            self._spoken = now
            _say(f"{self._task} {self._detail(now)}")

    def _detail(self, now: float) -> str:
        left = ""
        if self._total is not None and 0 < self._count < self._total:
            seconds = (now - self._begun) / self._count * (self._total - self._count)
            left = f", {seconds:.0f} s left"
        return f"{self._amount()}{left}{self._remark}"

    def _amount(self) -> str:
        if self._unit == "B":
            whole = "" if self._total is None else f"/{self._total / 1e6:.1f}"
            return f"{self._count / 1e6:.1f}{whole} MB"
        return f"{self._count} {self._unit}" if self._total is None else f"{self._count}/{self._total}"

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
        )
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bars.add_task(printable(self._task or ""), total=self._total, detail="")
        self._bars.start()

    def _close(self) -> None:
        self._task = None
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _say(line: str) -> None:
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()
