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
from jserve.serving.health import Health, Watchdog
from jserve.testing.waiting import wait_for

STOP = 9
STEP_S = 0.05


@dataclass
class Dispatched:
    plan: object
    emitted: list
    ready: float
    go: threading.Event

    @property
    def done(self):
        return self.go.is_set() and time.monotonic() >= self.ready


@dataclass
class Clock:
    """The machine's, and what a test adds."""

    added: float = 0.0

    def __call__(self):
        return time.monotonic() + self.added


@dataclass
class Device:
    """Takes ``step_s`` a step; a choice stops with its token number ``stop_at``, 1 being the first."""

    stop_at: int = 10**9
    step_s: float = STEP_S
    go: threading.Event = field(default_factory=threading.Event)
    """While it is not set, no dispatch ends."""
    on_dispatch: object = None
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

    def __post_init__(self):
        self.go.set()

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
        if self.on_dispatch:
            self.on_dispatch(plan)
        return Dispatched(plan, emitted, time.monotonic() + self.step_s * steps, self.go)

    def fetch(self, running):
        running.go.wait(60)
        time.sleep(max(0.0, running.ready - time.monotonic()))
        return running.emitted


@pytest.fixture
def started():
    engines = []

    def start(device, clock=time.monotonic):
        limits = EngineLimits(max_model_len=256, vocab_size=64, max_num_seqs=2, num_pages=64, page_size=8, max_queue=8)
        engine = Engine(device, limits=limits, max_dispatch_s=100.0, clock=clock)
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


def test_closing_a_device_that_hangs_ends_every_request(started, monkeypatch, caplog):
    monkeypatch.setattr("jserve.engine.thread._CLOSE_S", 0.1)
    device = Device()
    device.go.clear()
    engine = started(device)
    running, unseen = Listener(choices=2), Listener()
    engine.submit(request("running", [1], 200, n=2), running)
    plans_after(device, 0)
    engine._thread.join(0.2)  # until it waits for the device
    engine.submit(request("unseen", [1], 200), unseen)
    engine.close()
    assert running.over.is_set()
    assert unseen.over.is_set()
    assert "its device hangs" in caplog.text
    assert set(running.wait().reasons.values()) == set(unseen.wait().reasons.values()) == {FinishReason.CANCELLED}
    assert engine.stats().waiting == 0
    engine.close()  # Once more is no second end,
    device.go.set()
    engine._thread.join(10)  # nor is a device that comes back after all.
    assert engine.fault is None
    assert not engine._thread.is_alive()
    assert not running.wait().faults + unseen.wait().faults


def plans_after(device, count):
    wait_for(lambda: len(device.plans) > count)


@pytest.mark.parametrize("known", [False, True])
def test_a_slow_dispatch_is_no_hang_and_a_hang_is_found(started, known):
    clock, device = Clock(), Device(step_s=0.001)
    engine = started(device, clock)
    engine.mark_ready()
    watchdog = Watchdog(engine, lambda _: None, stall_s=8.0, clock=clock)
    for name, seconds in [("reading", 20.0)] * known + [("watched", 99.0 if known else 119.0)]:
        before = len(device.plans)
        device.go.clear()
        listener = Listener()
        engine.submit(request(name, [1], 2), listener)
        plans_after(device, before)
        assert watchdog.look() is Health.SERVING
        clock.added += seconds
        if known and name == "watched":
            plans_after(device, before + 1)  # due: the loop has planned ahead, and waits for the result
        assert watchdog.look() is Health.SERVING
        if name == "watched":
            clock.added += 30.0
            assert watchdog.look() is Health.STALLED
        device.go.set()
        listener.wait()
    assert watchdog.look() is Health.SERVING


def test_requests_are_taken_in_while_a_program_runs_for_the_first_time(started):
    device = Device()
    engine = started(device)
    device.go.clear()
    first, second = Listener(), Listener()
    engine.submit(request("first", [1], 2), first)
    plans_after(device, 0)
    engine.submit(request("second", [1], 2), second)
    engine.cancel("second")
    assert second.wait().reasons[0] is FinishReason.CANCELLED
    assert not first.reasons
    device.go.set()
    first.wait()


PROMPT = [1] * 100
MOMENTS = {
    "prefill": lambda plan, row: 0 < row.start < 64,
    "last chunk": lambda plan, row: row.start >= 0 and row.samples,
    "decode": lambda plan, row: plan.kind == "decode" and len(row.choice.tokens) > 1,
    "last token": lambda plan, row: row.choice.remaining == 0,
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("alone", [True, False])
def test_slot_and_pages_are_free_within_two_dispatches_of_a_cancel(started, moment, alone):
    device = Device(step_s=0.005)
    engine = started(device)
    cancelled_at, left = [], []

    def watch(plan):
        for row in plan.rows:
            if row.choice.request.request_id == "gone" and not cancelled_at and MOMENTS[moment](plan, row):
                cancelled_at.append(len(device.plans))
                engine.cancel("gone")

    class Leaving(Listener):
        def __call__(self, deltas):  # on the engine's thread: nothing moves meanwhile
            engine._scheduler.check()
            names = [choice.request.request_id for choice in engine._scheduler.running]
            left.append((len(device.plans), names, engine.stats().pages_in_use))
            super().__call__(deltas)

    device.on_dispatch = watch
    neighbour, gone = Listener(), Leaving()
    if not alone:
        engine.submit(request("neighbour", [1], 200), neighbour)
        neighbour.first.wait(10)
    engine.submit(request("gone", PROMPT, 100), gone)
    gone.wait()
    plans, names, pages = left[-1]
    assert plans - cancelled_at[0] <= 2
    assert "gone" not in names
    if alone:
        assert pages == 0
