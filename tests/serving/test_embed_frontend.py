"""Texts to vectors behind every door: order, bounds, room in the queue, and what ends a call early."""

import asyncio
import threading
import time

import numpy as np
import pytest

from jserve.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InvalidRequest,
    MessageTooLarge,
    NotFound,
    QueueFull,
)
from jserve.observe.metrics import Metrics
from jserve.serving.embed_texts import MAX_TEXT_BYTES, MAX_TEXTS, TextPreparer
from jserve.testing.fake_encoder import FakeEncoder, fake_vector
from jserve.testing.fake_server import fake_embed_frontend
from jserve.testing.tokenizer import ByteTokenizer


@pytest.fixture
def engine():
    with FakeEncoder() as engine:
        yield engine


@pytest.fixture
def frontend(engine):
    frontend = fake_embed_frontend(engine)
    yield frontend
    frontend.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("n", [0, 1, 10, 2, 500])
async def test_one_vector_a_text_in_order(frontend, engine, n):
    texts = [f"t{i}" for i in range(n)]
    found = await frontend.embed(texts)
    assert len(found) == n
    for text, embedding in zip(texts, found, strict=True):
        np.testing.assert_array_equal(embedding.values, fake_vector(text.encode(), 4))
        assert (embedding.prompt_tokens, embedding.truncated) == (len(text), False)
    assert frontend.live == 0


async def test_a_long_text_is_cut_off_and_says_so(frontend, engine):
    (cut, whole) = await frontend.embed(["x" * 17, "x" * 16])
    assert (cut.prompt_tokens, cut.truncated) == (16, True)
    assert (whole.prompt_tokens, whole.truncated) == (16, False)
    np.testing.assert_array_equal(cut.values, whole.values)


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        (["a"] * (MAX_TEXTS + 1), InvalidRequest, f"4097 texts; at most {MAX_TEXTS}"),
        (["a", "x" * (MAX_TEXT_BYTES + 1)], MessageTooLarge, "text 1 has 1048577 bytes"),
        (["a", 7], InvalidRequest, "text 1 is of type int"),
        (["\ud800"], InvalidRequest, "text 0 has a lone surrogate"),
        ([""], InvalidRequest, "no token"),
    ],
)
async def test_what_is_refused(frontend, engine, texts, error, words):
    with pytest.raises(error, match=words):
        await frontend.embed(texts)
    assert engine.computed == []


async def test_each_fails_alone_where_that_is_asked_for(frontend):
    found = await frontend.embed_each(["a", "", "x" * (MAX_TEXT_BYTES + 1), "b"])
    assert [type(result).__name__ for result in found] == [
        "Embedding",
        "InvalidRequest",
        "MessageTooLarge",
        "Embedding",
    ]


async def test_the_model_and_the_deadline(frontend, engine):
    with pytest.raises(NotFound):
        await frontend.embed(["a"], model="other")
    with pytest.raises(DeadlineExceeded):
        await frontend.embed(["a"], deadline=time.monotonic() - 1)
    engine.paused.set()
    call = asyncio.create_task(frontend.embed(["a", "b"], deadline=time.monotonic() + 0.05))
    await until(lambda: engine.stats().waiting == 2)
    await asyncio.sleep(0.06)
    engine.resume()
    with pytest.raises(DeadlineExceeded):
        await call
    assert engine.computed == []


async def test_more_texts_than_the_queue_takes_wait_their_turn():
    with FakeEncoder(max_queue=3) as engine:
        frontend = fake_embed_frontend(engine)
        found = await frontend.embed([f"{i}" for i in range(100)])
        assert len(found) == 100
        frontend.close()


async def test_a_full_queue_refuses_who_has_not_begun():
    with FakeEncoder(max_queue=2) as engine:
        frontend = fake_embed_frontend(engine)
        engine.paused.set()
        first = asyncio.create_task(frontend.embed(["a", "b", "c"]))
        await until(lambda: engine.stats().waiting == 2)
        with pytest.raises(QueueFull):
            await frontend.embed(["d"])
        patient = asyncio.create_task(frontend.embed_each(["e"], patient=True))
        await asyncio.sleep(0.02)
        engine.resume()
        assert len(await first) == 3
        assert len(await patient) == 1
        frontend.close()


