"""How long dispatches take, so that a decode dispatch fits its time, the next plan is made just before it is due, and
a slow dispatch is told from one that hangs."""

from __future__ import annotations

import math
from collections.abc import Hashable

from jserve.engine.plan import StepPlan

__all__ = ["Pace", "StepTimes"]

_WEIGHT = 0.25
"""Share of a new reading in the moving average."""
_SLOW = 5.0
"""A dispatch may take so many times what it should before it counts as hanging: other load, longer contexts."""
_LONGEST_FIRST_S = 120.0
"""How long the first dispatch of a program may take before it counts as hanging."""


class StepTimes:
    """Moving averages of the seconds a step takes, one a program. A dispatch is one step or more."""

    def __init__(self) -> None:
        self._step_s: dict[Hashable, float] = {}

    def expect(self, program: Hashable, *, steps: int = 1) -> float:
        """Seconds that a dispatch should take; infinite where its program has not run yet."""
        return self._step_s.get(program, math.inf) * steps

    def patience(self, program: Hashable, *, steps: int = 1) -> float:
        """Seconds that a dispatch may take and be merely slow."""
        expected = self.expect(program, steps=steps)
        return _SLOW * expected if math.isfinite(expected) else _LONGEST_FIRST_S

    def record(self, program: Hashable, seconds: float, *, steps: int = 1) -> None:
        """Take in that a dispatch of ``steps`` steps took ``seconds``."""
        reading = seconds / steps
        old = self._step_s.get(program, reading)
        self._step_s[program] = old + _WEIGHT * (reading - old)


class Pace:
    """StepTimes of a decoder's plans."""

    def __init__(self, *, max_dispatch_s: float, max_steps: int) -> None:
        self._max_dispatch_s = max_dispatch_s
        self._max_steps = max_steps
        self._times = StepTimes()
        self._last_decode: Hashable = None

    def steps(self) -> int:
        """Decode steps that fit one dispatch, by the last decode program's pace; 1 until it is known."""
        step_s = self._times.expect(self._last_decode)
        return max(1, min(self._max_steps, int(self._max_dispatch_s / max(step_s, 1e-6))))

    def expect(self, plan: StepPlan) -> float:
        """Seconds that a plan should take; infinite where its program has not run yet."""
        return self._times.expect(_program(plan), steps=_steps(plan))

    def patience(self, plan: StepPlan) -> float:
        """Seconds that a plan may take and be merely slow."""
        return self._times.patience(_program(plan), steps=_steps(plan))

    def record(self, plan: StepPlan, seconds: float, steps: int) -> None:
        """Take in that ``plan`` took ``seconds`` for the ``steps`` steps it really made. One that made none, as all its
        choices had ended in the dispatch before, teaches nothing."""
        if steps == 0:
            return
        if plan.kind == "decode":
            self._last_decode = _program(plan)
        self._times.record(_program(plan), seconds, steps=steps)


def _program(plan: StepPlan) -> Hashable:
    return plan.kind, plan.bucket


def _steps(plan: StepPlan) -> int:
    return max(row.tokens for row in plan.rows) if plan.kind == "decode" else 1
