"""The thread that an engine's loop runs on, and its life: started, ready, and then stopped or failed."""

from __future__ import annotations

import logging
import math
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable

from jserve.engine.compiles import compilations
from jserve.errors import Draining, EngineFailed

__all__ = ["EngineThread"]

log = logging.getLogger(__name__)

_CLOSE_S = 60.0
"""How long ``close`` waits for what is with the device."""


class EngineThread(ABC):
    """What engines have in common. ``_wake`` guards what the loop and the threads at the door both touch."""

    def __init__(self, *, name: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wake = threading.Condition()
        self._stopping = False
        self._failed: str | None = None
        self._fault: Exception | None = None
        self._last_progress = clock()
        self._patient_until = -math.inf
        """Until then the dispatch that runs may be merely slow, so that waiting for it counts as progress."""
        self._compilations_at_ready: int | None = None
        self._watches = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _loop(self) -> None:
        """Work until ``_stopping``."""

    @abstractmethod
    def _end_all(self, failure: str | None) -> None:
        """The loop is over: set ``_stopping`` and ``_failed``, and tell every request that lives that it has ended."""

    @abstractmethod
    def _abandon(self) -> None:
        """The loop hangs: tell every request that lives that it was cancelled, once. From the thread that closes."""

    @property
    def fault(self) -> Exception | None:
        """What brought the loop down."""
        return self._fault

    def start(self) -> None:
        """Start the loop. Not ready yet: that is said by ``mark_ready``, after a warm request."""
        self._thread.start()

    def mark_ready(self) -> None:
        """From here on every compilation is a fault: counted, and logged with its cause."""
        self._compilations_at_ready = compilations.count
        self._watches = True
        compilations.watch()

    def close(self) -> None:
        """Stop the loop; whatever still runs ends as cancelled. A device that hangs is waited for a minute, and then
        left behind."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                log.error("the engine did not stop within %.0f s: its device hangs", _CLOSE_S)
                self._abandon()
        if self._watches:
            self._watches = False
            compilations.unwatch()

    def _check_open(self) -> None:
        """Refuse what comes after the end. The caller holds the lock."""
        if self._failed is not None:
            raise EngineFailed(f"the engine failed ({self._failed}); see the server's log")
        if self._stopping:
            raise Draining("the engine was stopped; send the request elsewhere")

    def _is_ready(self) -> bool:
        return self._compilations_at_ready is not None and self._failed is None and not self._stopping

    def _newest_progress(self) -> float:
        """For EngineStats."""
        return max(self._last_progress, min(self._clock(), self._patient_until))

    def _compiled_since_ready(self) -> int:
        ready = self._compilations_at_ready
        return 0 if ready is None else compilations.count - ready

    def _run(self) -> None:
        failure = None
        try:
            self._loop()
        except Exception as error:
            self._fault = error
            failure = f"incident {uuid.uuid4().hex[:8]}"
            log.exception("the engine failed (%s)", failure)
        self._end_all(failure)