async def test_who_goes_away_is_not_computed(frontend, engine):
    engine.paused.set()
    call = asyncio.create_task(frontend.embed(["a", "b"]))
    await until(lambda: engine.stats().waiting == 2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine.stats().waiting == 0
    engine.resume()
    assert len(await frontend.embed(["c"])) == 1
    assert engine.computed == [(99,)]


async def test_a_failure_of_the_engine_is_told(frontend, engine):
    engine.paused.set()
    call = asyncio.create_task(frontend.embed(["a"]))
    await until(lambda: engine.stats().waiting == 1)
    engine.fail("incident 1")
    with pytest.raises(EngineFailed, match="incident 1"):
        await call
    with pytest.raises(EngineFailed):
        await frontend.embed(["a"])


async def test_drain(frontend, engine):
    engine.paused.set()
    call = asyncio.create_task(frontend.embed(["a"]))
    await until(lambda: engine.stats().waiting == 1)
    frontend.refuse("going home")
    with pytest.raises(Draining, match="going home"):
        await frontend.embed(["b"])
    frontend.abort_all("cut")
    with pytest.raises(Draining, match="cut"):
        await call
    assert engine.stats().waiting == 0


async def test_a_drain_leaves_a_call_that_has_begun_alone_to_its_last_text(frontend, engine):
    engine.paused.set()
    texts = [f"t{i}" for i in range(200)]
    call = asyncio.create_task(frontend.embed(texts))
    await until(lambda: engine.stats().waiting == 64)
    frontend.refuse("going home")
    engine.resume()
    assert [embedding.prompt_tokens for embedding in await call] == [len(text) for text in texts]


@pytest.mark.parametrize("waits", [False, True], ids=["checked", "tokenized"])
async def test_a_drain_leaves_a_call_alone_that_waits_for_a_worker(frontend, waits):
    busy, go = threading.Barrier(3), threading.Event()

    def work():
        busy.wait(20)
        go.wait(20)

    others = [frontend._workers.submit(work) for _ in range(2)]
    await asyncio.to_thread(busy.wait, 20)
    call = asyncio.create_task(frontend.embed_each(["a", "b"]) if waits else frontend.embed(["a", "b"]))
    await until(lambda: frontend.live == 1)
    await asyncio.sleep(0)
    frontend.refuse("going home")
    go.set()
    assert len(await call) == 2
    assert all(other.exception() is None for other in others)


async def test_texts_are_checked_once_and_not_on_the_loop(frontend, monkeypatch):
    checked = []

    def check(text, *, what):
        checked.append((text, threading.current_thread() is threading.main_thread()))
        return text

    monkeypatch.setattr("jserve.serving.embed_frontend.check_text", check)
    texts = [f"t{i}" for i in range(100)]
    await frontend.embed(texts)
    await frontend.embed_each(texts)
    await frontend.tokenize("a")
    assert checked == [(text, False) for text in [*texts, *texts, "a"]]


async def test_tokenize(frontend):
    assert await frontend.tokenize("ab") == [97, 98]
    assert len(await frontend.tokenize("x" * 20)) == 16


async def test_metrics(engine):
    metrics = Metrics(model_name="m", engine=engine)
    frontend = fake_embed_frontend(engine, metrics=metrics)
    await frontend.embed(["a", "b"])
    engine.paused.set()
    call = asyncio.create_task(frontend.embed(["c"]))
    await until(lambda: engine.stats().waiting == 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await asyncio.sleep(0)

    def value(name, **labels):
        return metrics.registry.get_sample_value(f"jserve_{name}", {"model_name": "m", **labels})

    await until(lambda: value("request_success_total", finished_reason="cancelled") == 1)
    assert value("request_success_total", finished_reason="stop") == 2
    assert value("e2e_request_latency_seconds_count") == 3
    assert value("prompt_tokens_total") == 2
    assert value("kv_cache_usage_ratio") == 0
    frontend.close()


def test_no_room_between_special_tokens():
    with pytest.raises(ConfigError, match="none is left for the text"):
        TextPreparer(ByteTokenizer(), max_tokens=0, lowercase=False)
    assert TextPreparer(ByteTokenizer(), max_tokens=4, lowercase=True).prepare(["AB"])[0].ids == (97, 98)
