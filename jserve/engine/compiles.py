"""Counts every compilation of this process, so that "no compilation after ready" is a number and not a hope."""

from __future__ import annotations

import logging
import threading
import traceback
from pathlib import Path
from typing import Any

import jax

__all__ = ["CompileCounter", "compilations"]

_EVENT = "/jax/core/compile/backend_compile_duration"
log = logging.getLogger(__name__)


class CompileCounter:
    """A listener of ``jax.monitoring``. While anybody watches, each compilation is logged with what caused it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._watchers = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    @property
    def count(self) -> int:
        return self._count

    def watch(self) -> None:
        with self._lock:
            self._watchers += 1

    def unwatch(self) -> None:
        """Take one ``watch`` back."""
        with self._lock:
            self._watchers -= 1

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event != _EVENT:
            return
        with self._lock:
            self._count += 1
        if self._watchers:
            log.warning("compilation after ready (%.2f s), caused at %s", duration_secs, _cause())


def _cause() -> str:
    """The innermost lines of the stack that are not JAX's own."""
    inside = str(Path(jax.__file__).parent)
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(inside) and f.filename != __file__]
    return " < ".join(f"{f.filename}:{f.lineno} {f.name}" for f in reversed(frames[-3:]))


compilations = CompileCounter()
"""The one counter of this process: jax offers no way to take a listener away again."""
