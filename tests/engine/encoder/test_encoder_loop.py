"""The loop of an encoder's engine on a scripted device: what a watchdog sees of groups that take their time."""

import threading
import time

import numpy as np

from jserve.engine.contract import EngineLimits
from jserve.engine.encoder.buckets import EncoderBuckets
from jserve.engine.encoder.engine import VectorEngine
from jserve.engine.encoder.executor import RunningGroup
from jserve.request import TextRequest
from jserve.serving.health import Health, Watchdog
from jserve.testing.waiting import wait_for

LIMITS = EngineLimits(max_model_len=16, vocab_size=64, max_num_seqs=1, num_pages=0, page_size=0, max_queue=8)


class Device:
    """Takes the place of EncoderExecutor. A group is one text, and ends when ``go`` is released for it."""

    buckets = EncoderBuckets.build(max_length=16, max_num_tokens=16, max_num_seqs=1)

    def __init__(self):
        self.fetching = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def dispatch(self, group, token_ids):
        return RunningGroup(group=group, vectors=np.zeros((group.num_rows, 4), np.float32))

    def fetch(self, running):
        self.fetching.release()
        assert self.go.acquire(timeout=60)
        return running.vectors


class Clock:
    """The machine's, and what a test adds."""

    def __init__(self):
        self.added = 0.0

    def __call__(self):
        return time.monotonic() + self.added


def test_a_slow_group_is_no_hang_and_a_hang_is_found():
    clock, device, answered = Clock(), Device(), []
    engine = VectorEngine(device, limits=LIMITS, dimensions=4, clock=clock)
    watchdog = Watchdog(engine, lambda _: None, stall_s=8.0, clock=clock)

    def submit(name):
        engine.submit(TextRequest(request_id=name, token_ids=(1,)), answered.append)

    def health_after(seconds):
        clock.added += seconds
        return watchdog.look()

    submit("first")
    submit("behind it")
    engine.start()
    engine.mark_ready()
    assert device.fetching.acquire(timeout=60)
    assert health_after(0.0) is Health.SERVING
    assert health_after(20.0) is Health.SERVING  # nobody knows yet how long its program takes
    device.go.release()
    # What was dispatched behind it begins now, and may take five times as long.
    assert device.fetching.acquire(timeout=60)
    assert health_after(95.0) is Health.SERVING
    assert health_after(30.0) is Health.STALLED
    device.go.release()
    wait_for(lambda: len(answered) == 2)
    assert health_after(0.0) is Health.SERVING

    submit("alone")  # 20 s, then 125 s: 46.25 s on the average
    assert device.fetching.acquire(timeout=60)
    assert health_after(225.0) is Health.SERVING
    assert health_after(30.0) is Health.STALLED
    device.go.release()
    engine.close()
    assert len(answered) == 3
