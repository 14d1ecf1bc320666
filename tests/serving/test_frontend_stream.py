"""A stream gives each choice's text and tokens once, in order, with one end; whatever the timing."""

import asyncio
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.engine.contract import EngineLimits
from jserve.errors import Cancelled, DeadlineExceeded, EngineFailed, SlowReader
from jserve.observe.metrics import Metrics
from jserve.request import FinishReason, SamplingParams, ServedModel, Timings, TokenDelta, TokenLogprob, Usage
from jserve.serving.frontend import Frontend
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.tokenizer import EOS_ID, ByteTokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class HandEngine:
    """A TokenEngine that says what the test tells it to."""

    limits = EngineLimits(max_model_len=512, vocab_size=258, max_num_seqs=4, num_pages=8, page_size=16, max_queue=4)

    def __init__(self):
        self.cancelled = []
        self.ended = []

    def submit(self, request, sink):
        self.request, self.sink = request, sink

    def cancel(self, request_id, reason=FinishReason.CANCELLED):
        self.cancelled.append((request_id, reason))

    def end_choice(self, request_id, choice):
        self.ended.append((request_id, choice))

    def delta(self, text="", *, choice=0, finish=None, scheduled=None, logprobs=False, error=None):
        ids = tuple(text.encode() if isinstance(text, str) else text)
        return TokenDelta(
            request_id=self.request.request_id,
            choice=choice,
            token_ids=ids,
            logprobs=tuple(TokenLogprob(token_id=i, logprob=-1.0, top=((i, -1.0),) * 20) for i in ids)
            if logprobs
            else None,
            finish_reason=finish,
            first_scheduled=scheduled,
            error=error,
        )

    def say(self, text="", **fields):
        self.sink([self.delta(text, **fields)])


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def frontend_of(engine, **changes):
    limits = engine.limits
    model = ServedModel(
        name="m",
        family="fake",
        dtype="float32",
        mesh="1 device",
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        has_chat_template=False,
        has_tokenizer=True,
    )
    fields = {
        "engine": engine,
        "tokenizer": ByteTokenizer(),
        "chat_template": None,
        "defaults": SamplingParams(),
        "eos_ids": (EOS_ID,),
        "model": model,
    }
    return Frontend(**{**fields, **changes})


@pytest.fixture
def engine():
    return HandEngine()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def metrics():
    return Metrics(model_name="m")


@pytest.fixture
def start(engine, clock, metrics):
    """Opens one stream on the hand-driven engine."""
    made = []

    def build(prompt="hi", *, outbox_bytes=1 << 20, **params):
        made.append(frontend_of(engine, clock=clock, metrics=metrics, outbox_bytes=outbox_bytes))
        return made[-1].open_sync(prompt, SamplingParams(**params), request_id="r")

    yield build
    for frontend in made:
        frontend.close()


def finished(metrics, reason):
    return metrics.registry.get_sample_value(
        "jserve_request_success_total", {"model_name": "m", "finished_reason": reason}
    )


def joined(batches, index=0):
    """One choice: its ids, its text, its finish reasons."""
    deltas = [delta for batch in batches for delta in batch if delta.index == index]
    return (
        bytes(token for delta in deltas for token in delta.token_ids).decode(),
        "".join(delta.text for delta in deltas),
        [delta.finish_reason for delta in deltas if delta.finish_reason is not None],
    )


def test_what_is_there_comes_as_one_delta_a_choice(engine, start):
    stream = start(n=2)
    for part in ("a", "b"):
        engine.sink([engine.delta(part, choice=0), engine.delta(part.upper(), choice=1)])
    (first, second) = next(stream)
    assert (first.index, first.text, first.token_ids) == (0, "ab", (97, 98))
    assert (second.index, second.text, second.token_ids) == (1, "AB", (65, 66))
    assert (first.request_id, first.finish_reason, first.usage, first.timings) == ("r", None, None, None)
    engine.say("c", choice=1)
    assert [(delta.index, delta.text) for delta in next(stream)] == [(1, "c")]


def test_usage_and_timings_come_once_at_the_very_end(engine, clock, start):
    stream = start(n=2)
    clock.now += 1
    engine.say("a", choice=0, scheduled=100.25)
    clock.now += 2
    engine.say("b", choice=0, finish=LENGTH)
    batches = [next(stream)]
    clock.now += 4
    engine.say("c", choice=1, finish=LENGTH)
    clock.now += 100  # A slow consumer does not lengthen the request.
    batches += stream
    deltas = [delta for batch in batches for delta in batch]
    assert [delta.usage for delta in deltas] == [None, Usage(prompt_tokens=2, output_tokens=3)]
    assert deltas[-1].timings == Timings(queue=0.25, ttft=1.0, total=7.0)
    assert stream.pull() is None
    assert list(stream) == []


