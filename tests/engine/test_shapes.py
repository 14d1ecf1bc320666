"""Plans, state and outputs have the shapes and dtypes that their classes say.

They are NamedTuples, so that a plan needs no JAX to be a tree of arrays; no constructor checks those.
"""

import typing

import numpy as np
import pytest
from harness import request, run
from jaxtyping import jaxtyped

from jserve.engine.plan import decode_arrays, mixed_arrays


def misfits(value):
    """Names of the fields that do not fit their annotations, all letters taken together."""
    wrong = []

    def visit(value):
        for name, hint in typing.get_type_hints(type(value), include_extras=True).items():
            part = getattr(value, name)
            if isinstance(part, tuple):
                visit(part)
            elif not isinstance(part, hint):
                wrong.append(name)

    with jaxtyped("context"):
        visit(value)
    return wrong


def test_plans_state_and_outputs_are_what_their_classes_say(engine, monkeypatch):
    seen, executor = [], engine._executor
    fetch = executor.fetch
    monkeypatch.setattr(executor, "fetch", lambda running: seen.append(running) or fetch(running))
    run(engine, request("a", range(40), logprobs=2), request("b", [1, 2], temperature=1.0, stop_ids=(5,)))
    assert {running.plan.kind for running in seen} == {"mixed", "decode"}
    for running in seen:
        assert misfits(running.plan.arrays) == []
        assert misfits(running.outputs) == []
    assert misfits(executor._state) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cu_q_lens", lambda a: a[..., :-1]),
        ("tokens", lambda a: a.astype(np.int64)),
        ("start", lambda a: a[0, 0]),
        ("distribution", lambda a: a[..., :2]),
    ],
)
def test_a_plan_that_does_not_fit_is_seen(name, change):
    plan = mixed_arrays([], bucket=32, size=4, width=3, num_slots=4)
    assert misfits(plan) == []
    assert misfits(plan._replace(**{name: change(getattr(plan, name))})) == [name]


def test_plans_hold_as_many_pages_as_asked():
    plan = decode_arrays([], size=2, width=7, num_slots=4, steps=3, leave_early=True)
    assert misfits(plan) == []
    assert plan.rows.page_table.shape == (1, 1, 2, 7)
