"""The fake engine keeps the promises of TokenEngine, so that what passes on it passes on the real one."""

import queue
import time

import pytest

from jserve.errors import Draining, DuplicateRequest, EngineFailed, PromptTooLong, QueueFull
from jserve.request import FinishReason, Request, ResolvedSampling, TokenDelta
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_tokens import fake_token


def request(request_id="r", *, prompt=(1, 2), deadline=None, **sampling):
    fields = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 0,
        "n": 1,
        "max_tokens": 4,
        "min_tokens": 0,
        "stop_ids": (),
        "logprobs": None,
    }
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=ResolvedSampling(**{**fields, **sampling}),
        arrival=time.monotonic(),
        deadline=deadline,
    )


class Sink:
    def __init__(self):
        self.deltas = queue.Queue()

    def __call__(self, deltas):
        for delta in deltas:
            self.deltas.put(delta)

    def all(self) -> list[TokenDelta]:
        return [self.deltas.get_nowait() for _ in range(self.deltas.qsize())]


def run(engine, req):
    sink = Sink()
    engine.submit(req, sink)
    assert engine.wait_idle()
    return sink.all()


def test_tokens_follow_the_rule_for_every_choice():
    with FakeEngine() as engine:
        deltas = run(engine, request(n=2, max_tokens=3))
    for choice in (0, 1):
        mine = [delta for delta in deltas if delta.choice == choice]
        ids = [token for delta in mine for token in delta.token_ids]
        assert ids == [fake_token((1, 2), choice, i) for i in range(3)]
        assert [delta.finish_reason for delta in mine] == [None, None, FinishReason.LENGTH]
        assert [delta.first_scheduled is None for delta in mine] == [False, True, True]


def test_a_script_repeats_and_a_stop_id_ends_it():
    with FakeEngine(script=[7, 8, 9], tokens_per_dispatch=2) as engine:
        (first, second) = run(engine, request(max_tokens=10, stop_ids=(9,)))
        assert (first.token_ids, second.token_ids) == ((7, 8), (9,))
        assert second.finish_reason is FinishReason.STOP
        deltas = run(engine, request(max_tokens=10, stop_ids=(9,), min_tokens=3))
        assert [token for delta in deltas for token in delta.token_ids] == [7, 8, 9, 7, 8, 9]


def test_one_logprob_a_token():
    with FakeEngine(vocab_size=200) as engine:
        deltas = run(engine, request(logprobs=2))
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in logprobs] == [token for delta in deltas for token in delta.token_ids]
    assert logprobs[0].top == ((logprobs[0].token_id, -0.125), ((logprobs[0].token_id + 1) % 200, -1.125))


def test_cancel_frees_the_id_at_once_and_says_so_to_the_right_sink():
    with FakeEngine() as engine:
        engine.pause()
        old, new = Sink(), Sink()
        engine.submit(request("x", n=2, max_tokens=100), old)
        engine.cancel("x")
        engine.submit(request("x", max_tokens=2), new)
        with pytest.raises(DuplicateRequest):
            engine.submit(request("x"), Sink())
        engine.resume()
        assert engine.wait_idle()
        assert [(d.choice, d.finish_reason) for d in old.all()] == [
            (0, FinishReason.CANCELLED),
            (1, FinishReason.CANCELLED),
        ]
        assert [d.finish_reason for d in new.all()] == [None, FinishReason.LENGTH]
        engine.cancel("never heard of")


def test_an_ended_choice_is_silent_and_the_other_goes_on():
    with FakeEngine() as engine:
        engine.pause()
        sink = Sink()
        engine.submit(request("x", n=2), sink)
        engine.end_choice("x", 0)
        engine.resume()
        assert engine.wait_idle()
        assert {delta.choice for delta in sink.all()} == {1}


def test_a_deadline_ends_waiting_and_running_alike():
    with FakeEngine() as engine:
        engine.pause()
        sink = Sink()
        engine.submit(request(deadline=time.monotonic() + 0.02), sink)
        assert engine.wait_idle()
        assert [delta.finish_reason for delta in sink.all()] == [FinishReason.DEADLINE]


def test_tokens_outside_the_vocabulary_are_refused_at_once():
    with pytest.raises(ValueError, match="at least 123"):
        FakeEngine(vocab_size=100)
    with pytest.raises(ValueError, match=r"0\.\.99"):
        FakeEngine(vocab_size=100, script=[1, 100])


def test_refusals():
    with FakeEngine(max_queue=1, max_model_len=8) as engine:
        engine.pause()
        engine.submit(request("a"), Sink())
        with pytest.raises(QueueFull):
            engine.submit(request("b"), Sink())
        with pytest.raises(PromptTooLong):
            engine.submit(request("c", max_tokens=7), Sink())
        engine.drain()
        with pytest.raises(Draining):
            engine.submit(request("d"), Sink())
        assert (engine.live, engine.stats().waiting, engine.stats().running) == (1, 1, 0)


def test_a_failed_engine_ends_everything_with_an_error():
    with FakeEngine() as engine:
        engine.pause()
        sink = Sink()
        engine.submit(request(), sink)
        engine.fail("out of luck")
        assert engine.wait_idle()
        (delta,) = sink.all()
        assert (delta.finish_reason, delta.error) == (FinishReason.ERROR, "the engine failed")
        with pytest.raises(EngineFailed):
            engine.submit(request(), Sink())
        assert engine.stats().failed == "out of luck"
        assert not engine.stats().ready


def test_pages_are_counted_and_come_back():
    with FakeEngine(num_pages=10, page_size=4, token_delay_s=0.01) as engine:
        sink = Sink()
        engine.submit(request(prompt=(1,) * 9, max_tokens=20), sink)
        sink.deltas.get(timeout=5)
        assert engine.stats().pages_in_use >= 3
        engine.cancel("r")
        assert engine.wait_idle()
        stats = engine.stats()
        assert (stats.pages_in_use, stats.pages_free) == (0, 10)
