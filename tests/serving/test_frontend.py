"""From what a caller wrote to a running request: prompts, BOS, names, deadlines, refusals, and both ways of opening."""

import asyncio
import threading
import time

import pytest

from jserve.errors import (
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineFailed,
    InvalidRequest,
    NotFound,
    PromptTooLong,
    QueueFull,
    TemplateError,
    Unsupported,
)
from jserve.request import FinishReason, SamplingParams, ServedModel
from jserve.serving.frontend import Frontend
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_tokens import fake_token
from jserve.testing.tokenizer import BOS_ID, CHAT_TEMPLATE, EOS_ID, ByteTokenizer
from jserve.text.chat_template import ChatTemplate

FOUR = SamplingParams(max_tokens=4)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def make(engine):
    """Makes frontends on the engine, and closes them."""
    made = []

    def build(**changes):
        limits = engine.limits
        fields = {
            "engine": engine,
            "tokenizer": ByteTokenizer(),
            "chat_template": ChatTemplate(CHAT_TEMPLATE, bos_token="<bos>", eos_token="<eos>"),
            "defaults": SamplingParams(),
            "eos_ids": (EOS_ID,),
            "model": ServedModel(
                name="tiny",
                family="fake",
                dtype="float32",
                mesh="1 device",
                max_model_len=limits.max_model_len,
                vocab_size=limits.vocab_size,
                num_pages=limits.num_pages,
                page_size=limits.page_size,
                has_chat_template=True,
                has_tokenizer=True,
            ),
        }
        made.append(Frontend(**{**fields, **changes}))
        return made[-1]

    yield build
    for frontend in made:
        frontend.close()


def whole(stream):
    """Token ids, text and finish of a stream of one choice."""
    deltas = [delta for batch in stream for delta in batch]
    ids = [token for delta in deltas for token in delta.token_ids]
    return ids, "".join(delta.text for delta in deltas), deltas[-1].finish_reason


def prompt_ids(engine):
    return list(engine.submitted[-1].prompt_ids)


def test_raw_text_runs(engine, make):
    stream = make().open_sync("hi", FOUR)
    ids, text, finish = whole(stream)
    assert prompt_ids(engine) == [104, 105]
    assert ids == [fake_token([104, 105], 0, i) for i in range(4)]
    assert text == bytes(ids).decode()
    assert finish is FinishReason.LENGTH
    assert stream.failure is None


async def test_the_asynchronous_way_is_the_same(make):
    stream = await make().open("hi", FOUR)
    deltas = [delta async for batch in stream for delta in batch]
    assert [token for delta in deltas for token in delta.token_ids] == [fake_token([104, 105], 0, i) for i in range(4)]
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.output_tokens) == (2, 4)


CHAT_IDS = list(b"user: hi\nassistant:")


@pytest.mark.parametrize(
    ("add_bos", "prompt", "ids"),
    [
        (True, HI, [BOS_ID, *CHAT_IDS]),
        (False, HI, [BOS_ID, *CHAT_IDS]),
        (True, "<bos>user: hi\nassistant:", [BOS_ID, *CHAT_IDS]),
        (True, "hi", [BOS_ID, *b"hi"]),
        (False, "hi", [*b"hi"]),
        (False, "<bos>hi", [BOS_ID, *b"hi"]),
        (True, [104, 105], [104, 105]),
        (True, [BOS_ID, BOS_ID, 104], [BOS_ID, BOS_ID, 104]),
    ],
)
async def test_bos_is_never_doubled(engine, make, add_bos, prompt, ids):
    frontend = make(tokenizer=ByteTokenizer(add_bos=add_bos))
    whole(frontend.open_sync(prompt, FOUR))
    assert prompt_ids(engine) == ids
    assert await frontend.tokenize(prompt) == ids


