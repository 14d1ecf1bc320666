"""Decides what the next dispatch does. No JAX, no clock, no threads: a function of its state and its inputs.

First come, first served. While a prompt waits to be computed, steps are *mixed*: every running choice decodes one
token and the rest of the token budget goes to prompts, in chunks, oldest first. Else a *decode* dispatch runs up to
``k`` steps. A choice at the head of the queue that does not fit is waited for: later ones never overtake it.

Plans may be made ahead: plan n+1 while n runs. A plan reserves pages for the most tokens it may write; a choice that
is sure to end in a plan in flight is left out. Pages and slots freed here may be given away at once: the device runs
plans in order, so whoever wrote to them last is done before a later plan touches them.

When a running choice needs a page and none is free, the youngest running choice is preempted: its pages go back, it
returns to the head of the queue, and later computes its prompt and output so far anew. Its tokens do not change.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jserve.engine.buckets import Buckets
from jserve.engine.choice import Choice, ChoiceState, Emitted
from jserve.engine.pages import PageAllocator, pages_for
from jserve.engine.plan import PlanRow, StepPlan, decode_arrays, mixed_arrays
from jserve.request import FinishReason, Request

__all__ = ["Scheduler", "SchedulerConfig"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    page_size: int
    num_pages: int
    max_steps: int
    """Most steps of one decode dispatch."""
    buckets: Buckets

    @property
    def table_width(self) -> int:
        """Pages a row of the page table has room for."""
        return pages_for(self.max_model_len, self.page_size)


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pages = PageAllocator(config.num_pages)
        self.waiting: deque[Choice] = deque()
        self.running: list[Choice] = []
        """Oldest first."""
        self.preemptions = 0
        self._paused: list[Choice] = []
        """Preempted, with results still in flight."""
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))

    # --- requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Choice]:
        """Queue a request's choices. The caller has checked that it can ever run."""
        choices = [Choice(request=request, index=i) for i in range(request.sampling.n)]
        self.waiting.extend(choices)
        return choices

    def end(self, choice: Choice) -> None:
        """Take a choice out, wherever it is; its pages are free at once. Plans in flight may still name it."""
        if choice.state is ChoiceState.ENDED:
            return
        if choice.running:
            self._vacate(choice)
        elif choice in self._paused:
            self._paused.remove(choice)
        else:
            self.waiting.remove(choice)
        choice.state = ChoiceState.ENDED

    def expire(self, now: float) -> list[Choice]:
        """End every choice whose deadline is past; return them."""
        late = [c for c in self._all() if c.request.deadline is not None and c.request.deadline <= now]
        for choice in late:
            self.end(choice)
        return late

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self._paused)

    # --- plans ----------------------------------------------------------------------------------------------------

    def plan(self, now: float, *, max_steps: int) -> StepPlan | None:
        """The next dispatch, or None where nothing can be done before results in flight are applied.

        ``max_steps`` bounds a decode dispatch (1..config.max_steps): the engine's estimate of what fits its time.
        """
        self._requeue_paused()
        prompts = any(c.state is ChoiceState.PREFILL for c in self.running) or self._head_fits()
        decodes = self._decode_rows(1 if prompts else max(1, min(max_steps, self.config.max_steps)))
        if prompts:
            chunks = self._prefill_rows(self.config.max_num_tokens - len(decodes), now)
            if chunks:
                return self._mixed_plan([*decodes, *chunks])
        if not decodes:
            return None
        return self._decode_plan(decodes)

    def apply(self, plan: StepPlan, emitted: Sequence[Emitted]) -> list[tuple[Choice, Emitted, FinishReason | None]]:
        """Take in a plan's results, one a row; return what is new of each choice that still lives."""
        news: list[tuple[Choice, Emitted, FinishReason | None]] = []
        for row, result in zip(plan.rows, emitted, strict=True):
            choice = row.choice
            choice.in_flight -= 1
            choice.planned_tokens -= row.tokens
            if choice.state is ChoiceState.ENDED or not result.tokens:
                continue
            choice.tokens.extend(result.tokens)
            reason = finish_reason(choice)
            if reason is not None:
                self.end(choice)
            news.append((choice, result, reason))
        return news

    def check(self) -> None:
        """Prove the invariants of pages, slots and queues; raises RuntimeError."""
        self.pages.check((c.key, c.pages) for c in self.running)
        taken = [c.slot for c in self.running]
        if sorted(taken + self._slots) != list(range(self.config.max_num_seqs)):
            raise RuntimeError(f"slots taken {taken} and free {self._slots} do not add up")
        if any(c.pages or c.slot != -1 for c in itertools.chain(self.waiting, self._paused)):
            raise RuntimeError("a choice that is not running holds pages or a slot")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[Choice]:
        return itertools.chain(list(self.running), list(self._paused), list(self.waiting))

    def _decode_rows(self, steps: int) -> list[PlanRow]:
        """A row for every decoding choice, with its pages reserved; preempts from the young end where they lack."""
        ready = [c for c in self.running if c.state is ChoiceState.DECODE and c.remaining > 0]
        if ready:
            steps = min(steps, max(c.remaining for c in ready))
        rows: list[PlanRow] = []
        for choice in ready:
            if choice.state is not ChoiceState.DECODE:
                continue  # preempted for an older one
            while not self._reserve(choice, choice.context_after(steps)):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is choice:
                    break
            if choice.state is ChoiceState.DECODE:
                rows.append(PlanRow(choice=choice, tokens=min(steps, choice.remaining)))
        return rows

    def _prefill_rows(self, budget: int, now: float) -> list[PlanRow]:
        """Chunks of prompts within ``budget`` tokens: those begun first, then new ones as they fit."""
        rows = []
        for choice in self.running:
            if choice.state is ChoiceState.PREFILL and budget > 0:
                rows.append(self._chunk(choice, budget))
                budget -= rows[-1].q_len
        while budget > 0 and self._head_fits():
            choice = self.waiting.popleft()
            choice.state = ChoiceState.PREFILL
            choice.slot = self._slots.pop()
            choice.prefill_ids = (*choice.request.prompt_ids, *choice.tokens)
            choice.prefilled = 0
            if choice.first_scheduled is None:
                choice.first_scheduled = now
            self._reserve(choice, len(choice.prefill_ids))
            self.running.append(choice)
            rows.append(self._chunk(choice, budget))
            budget -= rows[-1].q_len
        return rows

    def _chunk(self, choice: Choice, budget: int) -> PlanRow:
        start = choice.prefilled
        q_len = min(budget, len(choice.prefill_ids) - start)
        choice.prefilled += q_len
        last = choice.prefilled == len(choice.prefill_ids)
        if last:
            choice.state = ChoiceState.DECODE
        return PlanRow(choice=choice, start=start, q_len=q_len, samples=last, tokens=1 if last else 0)

    def _head_fits(self) -> bool:
        """Whether the oldest waiting choice can start: a slot, and pages for all it must compute.

        Not while a preempted one is on its way back to the head of the queue: its pages are not for younger ones.
        """
        if self._paused or not self.waiting or not self._slots:
            return False
        head = self.waiting[0]
        need = pages_for(len(head.request.prompt_ids) + len(head.tokens), self.config.page_size)
        return need <= self.pages.free

    def _reserve(self, choice: Choice, context: int) -> bool:
        missing = pages_for(context, self.config.page_size) - len(choice.pages)
        if missing <= 0:
            return True
        pages = self.pages.allocate(missing, choice.key)
        if pages is None:
            return False
        choice.pages.extend(pages)
        return True

    def _vacate(self, choice: Choice) -> None:
        self.running.remove(choice)
        self.pages.release(choice.pages, choice.key)
        choice.pages = []
        self._slots.append(choice.slot)
        choice.slot = -1

    def _preempt(self, choice: Choice) -> None:
        self._vacate(choice)
        choice.state = ChoiceState.WAITING
        self.preemptions += 1
        self._paused.append(choice)

    def _requeue_paused(self) -> None:
        """Preempted choices whose results have all come go back to the head of the queue, oldest first."""
        known = [c for c in self._paused if c.in_flight == 0]
        self._paused = [c for c in self._paused if c.in_flight]
        # Paused youngest first, so that pushing them to the front in that order leaves the oldest at the head.
        self.waiting.extendleft(known)

    def _mixed_plan(self, rows: list[PlanRow]) -> StepPlan:
        bucket = self.config.buckets.mixed_for(sum(row.q_len for row in rows))
        size, width = self.config.max_num_seqs, self.config.table_width
        arrays = mixed_arrays(rows, bucket=bucket, size=size, width=width, num_slots=size)
        return self._dispatched(StepPlan(kind="mixed", bucket=bucket, rows=tuple(rows), arrays=arrays))

    def _decode_plan(self, rows: list[PlanRow]) -> StepPlan:
        size = self.config.buckets.decode_for(len(rows))
        arrays = decode_arrays(
            rows,
            size=size,
            width=self.config.table_width,
            num_slots=self.config.max_num_seqs,
            steps=max(row.tokens for row in rows),
            leave_early=bool(self.waiting or self._paused),
        )
        return self._dispatched(StepPlan(kind="decode", bucket=size, rows=tuple(rows), arrays=arrays))

    def _dispatched(self, plan: StepPlan) -> StepPlan:
        for row in plan.rows:
            row.choice.in_flight += 1
            row.choice.planned_tokens += row.tokens
        return plan


def finish_reason(choice: Choice) -> FinishReason | None:
    """Why a choice is over after its applied tokens: the same tests as the compiled step makes."""
    sampling = choice.request.sampling
    if choice.tokens[-1] in sampling.stop_ids and len(choice.tokens) > sampling.min_tokens:
        return FinishReason.STOP
    if len(choice.tokens) >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
