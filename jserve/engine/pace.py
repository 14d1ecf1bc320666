"""How long dispatches take, so that a decode dispatch fits its time, the next plan is made just before it is due, and
a slow dispatch is told from one that hangs."""

from __future__ import annotations

import math

from jserve.engine.plan import StepPlan

__all__ = ["Pace"]

_WEIGHT = 0.25
"""Share of a new reading in the moving average."""
_SLOW = 5.0
"""A dispatch may take so many times what it should before it counts as hanging: other load, longer contexts."""
_LONGEST_FIRST_S = 120.0
"""How long the first dispatch of a program may take before it counts as hanging."""


class Pace:
    """Moving averages of the seconds a step takes, one a program."""

    def __init__(self, *, max_dispatch_s: float, max_steps: int) -> None:
        self._max_dispatch_s = max_dispatch_s
        self._max_steps = max_steps
        self._step_s: dict[tuple[str, int], float] = {}
        self._last_decode: tuple[str, int] | None = None

    def steps(self) -> int:
        """Decode steps that fit one dispatch, by the last decode program's pace; 1 until it is known."""
        step_s = self._step_s.get(self._last_decode) if self._last_decode else None
        if step_s is None:
            return 1
        return max(1, min(self._max_steps, int(self._max_dispatch_s / max(step_s, 1e-6))))

    def expect(self, plan: StepPlan) -> float:
        """Seconds that a plan should take; infinite where its program has not run yet."""
        return self._step_s.get((plan.kind, plan.bucket), math.inf) * _steps(plan)

    def patience(self, plan: StepPlan) -> float:
        """Seconds that a plan may take and be merely slow."""
        expected = self.expect(plan)
        return _SLOW * expected if math.isfinite(expected) else _LONGEST_FIRST_S

    def record(self, plan: StepPlan, seconds: float, steps: int) -> None:
        """Take in that ``plan`` took ``seconds`` for the ``steps`` steps it really made. One that made none, as all its
        choices had ended in the dispatch before, teaches nothing."""
        if steps == 0:
            return
        program = (plan.kind, plan.bucket)
        if plan.kind == "decode":
            self._last_decode = program
        reading = seconds / steps
        old = self._step_s.get(program, reading)
        self._step_s[program] = old + _WEIGHT * (reading - old)


def _steps(plan: StepPlan) -> int:
    return max(row.tokens for row in plan.rows) if plan.kind == "decode" else 1
