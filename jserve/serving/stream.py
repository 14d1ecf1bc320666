"""One request's way back: the engine's deltas become the caller's."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from jserve.engine.contract import TokenEngine
from jserve.errors import Cancelled, DeadlineExceeded, EngineFailed, JserveError, RequestError, SlowReader
from jserve.request import Delta, FinishReason, Request, Timings, TokenDelta, Usage
from jserve.serving.choice_text import ChoiceText
from jserve.serving.meter import RequestMeter
from jserve.serving.outbox import Outbox

__all__ = ["Stream"]


class Stream:
    """One request's deltas, as a blocking or as an asynchronous iterator.

    Each item is a list: all that is there, one Delta a choice. The last item's last Delta has usage and timings.
    Iterating never raises for what befell the request: once it ends, ``failure`` is the typed error, or None.

    One consumer at a time, in one way. The engine's thread only puts into the outbox and never waits; text is
    made on the consumer's side. A consumer that lets the outbox grow beyond its bound in bytes loses this stream
    (what is in the outbox it still gets) and no other. Every other method may be called from any thread.
    """

    def __init__(
        self,
        request_id: str,
        request: Request,
        *,
        engine: TokenEngine,
        choices: Sequence[ChoiceText],
        outbox_bytes: int,
        clock: Callable[[], float],
        meter: RequestMeter,
        on_released: Callable[[], None],
    ) -> None:
        """``request_id`` is the caller's; ``request.request_id`` the engine's. ``on_released`` is called once, from
        any thread, when the caller's id may be used again: the request is over or cancelled."""
        self.request_id = request_id
        self._request = request
        self._engine = engine
        self._choices = choices
        self._outbox = Outbox()
        self._bound = outbox_bytes
        self._clock = clock
        self._meter = meter
        self._on_released = on_released

        self._lock = threading.Lock()
        # Under the lock.
        self._running = set(range(len(choices)))
        self._reasons: dict[int, FinishReason] = {}
        self._verdict: RequestError | None = None
        self._abandoned = False
        self._released = False
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._closed_at = request.arrival
        # The consumer's own.
        self._ended = False
        self._failure: RequestError | None = None

    # The engine's side

    def accept(self, deltas: Sequence[TokenDelta]) -> None:
        """The engine's sink: never blocks, never raises."""
        now = self._clock()
        with self._lock:
            kept = [delta for delta in deltas if delta.choice in self._running]
            for delta in kept:
                self._note(delta, now)
            self._outbox.put(kept)
            closed = bool(kept) and not self._running
            if closed:
                self._close(now)
            overflow = bool(self._running) and self._outbox.size > self._bound
        if overflow:
            self.abort(
                SlowReader(
                    f"the caller did not read: more than {self._bound} bytes of output waited; read faster or ask for "
                    "less, such as fewer logprobs"
                )
            )
        if closed:
            self._release()
        if kept:
            self._outbox.wake()

    def _note(self, delta: TokenDelta, now: float) -> None:
        if self._scheduled is None:
            self._scheduled = delta.first_scheduled
        if delta.token_ids:
            if self._first_token is None:
                self._first_token = now
            self._meter.tokens(delta.choice, len(delta.token_ids), now)
        if delta.finish_reason is not None:
            self._running.discard(delta.choice)
            self._reasons[delta.choice] = delta.finish_reason

    def _close(self, now: float) -> None:
        """The engine owes nothing more."""
        self._closed_at = now
        if self._abandoned:
            self._count_all()

    def _count_all(self) -> None:
        """Count choices by the engine's word, where no consumer may be left to find out about stop strings."""
        for choice in self._choices:
            reason = self._reasons.get(choice.index, FinishReason.ERROR)
            self._meter.finished(choice.index, reason, scheduled=self._scheduled, now=self._closed_at)

    def _release(self) -> None:
        """Tell the owner, once, that the caller's request id is free again."""
        with self._lock:
            released, self._released = self._released, True
        if not released:
            self._on_released()

    # The caller's side

    @property
    def failure(self) -> JserveError | None:
        """Why the request failed: the first error of its choices, known once its delta was given out; else None."""
        return self._failure

    @property
    def closed(self) -> bool:
        """The engine owes nothing more; what it made may still be there to pull."""
        with self._lock:
            return not self._running

    def cancel(self) -> None:
        """The caller went away or wants no more. The engine ends the choices within two dispatches; a consumer that
        stays gets their last deltas, with finish_reason cancelled. The request id is free at once. Idempotent."""
        with self._lock:
            first, self._abandoned = not self._abandoned, True
            running = bool(self._running)
            if first and not running:
                self._count_all()
        if first and running:
            self._engine.cancel(self._request.request_id)
        self._release()

    def abort(self, error: RequestError) -> None:
        """End the request with an error now, without waiting for the engine; what is in the outbox is still given
        out before it."""
        with self._lock:
            if not self._running:
                return
            self._running.clear()
            self._verdict = error
            self._close(self._clock())
        self._engine.cancel(self._request.request_id)
        self._release()
        self._outbox.close()
        self._outbox.wake()

    def notify(self, callback: Callable[[], None] | None) -> None:
        """Call this from the engine's thread whenever there is something to pull, and once now where there is: for
        one thread that serves many streams with ``pull(timeout=0)``. It must neither block nor raise. None ends it."""
        self._outbox.notify(callback)

    def pull(self, timeout: float | None = None) -> list[Delta] | None:
        """All that is there, one Delta a choice. Waits for something, at most ``timeout`` seconds (then: ``[]``).
        None after the end."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ended:
            deltas = self._assemble()
            if deltas:
                return deltas
            if not self._outbox.wait(None if until is None else until - time.monotonic()):
                return []
        return None

    def __iter__(self) -> Iterator[list[Delta]]:
        return self

    def __next__(self) -> list[Delta]:
        deltas = self.pull()
        if deltas is None:
            raise StopIteration
        return deltas

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._ended:
            deltas = self._assemble()
            if deltas:
                return deltas
            await self._outbox.wait_async()
        raise StopAsyncIteration

    def _assemble(self) -> list[Delta]:
        """Empty the outbox into deltas; [] where nothing new is to be said."""
        with self._lock:
            # Before the outbox is taken: after a verdict nothing is put, so that then all is taken.
            verdict = self._verdict
        touched: dict[int, ChoiceText] = {}
        for delta in self._outbox.take():
            choice = self._choices[delta.choice]
            if choice.finish is not None:
                continue
            touched[choice.index] = choice
            choice.take(delta)
            if choice.met_stop_string:
                self._end_at_engine(choice.index)
            elif delta.finish_reason is not None:
                choice.end(delta.finish_reason, _error_of(delta))
        if verdict is not None:
            for choice in self._choices:
                if choice.finish is None:
                    touched[choice.index] = choice
                    choice.end(FinishReason.ERROR, verdict)
        return self._emit([touched[i] for i in sorted(touched)])

    def _end_at_engine(self, index: int) -> None:
        """A stop string ended a choice: the engine need not go on with it."""
        with self._lock:
            running = index in self._running
            self._running.discard(index)
            self._reasons[index] = FinishReason.STOP
            closed = running and not self._running
            if closed:
                self._close(self._clock())
        if running:
            self._engine.end_choice(self._request.request_id, index)
        if closed:
            self._release()

    def _emit(self, choices: Sequence[ChoiceText]) -> list[Delta]:
        deltas = [choice.emit(self.request_id) for choice in choices]
        for choice in choices:
            if choice.finish is not None:
                self._failure = self._failure or choice.error
                with self._lock:
                    self._meter.finished(choice.index, choice.finish, scheduled=self._scheduled, now=self._closed_at)
        if deltas and all(choice.finish is not None for choice in self._choices):
            deltas[-1] = replace(deltas[-1], usage=self._usage(), timings=self._timings())
            self._ended = True
        return deltas

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self._request.prompt_ids),
            output_tokens=sum(choice.num_tokens for choice in self._choices),
        )

    def _timings(self) -> Timings:
        """A request that was never scheduled waited to its end; without a token ``ttft`` is 0."""
        arrival, end = self._request.arrival, self._closed_at
        return Timings(
            queue=(end if self._scheduled is None else self._scheduled) - arrival,
            ttft=0.0 if self._first_token is None else self._first_token - arrival,
            total=end - arrival,
        )


def _error_of(delta: TokenDelta) -> RequestError | None:
    match delta.finish_reason:
        case FinishReason.DEADLINE:
            return DeadlineExceeded("the request's deadline passed before it was done")
        case FinishReason.CANCELLED:
            return Cancelled("the request was cancelled")
        case FinishReason.ERROR:
            return EngineFailed(delta.error or "the engine failed under this request; see the server's log")
    return None
