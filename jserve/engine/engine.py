"""The engine: one thread that plans, dispatches and delivers, and the thread-safe door in front of it.

The loop keeps one dispatch running and makes the next plan shortly before that one should end: late, so that an
arrival waits at most one dispatch; early enough that the device never waits for the host. A dispatch that ends before
that (its choices stopped) is read at once, and the next plan knows what it freed.

    take the inbox -> expire deadlines -> Scheduler.plan -> Executor.dispatch(n + 1) -> fetch(n) -> apply -> deliver
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from jserve.engine.admission import check_request
from jserve.engine.choice import ChoiceState, Emitted
from jserve.engine.contract import EngineLimits, EngineStats, Sink
from jserve.engine.executor import Executor, Running
from jserve.engine.live import Live, LiveRequests
from jserve.engine.pace import Pace
from jserve.engine.scheduler import Scheduler
from jserve.engine.thread import EngineThread
from jserve.request import FinishReason, Request

__all__ = ["Engine"]

log = logging.getLogger(__name__)

_IDLE_WAKE_S = 0.5
"""How often an idle loop comes round, so that a watchdog sees it alive."""
_POLL_S = 0.002
"""How often a dispatch is asked whether it has ended early."""


class Engine(EngineThread):
    """Implements ``jserve.engine.contract.TokenEngine`` on an Executor whose programs are compiled."""

    def __init__(
        self,
        executor: Executor,
        *,
        limits: EngineLimits,
        max_dispatch_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="engine", clock=clock)
        self._executor = executor
        self._scheduler = Scheduler(executor.config)
        self._limits = limits
        self._pace = Pace(max_dispatch_s=max_dispatch_s, max_steps=executor.config.max_steps)
        self._inbox: list[Callable[[], None]] = []
        self._live = LiveRequests(max_queue=limits.max_queue, on_broken_sink=self.cancel)
        self._over = False
        """Nothing takes the inbox any more."""
        self._prompt_tokens = self._output_tokens = self._dispatches = 0

    # --- the door: any thread -------------------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def submit(self, request: Request, sink: Sink) -> None:
        check_request(request, self._limits)
        with self._wake:
            self._check_open()
            live = self._live.admit(request, sink)
            self._post(lambda: self._add(live))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        with self._wake:
            self._post(lambda: self._cancel(request_id, reason))

    def end_choice(self, request_id: str, choice: int) -> None:
        with self._wake:
            self._post(lambda: self._end_choice(request_id, choice))

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        running = len(scheduler.running)
        return EngineStats(
            waiting=max(0, self._live.open_choices() - running),
            running=running,
            pages_free=scheduler.pages.free,
            pages_in_use=scheduler.pages.in_use,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            dispatches=self._dispatches,
            preemptions=scheduler.preemptions,
            compilations=self._compiled_since_ready(),
            last_progress=self._newest_progress(),
            ready=self._is_ready(),
            failed=self._failed,
        )

    # --- the loop: the engine's thread only -----------------------------------------------------------------------

    def _loop(self) -> None:
        running: Running | None = None
        begun = due = 0.0
        while self._await_work(running, due):
            now = self._clock()
            if running is not None and running.done:
                self._finish(running, begun)
                running = None
            late = self._scheduler.expire(now)
            self._live.deliver((choice, Emitted(tokens=()), FinishReason.DEADLINE) for choice in late)
            plan = self._scheduler.plan(now, max_steps=self._pace.steps())
            following = None
            if plan is not None:
                if running is None:  # some devices run it within the call
                    self._patient_until = now + self._pace.patience(plan)
                following = self._executor.dispatch(plan)
                self._dispatches += 1
                self._live.note_scheduled(row.choice for row in plan.rows)
            if running is not None:
                self._finish(running, begun)
            # What was dispatched behind another begins when that one ends: now.
            begun = self._clock() if running is not None or following is None else now
            running = following
            if running is not None:
                expected = self._pace.expect(running.plan)
                due = begun + 0.9 * expected - 0.002
                self._patient_until = begun + self._pace.patience(running.plan)
        if running is not None:
            self._executor.fetch(running)

    def _await_work(self, running: Running | None, due: float) -> bool:
        """Wait until there is something to do, and take the inbox. False: stop."""
        while True:
            with self._wake:
                if self._stopping:
                    return False
                if running is not None:
                    wait = 0.0 if running.done else min(due - self._clock(), _POLL_S)
                elif self._inbox or not self._scheduler.idle:
                    wait = 0.0
                else:
                    wait = _IDLE_WAKE_S
                if wait > 0:
                    self._wake.wait(wait)
                inbox, self._inbox = self._inbox, []
            for command in inbox:
                command()
            if running is not None:
                if running.done or self._clock() >= due:
                    return not self._stopping
                continue
            self._last_progress = self._clock()
            if not self._scheduler.idle:
                return not self._stopping
            if not inbox:
                self._scheduler.check()

    def _finish(self, running: Running, begun: float) -> None:
        emitted = self._executor.fetch(running)
        self._last_progress = self._clock()
        self._patient_until = -math.inf
        steps = max((len(e.tokens) for e in emitted), default=1) if running.plan.kind == "decode" else 1
        self._pace.record(running.plan, self._clock() - begun, steps)
        prompts = [row for row in running.plan.rows if row.start >= 0]
        self._prompt_tokens += sum(row.choice.note_prefilled(row.start + row.q_len) for row in prompts)
        news = self._scheduler.apply(running.plan, emitted)
        self._output_tokens += sum(len(result.tokens) for _, result, _ in news)
        self._live.deliver(news)

    # --- commands, in the order they came -------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        """Queue a command for the loop, if it still runs; the caller holds the lock."""
        if self._over:
            return
        self._inbox.append(command)
        self._wake.notify()

    def _add(self, live: Live) -> None:
        live.choices = self._scheduler.add(live.request)

    def _cancel(self, request_id: str, reason: FinishReason) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        unfinished = live.unfinished()
        for choice in unfinished:
            self._scheduler.end(choice)
        self._live.deliver((choice, Emitted(tokens=()), reason) for choice in unfinished)

    def _end_choice(self, request_id: str, index: int) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        choice = live.choices[index]
        if choice.state is not ChoiceState.ENDED:
            self._scheduler.end(choice)
            self._live.close(live, 1)

    def _abandon(self) -> None:
        """The scheduler is left alone: the loop may come back to it."""
        with self._wake:
            self._over = True
        self._live.abandon()

    def _end_all(self, failure: str | None) -> None:
        """Tell every live request that it is over: cancelled, or with an error after a ``failure``."""
        with self._wake:
            self._stopping = self._over = True
            self._failed = failure
            inbox, self._inbox = self._inbox, []
        if failure is None:
            reason, error = FinishReason.CANCELLED, None
            for command in inbox:
                command()
        else:
            reason, error = FinishReason.ERROR, f"the engine failed, {failure}"
            # The failure may have come in the middle of a change: nothing is asked of the old one any more.
            self._scheduler = Scheduler(self._executor.config)
        for live in self._live.all():
            unfinished = live.unfinished()
            if failure is None:
                for choice in unfinished:
                    self._scheduler.end(choice)
            self._live.deliver(((choice, Emitted(tokens=()), reason) for choice in unfinished), error)
