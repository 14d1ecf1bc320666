"""Embed through a real server, a stock gRPC client and our own."""

import threading

import grpc
import numpy as np
import pytest

from jserve.client import AsyncClient, Client
from jserve.errors import DeadlineExceeded, InvalidRequest, MessageTooLarge, NotFound, QueueFull, Unsupported
from jserve.request import SamplingParams
from jserve.testing.fake_encoder import FakeEncoder, fake_vector
from jserve.testing.fake_server import fake_encoder_server
from jserve.testing.waiting import wait_for
from jserve.v1 import inference_pb2 as pb
from jserve.v1 import inference_pb2_grpc


@pytest.fixture(scope="module")
def server():
    with fake_encoder_server() as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.addresses.grpc) as client:
        yield client


def test_a_stock_client(server):
    with grpc.insecure_channel(server.addresses.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        response = stub.Embed(pb.EmbedRequest(texts=["ab", "x" * 20]))
        assert [list(e.values) for e in response.embeddings] == [
            fake_vector(b"ab", 4).tolist(),
            fake_vector(b"x" * 16, 4).tolist(),
        ]
        assert [(e.prompt_tokens, e.truncated) for e in response.embeddings] == [(2, False), (16, True)]
        assert len(stub.Embed(pb.EmbedRequest()).embeddings) == 0


def test_batches_of_all_sizes_bring_their_own_rows(client):
    for n in (10, 2, 10, 0, 100, 1):
        texts = [f"{n}.{i}" for i in range(n)]
        embeddings = client.embed(texts)
        assert len(embeddings) == n
        if n:
            expected = np.stack([fake_vector(text.encode(), 4) for text in texts])
            np.testing.assert_array_equal(np.asarray(embeddings), expected)
            assert embeddings.values.dtype == np.float32
            assert embeddings.truncated == (False,) * n


async def test_async_client(server):
    async with AsyncClient(server.addresses.grpc) as client:
        embeddings = await client.embed(["ab"], model="fake", timeout=20)
        np.testing.assert_array_equal(embeddings.values, [fake_vector(b"ab", 4)])
        with pytest.raises(NotFound):
            await client.embed(["ab"], model="other")


def test_what_an_encoder_says_of_itself(client, server):
    (model,) = client.models()
    assert model == server.frontend.model
    assert (model.kind, model.dimensions, model.num_pages) == ("encoder", 4, 0)
    assert client.health() == "SERVING"


def test_it_generates_nothing(client):
    with pytest.raises(Unsupported, match="'fake' is an encoder: it embeds texts and generates none"):
        list(client.generate("a", SamplingParams(max_tokens=1)))
    with pytest.raises(Unsupported, match="is an encoder"):
        list(client.generate_stream([]))


def test_tokenize(client):
    assert client.tokenize("ab") == [97, 98]
    with pytest.raises(Unsupported, match="is an encoder"):
        client.tokenize([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        (["a"] * 4097, InvalidRequest, "4097 texts; at most 4096"),
        (["a", "x" * 1048577], MessageTooLarge, "text 1 has 1048577 bytes"),
        (["a", ""], InvalidRequest, "no token"),
        ("lone", InvalidRequest, "one text; give a list"),
        ([b"\xff"], InvalidRequest, "cannot be sent"),
    ],
)
def test_what_is_refused(client, texts, error, words):
    with pytest.raises(error, match=words):
        client.embed(texts)


def test_an_answer_that_would_not_fit_is_refused_before_it_is_computed():
    with FakeEncoder(dimensions=1 << 18) as engine, fake_encoder_server(engine, max_message_mb=1) as server:
        with Client(server.addresses.grpc) as client, pytest.raises(MessageTooLarge, match="make several calls"):
            client.embed(["a"])
        assert engine.submitted == 0


def test_deadline_cancel_and_a_full_queue():
    with (
        FakeEncoder(max_queue=1) as engine,
        fake_encoder_server(engine) as server,
        Client(server.addresses.grpc) as client,
    ):
        engine.paused.set()
        with pytest.raises(DeadlineExceeded):
            client.embed(["a"], timeout=0.2)
        wait_for(lambda: engine.stats().waiting == 0)  # the server heard of it
        call = client._stub.Embed.future(pb.EmbedRequest(texts=["b"]))
        wait_for(lambda: engine.stats().waiting == 1)
        with pytest.raises(QueueFull) as caught:
            client.embed(["c"])
        assert caught.value.retry_after_s > 0
        call.cancel()
        wait_for(lambda: engine.stats().waiting == 0)
        engine.resume()
        assert len(client.embed(["d"])) == 1
        assert engine.computed == [(100,)]


def test_a_drain_lets_calls_end():
    """Also one whose texts do not all fit in the queue yet."""
    with (
        FakeEncoder() as engine,
        fake_encoder_server(engine) as server,
        Client(server.addresses.grpc) as client,
    ):
        engine.paused.set()
        call = client._stub.Embed.future(pb.EmbedRequest(texts=["a"] * 200))
        wait_for(lambda: engine.stats().waiting == 64)
        drain = threading.Thread(target=server.server.drain, args=(20.0,))
        drain.start()
        wait_for(lambda: server.server.health == "draining")
        engine.resume()
        assert len(call.result(20).embeddings) == 200
        drain.join()