# Stop strings

SCRIPT = "ABCDEFGHIJ"


@pytest.mark.parametrize(
    ("stop", "include", "text", "tokens", "finish"),
    [
        ("DEFGHIJ", False, "ABC", 10, STOP),
        ("DEFGHIJ", True, "ABCDEFGHIJ", 10, STOP),
        ("DEFGHIK", False, "ABCDEFGHIJ", 10, LENGTH),
        ("DEFGHIK", True, "ABCDEFGHIJ", 10, LENGTH),
        ("C", False, "AB", 3, STOP),
        ("EF", True, "ABCDEF", 6, STOP),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_stop_string_over_tokens(stop, include, text, tokens, finish, size):
    with FakeEngine(script=list(SCRIPT.encode()), tokens_per_dispatch=size) as engine:
        frontend = frontend_of(engine)
        stream = frontend.open_sync("x", SamplingParams(max_tokens=10, stop=(stop,), include_stop=include, logprobs=0))
        batches = list(stream)
        frontend.close()
    ids, streamed, reasons = joined(batches)
    assert (ids, streamed, reasons) == (SCRIPT[:tokens], text, [finish])
    deltas = [delta for batch in batches for delta in batch]
    assert deltas[-1].usage.output_tokens == tokens
    assert [entry.token_id for delta in deltas for entry in delta.logprobs or ()] == list(SCRIPT[:tokens].encode())


def test_nothing_of_a_stop_string_is_sent_early(engine, start):
    stream = start(stop=("DEFGHIJ",))
    texts = []
    for char in "ABCDEFGHI":
        engine.say(char)
        texts.append(next(stream)[0].text)
    assert texts == ["A", "B", "C", "", "", "", "", "", ""]
    engine.say("J")
    (last,) = next(stream)
    assert (last.text, last.token_ids, last.finish_reason) == ("", (74,), STOP)
    assert engine.ended == [("r#0", 0)]


def test_a_stop_inside_a_token_cuts_the_text_and_keeps_the_token():
    tokenizer = ByteTokenizer()
    tokenizer.backend.add_tokens(["xxSTOPyy"])
    engine = HandEngine()
    frontend = frontend_of(engine, tokenizer=tokenizer)
    stream = frontend.open_sync("a", SamplingParams(stop=("STOP",)))
    engine.say([97, 258, 98])
    (delta,) = next(stream)
    assert (delta.token_ids, delta.text, delta.finish_reason) == ((97, 258), "axx", STOP)
    assert delta.usage.output_tokens == 2
    frontend.close()


def test_one_choice_that_stops_does_not_stop_the_other(engine, start, metrics):
    stream = start(n=2, stop=("B",))
    engine.sink([engine.delta("AB", choice=0), engine.delta("A", choice=1)])
    (first, second) = next(stream)
    assert (first.text, first.finish_reason, second.text, second.finish_reason) == ("A", STOP, "A", None)
    assert engine.ended == [("r#0", 0)]
    # What the engine had under way for the first choice is dropped.
    engine.sink([engine.delta("CD", choice=0), engine.delta("D", choice=1, finish=LENGTH)])
    (last,) = next(stream)
    assert (last.index, last.text, last.finish_reason, last.usage.output_tokens) == (1, "D", LENGTH, 4)
    assert (finished(metrics, "stop"), finished(metrics, "length")) == (1, 1)
    assert engine.ended == [("r#0", 0)]


def test_the_engine_s_end_before_a_late_stop_string(engine, start, metrics):
    stream = start(stop=("B",))
    engine.say("AB", finish=LENGTH)
    (delta,) = next(stream)
    assert (delta.text, delta.finish_reason) == ("A", STOP)
    assert engine.ended == []
    assert (finished(metrics, "stop"), finished(metrics, "length")) == (1, 0)


def test_min_tokens_come_before_any_stop_string(engine, start):
    stream = start(stop=("B", "EF"), min_tokens=3)
    engine.say("ABCDEFG")
    ids, text, _ = joined([next(stream)])
    assert (ids, text) == ("ABCDEF", "ABCD")


def test_a_short_output_gives_out_what_a_long_stop_string_held_back(engine, start):
    stream = start(stop=("AB" + "C" * 100,))
    engine.say("AB", finish=LENGTH)
    assert joined(stream) == ("AB", "AB", [LENGTH])


def test_an_end_inside_a_character(engine, start):
    stream = start()
    emoji = "\N{GRINNING FACE}".encode()
    engine.say(list(b"a" + emoji[:3]))
    (delta,) = next(stream)
    assert (len(delta.token_ids), delta.text) == (4, "a")
    engine.say("", finish=LENGTH)
    (last,) = next(stream)
    assert (last.text, last.finish_reason) == ("\ufffd", LENGTH)


def test_bytes_that_are_no_text_do_not_hold_up_what_follows(engine, start):
    stream = start()
    engine.say([0x80] * 20 + list(b"ok"))
    (delta,) = next(stream)
    assert delta.text == "\ufffd" * 20 + "ok"


def test_the_eos_token_is_a_token_without_text(engine, start):
    stream = start()
    engine.say([97, EOS_ID], finish=STOP)
    (delta,) = next(stream)
    assert (delta.token_ids, delta.text, delta.finish_reason, delta.usage.output_tokens) == ((97, EOS_ID), "a", STOP, 2)


# Ends


@pytest.mark.parametrize(
    ("finish", "error", "kind", "code"),
    [
        (FinishReason.DEADLINE, None, DeadlineExceeded, "JS-REQ-07"),
        (FinishReason.CANCELLED, None, Cancelled, "JS-REQ-08"),
        (FinishReason.ERROR, "it broke", EngineFailed, "JS-SRV-02"),
    ],
)
def test_a_bad_end_comes_after_what_was_made(engine, start, metrics, finish, error, kind, code):
    stream = start()
    engine.say("ab")
    assert stream.failure is None
    engine.say("", finish=finish, error=error)
    (delta,) = next(stream)
    assert (delta.text, delta.finish_reason, delta.error_code) == ("ab", finish, code)
    assert delta.error == (error or str(stream.failure))
    assert type(stream.failure) is kind
    assert delta.usage == Usage(prompt_tokens=2, output_tokens=2)
    assert list(stream) == []
    assert finished(metrics, finish.value) == 1


def test_an_end_in_the_queue_was_all_queue(engine, clock, start):
    stream = start()
    clock.now += 3
    engine.say("", finish=FinishReason.DEADLINE)
    (delta,) = next(stream)
    assert delta.timings == Timings(queue=3.0, ttft=0.0, total=3.0)


def test_cancel_asks_the_engine_once_and_its_end_is_counted_without_a_reader(engine, start, metrics):
    stream = start(n=2)
    engine.say("a", choice=0, finish=LENGTH)
    stream.cancel()
    stream.cancel()
    assert engine.cancelled == [("r#0", FinishReason.CANCELLED)]
    engine.say("", choice=1, finish=FinishReason.CANCELLED)
    assert (finished(metrics, "length"), finished(metrics, "cancelled")) == (1, 1)
    # A reader that stayed sees both ends, and they are not counted again.
    assert [(d.index, d.finish_reason) for batch in stream for d in batch] == [(0, LENGTH), (1, FinishReason.CANCELLED)]
    assert (finished(metrics, "length"), finished(metrics, "cancelled")) == (1, 1)


def test_a_stop_string_that_is_read_after_the_cancel_is_counted_as_such(engine, start, metrics):
    stream = start(stop=("B",))
    engine.say("AB")
    stream.cancel()
    assert joined(stream) == ("AB", "A", [STOP])
    engine.say("", finish=FinishReason.CANCELLED)
    assert [finished(metrics, reason.value) for reason in FinishReason] == [1, 0, 0, 0, 0]


def test_cancel_after_the_end_does_nothing(engine, start, metrics):
    stream = start()
    engine.say("a", finish=LENGTH)
    stream.cancel()
    assert engine.cancelled == []
    assert finished(metrics, "length") == 1


def test_a_slow_reader_loses_its_own_stream(engine, start, metrics):
    stream = start(outbox_bytes=10_000, logprobs=20)
    engine.say("a", logprobs=True)
    assert next(stream)[0].text == "a"
    for _ in range(20):
        engine.say("b", logprobs=True)
    assert engine.cancelled == [("r#0", FinishReason.CANCELLED)]
    engine.say("c")
    engine.say("", finish=FinishReason.CANCELLED)
    (last,) = next(stream)
    assert set(last.text) == {"b"}
    assert 1 <= len(last.text) < 20
    assert (last.finish_reason, last.error_code) == (FinishReason.ERROR, "JS-LIM-03")
    assert isinstance(stream.failure, SlowReader)
    assert finished(metrics, "error") == 1


def test_other_streams_do_not_notice_a_slow_reader():
    with FakeEngine(tokens_per_dispatch=4) as engine:
        frontend = frontend_of(engine, outbox_bytes=60_000)
        slow = frontend.open_sync("a", SamplingParams(logprobs=20))
        quick = frontend.open_sync("b", SamplingParams(max_tokens=400))
        ids, _, _ = joined(quick)
        assert len(ids) == 400
        assert engine.wait_idle()
        assert [delta.error_code for batch in slow for delta in batch][-1] == "JS-LIM-03"
        assert frontend.live == 0
        frontend.close()


# Waiting


def test_pull_waits_as_long_as_it_is_told(engine, start):
    stream = start()
    assert stream.pull(timeout=0) == []
    began = time.monotonic()
    assert stream.pull(timeout=0.05) == []
    assert time.monotonic() - began >= 0.05
    timer = threading.Timer(0.05, lambda: engine.say("a", finish=LENGTH))
    timer.start()
    assert stream.pull(timeout=10)[0].text == "a"
    assert stream.pull(timeout=0) is None
    timer.join()


def test_notify_is_called_when_there_is_something(engine, start):
    stream = start()
    engine.say("a")
    calls = []
    stream.notify(lambda: calls.append(stream.pull(timeout=0)[0].text))
    engine.say("b")
    assert calls == ["a", "b"]
    stream.notify(None)
    engine.say("c")
    assert calls == ["a", "b"]
    assert stream.pull(timeout=0)[0].text == "c"


async def test_a_waiting_task_is_woken_from_another_thread(engine, start):
    stream = start()
    task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.02)
    assert not task.done()
    await asyncio.to_thread(engine.say, "a")
    assert (await asyncio.wait_for(task, 5))[0].text == "a"


async def test_a_task_that_stops_waiting_leaves_no_trace(engine, start):
    stream = start()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
    assert stream._outbox._wakers == []
    engine.say("a", finish=LENGTH)
    assert [delta.text async for batch in stream for delta in batch] == ["a"]


def test_a_loop_that_is_gone_does_not_harm_the_engine(engine, start):
    stream = start()
    loop = asyncio.new_event_loop()
    coroutine = stream._outbox.wait_async()
    task = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.sleep(0))
    loop._ready.clear()  # As if the loop died with the task in it.
    loop.close()
    engine.say("a")
    assert stream.pull(timeout=0)[0].text == "a"
    task._log_destroy_pending = False


