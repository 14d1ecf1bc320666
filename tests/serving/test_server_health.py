"""Health follows the engine's progress: an alarm for a blocked loop, none for a starting or an idle engine."""

import threading
from dataclasses import replace

import pytest

from jserve.engine.contract import EngineStats
from jserve.serving.health import Health, Watchdog

IDLE = EngineStats(
    waiting=0,
    running=0,
    pages_free=8,
    pages_in_use=0,
    prompt_tokens=0,
    output_tokens=0,
    dispatches=0,
    preemptions=0,
    compilations=0,
    last_progress=100.0,
    ready=True,
    failed=None,
)
BUSY = replace(IDLE, running=1)


class Engine:
    """Says what it is told to say."""

    def __init__(self, stats):
        self.said = stats

    def stats(self):
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


@pytest.fixture
def watched():
    engine, told, now = Engine(IDLE), [], [100.0]
    watchdog = Watchdog(engine, told.append, stall_s=8.0, clock=lambda: now[0])

    def look(stats, at):
        engine.said, now[0] = stats, at
        return watchdog.look()

    look.told, look.watchdog = told, watchdog
    return look


def test_starting_is_no_alarm_however_long(watched):
    starting = replace(BUSY, ready=False)
    assert watched(starting, 101.0) is Health.STARTING
    assert watched(starting, 10_000.0) is Health.STARTING
    assert watched(replace(IDLE, last_progress=10_001.0), 10_001.0) is Health.SERVING
    assert watched.told == [Health.SERVING]


def test_an_idle_engine_may_sleep(watched):
    assert watched(IDLE, 10_000.0) is Health.SERVING
    # Work arrives; the loop's last round is long ago, and its silence counts from now.
    assert watched(BUSY, 10_001.0) is Health.SERVING
    assert watched(BUSY, 10_009.0) is Health.SERVING
    assert watched(BUSY, 10_009.1) is Health.STALLED


def test_a_blocked_loop_is_stalled_and_may_recover(watched):
    assert watched(replace(BUSY, last_progress=200.0), 200.0) is Health.SERVING
    assert watched(replace(BUSY, last_progress=208.0), 208.0) is Health.SERVING
    assert watched(replace(BUSY, last_progress=208.0), 216.5) is Health.STALLED
    assert watched(replace(BUSY, last_progress=217.0), 217.0) is Health.SERVING
    assert watched.told == [Health.SERVING, Health.STALLED, Health.SERVING]


def test_waiting_alone_is_work(watched):
    waiting = replace(IDLE, waiting=1)
    watched(waiting, 200.0)
    assert watched(waiting, 209.0) is Health.STALLED


def test_a_failed_engine_is_failed(watched):
    assert watched(replace(IDLE, failed="out of memory"), 101.0) is Health.FAILED


def test_an_engine_that_cannot_tell_is_failed_and_logged(watched, caplog):
    assert watched(RuntimeError("no stats"), 101.0) is Health.FAILED
    assert "no stats" in caplog.text


def test_draining_is_final(watched):
    watched(IDLE, 101.0)
    watched.watchdog.drain()
    assert watched(replace(IDLE, failed="x"), 102.0) is Health.DRAINING
    assert watched.told == [Health.SERVING, Health.DRAINING]


def test_the_thread_looks_until_stopped():
    engine, stalled = Engine(BUSY), threading.Event()
    watchdog = Watchdog(
        engine, lambda health: health is Health.STALLED and stalled.set(), stall_s=0.05, interval_s=0.01
    )
    watchdog.start()
    try:
        assert stalled.wait(5)
    finally:
        watchdog.stop()
    assert watchdog.health is Health.STALLED
