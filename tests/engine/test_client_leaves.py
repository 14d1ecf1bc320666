"""A client that leaves gives back what it held: through the door, the frontend and a real engine."""

import time

import grpc
import pytest
from flax import nnx

from jserve.config import ServeConfig
from jserve.load import load
from jserve.serving.server import Server
from jserve.testing.models import tiny_llama
from jserve.testing.tokenizer import ByteTokenizer
from jserve.testing.waiting import wait_for
from jserve.v1 import inference_pb2 as pb
from jserve.v1 import inference_pb2_grpc as rpc


@pytest.fixture
def loaded():
    graphdef, params = tiny_llama(vocab_size=ByteTokenizer().vocab_size)
    config = ServeConfig(
        grpc_address="127.0.0.1:0",
        flight_address="",
        metrics_address="",
        max_num_seqs=2,
        max_num_tokens=16,
        num_pages=64,
        max_dispatch_ms=1e-3,
        program_store=False,
    )
    loaded = load(config, model=(nnx.merge(graphdef, params), params, ByteTokenizer()))
    yield config, loaded
    loaded.close()


def test_pages_are_back_within_two_dispatches_of_a_client_that_leaves(loaded, monkeypatch):
    config, model = loaded
    engine = model.engine
    dispatch, cancel, cancelled_at = engine._executor.dispatch, engine.cancel, []

    def slow(plan):  # one token a dispatch, so that the answer would take many seconds
        time.sleep(0.05)
        return dispatch(plan)

    def counted(*args):
        cancelled_at.append(engine.stats().dispatches)
        cancel(*args)

    monkeypatch.setattr(engine._executor, "dispatch", slow)
    monkeypatch.setattr(engine, "cancel", counted)
    with Server(config, model.frontend, engine, model.metrics) as server:
        address = server.start().grpc
        with grpc.insecure_channel(address) as channel:
            sampling = pb.SamplingParams(max_tokens=400, ignore_eos=True)
            call = rpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="Once upon", sampling=sampling))
            next(call)
            assert engine.stats().pages_in_use > 0
            call.cancel()
            wait_for(lambda: not engine.stats().pages_in_use and not engine.stats().running)
    stats = engine.stats()
    assert stats.dispatches - cancelled_at[0] <= 2
    assert stats.output_tokens < 400