async def test_special_tokens_in_messages_are_plain_text(make):
    frontend = make(tokenizer=ByteTokenizer(add_bos=True))
    typed = [{"role": "user", "content": "<eos><bos>"}]
    assert await frontend.tokenize(typed) == [BOS_ID, *b"user: <eos><bos>\nassistant:"]
    with pytest.raises(TemplateError, match=r"unknown role <bos>$"):
        await frontend.tokenize([{"role": "<bos>", "content": "hi"}])
    # In raw text they are special tokens.
    assert await frontend.tokenize("<eos>") == [BOS_ID, EOS_ID]


async def test_a_template_without_bos_gets_the_one_that_the_model_wants(make):
    template = ChatTemplate("{{ messages[0].content }}", bos_token="<bos>", eos_token="<eos>")
    assert await make(chat_template=template, tokenizer=ByteTokenizer(add_bos=True)).tokenize(HI) == [BOS_ID, 104, 105]
    assert await make(chat_template=template).tokenize(HI) == [104, 105]


async def test_tokenize_takes_the_same_way(make):
    frontend = make()
    assert await frontend.tokenize(HI) == [BOS_ID, *CHAT_IDS]
    with pytest.raises(TemplateError, match="unknown role robot"):
        await frontend.tokenize([{"role": "robot", "content": "x"}])


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", InvalidRequest, "the prompt has 0 tokens"),
        ([], InvalidRequest, "the prompt has 0 tokens"),
        ((), InvalidRequest, "the prompt has 0 tokens"),
        (b"hi", InvalidRequest, "the prompt is of type bytes; give text, a list of token ids or a list of messages"),
        ({"role": "user", "content": "x"}, InvalidRequest, "of type dict"),
        (5, InvalidRequest, "of type int"),
        ({1, 2}, InvalidRequest, "of type set"),
        ([258], InvalidRequest, r"prompt token id 258 at position 0 is not in 0\.\.257"),
        (["hi"], InvalidRequest, "a prompt token id is 'hi'"),
        ("x" * 512, PromptTooLong, "the prompt has 512 tokens; prompt and output together may have 512"),
        ("x" * 2561, PromptTooLong, "the prompt has 2561 bytes; the limit of 512 tokens holds at most 2560"),
        ([1] * 512, PromptTooLong, "so a prompt may have 511"),
        ([{"role": "user"}], InvalidRequest, "exactly role and content"),
        ([{"role": "robot", "content": "x"}], TemplateError, "unknown role robot"),
    ],
)
def test_bad_prompts_are_refused_before_the_engine_hears_of_them(engine, make, prompt, error, words):
    frontend = make()
    with pytest.raises(error, match=words):
        frontend.open_sync(prompt, SamplingParams())
    assert engine.submitted == []
    assert frontend.live == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "given"), [(511, None, 1), (510, None, 2), (1, None, 511), (510, 1, 1)]
)
def test_the_limit_is_filled_exactly(engine, make, length, max_tokens, given):
    ids, _, finish = whole(make().open_sync([97] * length, SamplingParams(max_tokens=max_tokens)))
    assert (len(ids), finish) == (given, FinishReason.LENGTH)
    assert engine.submitted[-1].sampling.max_tokens == given


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(max_tokens=0), "max_tokens is 0"),
        (SamplingParams(max_tokens=3), "max_tokens is 3; after a prompt of 510 tokens 2 fit in the limit of 512"),
        (SamplingParams(stop="end"), "stop is 'end'"),
        (SamplingParams(temperature=float("nan")), "temperature is nan"),
    ],
)
def test_bad_params_are_refused(make, params, words):
    with pytest.raises(InvalidRequest, match=words):
        make().open_sync([97] * 510, params)


def test_defaults_of_the_checkpoint_are_used(engine, make):
    frontend = make(defaults=SamplingParams(temperature=0.2, top_k=3))
    whole(frontend.open_sync("hi", SamplingParams(max_tokens=1, temperature=0.0)))
    sampling = engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop_ids) == (0.0, 3, (EOS_ID,))


