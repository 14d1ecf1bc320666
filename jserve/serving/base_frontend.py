"""What the frontends of decoders and encoders have in common: a model, workers, and an end."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jserve.errors import DeadlineExceeded, Draining, NotFound
from jserve.request import ServedModel

__all__ = ["BaseFrontend"]

T = TypeVar("T")


class BaseFrontend(ABC):
    """Safe from any thread. ``clock`` is monotonic seconds, the engine's own."""

    model: ServedModel

    def __init__(self, *, model: ServedModel, clock: Callable[[], float], workers: int) -> None:
        self.model = model
        self._clock = clock
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="jserve-text")
        self._lock = threading.Lock()
        self._refusal: str | None = None

    @property
    @abstractmethod
    def live(self) -> int:
        """Requests that are prepared, wait or run, and are not cancelled."""

    @abstractmethod
    def abort_all(self, words: str) -> None:
        """End everything that is live with Draining, in these words."""

    def check_model(self, name: str) -> None:
        """Raise NotFound unless the name is empty or the served one."""
        if name and name != self.model.name:
            raise NotFound(f"model {name!r:.80} is not served here; served is {self.model.name!r}")

    def refuse(self, words: str) -> None:
        """From now on every new request is refused with Draining, in these words; what has begun goes on. A prompt to
        generate from begins in the engine: one that is still prepared is refused too."""
        with self._lock:
            self._refusal = words

    def close(self) -> None:
        """Refuse new requests and stop the workers; what is live is the engine's to end."""
        self.refuse("the server is shutting down; send the request elsewhere")
        self._workers.shutdown()

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise Draining(self._refusal)

    def _check_deadline(self, deadline: float | None) -> None:
        if deadline is not None and self._clock() >= deadline:
            raise DeadlineExceeded("the request's deadline passed before it was started")

    async def _on_worker(self, work: Callable[[], T], *, begun: bool = False) -> T:
        """``begun``: the work is part of a request that a refusal does not reach any more."""

        def run() -> T:
            if not begun:
                self._check_open()
            return work()

        try:
            result = asyncio.get_running_loop().run_in_executor(self._workers, run)
        except RuntimeError:  # The workers were shut down.
            self._check_open()
            raise
        return await result
