"""Where one request's deltas wait between the engine's thread and their one consumer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from jserve.request import Delta, TokenDelta

__all__ = ["Outbox", "delta_bytes", "token_bytes"]

# What a waiting delta costs in memory, in bytes, as measured: a bound on the sum is a bound on memory.
DELTA_BYTES = 240
TOKEN_BYTES = 40
LOGPROB_BYTES = 200
TOP_LOGPROB_BYTES = 130


class Outbox:
    """A list with a lock, and ways to wait for it: blocking, asynchronous, or by being called.

    Putting never waits. The outbox counts bytes and bounds nothing itself: its owner looks at ``size``.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deltas: list[TokenDelta] = []
        self._size = 0
        self._closed = False
        self._wakers: list[Callable[[], None]] = []
        self._notify: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        """Bytes of memory that the waiting deltas take, about."""
        return self._size

    def put(self, deltas: Sequence[TokenDelta]) -> None:
        """Add deltas. Call ``wake`` afterwards, with no lock held that a consumer may want."""
        with self._changed:
            self._deltas.extend(deltas)
            self._size += sum(map(delta_bytes, deltas))

    def take(self) -> list[TokenDelta]:
        """All that waits, removed."""
        with self._changed:
            deltas, self._deltas, self._size = self._deltas, [], 0
        return deltas

    def close(self) -> None:
        """Be ready from now on, with or without deltas."""
        with self._changed:
            self._closed = True

    def wake(self) -> None:
        """Wake whoever waits."""
        with self._changed:
            self._changed.notify_all()
            wakers, self._wakers = self._wakers, []
            notify = self._notify
        for waker in wakers:
            waker()
        if notify is not None:
            notify()

    def notify(self, callback: Callable[[], None] | None) -> None:
        """Call this at every wake, and once now if there is something. None: no more."""
        with self._changed:
            self._notify = callback
            ready = self._ready()
        if callback is not None and ready:
            callback()

    def wait(self, timeout: float | None) -> bool:
        """Wait until there is something, or it is closed; False where ``timeout`` seconds came first."""
        with self._changed:
            return self._changed.wait_for(self._ready, timeout)

    async def wait_async(self) -> None:
        """Wait until there is something, or it is closed; or until another wake, of any cause."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            # A closed loop has no consumer left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, woken)

        with self._changed:
            if self._ready():
                return
            self._wakers.append(wake)
        try:
            await woken
        finally:
            with self._changed, contextlib.suppress(ValueError):
                self._wakers.remove(wake)

    def _ready(self) -> bool:
        return bool(self._deltas) or self._closed


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def delta_bytes(delta: TokenDelta | Delta) -> int:
    """Bytes of memory that a delta takes besides its text, about."""
    return DELTA_BYTES + token_bytes(delta)


def token_bytes(delta: TokenDelta | Delta) -> int:
    """The part of ``delta_bytes`` that its tokens and their logprobs take."""
    size = TOKEN_BYTES * len(delta.token_ids)
    for logprob in delta.logprobs or ():
        size += LOGPROB_BYTES + TOP_LOGPROB_BYTES * len(logprob.top)
    return size
