"""An event loop on a thread of its own, driven from other threads.

All doors of a server share one: gRPC's asyncio parts run markedly slower with several loops in a process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["LoopThread"]

_Result = TypeVar("_Result")


class LoopThread:
    """Runs from construction until ``close``; then what still runs on it is cancelled."""

    def __init__(self, name: str) -> None:
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name=name, daemon=True)
        self._thread.start()
        self._loop, self._closed = self._started.result()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the loop and wait for its result. Never from the loop's own thread.

        RuntimeError where the loop is closed.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise
        return future.result()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _live(self) -> None:
        closed = asyncio.Event()
        self._started.set_result((asyncio.get_running_loop(), closed))
        await closed.wait()
