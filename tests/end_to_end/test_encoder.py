"""A random BERT from its folder through every door, beside what transformers made of the same weights."""

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jserve import LLM
from jserve.cli.serve import describe
from jserve.client import AsyncClient, Client, FlightClient
from jserve.config import ServeConfig
from jserve.errors import ConfigError, MeshError, Unsupported
from jserve.load import load
from jserve.progress import SILENT
from jserve.serving.server import Server

TINY = Path(__file__).parents[1] / "oracle" / "data" / "tiny_bert"
EXPECTED = np.load(TINY / "expected.npz")
TEXTS = EXPECTED["texts"].tolist()
MEAN = np.stack([EXPECTED[f"mean_{i}"] for i in range(len(TEXTS))])
TOKENS = tuple(len(EXPECTED[f"ids_{i}"]) for i in range(len(TEXTS)))
TRUNCATED = (False, False, False, True)
SETTINGS = {"model": str(TINY), "max_num_seqs": 4, "max_num_tokens": 64, "program_store": False}


@pytest.fixture(scope="module")
def loaded():
    loaded = load(ServeConfig(**SETTINGS))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def doors(loaded):
    addresses = dict.fromkeys(("grpc_address", "flight_address", "metrics_address"), "127.0.0.1:0")
    config = ServeConfig(**SETTINGS, **addresses)
    with Server(config, loaded.frontend, loaded.engine, loaded.metrics) as server:
        yield server.start()


def check(embeddings):
    np.testing.assert_allclose(embeddings.values, MEAN, atol=1e-5)
    assert embeddings.prompt_tokens == TOKENS
    assert embeddings.truncated == TRUNCATED


def test_grpc(doors, loaded):
    with Client(doors.grpc) as client:
        check(client.embed(TEXTS))
        assert client.models() == [loaded.served]
        assert client.tokenize(TEXTS[3]) == EXPECTED["ids_3"].tolist()
        with pytest.raises(Unsupported):
            list(client.generate("the ship"))


async def test_many_calls_at_once(doors):
    async with AsyncClient(doors.grpc) as client:
        for embeddings in await asyncio.gather(*(client.embed(TEXTS) for _ in range(20))):
            check(embeddings)


def test_flight(doors):
    with FlightClient(doors.flight) as client:
        check(client.embed(TEXTS))
        batches = [pa.record_batch({"text": (TEXTS * 5)[:n]}) for n in (10, 2, 10)]
        table = pa.Table.from_batches(client.embed_exchange(batches))
        wanted = np.concatenate([np.concatenate([MEAN] * 5)[:n] for n in (10, 2, 10)])
        np.testing.assert_allclose(np.stack(table["embedding"].to_pylist()), wanted, atol=1e-5)


def test_what_is_told_at_the_start(doors, loaded):
    served = loaded.served
    assert (served.name, served.family, served.kind, served.dimensions) == ("tiny_bert", "bert", "encoder", 32)
    assert (served.max_model_len, served.vocab_size, served.dtype) == (24, 65, "float32")
    rows = dict(describe(served, doors, ServeConfig(**SETTINGS)))
    assert rows["vectors"] == "32 numbers each, of texts of up to 24 tokens"
    assert rows["grpc"] == doors.grpc
    assert "cache" not in rows
    assert loaded.engine.stats().compilations == 0


def test_llm():
    settings = {key: value for key, value in SETTINGS.items() if key != "model"}
    with LLM(str(TINY), **settings, mesh="tensor=2", progress=SILENT) as llm:
        check(llm.embed(TEXTS))
        assert llm.embed(TEXTS[0]).values.shape == (1, 32)
        assert llm.embed([]).values.shape == (0, 32)
        assert np.asarray(llm.embed(TEXTS * 30)).shape == (120, 32)
        with pytest.raises(Unsupported, match="is an encoder"):
            llm.generate("the ship")

        async def inside():
            return llm.embed(TEXTS)

        check(asyncio.run(inside()))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"mesh": "tensor=8"}, MeshError, "tensor=8 does not divide"),
        ({"max_model_len": 2}, ConfigError, "none is left for the text"),
        ({"max_model_len": 25}, ConfigError, "exceeds the model's limit of 24"),
        ({"page_size": 8}, ConfigError, "has no KV cache"),
        ({"max_dispatch_ms": 20.0}, ConfigError, "runs each text in one step"),
    ],
)
def test_settings_that_cannot_be_are_told_before_anything_is_compiled(settings, error, words, monkeypatch):
    monkeypatch.delattr("jserve.engine.encoder.executor.EncoderExecutor.compile")
    with pytest.raises(error, match=words):
        load(ServeConfig(**SETTINGS, **settings))