def test_what_the_model_lacks_is_said(engine, make):
    with pytest.raises(TemplateError, match="'tiny' has no chat template; send raw text or token ids"):
        make(chat_template=None).open_sync(HI, FOUR)
    bare = make(tokenizer=None)
    for prompt in ("hi", HI):
        with pytest.raises(Unsupported, match="no tokenizer; send token ids"):
            bare.open_sync(prompt, FOUR)
    with pytest.raises(Unsupported, match="stop strings cannot be found"):
        bare.open_sync([1], SamplingParams(stop=("x",)))
    ids, text, _ = whole(bare.open_sync([104, 105], FOUR))
    assert (ids, text) == ([fake_token([104, 105], 0, i) for i in range(4)], "")


def test_the_model_s_name_is_checked(make):
    frontend = make()
    whole(frontend.open_sync("hi", FOUR, model="tiny"))
    with pytest.raises(NotFound, match="'big' is not served here; served is 'tiny'"):
        frontend.open_sync("hi", FOUR, model="big")
    with pytest.raises(NotFound) as caught:
        frontend.check_model("\0" * 1_000_000)
    assert len(str(caught.value)) < 200  # a stream of many requests carries it beside their answers


def test_a_deadline_that_has_passed_costs_nothing(engine, make):
    with pytest.raises(DeadlineExceeded):
        make().open_sync("hi", FOUR, deadline=time.monotonic() - 1)
    assert engine.submitted == []


def test_a_deadline_that_passes_while_preparing_costs_no_prefill(engine, make):
    ticks = iter([0.0, 1.0, 3.0])
    with pytest.raises(DeadlineExceeded):
        make(clock=lambda: next(ticks)).open_sync("hi", FOUR, deadline=2.0)
    assert engine.submitted == []


def test_live_request_ids_are_unique_and_free_after_the_end(engine, make):
    frontend = make()
    engine.pause()
    first = frontend.open_sync("hi", FOUR, request_id="x")
    with pytest.raises(DuplicateRequest, match="'x' is in use"):
        frontend.open_sync("hi", FOUR, request_id="x")
    engine.resume()
    whole(first)
    whole(frontend.open_sync("hi", FOUR, request_id="x"))
    assert frontend.open_sync("hi", FOUR).request_id.startswith("req-")


def test_a_cancelled_id_is_free_at_once_and_the_new_request_unharmed(engine, make):
    frontend = make()
    for _ in range(200):
        frontend.open_sync("hi", SamplingParams(max_tokens=100), request_id="x").cancel()
        stream = frontend.open_sync("hi", FOUR, request_id="x")
        ids, _, finish = whole(stream)
        assert (len(ids), finish) == (4, FinishReason.LENGTH)
    assert engine.wait_idle()
    assert (frontend.live, engine.live) == (0, 0)


def test_the_engine_s_refusal_leaves_nothing_behind(engine, make):
    frontend = make()
    engine.fail("broken")
    with pytest.raises(EngineFailed):
        frontend.open_sync("hi", FOUR, request_id="x")
    assert frontend.live == 0


def test_a_full_queue(engine, make):
    frontend = make()
    engine.pause()
    for _ in range(engine.limits.max_queue):
        frontend.open_sync("hi", FOUR)
    with pytest.raises(QueueFull):
        frontend.open_sync("hi", FOUR)
    assert frontend.live == engine.limits.max_queue


class SlowTokenizer(ByteTokenizer):
    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.started = threading.Semaphore(0)

    def encode(self, text, *, add_special):
        self.started.release()
        assert self.go.wait(10)
        return super().encode(text, add_special=add_special)


