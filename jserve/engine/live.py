"""The requests that an engine has accepted and not ended, each with the sink that hears of it."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jserve.engine.choice import Choice, ChoiceState, Emitted
from jserve.engine.contract import Sink
from jserve.errors import DuplicateRequest, QueueFull
from jserve.request import FinishReason, Request, TokenDelta

__all__ = ["Live", "LiveRequests", "News"]

News = tuple[Choice, Emitted, FinishReason | None]
"""What became of a choice: its new tokens, and why it ended if it did."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Live:
    """One accepted request."""

    request: Request
    sink: Sink
    open: int
    """Choices that have not ended."""
    choices: list[Choice] = field(default_factory=list)
    """Empty until the scheduler has it."""
    scheduled: bool = False

    def unfinished(self) -> list[Choice]:
        choices = self.choices or [Choice(request=self.request, index=i) for i in range(self.open)]
        return [choice for choice in choices if choice.state is not ChoiceState.ENDED]


class LiveRequests:
    """``admit``, ``open_choices`` and ``abandon`` for any thread, the rest for the engine's."""

    def __init__(self, *, max_queue: int, on_broken_sink: Callable[[str], None]) -> None:
        """``on_broken_sink`` is told the id of a request whose sink raised."""
        self._max_queue = max_queue
        self._on_broken_sink = on_broken_sink
        self._lock = threading.Lock()
        self._live: dict[str, Live] = {}
        self._queued = 0
        """Requests of which no choice has been scheduled; counted against the queue's bound."""

    def admit(self, request: Request, sink: Sink) -> Live:
        """Raises DuplicateRequest and QueueFull."""
        with self._lock:
            if request.request_id in self._live:
                raise DuplicateRequest(f"request {request.request_id!r} is still running; choose another request_id")
            if self._queued >= self._max_queue:
                raise QueueFull(f"{self._queued} requests are waiting, as many as are allowed; try again later")
            live = Live(request=request, sink=sink, open=request.sampling.n)
            self._live[request.request_id] = live
            self._queued += 1
            return live

    def open_choices(self) -> int:
        """Choices that have not ended, waiting or running."""
        with self._lock:
            return sum(live.open for live in self._live.values())

    def get(self, request_id: str) -> Live | None:
        return self._live.get(request_id)

    def all(self) -> list[Live]:
        with self._lock:
            return list(self._live.values())

    def note_scheduled(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            live = self._live.get(choice.request.request_id)
            if live is not None and not live.scheduled:
                live.scheduled = True
                with self._lock:
                    self._queued -= 1

    def deliver(self, news: Iterable[News], error: str | None = None) -> None:
        """Hand each request its news of one dispatch in one call of its sink; forget those that have ended."""
        deltas: dict[str, list[TokenDelta]] = defaultdict(list)
        for choice, emitted, reason in news:
            deltas[choice.request.request_id].append(_delta(choice, emitted, reason, error))
        for request_id, batch in deltas.items():
            live = self._live.get(request_id)
            if live is None:
                continue
            self.close(live, sum(delta.finish_reason is not None for delta in batch))
            self._tell(live, batch)

    def abandon(self) -> None:
        """Every request hears that it was cancelled, and is forgotten: the engine's thread hangs. Should that thread
        come back, nobody hears of it."""
        with self._lock:
            abandoned = list(self._live.values())
            self._live.clear()
            self._queued = 0
        for live in abandoned:
            ends = [_delta(c, Emitted(tokens=()), FinishReason.CANCELLED, None) for c in live.unfinished()]
            self._tell(live, ends)

    def close(self, live: Live, ended: int) -> None:
        """So many of its choices have ended; with the last one it is forgotten."""
        live.open -= ended
        if live.open == 0:
            with self._lock:
                if self._live.pop(live.request.request_id, None) is not None and not live.scheduled:
                    self._queued -= 1

    def _tell(self, live: Live, batch: list[TokenDelta]) -> None:
        try:
            live.sink(batch)
        except Exception:  # one request's listener must not end the others
            log.exception("the sink of request %s failed; the request is cancelled", live.request.request_id)
            self._on_broken_sink(live.request.request_id)


def _delta(choice: Choice, emitted: Emitted, reason: FinishReason | None, error: str | None) -> TokenDelta:
    return TokenDelta(
        request_id=choice.request.request_id,
        choice=choice.index,
        token_ids=emitted.tokens,
        logprobs=emitted.logprobs,
        finish_reason=reason,
        error=error,
        first_scheduled=choice.first_scheduled,
    )
