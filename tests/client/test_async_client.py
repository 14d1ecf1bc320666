"""The asyncio gRPC client against a real server."""

import asyncio
import contextlib

import pytest

from jserve import errors
from jserve.client import AsyncClient, Cancel, PromptRequest
from jserve.request import FinishReason, SamplingParams
from jserve.testing.fake_server import fake_server
from jserve.testing.fake_tokens import fake_token


@pytest.fixture
def served():
    with fake_server() as served:
        yield served


def ids_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


def expected(prompt, count):
    return [fake_token(prompt, 0, i) for i in range(count)]


async def all_of(stream):
    return [delta async for delta in stream]


async def idle(served):
    """Whether the engine has nothing left to do within 2 s."""
    return await asyncio.to_thread(served.engine.wait_idle, 2)


async def test_the_whole_service(served):
    async with AsyncClient(served.grpc) as client:
        deltas = await all_of(client.generate("hello", SamplingParams(max_tokens=5), request_id="mine"))
        assert ids_of(deltas) == expected(b"hello", 5)
        assert deltas[-1].usage.output_tokens == 5
        assert {delta.request_id for delta in deltas} == {"mine"}
        assert await client.tokenize("hé") == list("hé".encode())
        assert [model.name for model in await client.models()] == ["fake"]
        assert await client.health() == "SERVING"


async def test_64_requests_at_once(served):
    async with AsyncClient(served.grpc) as client:
        streams = [client.generate("x" * (i + 1), SamplingParams(max_tokens=i + 1)) for i in range(64)]
        answers = await asyncio.gather(*map(all_of, streams))
    assert [ids_of(deltas) for deltas in answers] == [expected(b"x" * (i + 1), i + 1) for i in range(64)]


async def test_errors_come_back_as_their_own_class(served):
    async with AsyncClient(served.grpc) as client:
        with pytest.raises(errors.InvalidRequest, match="0 tokens"):
            await all_of(client.generate(""))
        with pytest.raises(errors.NotFound):
            await client.tokenize("a", model="gpt")
        served.engine.pause()
        with pytest.raises(errors.DeadlineExceeded, match=r"within 0\.5 s|deadline passed"):
            await all_of(client.generate("a", timeout=0.5))
        served.frontend.refuse("going away")
        with pytest.raises(errors.Draining, match="going away"):
            await all_of(client.generate("a"))


async def test_no_server(unused_tcp_port):
    async with AsyncClient(f"127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(errors.Unreachable, match="jserve serve"):
            await all_of(client.generate("a"))
        with pytest.raises(errors.Unreachable, match="jserve serve"):
            await client.health()


async def test_leaving_the_iteration_cancels_the_request(served):
    served.engine.token_delay_s = 0.02
    async with AsyncClient(served.grpc) as client:
        async for _ in client.generate("a"):
            break
        assert await idle(served)
        async with contextlib.aclosing(client.generate("a")) as stream:
            await anext(stream)
        assert await idle(served)
    assert len(served.engine.cancelled) == 2


async def test_a_cancelled_task_cancels_its_request(served):
    served.engine.token_delay_s = 0.02
    async with AsyncClient(served.grpc) as client:
        task = asyncio.create_task(all_of(client.generate("a")))
        while not served.engine.live:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await idle(served)


async def test_generate_stream_takes_sync_and_async_iterables_and_fails_alone(served):
    items = [
        PromptRequest(prompt="x" * (i + 1), params=SamplingParams(max_tokens=3), request_id=str(i)) for i in range(50)
    ]
    items[25] = PromptRequest(prompt="", request_id="25")

    async def later():
        for item in items:
            await asyncio.sleep(0)
            yield item

    async with AsyncClient(served.grpc) as client:
        for requests in (items, later()):
            answers = {}
            async for delta in client.generate_stream(requests, window=8):
                answers.setdefault(delta.request_id, []).append(delta)
            assert [delta.error_code for delta in answers.pop("25")] == ["JS-REQ-01"]
            assert {name: ids_of(deltas) for name, deltas in answers.items()} == {
                str(i): expected(b"x" * (i + 1), 3) for i in range(50) if i != 25
            }


async def test_generate_stream_cancels_by_id(served):
    served.engine.token_delay_s = 0.005
    begun = asyncio.Event()

    async def requests():
        yield PromptRequest(prompt="a", request_id="long")
        await begun.wait()
        yield Cancel("long")

    deltas = []
    async with AsyncClient(served.grpc) as client:
        async for delta in client.generate_stream(requests()):
            deltas.append(delta)
            begun.set()
    assert deltas[-1].finish_reason is FinishReason.CANCELLED
    assert len(ids_of(deltas)) < 300


async def test_leaving_generate_stream_ends_everything(served):
    served.engine.token_delay_s = 0.02
    async with AsyncClient(served.grpc) as client:
        requests = [PromptRequest(prompt="a", request_id=str(i)) for i in range(100)]
        async with contextlib.aclosing(client.generate_stream(requests, window=4)) as stream:
            await anext(stream)
        assert await idle(served)
    assert len(served.engine.submitted) <= 5


async def test_what_the_callers_iterable_raises_is_raised_to_the_caller(served):
    async def requests():
        yield PromptRequest(prompt="a", params=SamplingParams(max_tokens=3), request_id="good")
        raise RuntimeError("mine")

    deltas = []

    async def collect(stream):
        async for delta in stream:
            deltas.append(delta)

    async with AsyncClient(served.grpc) as client:
        with pytest.raises(RuntimeError, match="mine"):
            await collect(client.generate_stream(requests()))
    assert ids_of(deltas) == expected(b"a", 3)


async def test_a_server_that_drains_cuts_the_stream_with_its_reason(served):
    served.engine.token_delay_s = 0.02
    async with AsyncClient(served.grpc) as client:
        requests = [PromptRequest(prompt="a", request_id=str(i)) for i in range(4)]
        stream = client.generate_stream(requests)
        await anext(stream)
        await asyncio.to_thread(served.server.drain, 0.0)
        last = {delta.request_id: delta async for delta in stream}
    assert {delta.error_code for delta in last.values()} == {"JS-SRV-01"}


def test_a_client_needs_a_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncClient("127.0.0.1:1")
