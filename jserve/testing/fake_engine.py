"""An engine without a model: a thread that emits tokens by a fixed rule. For tests of whatever stands on an engine.

The rule is that of jserve.testing.fake_tokens. With ``script`` output token ``i`` is ``script[i % len(script)]``
whatever the prompt.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from jserve.engine.contract import EngineLimits, EngineStats, Sink
from jserve.errors import Draining, DuplicateRequest, EngineFailed, PromptTooLong, QueueFull
from jserve.request import FinishReason, Request, TokenDelta, TokenLogprob
from jserve.testing.fake_tokens import fake_logprob, fake_token

__all__ = ["FakeEngine"]


@dataclass(eq=False)
class _Live:
    """One accepted request."""

    request: Request
    sink: Sink
    open: set[int]
    """Choices that have not ended."""
    emitted: list[int]
    """Output tokens so far, by choice."""
    scheduled: float | None = None
    ending: FinishReason | None = None
    error: str | None = None
    told: set[int] = field(default_factory=set)
    """Choices whose first delta, with ``first_scheduled``, was made."""


class FakeEngine:
    """A TokenEngine with a thread of its own.

    Every dispatch takes ``token_delay_s`` and gives each running choice ``tokens_per_dispatch`` tokens. It
    honours max_tokens, stop ids (not before min_tokens), cancel, end_choice, deadlines, ``max_num_seqs``, the
    queue's bound and duplicate ids. Close it, or use it as a context manager. ``clock`` is monotonic seconds,
    used for deadlines and ``first_scheduled``.
    """

    def __init__(
        self,
        *,
        script: Sequence[int] | None = None,
        vocab_size: int = 258,
        max_model_len: int = 512,
        max_num_seqs: int = 8,
        max_queue: int = 64,
        num_pages: int = 1024,
        page_size: int = 16,
        token_delay_s: float = 0.0,
        tokens_per_dispatch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if script is not None and not script:
            raise ValueError("script is empty; give at least one token id, or None")
        if script is None and vocab_size <= ord("z"):
            raise ValueError(f"vocab_size is {vocab_size}; without a script it must be at least {ord('z') + 1}")
        if script is not None and not all(0 <= token < vocab_size for token in script):
            raise ValueError(f"the script has an id that is not in 0..{vocab_size - 1}")
        self._limits = EngineLimits(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=max_num_seqs,
            num_pages=num_pages,
            page_size=page_size,
            max_queue=max_queue,
        )
        self.token_delay_s = token_delay_s
        """Seconds of one dispatch; may be set while it runs."""
        self._script = script
        self._per_dispatch = tokens_per_dispatch
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[_Live] = deque()
        self._running: list[_Live] = []
        self._ids: dict[str, _Live] = {}
        self._counts = {"prompt": 0, "output": 0, "dispatches": 0}
        self._failed: str | None = None
        self._held = False
        self._draining = False
        self._closed = False
        self._delivering = False
        self._last_progress = clock()
        self.submitted: list[Request] = []
        """Every request ever accepted, in order."""
        self.cancelled: list[str] = []
        """The request id of every call of ``cancel``, in order."""
        self.ended: list[tuple[str, int]] = []
        """Every call of ``end_choice``, in order."""
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)
        self._thread.start()

    # TokenEngine

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def submit(self, request: Request, sink: Sink) -> None:
        limits = self._limits
        with self._changed:
            if self._failed is not None:
                raise EngineFailed("the engine has failed; see the server's log")
            if self._draining or self._closed:
                raise Draining("the server is shutting down; send the request elsewhere")
            if request.request_id in self._ids:
                raise DuplicateRequest(f"request id {request.request_id!r} is in use by a live request")
            if len(request.prompt_ids) + request.sampling.max_tokens > limits.max_model_len:
                raise PromptTooLong(
                    f"prompt of {len(request.prompt_ids)} tokens and max_tokens {request.sampling.max_tokens} "
                    f"exceed the limit of {limits.max_model_len}"
                )
            if len(self._waiting) >= limits.max_queue:
                raise QueueFull(f"{len(self._waiting)} requests wait and {limits.max_queue} may; try again later")
            n = request.sampling.n
            live = _Live(request, sink, set(range(n)), [0] * n)
            self._ids[request.request_id] = live
            self._waiting.append(live)
            self.submitted.append(request)
            self._changed.notify_all()

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            # The id is free at once: a caller may cancel and submit the same id without waiting.
            live = self._ids.pop(request_id, None)
            if live is not None:
                live.ending = reason
                live.error = "ended by the engine" if reason is FinishReason.ERROR else None
                self._changed.notify_all()

    def end_choice(self, request_id: str, choice: int) -> None:
        with self._changed:
            self.ended.append((request_id, choice))
            live = self._ids.get(request_id)
            if live is not None:
                live.open.discard(choice)
                if not live.open:
                    del self._ids[request_id]
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            in_use = sum(self._pages(live) for live in self._running)
            return EngineStats(
                waiting=sum(len(live.open) for live in self._waiting),
                running=sum(len(live.open) for live in self._running),
                pages_free=self._limits.num_pages - in_use,
                pages_in_use=in_use,
                prompt_tokens=self._counts["prompt"],
                output_tokens=self._counts["output"],
                dispatches=self._counts["dispatches"],
                preemptions=0,
                compilations=0,
                last_progress=self._last_progress,
                ready=self._failed is None and not self._closed,
                failed=self._failed,
            )

    # For tests

    @property
    def live(self) -> int:
        """Requests accepted and not yet ended."""
        with self._changed:
            return sum(bool(live.open) for live in [*self._waiting, *self._running])

    def wait_idle(self, timeout: float = 10.0) -> bool:
        """Wait until no request is live. False where the timeout came first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._running and not self._delivering, timeout
            )

    def pause(self) -> None:
        """Make no tokens until ``resume``; cancels and deadlines still work."""
        with self._changed:
            self._held = True

    def resume(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def drain(self) -> None:
        """Refuse new requests with Draining; the old ones go on."""
        with self._changed:
            self._draining = True

    def fail(self, words: str) -> None:
        """Bring the engine down: every live choice ends with FinishReason.ERROR, every submit is refused."""
        with self._changed:
            self._failed = words
            for live in self._ids.values():
                live.ending, live.error = FinishReason.ERROR, "the engine failed"
            self._ids.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel what is live and stop the thread."""
        with self._changed:
            for live in self._ids.values():
                live.ending = FinishReason.CANCELLED
            self._ids.clear()
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The thread

    def _loop(self) -> None:
        next_dispatch = 0.0
        while True:
            with self._changed:
                now = self._clock()
                self._last_progress = now
                self._delivering = False
                batches = self._end_the_ended(now)
                idle = not self._waiting and not self._running
                if idle and not batches:
                    self._changed.notify_all()
                    if self._closed:
                        return
                pause = next_dispatch - time.monotonic()
                if not batches and (idle or self._held or pause > 0):
                    # Held or waiting: look again now and then, for deadlines.
                    self._changed.wait(None if idle else min(pause, 0.01) if pause > 0 else 0.01)
                    continue
                if not batches:
                    batches = self._dispatch(now)
                    next_dispatch = time.monotonic() + self.token_delay_s
                self._delivering = True
            # Outside the lock, so that a sink may call the engine.
            for sink, deltas in batches:
                sink(deltas)

    def _end_the_ended(self, now: float) -> list[tuple[Sink, list[TokenDelta]]]:
        """Remove requests that are cancelled, late or wholly ended; the last deltas of their open choices."""
        batches = []
        for live in [*self._waiting, *self._running]:
            deadline = live.request.deadline
            if live.ending is None and live.open and deadline is not None and now >= deadline:
                live.ending = FinishReason.DEADLINE
            if live.ending is None and live.open:
                continue
            if live in self._running:
                self._running.remove(live)
            else:
                self._waiting.remove(live)
            request_id = live.request.request_id
            if self._ids.get(request_id) is live:
                del self._ids[request_id]
            if live.open:
                deltas = [
                    self._delta(live, choice, (), None, finish=live.ending, error=live.error)
                    for choice in sorted(live.open)
                ]
                batches.append((live.sink, deltas))
        return batches

    def _dispatch(self, now: float) -> list[tuple[Sink, list[TokenDelta]]]:
        """Admit in order of arrival, then give every running choice its tokens."""
        free = self._limits.max_num_seqs - sum(len(live.open) for live in self._running)
        while self._waiting and (len(self._waiting[0].open) <= free or not self._running):
            live = self._waiting.popleft()
            live.scheduled = now
            free -= len(live.open)
            self._counts["prompt"] += len(live.request.prompt_ids)
            self._running.append(live)
        self._counts["dispatches"] += 1
        return [
            (live.sink, [self._advance(live, choice) for choice in sorted(live.open)]) for live in list(self._running)
        ]

    def _advance(self, live: _Live, choice: int) -> TokenDelta:
        sampling = live.request.sampling
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish: FinishReason | None = None
        while finish is None and len(ids) < self._per_dispatch:
            i = live.emitted[choice]
            if self._script is not None:
                token = self._script[i % len(self._script)]
            else:
                token = fake_token(live.request.prompt_ids, choice, i)
            ids.append(token)
            if sampling.logprobs is not None:
                logprobs.append(fake_logprob(token, i, top=sampling.logprobs, vocab_size=self._limits.vocab_size))
            live.emitted[choice] += 1
            if token in sampling.stop_ids and i >= sampling.min_tokens:
                finish = FinishReason.STOP
            elif live.emitted[choice] >= sampling.max_tokens:
                finish = FinishReason.LENGTH
        self._counts["output"] += len(ids)
        if finish is not None:
            live.open.discard(choice)
        return self._delta(
            live, choice, tuple(ids), tuple(logprobs) if sampling.logprobs is not None else None, finish=finish
        )

    def _delta(
        self,
        live: _Live,
        choice: int,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        *,
        finish: FinishReason | None,
        error: str | None = None,
    ) -> TokenDelta:
        first = choice not in live.told
        live.told.add(choice)
        return TokenDelta(
            request_id=live.request.request_id,
            choice=choice,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=finish,
            error=error,
            first_scheduled=live.scheduled if first else None,
        )

    def _pages(self, live: _Live) -> int:
        size = self._limits.page_size
        return sum(-(-(len(live.request.prompt_ids) + live.emitted[choice]) // size) for choice in live.open)
