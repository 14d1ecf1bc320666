"""Health as the engine's progress, watched from a thread of its own.

A server is healthy while its engine is ready, has not failed, and makes progress whenever there is work.
An idle engine may sleep as long as it likes.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable

from jserve.engine.contract import EngineStats, Watched

__all__ = ["Health", "Watchdog"]

log = logging.getLogger(__name__)


class Health(enum.StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    STALLED = "stalled"
    """There is work and the engine has made no progress for ``stall_s``; it may recover."""
    FAILED = "failed"
    DRAINING = "draining"
    """Final."""


class Watchdog:
    """Looks at an engine every ``interval_s`` and calls ``on_change`` with each new Health, on its own thread.

    A blocked loop is reported within ``stall_s + interval_s``. ``clock`` is monotonic seconds.
    """

    def __init__(
        self,
        engine: Watched,
        on_change: Callable[[Health], None],
        *,
        stall_s: float = 8.0,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._on_change = on_change
        self._stall_s = stall_s
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._health = Health.STARTING
        self._busy_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jserve-watchdog", daemon=True)

    @property
    def health(self) -> Health:
        return self._health

    def start(self) -> None:
        """Look once, on the calling thread, and then go on looking."""
        self.look()
        self._thread.start()

    def drain(self) -> None:
        """Say DRAINING now and for ever."""
        self._stop.set()
        self._say(Health.DRAINING)

    def stop(self) -> None:
        """Stop looking. Idempotent. An engine that hangs while it is looked at is left to itself."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._interval_s)

    def look(self) -> Health:
        """One look at the engine."""
        try:
            health = self._judge(self._engine.stats())
        except Exception:  # the watchdog must outlive whatever it watches
            log.exception("the engine does not tell its state")
            health = Health.FAILED
        self._say(health)
        return self._health

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()

    def _judge(self, stats: EngineStats) -> Health:
        if stats.failed is not None:
            return Health.FAILED
        if not stats.ready:
            return Health.STARTING
        if not (stats.waiting or stats.running):
            self._busy_since = None
            return Health.SERVING
        now = self._clock()
        if self._busy_since is None:
            # The loop slept until just now: its silence counts from here.
            self._busy_since = now
        silent = now - max(stats.last_progress, self._busy_since)
        return Health.STALLED if silent > self._stall_s else Health.SERVING

    def _say(self, health: Health) -> None:
        with self._lock:
            if health is self._health or self._health is Health.DRAINING:
                return
            before, self._health = self._health, health
            bad = health in (Health.STALLED, Health.FAILED)
            log.log(logging.ERROR if bad else logging.INFO, "health: %s -> %s", before, health)
            self._on_change(health)
