"""Talk to the person at the terminal: lines and progress, all on stderr. Bars only where there is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from jserve.engine.executor import CompileProgress

__all__ = ["ConsoleProgress", "rows", "say"]

_QUIET_S = 5.0
"""Without a terminal: seconds between two lines on the same task."""


def say(text: str = "") -> None:
    """One line, or several, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def rows(pairs: Sequence[tuple[str, str]], *, indent: str = "  ") -> str:
    """Names and values in two aligned columns. An empty name goes on with the value above."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{indent}{name:<{width}}  {value}".rstrip() for name, value in pairs)


class ConsoleProgress:
    """Draws ``jserve.checkpoints.progress.Progress`` and the engine's compile progress. A context manager."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._task, self._unit = "", ""
        self._total: int | None = None
        self._count = 0
        self._detail = ""
        self._begun = self._spoken = 0.0

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def start(self, task: str, total: int | None, unit: str) -> None:
        self._close()
        self._task, self._total, self._unit, self._count, self._detail = task, total, unit, 0, ""
        self._begun = self._spoken = time.monotonic()
        if sys.stderr.isatty():
            self._draw(total)
        else:
            say(f"{task} ...")

    def advance(self, n: int) -> None:
        self._count += n
        self._show(self._amount())

    def note(self, message: str) -> None:
        if self._bars is not None:
            self._bars.console.print(message, highlight=False, markup=False)
        else:
            say(message)

    def compiled(self, update: CompileProgress) -> None:
        """Programs of the engine that are ready to run: ``compile 7/23, 48 s left (5 from the cache)``."""
        if self._task != "compile":
            self.start("compile", update.total, "programs")
        self._count = update.done
        left = f", {update.seconds_left:.0f} s left" if update.done < update.total else ""
        stored = f" ({update.stored} from the cache)" if update.stored else ""
        self._detail = f"{update.done}/{update.total}{left}{stored}"
        self._show(self._detail)

    def done(self) -> None:
        if not self._task:
            return
        took = time.monotonic() - self._begun
        line = f"{self._task} {self._detail or self._amount()} in {took:.1f} s"
        self._close()
        say(line)
        self._task = ""

    def _show(self, detail: str) -> None:
        now = time.monotonic()
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self._count, detail=detail)
        elif now - self._spoken >= _QUIET_S:
            self._spoken = now
            say(f"{self._task} {detail}")

    def _amount(self) -> str:
        if self._unit == "B":
            whole = "" if self._total is None else f"/{self._total / 1e6:.1f}"
            return f"{self._count / 1e6:.1f}{whole} MB"
        whole = "" if self._total is None else f"/{self._total}"
        return f"{self._count}{whole} {self._unit}".rstrip()

    def _draw(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = ("{task.description}", BarColumn(), TextColumn("{task.fields[detail]}"), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bars.add_task(self._task, total=total, detail="")
        self._bars.start()

    def _close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
