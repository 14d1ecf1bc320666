"""A server's life: signals to real processes, drains, and starts that fail."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jserve.config import ServeConfig
from jserve.errors import ConfigError
from jserve.serving.server import Server, _Events
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_frontend, fake_server
from jserve.testing.waiting import wait_for
from jserve.v1 import inference_pb2 as pb
from jserve.v1 import inference_pb2_grpc

SCRIPT = Path(__file__).with_name("serve_fake.py")
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def serving(grace_s, token_delay_s, how=""):
    """A server process and its gRPC address; see the script."""
    command = [sys.executable, str(SCRIPT), str(grace_s), str(token_delay_s), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def request(max_tokens):
    return pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=max_tokens))


def outcome(call):
    """The token count, and "ok" or the status and code."""
    count = 0
    try:
        for response in call:
            count += len(response.token_ids)
    except grpc.RpcError as error:
        return count, error.code().name, dict(error.trailing_metadata()).get("jserve-code")
    return count, "ok", None


def start_streams(stub, number, *, max_tokens):
    """Calls that have all begun, each with its first delta put back."""
    calls = [stub.Generate(request(max_tokens)) for _ in range(number)]
    return [itertools.chain([next(call)], call) for call in calls]


def outcomes(calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def test_sigterm_lets_running_streams_end_and_refuses_new_ones():
    with serving(30, 0.01) as (process, address), grpc.insecure_channel(address) as channel:
        stub, health = inference_pb2_grpc.InferenceStub(channel), health_pb2_grpc.HealthStub(channel)
        idle = stub.GenerateStream(iter(threading.Event().wait, False))
        calls = start_streams(stub, 10, max_tokens=300)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        process.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        assert health.Check(health_pb2.HealthCheckRequest(service="jserve.v1.Inference")).status == NOT_SERVING
        assert outcome(stub.Generate(request(1))) == (0, "UNAVAILABLE", "JS-SRV-01")
        assert stub.ListModels(pb.ListModelsRequest()).models[0].name == "fake"
        assert outcomes(calls) == [(300, "ok", None)] * 10
        assert process.wait(10) == 0
        assert outcome(idle)[1:] == ("UNAVAILABLE", "JS-SRV-01")
        assert "Traceback" not in process.stderr.read()


def test_without_grace_running_streams_get_a_status_that_says_why():
    with serving(0, 0.01) as (process, address), grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = start_streams(stub, 10, max_tokens=500)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        ended = outcomes(calls)
        assert [end[1:] for end in ended] == [("UNAVAILABLE", "JS-SRV-01")] * 10
        assert process.wait(10) == 0
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize("how", ["", "elsewhere"])
def test_a_second_signal_ends_the_grace(how):
    with serving(300, 0.05, how) as (process, address), grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = start_streams(stub, 2, max_tokens=500)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watch)
        process.send_signal(signal.SIGINT)
        assert next(watch).status == NOT_SERVING
        process.send_signal(signal.SIGINT)
        assert [end[1:] for end in outcomes(calls)] == [("UNAVAILABLE", "JS-SRV-01")] * 2
        assert process.wait(10) == 128 + signal.SIGINT


def test_signals_of_a_forked_child_are_its_own():
    with serving(300, 0.01, "forked") as (process, first):
        second = process.stdout.readline().strip()
        child, address = sorted((first, second), key=lambda line: ":" in line)
        os.kill(int(child), signal.SIGTERM)
        with grpc.insecure_channel(address) as channel:
            wait_for(lambda: not Path(f"/proc/{child}/stat").exists() or "Z" in Path(f"/proc/{child}/stat").read_text())
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert check.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0


def test_a_signal_is_heard_though_nobody_empties_the_socket():
    with _Events() as events:
        with suppress(BlockingIOError):
            while True:
                events._in.send(b"x" * 4096)
        os.kill(os.getpid(), signal.SIGTERM)
        assert events.get(5) == signal.SIGTERM
        events.done()
        assert events.get(5) is None
        with pytest.raises(TimeoutError):
            events.get(0.01)


def test_an_idle_server_stops_at_once():
    with serving(300, 0) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0


def test_a_client_that_does_not_read_cannot_hold_a_drain():
    engine = FakeEngine(max_model_len=32_000, num_pages=50_000, tokens_per_dispatch=64)
    with fake_server(engine, outbox_bytes=1 << 30) as served, grpc.insecure_channel(served.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(logprobs=20))
        )
        next(call)
        assert engine.wait_idle(20)
        begun = time.monotonic()
        served.server.drain(0.2)
        assert time.monotonic() - begun < 20
        # Our own words may not get past what it left unread.
        assert outcome(call)[1] == "UNAVAILABLE"


def test_a_hung_engine_cannot_hold_a_drain():
    with fake_server() as served, grpc.insecure_channel(served.grpc) as channel:
        served.engine.pause()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request(1))
        wait_for(lambda: served.engine.live > 0)
        served.server.drain(0.1)
        assert outcome(call) == (0, "UNAVAILABLE", "JS-SRV-01")


def test_new_requests_of_an_open_stream_are_refused_while_draining():
    with fake_server(FakeEngine(token_delay_s=0.01)) as served, grpc.insecure_channel(served.grpc) as channel:
        more = threading.Event()

        def messages():
            sampling = pb.SamplingParams(max_tokens=200)
            yield pb.GenerateStreamRequest(generate=pb.GenerateRequest(request_id="old", text="a", sampling=sampling))
            more.wait(60)
            yield pb.GenerateStreamRequest(generate=pb.GenerateRequest(request_id="new", text="a"))

        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(messages())
        next(call)
        with ThreadPoolExecutor(1) as pool:
            draining = pool.submit(served.server.drain, 30)
            wait_for(lambda: served.server.health == "draining")
            more.set()
            last = {response.request_id: response for response in call}
            draining.result()
    assert (last["new"].finish_reason, last["new"].error_code) == ("error", "JS-SRV-01")
    assert last["old"].finish_reason == "length"


def test_all_doors_open_and_close_together():
    with fake_server(flight_address="127.0.0.1:0", metrics_address="127.0.0.1:0") as served:
        addresses = [address.removeprefix("grpc://") for address in vars(served.addresses).values()]
        assert len({address.rpartition(":")[2] for address in addresses}) == 3
        with grpc.insecure_channel(served.grpc) as channel:
            assert outcome(inference_pb2_grpc.InferenceStub(channel).Generate(request(3))) == (3, "ok", None)
        with urllib.request.urlopen(f"http://{served.addresses.metrics}/metrics") as page:
            assert (
                'jserve_request_success_total{finished_reason="length",model_name="fake"} 1.0' in page.read().decode()
            )
        served.server.stop()
        for address in addresses:
            host, _, port = address.rpartition(":")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)))
        with pytest.raises(RuntimeError, match="starts once"):
            served.server.start()


def test_a_door_that_cannot_open_closes_the_others():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"{port} cannot be opened"),
            fake_server(flight_address="127.0.0.1:0", metrics_address="127.0.0.1:0", grpc_address=f"127.0.0.1:{port}"),
        ):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jserve")]


def test_stop_is_idempotent_and_safe_before_start():
    with FakeEngine() as engine:
        frontend = fake_frontend(engine)
        config = ServeConfig(grpc_address="127.0.0.1:0", flight_address="", metrics_address="")
        server = Server(config, frontend, engine)
        server.stop()
        server.stop()
        frontend.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grpc_address": ""}, "both empty"),
        ({"grpc_address": "0.0.0.0:0"}, "grpc_address is .* without TLS"),
        ({"grpc_address": "7470"}, "give host:port"),
        ({"metrics_address": "0.0.0.0:0"}, "metrics_address is .* without TLS"),
        ({"flight_address": "example.org:1"}, "flight_address is .* without TLS"),
        ({"metrics_address": "unix:/m"}, "metrics_address is .* a Unix socket cannot be used"),
        ({"grpc_address": "127.0.0.1:9", "flight_address": "127.0.0.1:9"}, "are both 127.0.0.1:9"),
    ],
)
def test_addresses_are_checked_before_any_door_opens(settings, words):
    with pytest.raises(ConfigError, match=words), fake_server(**settings):
        pass


def test_insecure_opens_other_addresses():
    with fake_server(grpc_address="0.0.0.0:0", insecure=True) as served:
        port = served.grpc.rpartition(":")[2]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert outcome(inference_pb2_grpc.InferenceStub(channel).Generate(request(3))) == (3, "ok", None)
