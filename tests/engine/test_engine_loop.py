"""The loop on a device of plain Python: what it does when, whatever the device brings."""

import threading
import time
from dataclasses import dataclass, field

import pytest
from harness import Listener, request

from jserve.engine.buckets import Buckets
from jserve.engine.choice import Emitted
from jserve.engine.contract import EngineLimits
from jserve.engine.engine import Engine
from jserve.engine.scheduler import SchedulerConfig
from jserve.errors import Draining
from jserve.request import FinishReason

STOP = 9
STEP_S = 0.05


@dataclass
class Dispatched:
    plan: object
    emitted: list
    ready: float

    @property
    def done(self):
        return time.monotonic() >= self.ready


@dataclass
class Device:
    """Takes ``STEP_S`` a step; a choice stops with its token number ``stop_at``, 1 being the first."""

    stop_at: int = 10**9
    plans: list = field(default_factory=list)
    broken: threading.Event = field(default_factory=threading.Event)
    config: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(
            max_model_len=256,
            max_num_seqs=2,
            max_num_tokens=32,
            page_size=8,
            num_pages=64,
            max_steps=32,
            buckets=Buckets.build(max_num_seqs=2, max_num_tokens=32),
        )
    )

    def dispatch(self, plan):
        if self.broken.is_set():
            raise RuntimeError("device lost")
        self.plans.append(plan)
        emitted = []
        for row in plan.rows:
            made = len(row.choice.tokens)
            count = min(row.tokens, self.stop_at - made)
            emitted.append(Emitted(tokens=tuple(STOP if made + i == self.stop_at else 1 for i in range(1, count + 1))))
        steps = max(len(e.tokens) for e in emitted)
        return Dispatched(plan, emitted, time.monotonic() + STEP_S * steps)

    def fetch(self, running):
        time.sleep(max(0.0, running.ready - time.monotonic()))
        return running.emitted


@pytest.fixture
def started():
    engines = []

    def start(device):
        limits = EngineLimits(max_model_len=256, vocab_size=64, max_num_seqs=2, num_pages=64, page_size=8, max_queue=8)
        engine = Engine(device, limits=limits, max_dispatch_s=100.0)
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.close()


def test_a_dispatch_that_ends_early_is_read_at_once(started):
    device = Device(stop_at=4)
    engine = started(device)
    listener = Listener()
    engine.submit(request("a", [1], 200, stop_ids=(STOP,)), listener)
    began = time.monotonic()
    listener.wait()
    assert listener.tokens[0] == [1, 1, 1, STOP]
    longest = max(row.tokens for plan in device.plans for row in plan.rows)
    assert longest == 32, "a dispatch that could have taken 32 steps"
    assert time.monotonic() - began < 16 * STEP_S


def test_a_failure_reaches_requests_that_the_loop_never_saw(started, caplog):
    device = Device()
    engine = started(device)
    entered, go = threading.Event(), threading.Event()

    def slow(_deltas):
        entered.set()
        go.wait(10)

    engine.submit(request("first", [1], 200), slow)
    assert entered.wait(10)
    listener = Listener(choices=2)
    engine.submit(request("second", [1], n=2), listener)
    with engine._wake:
        engine._inbox.insert(0, lambda: {}["no such command"])
    go.set()
    listener.wait()
    assert set(listener.reasons.values()) == {FinishReason.ERROR}
    assert engine.stats().failed
    assert (engine.stats().running, engine.stats().pages_in_use, engine.stats().waiting) == (0, 0, 0)


def test_choices_of_one_request_pass_their_deadline_in_one_call(started):
    engine = started(Device())
    calls = []
    over = threading.Event()

    def sink(deltas):
        calls.append([(delta.choice, delta.finish_reason) for delta in deltas])
        over.set()

    engine.submit(request("late", [1], n=3, deadline=time.monotonic() - 1), sink)
    assert over.wait(10)
    assert calls == [[(i, FinishReason.DEADLINE) for i in range(3)]]


def test_a_stopped_engine_sends_requests_elsewhere(started):
    engine = started(Device())
    engine.close()
    with pytest.raises(Draining, match="was stopped"):
        engine.submit(request("a", [1]), Listener())
    engine.cancel("a")
    assert engine._inbox == []
