"""The engine of an encoder: one thread that groups texts, dispatches and delivers, and the thread-safe door before it.

    take the inbox -> drop what is past its deadline -> group -> dispatch(n + 1) -> fetch(n) -> deliver

Two groups are with the device at most: the next is prepared and queued while one runs, so that the device never waits
for the host, and what comes meanwhile gathers into a larger group.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jserve.engine.contract import Encoded, EngineLimits, EngineStats, VectorSink
from jserve.engine.encoder.batching import Group, WaitingTexts
from jserve.engine.encoder.executor import EncoderExecutor, RunningGroup
from jserve.engine.pace import StepTimes
from jserve.engine.thread import EngineThread
from jserve.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    EngineFailed,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from jserve.request import TextRequest

__all__ = ["VectorEngine"]

log = logging.getLogger(__name__)

_DEPTH = 2
"""Groups that are with the device at once."""
_IDLE_WAKE_S = 0.5
"""How often an idle loop comes round, so that a watchdog sees it alive."""


@dataclass(eq=False)
class _Text:
    """A text that was accepted and not answered."""

    request: TextRequest
    sink: VectorSink
    scheduled: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens


class VectorEngine(EngineThread):
    """Implements ``jserve.engine.contract.EncoderEngine`` on an executor whose programs are compiled."""

    def __init__(
        self,
        executor: EncoderExecutor,
        *,
        limits: EngineLimits,
        dimensions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="encoder", clock=clock)
        self._executor = executor
        self._limits = limits
        self._dimensions = dimensions
        self._waiting: WaitingTexts[_Text] = WaitingTexts(executor.buckets)
        self._live: dict[str, _Text] = {}
        self._times = StepTimes()
        self._prompt_tokens = self._dispatches = 0

    # --- the door: any thread -------------------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def dimensions(self) -> int:
        return self._dimensions

    def submit(self, request: TextRequest, sink: VectorSink) -> None:
        self._check(request)
        with self._wake:
            self._check_open()
            if request.request_id in self._live:
                raise DuplicateRequest(f"request {request.request_id!r} is still running; choose another request_id")
            if len(self._waiting) >= self._limits.max_queue:
                raise QueueFull(f"{len(self._waiting)} texts are waiting, as many as are allowed; try again later")
            text = self._live[request.request_id] = _Text(request, sink)
            self._waiting.add(text)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        with self._wake:
            text = self._live.pop(request_id, None)
            if text is not None:
                self._waiting.remove(text)
        if text is not None:
            self._tell(text, error=Cancelled("the request was cancelled"))

    def stats(self) -> EngineStats:
        with self._wake:
            waiting, live = len(self._waiting), len(self._live)
        return EngineStats(
            waiting=waiting,
            running=live - waiting,
            pages_free=0,
            pages_in_use=0,
            prompt_tokens=self._prompt_tokens,
            output_tokens=0,
            dispatches=self._dispatches,
            preemptions=0,
            compilations=self._compiled_since_ready(),
            last_progress=self._newest_progress(),
            ready=self._is_ready(),
            failed=self._failed,
        )

    def _check(self, request: TextRequest) -> None:
        """What can never run is refused at once. The frontend says it better; this is the last line."""
        ids, limits = request.token_ids, self._limits
        if not ids:
            raise InvalidRequest("the text has no token; it needs at least 1")
        if len(ids) > limits.max_model_len:
            raise PromptTooLong(f"the text has {len(ids)} tokens; the limit is {limits.max_model_len}")
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            raise InvalidRequest(f"token ids must be in 0..{limits.vocab_size - 1}; got {min(ids)}..{max(ids)}")

    # --- the loop: the engine's thread only -----------------------------------------------------------------------

    def _loop(self) -> None:
        running: deque[RunningGroup[_Text]] = deque()
        begun = 0.0
        while self._await_work(idle=not running):
            group = self._next_group() if len(running) < _DEPTH else None
            if group is not None:
                if not running:  # some devices run it within the call
                    begun = self._begin(group)
                running.append(self._executor.dispatch(group, [text.request.token_ids for text in group.texts]))
                self._dispatches += 1
            if running and (group is None or len(running) == _DEPTH):
                self._finish(running.popleft(), begun)
                if running:
                    begun = self._begin(running[0].group)
        for group_left in running:
            self._executor.fetch(group_left)

    def _await_work(self, *, idle: bool) -> bool:
        """Wait until there is something to do. False: stop."""
        with self._wake:
            while idle and not self._stopping and not len(self._waiting):
                self._last_progress = self._clock()
                self._wake.wait(_IDLE_WAKE_S)
            return not self._stopping

    def _next_group(self) -> Group[_Text] | None:
        """What runs next; texts past their deadline are dropped before they cost anything."""
        now = self._clock()
        with self._wake:
            late = [t for t in self._waiting if t.request.deadline is not None and t.request.deadline <= now]
            for text in late:
                self._waiting.remove(text)
                self._live.pop(text.request_id, None)
            group = self._waiting.take()
            for text in () if group is None else group.texts:
                text.scheduled = now
        for text in late:
            self._tell(text, error=DeadlineExceeded("the request's deadline passed before it was done"))
        return group

    def _begin(self, group: Group[_Text]) -> float:
        """The device computes a group from now on: behind another one, when that has ended."""
        now = self._clock()
        self._patient_until = now + self._times.patience(_program(group))
        return now

    def _finish(self, running: RunningGroup[_Text], begun: float) -> None:
        vectors = self._executor.fetch(running)
        self._last_progress = now = self._clock()
        self._patient_until = -math.inf
        self._times.record(_program(running.group), now - begun)
        texts = running.group.texts
        self._prompt_tokens += sum(text.num_tokens for text in texts)
        with self._wake:
            # A text that was cancelled is gone, and another may have come under its id.
            wanted = [self._live.get(text.request_id) is text for text in texts]
            for text, is_wanted in zip(texts, wanted, strict=True):
                if is_wanted:
                    del self._live[text.request_id]
        for text, vector, is_wanted in zip(texts, vectors, wanted, strict=True):
            if is_wanted:
                self._tell(text, vector=vector)

    def _tell(
        self, text: _Text, *, vector: NDArray[np.float32] | None = None, error: RequestError | None = None
    ) -> None:
        """Answer a text that lives no more."""
        # A copy, so that whoever keeps one vector does not keep those of the whole group.
        own = None if vector is None else vector.copy()
        try:
            text.sink(Encoded(vector=own, error=error, first_scheduled=text.scheduled))
        except Exception:  # one text's listener must not end the others
            log.exception("the sink of request %s failed", text.request_id)

    def _abandon(self) -> None:
        self._end_all(None)

    def _end_all(self, failure: str | None) -> None:
        """Answer every text that lives: cancelled, or with an error after a ``failure``."""
        with self._wake:
            self._stopping = True
            self._failed = failure
            texts: Sequence[_Text] = list(self._live.values())
            self._live.clear()
            self._waiting = WaitingTexts(self._executor.buckets)
        for text in texts:
            error: RequestError = Cancelled("the engine was stopped")
            if failure is not None:
                error = EngineFailed(f"the engine failed, {failure}")
            self._tell(text, error=error)


def _program(group: Group[_Text]) -> tuple[int, int]:
    return group.num_rows, group.length
