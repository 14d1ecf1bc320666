"""How long dispatches take, from readings."""

import math

import pytest

from jserve.engine.choice import Choice
from jserve.engine.pace import Pace
from jserve.engine.plan import PlanRow, StepPlan, decode_arrays

ARRAYS = decode_arrays([], size=1, width=1, num_slots=1, steps=1, leave_early=False)


def plan(kind="decode", bucket=4, tokens=8):
    row = PlanRow(choice=Choice(None, 0), tokens=tokens)
    return StepPlan(kind=kind, bucket=bucket, rows=(row,), arrays=ARRAYS)


def test_steps_fit_the_dispatch_by_the_last_decode_programs_pace():
    pace = Pace(max_dispatch_s=0.05, max_steps=32)
    assert (pace.steps(), pace.expect(plan())) == (1, math.inf)
    pace.record(plan(), 0.04, 4)
    assert pace.steps() == 5
    assert pace.expect(plan(tokens=3)) == pytest.approx(0.03)
    pace.record(plan("mixed", 32), 0.5, 1)
    assert pace.steps() == 5
    assert pace.expect(plan("mixed", 32)) == pytest.approx(0.5)
    pace.record(plan(bucket=8), 0.0001, 1)
    assert pace.steps() == 32
    pace.record(plan(bucket=1), 9.0, 1)
    assert pace.steps() == 1


def test_a_reading_moves_the_average_by_a_quarter_and_no_step_is_no_reading():
    pace = Pace(max_dispatch_s=1.0, max_steps=32)
    pace.record(plan(), 0.1, 1)
    pace.record(plan(), 0.0001, 0)
    assert pace.expect(plan(tokens=1)) == pytest.approx(0.1)
    pace.record(plan(), 0.4, 2)
    assert pace.expect(plan(tokens=1)) == pytest.approx(0.125)


def test_a_dispatch_may_take_five_times_its_expectation_and_two_minutes_at_first():
    pace = Pace(max_dispatch_s=0.05, max_steps=32)
    assert pace.patience(plan()) == 120.0
    pace.record(plan(), 8.0, 4)
    assert pace.patience(plan(tokens=3)) == pytest.approx(30.0)
    assert pace.patience(plan("mixed", 32)) == 120.0