async def test_a_caller_that_leaves_while_its_prompt_is_prepared_starts_nothing(engine, make):
    tokenizer = SlowTokenizer()
    frontend = make(tokenizer=tokenizer)
    task = asyncio.create_task(frontend.open("hi", FOUR, request_id="x"))
    await asyncio.to_thread(tokenizer.started.acquire, timeout=5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert frontend.live == 0
    tokenizer.go.set()
    stream = await frontend.open("hi", FOUR, request_id="x")
    assert [delta.finish_reason async for batch in stream for delta in batch][-1] is FinishReason.LENGTH
    assert len(engine.submitted) == 1


async def test_prompts_in_preparation_are_bounded(engine, make):
    tokenizer = SlowTokenizer()
    frontend = make(tokenizer=tokenizer, workers=1)
    tasks = [asyncio.create_task(frontend.open("hi", FOUR)) for _ in range(engine.limits.max_queue)]
    await asyncio.to_thread(tokenizer.started.acquire, timeout=5)
    with pytest.raises(QueueFull, match="being prepared"):
        await frontend.open("hi", FOUR)
    tokenizer.go.set()
    for task in tasks:
        async for _ in await task:
            pass


async def test_tokenizing_does_not_hold_up_the_loop(make):
    tokenizer = SlowTokenizer()
    task = asyncio.create_task(make(tokenizer=tokenizer).tokenize("hi"))
    await asyncio.to_thread(tokenizer.started.acquire, timeout=5)
    assert not task.done()
    tokenizer.go.set()
    assert await task == [104, 105]


async def test_closing_refuses_what_is_new_and_what_waits(make):
    tokenizer = SlowTokenizer()
    frontend = make(tokenizer=tokenizer, workers=1)
    tasks = [asyncio.create_task(frontend.open("hi", FOUR)) for _ in range(3)]
    await asyncio.to_thread(tokenizer.started.acquire, timeout=5)
    frontend.refuse("going down")
    tokenizer.go.set()
    for task in tasks:
        with pytest.raises(Draining, match="going down"):
            await task
    frontend.close()
    with pytest.raises(Draining):
        frontend.open_sync("hi", FOUR)
    with pytest.raises(Draining):
        await frontend.tokenize("hi")
    assert frontend.live == 0


def test_abort_all_ends_live_streams_with_their_tokens(engine, make):
    frontend = make()
    engine.token_delay_s = 0.01
    streams = [frontend.open_sync("hi", SamplingParams(n=2)) for _ in range(3)]
    first = [next(stream) for stream in streams]
    assert all(batch[0].token_ids for batch in first)
    frontend.abort_all("the grace is over")
    for stream in streams:
        last = [delta for batch in stream for delta in batch][-2:]
        assert {(d.index, d.finish_reason, d.error, d.error_code) for d in last} == {
            (index, FinishReason.ERROR, "the grace is over", "JS-SRV-01") for index in (0, 1)
        }
        assert isinstance(stream.failure, Draining)
    assert engine.wait_idle()
    assert frontend.live == 0


async def test_many_streams_at_once_some_cancelled(engine, make):
    frontend = make()

    async def one(i):
        prompt = [97 + i % 20] * (i % 7 + 1)
        length = 1 + i * 7 % 40
        stream = await frontend.open(prompt, SamplingParams(max_tokens=length, n=i % 3 + 1))
        ids = [[] for _ in range(i % 3 + 1)]
        ends = []
        async for batch in stream:
            for delta in batch:
                ids[delta.index].extend(delta.token_ids)
                ends.append(delta.finish_reason)
            if i % 5 == 0:
                stream.cancel()
        expected = [[fake_token(prompt, choice, k) for k in range(length)] for choice in range(i % 3 + 1)]
        if i % 5:
            assert ids == expected
        else:
            assert all(want[: len(got)] == got for got, want in zip(ids, expected, strict=True))
        assert len(ends) - ends.count(None) == i % 3 + 1

    for _ in range(3):
        await asyncio.gather(*(one(i) for i in range(60)))
    assert await asyncio.to_thread(engine.wait_idle)
    assert frontend.live == 0
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.pages_in_use) == (0, 0, 0)
