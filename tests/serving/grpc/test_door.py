"""The gRPC door itself: limits, health, reflection, pings, and clients that vanish."""

import asyncio
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jserve.errors import ConfigError
from jserve.serving.calls import Calls
from jserve.serving.door import server_options
from jserve.serving.grpc import door
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server
from jserve.testing.waiting import wait_for
from jserve.v1 import inference_pb2 as pb
from jserve.v1 import inference_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def served():
    with fake_server() as served:
        yield served


@pytest.fixture
def channel(served):
    with grpc.insecure_channel(served.grpc) as channel:
        yield channel


def test_health_answers_for_the_server_and_the_service(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", "jserve.v1.Inference"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_watch_tells_a_failed_engine():
    with fake_server(watch_interval_s=0.01) as served, grpc.insecure_channel(served.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        served.engine.fail("gone")
        assert next(watch).status == NOT_SERVING
        assert served.server.health == "failed"


def test_health_is_not_serving_until_the_engine_is_ready(monkeypatch):
    engine = FakeEngine()
    stats = engine.stats
    ready = threading.Event()
    monkeypatch.setattr(engine, "stats", lambda: dataclasses.replace(stats(), ready=ready.is_set()))
    with fake_server(engine, watch_interval_s=0.01) as served, grpc.insecure_channel(served.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == NOT_SERVING
        ready.set()
        assert next(watch).status == SERVING


def test_reflection_lists_and_describes_the_service(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest
    listed, described = stub.ServerReflectionInfo(
        iter([request(list_services=""), request(file_containing_symbol="jserve.v1.Inference")])
    )
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        "jserve.v1.Inference",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    files = described.file_descriptor_response.file_descriptor_proto
    (file,) = (descriptor_pb2.FileDescriptorProto.FromString(data) for data in files)
    assert [method.name for method in file.service[0].method] == [
        "Generate",
        "GenerateStream",
        "Tokenize",
        "Embed",
        "ListModels",
    ]


def test_health_and_models_answer_when_every_place_is_taken():
    with fake_server(max_streams=4) as served, grpc.insecure_channel(served.grpc) as channel:
        served.engine.pause()
        stub = inference_pb2_grpc.InferenceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Generate(pb.GenerateRequest(text="a")) for _ in range(4)]
        wait_for(lambda: served.engine.live == 4)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(50)]
        assert {next(watch).status for watch in watches} == {SERVING}
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Generate(pb.GenerateRequest(text="a")))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4 calls are open" in caught.value.details()
        begun = time.monotonic()
        assert health.Check(health_pb2.HealthCheckRequest()).status == SERVING
        assert stub.ListModels(pb.ListModelsRequest()).models[0].name == "fake"
        assert time.monotonic() - begun < 1
        for call in [*calls, *watches]:
            call.cancel()
        assert served.engine.wait_idle(2)
        served.engine.resume()
        (response,) = stub.Generate(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1)))
        assert response.finish_reason == "length"


def test_watches_are_bounded(monkeypatch):
    monkeypatch.setattr(door, "MAX_WATCHES", 2)
    with fake_server() as served, grpc.insecure_channel(served.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        assert [next(watch).status for watch in watches] == [SERVING, SERVING]
        with pytest.raises(grpc.RpcError) as caught:
            next(health.Watch(health_pb2.HealthCheckRequest()))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_messages_over_the_limit_are_refused_and_nothing_is_computed():
    engine = FakeEngine(max_model_len=4_000_000, num_pages=1_000_000)
    with fake_server(engine, max_message_mb=6) as served, grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="x" * (7 << 20))))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in caught.value.details()
        assert engine.submitted == []
        # 5 MB in, with the client's defaults.
        ids = pb.TokenPrompt(ids=[200] * 2_500_000)
        request = pb.GenerateRequest(tokens=ids, sampling=pb.SamplingParams(max_tokens=1))
        assert request.ByteSize() > 5_000_000
        (response,) = stub.Generate(request)
        assert response.usage.prompt_tokens == 2_500_000


def test_5_mb_of_output_reach_a_client_with_default_limits():
    # One dispatch gives 28,000 tokens with 20 alternatives each; gRPC's default limit is 4 MiB a message.
    engine = FakeEngine(max_model_len=30_000, num_pages=10_000, tokens_per_dispatch=28_000)
    with fake_server(engine, outbox_bytes=1 << 30) as served, grpc.insecure_channel(served.grpc) as channel:
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=28_000, logprobs=20))
        responses = list(inference_pb2_grpc.InferenceStub(channel).Generate(request))
    assert sum(response.ByteSize() for response in responses) > 5_000_000
    assert sum(len(response.token_ids) for response in responses) == 28_000
    assert [len(response.logprobs) for response in responses] == [len(response.token_ids) for response in responses]
    assert [response.finish_reason for response in responses if response.finish_reason] == ["length"]