@st.composite
def runs(draw):
    """What an engine says of two choices, in dispatches, and after which of them the consumer pulls."""
    texts = [draw(st.text("abé\N{GRINNING FACE}", max_size=8)).encode() for _ in range(2)]
    ends = [draw(st.sampled_from([LENGTH, STOP, FinishReason.CANCELLED])) for _ in range(2)]
    left, dispatches = list(texts), []
    for *sizes, pull in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=10)):
        dispatch = []
        for choice, size in enumerate(sizes):
            part, left[choice] = left[choice][:size], left[choice][size:]
            if part:
                dispatch.append((choice, part, None))
        dispatches.append((dispatch, pull))
    first = draw(st.integers(0, 1))
    for choice in (first, 1 - first):
        dispatches.append(([(choice, left[choice], ends[choice])], draw(st.booleans())))
    return texts, ends, dispatches


@given(runs(), st.lists(st.text("abé", min_size=1, max_size=3), max_size=2, unique=True))
@settings(max_examples=150, deadline=None)
def test_any_timing_gives_the_same(run, stops):
    texts, ends, dispatches = run
    engine = HandEngine()
    frontend = frontend_of(engine)
    stream = frontend.open_sync("x", SamplingParams(n=2, stop=tuple(stops)))
    batches = []
    for dispatch, pull in dispatches:
        engine.sink([engine.delta(part, choice=choice, finish=finish) for choice, part, finish in dispatch])
        if pull:
            batches.append(stream.pull(timeout=0) or [])
    batches += stream
    frontend.close()

    for choice in (0, 1):
        text = texts[choice].decode()
        # The match that ends first ends the text, with the token that completes it.
        cut = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
        mine = [delta for batch in batches for delta in batch if delta.index == choice]
        ids = bytes(token for delta in mine for token in delta.token_ids)
        got = "".join(delta.text for delta in mine)
        if cut is None:
            assert (ids, got) == (texts[choice], text)
            assert [delta.finish_reason for delta in mine][-1] is ends[choice]
        else:
            longest = max((stop for stop in stops if text[:cut].endswith(stop)), key=len)
            assert (ids, got) == (text[:cut].encode(), text[: cut - len(longest)])
            assert [delta.finish_reason for delta in mine][-1] is STOP
        assert all(delta.finish_reason is None for delta in mine[:-1])
    usages = [delta.usage for batch in batches for delta in batch]
    assert usages[-1] is not None
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert frontend.live == 0