@pytest.mark.parametrize("where", ["in a write", "at the cut"])
def test_a_call_that_broke_underneath_ends_as_cancelled(where):
    """gRPC logs a traceback for any other end."""

    async def refuse(context, error):
        raise grpc.aio.InternalError("a message is under way")

    async def main():
        calls = Calls(1, abort=refuse)

        async def call():
            async with calls.place(None):
                if where == "in a write":
                    raise grpc.aio.InternalError("the client is gone")
                await asyncio.Event().wait()

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        calls.cut()
        await asyncio.wait([task])
        assert task.cancelled()
        assert await calls.wait_quiet(0)

    asyncio.run(main())


def test_a_response_that_cannot_fit_is_refused_in_words():
    engine = FakeEngine(max_model_len=4_000_000, num_pages=1_000_000)
    with fake_server(engine, max_message_mb=1) as served, grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Tokenize(pb.TokenizeRequest(text="é" * 265_000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata())["jserve-code"] == "JS-LIM-01"
    assert "530000 token ids do not fit" in caught.value.details()


@pytest.mark.parametrize(
    ("method", "data", "code"),
    [
        ("jserve.v1.Inference/Generate", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("jserve.v1.Inference/Tokenize", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("jserve.v1.Inference/GenerateStream", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("jserve.v1.Inference/Generate", b"\x1a\x01\xff", grpc.StatusCode.INVALID_ARGUMENT),  # text of broken UTF-8
        ("grpc.health.v1.Health/Check", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("jserve.v1.Inference/Nothing", b"", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_bytes_that_are_no_message_and_unknown_methods(served, channel, caplog, method, data, code):
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(f"/{method}")(iter([data])))
    assert caught.value.code() is code
    assert served.engine.submitted == []
    assert "Traceback" not in caplog.text


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ConfigError, match=f"grpc_address {address} cannot be opened"),
            fake_server(grpc_address=address),
        ):
            pass


def test_two_servers_never_share_a_port(served):
    with pytest.raises(ConfigError, match="cannot be opened"), fake_server(grpc_address=served.grpc):
        pass


def test_a_unix_socket(tmp_path):
    address = f"unix:{tmp_path}/s"
    with fake_server(grpc_address=address) as served, grpc.insecure_channel(address) as channel:
        assert served.grpc == address
        assert inference_pb2_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest()).models[0].name == "fake"


def test_clients_may_ping_often_through_a_silence(monkeypatch):
    # The proportions of a ping every 10 s against a limit of 5 s, 10 times faster (gRPC sends no more than one a
    # second). Without the options the third ping within five minutes cuts the client off.
    options = server_options(max_message_bytes=1 << 20)
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 5_000
    assert options["grpc.keepalive_permit_without_calls"] == 1
    options["grpc.http2.min_ping_interval_without_data_ms"] //= 10
    monkeypatch.setattr(door, "server_options", lambda **_: options)
    pinging = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with fake_server() as served, grpc.insecure_channel(served.grpc, options=pinging) as channel:
        served.engine.pause()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1))
        )
        time.sleep(6)
        served.engine.resume()
        assert next(call).finish_reason == "length"


@pytest.mark.slow
def test_a_client_that_pings_every_10_s_survives_a_first_token_after_65_s():
    pinging = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with fake_server() as served, grpc.insecure_channel(served.grpc, options=pinging) as channel:
        served.engine.pause()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1))
        )
        time.sleep(65)
        served.engine.resume()
        assert next(call).finish_reason == "length"


def test_300_clients_that_leave_in_prefill_decode_or_at_the_last_token_leave_nothing_behind(served, channel, caplog):
    stub = inference_pb2_grpc.InferenceStub(channel)
    rng = random.Random(7)
    served.engine.token_delay_s = 0.0005
    for i in range(300):
        call = stub.Generate(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=20)))
        if i % 3 == 0:
            time.sleep(rng.random() * 0.002)
        elif i % 3 == 1:
            for _ in range(rng.randrange(1, 10)):
                next(call, None)
        else:
            while not next(call).finish_reason:
                pass
        call.cancel()
    assert served.engine.wait_idle(5)
    wait_for(lambda: served.frontend.live == 0)
    stats = served.engine.stats()
    assert (stats.waiting, stats.running, stats.pages_in_use) == (0, 0, 0)
    # gRPC itself may log that it could not tell a client that had just left.
    assert [record for record in caplog.records if record.name.startswith("jserve")] == []


def test_killed_client_processes_leave_nothing_behind():
    code = """if True:
        import sys
        from jserve.client import Client
        client = Client(sys.argv[1])
        calls = [client.generate("a") for _ in range(20)]
        for call in calls:
            next(call)
        print("decoding", flush=True)
        input()
    """
    engine = FakeEngine(max_num_seqs=20, token_delay_s=0.05)
    with fake_server(engine) as served:
        command = [sys.executable, "-c", code, served.grpc]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout.readline() == "decoding\n"
            os.kill(client.pid, signal.SIGKILL)
        assert engine.wait_idle(2)
        assert len(engine.cancelled) == 20
