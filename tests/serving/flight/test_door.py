"""The door itself: what it says it serves, its actions, its bounds, its errors, and how it closes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from pyarrow import flight

import jserve
from jserve.client import Client
from jserve.config import MAX_MESSAGE_MB, ServeConfig
from jserve.errors import ConfigError
from jserve.serving.flight.door import FlightDoor
from jserve.serving.loop import LoopThread
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_frontend, fake_server
from jserve.testing.fake_tokens import fake_text
from jserve.testing.waiting import wait_for
from jserve.wire.columns import OUTPUT
from jserve.wire.flight import FLIGHT_SERVICE

Serve = Callable[..., Any]

GENERATE = flight.FlightDescriptor.for_path("generate", "fake")


def act(client: flight.FlightClient, name: str, body: Any = None) -> Any:
    results = list(client.do_action(flight.Action(name, b"" if body is None else json.dumps(body).encode())))
    return [json.loads(result.body.to_pybytes()) for result in results]


def info_of(caught: pytest.ExceptionInfo[flight.FlightError]) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(caught.value.extra_info)
    return info


def test_what_is_served_is_listed_and_described(serve: Serve) -> None:
    served = serve()
    (listed,) = served.client.list_flights()
    described = served.client.get_flight_info(GENERATE)
    for info in (listed, described):
        assert info.descriptor.path == [b"generate", b"fake"]
        assert info.schema == OUTPUT
        assert info.endpoints == []
        about = json.loads(info.app_metadata)
        assert about["model"]["name"] == "fake"
        assert about["methods"] == ["DoExchange", "DoPut"]
        assert about["exactly_one_of"] == ["prompt", "token_ids", "messages"]
        assert about["input_columns"]["seed"] == "uint64"
    assert served.client.get_schema(GENERATE).schema == OUTPUT
    # A ticket's field among the values makes no ticket of a command.
    for command in (b'{"temperature": 0.5}', b'{"model": "", "stop": ["table"]}'):
        descriptor = flight.FlightDescriptor.for_command(command)
        assert served.client.get_schema(descriptor).schema == OUTPUT
        assert served.client.get_flight_info(descriptor).descriptor.path == [b"generate", b"fake"]


def test_a_table_is_known_by_its_field_however_it_is_written(serve: Serve) -> None:
    escaped = flight.FlightDescriptor.for_command(b'{"t\\u0061ble": "guess"}')
    with pytest.raises(flight.FlightError, match="this ticket is not known here"):
        serve().client.get_flight_info(escaped)


def test_an_unknown_model_is_not_described(serve: Serve) -> None:
    served = serve()
    other = flight.FlightDescriptor.for_path("generate", "other")
    with pytest.raises(flight.FlightError) as caught:
        served.client.get_flight_info(other)
    info = info_of(caught)
    assert (info["code"], info["grpc_status"]) == ("JS-REQ-04", "NOT_FOUND")
    # pyarrow keeps extra_info from this call's errors.
    with pytest.raises(pa.ArrowKeyError, match="model 'other' is not served here; served is 'fake'") as plain:
        served.client.get_schema(other)
    assert "Traceback" not in str(plain.value)


def test_actions(serve: Serve) -> None:
    served = serve()
    assert [action.type for action in served.client.list_actions()] == [
        "health",
        "version",
        "list_models",
        "cancel",
        "CancelFlightInfo",
    ]
    assert act(served.client, "health") == [{"status": "serving"}]
    assert act(served.client, "version")[0]["jserve"] == jserve.__version__
    assert act(served.client, "list_models")[0]["max_model_len"] == 512


@pytest.mark.parametrize(
    ("name", "body", "code", "words"),
    [
        ("reboot", None, "JS-REQ-06", "there is no action 'reboot'; there are health, version"),
        ("cancel", None, "JS-REQ-01", "the body of cancel is not a JSON object"),
        ("cancel", {"id": "x"}, "JS-REQ-01", 'must be {"request_id": ID} and nothing else'),
        ("cancel", {"request_id": "x", "force": 1}, "JS-REQ-01", "and nothing else"),
        ("CancelFlightInfo", {"no": "protobuf"}, "JS-REQ-01", "not a Flight message"),
    ],
)
def test_a_bad_action_is_refused(serve: Serve, name: str, body: Any, code: str, words: str) -> None:
    with pytest.raises(flight.FlightError) as caught:
        act(serve().client, name, body)
    info = info_of(caught)
    assert info["code"] == code
    assert words in info["message"]


def test_a_call_without_descriptor_or_schema_is_refused(serve: Serve, messages: Callable[..., list[bytes]]) -> None:
    served = serve()
    first, *_ = messages(pa.record_batch({"prompt": ["a"]}))
    for method in ("DoExchange", "DoPut"):
        empty = served.raw(method, [])
        assert (empty.status, empty.code) == ("INVALID_ARGUMENT", "JS-REQ-01")
        assert "no descriptor" in empty.message
        assert served.raw(method, [b"\x0a\x02\xff\xff"]).code == "JS-REQ-01"
    assert (
        served.raw("DoPut", [b"\x0a" + bytes([len(GENERATE.serialize())]) + GENERATE.serialize()]).code == "JS-REQ-01"
    )
    assert len(served.raw("DoExchange", [first])) == 1
    assert served.raw("Handshake", [b""]).status == "UNIMPLEMENTED"


@pytest.mark.parametrize("method", ["DoExchange", "DoPut"])
@pytest.mark.parametrize(
    ("second", "code", "status"),
    [
        (pa.record_batch({"prompt": ["a"], "n": [1]}), "JS-REQ-01", "INVALID_ARGUMENT"),
        (pa.record_batch({"prompt": pa.nulls(100_000)}), "JS-LIM-01", "RESOURCE_EXHAUSTED"),
    ],
    ids=["other columns", "too many rows"],
)
def test_a_bad_second_batch_ends_the_call(
    serve: Serve, messages: Callable[..., list[bytes]], method: str, second: pa.RecordBatch, code: str, status: str
) -> None:
    served = serve(engine={"token_delay_s": 0.02})
    failure = served.raw(method, messages(pa.record_batch({"prompt": ["a"]}), second))
    assert (failure.code, failure.status) == (code, status)
    assert "batch 2" in failure.message
    wait_for(lambda: served.frontend.live == 0)


def test_a_message_over_the_limit_is_refused_in_words(serve: Serve) -> None:
    """5 MB passes with the default; the limit is the setting's, and nothing is computed over it."""
    text = "x" * (5 << 20)
    batch = pa.record_batch({"prompt": [text], "max_tokens": [1]})
    (row,) = serve().exchange([batch])
    assert row["error_code"] == "JS-REQ-02"
    served = serve(max_message_mb=4)
    with pytest.raises(flight.FlightError) as caught:
        served.exchange([batch])
    assert info_of(caught)["code"] == "JS-LIM-01"
    assert "at most 4194304 are taken" in str(caught.value)
    assert served.engine.submitted == []


def test_a_message_far_over_the_limit_ends_the_call(serve: Serve, messages: Callable[..., list[bytes]]) -> None:
    served = serve(engine={"token_delay_s": 0.02}, max_message_mb=1)
    small, large = pa.record_batch({"prompt": ["a"]}), pa.record_batch({"prompt": ["x" * (3 << 20)]})
    failure = served.raw("DoExchange", messages(small, large))
    assert failure.status == "RESOURCE_EXHAUSTED"
    wait_for(lambda: served.frontend.live == 0)


def test_a_compression_bomb_costs_nothing(serve: Serve) -> None:
    """33 KB that would be 1 GB: the sender's compressor is asked for 100 MB here, which is as good."""
    served = serve()
    bomb = pa.record_batch({"prompt": ["x" * 100_000_000]})
    writer, reader = served.client.do_exchange(GENERATE)
    writer.begin(bomb.schema, pa.ipc.IpcWriteOptions(compression="zstd"))
    before = pa.total_allocated_bytes()
    writer.write_batch(bomb)
    writer.done_writing()
    with pytest.raises(flight.FlightError) as caught:
        reader.read_all()
    assert info_of(caught)["code"] == "JS-REQ-06"
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_only_so_many_calls_are_open(serve: Serve) -> None:
    served = serve(max_streams=2)
    schema = pa.schema([("prompt", pa.utf8())])
    opened = [served.client.do_exchange(GENERATE) for _ in range(2)]
    for writer, reader in opened:
        writer.begin(schema)
        assert reader.schema == OUTPUT
    with pytest.raises(flight.FlightUnavailableError) as caught:
        served.exchange([pa.record_batch({"prompt": ["a"]})])
    assert info_of(caught)["code"] == "JS-LIM-02"
    assert act(served.client, "health") == [{"status": "serving"}]
    for writer, _ in opened:
        writer.close()
    assert len(served.exchange([pa.record_batch({"prompt": ["a"], "max_tokens": [1]})])) == 1


def test_what_breaks_inside_is_told_by_an_id_only(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()

    def broken(name: str) -> None:
        raise RuntimeError("secret path /etc/x")

    monkeypatch.setattr(served.frontend, "check_model", broken)
    with pytest.raises(flight.FlightError) as caught:
        served.client.get_flight_info(GENERATE)
    assert "secret" not in str(caught.value)
    info = info_of(caught)
    assert info["code"] == "JS-INT-01"
    incident = info["message"].split("id ")[1].split(";")[0]
    assert incident in caplog.text
    assert "secret path" in caplog.text


def test_messages_stay_short(serve: Serve) -> None:
    served = serve()
    schema = pa.schema([(f"ä{i}" * 100, pa.utf8()) for i in range(200)])
    writer, reader = served.client.do_exchange(GENERATE)
    writer.begin(schema)
    writer.done_writing()
    with pytest.raises(flight.FlightError) as caught:
        reader.read_all()
    assert len(info_of(caught)["message"].encode()) <= 700


def test_running_calls_end_within_the_grace_and_new_ones_are_refused(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02})
    batch = pa.record_batch({"prompt": ["hi"], "max_tokens": [30]})
    idle_writer, idle_reader = served.client.do_exchange(GENERATE)
    idle_writer.begin(batch.schema)
    assert idle_reader.schema == OUTPUT
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(served.exchange, [batch])
        wait_for(lambda: served.engine.live == 1)
        start = time.monotonic()
        stopping = pool.submit(served.door.stop, 10.0)
        wait_for(lambda: served.door._calls._draining)
        with pytest.raises(flight.FlightUnavailableError) as caught:
            served.exchange([batch])
        assert info_of(caught)["code"] == "JS-SRV-01"
        assert "".join(row["text"] for row in running.result()) == fake_text("hi", 30)
        stopping.result()
    # An idle call does not hold it up; it is cut.
    assert time.monotonic() - start < 5
    with pytest.raises(flight.FlightUnavailableError):
        idle_reader.read_all()


def test_calls_that_wait_for_their_client_do_not_hold_up_a_drain(serve: Serve) -> None:
    """Calls that sent nothing yet, an upload, and the fetch of what that has not brought."""
    served = serve()
    batch = pa.record_batch({"prompt": ["hi"], "max_tokens": [1]})
    silent = [grpc.insecure_channel(served.location.removeprefix("grpc://")) for _ in range(2)]
    done = threading.Event()
    calls = [
        channel.stream_stream(f"/{FLIGHT_SERVICE}/{method}")(iter(done.wait, True))
        for channel, method in zip(silent, ("DoExchange", "DoPut"), strict=True)
    ]
    writer, answers = served.client.do_put(GENERATE, batch.schema)
    ticket = answers.read().to_pybytes()
    writer.write_batch(batch)
    reader = served.client.do_get(flight.Ticket(ticket))
    assert reader.read_chunk().data.num_rows == 1
    wait_for(lambda: len(served.door._calls._places) == 4)
    start = time.monotonic()
    served.door.stop(10.0)
    assert time.monotonic() - start < 5
    with pytest.raises(flight.FlightUnavailableError):
        reader.read_chunk()
    done.set()
    for call, channel in zip(calls, silent, strict=True):
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        channel.close()


def test_what_runs_past_the_grace_is_cut(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.05})
    writer, reader = served.client.do_exchange(GENERATE)
    batch = pa.record_batch({"prompt": ["hi"]})
    writer.begin(batch.schema)
    writer.write_batch(batch)
    rows = reader.read_chunk().data.to_pylist()
    stopping = threading.Thread(target=served.door.stop, args=(0.1,))
    stopping.start()
    while rows[-1]["finish_reason"] is None:
        rows += reader.read_chunk().data.to_pylist()
    assert (rows[-1]["finish_reason"], rows[-1]["error_code"]) == ("error", "JS-SRV-01")
    stopping.join(5)
    assert not stopping.is_alive()
    wait_for(lambda: served.frontend.live == 0)


def test_addresses(tmp_path: Path) -> None:
    with FakeEngine() as engine, LoopThread("test-doors") as loop, socket.socket() as taken:
        frontend = fake_frontend(engine)

        def door(address: str, **config: Any) -> FlightDoor:
            settings = ServeConfig(flight_address=address, **config)
            return FlightDoor(frontend, settings, loop=loop, health=lambda: "serving")

        with pytest.raises(ConfigError, match=r"flight_address is '0\.0\.0\.0:0'"):
            door("0.0.0.0:0")
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be opened"):
            door(f"127.0.0.1:{taken.getsockname()[1]}").start()
        for address, location in (
            ("127.0.0.1:0", "grpc://127.0.0.1:"),
            ("localhost:0", "grpc://localhost:"),
            (f"unix:{tmp_path}/door", f"grpc+unix://{tmp_path}/door"),
        ):
            opened = door(address)
            bound = opened.start()
            assert bound.startswith(location)
            with flight.connect(bound) as client:
                assert act(client, "health") == [{"status": "serving"}]
            opened.stop(0.0)
        frontend.close()


def test_both_doors_of_a_server() -> None:
    with fake_server(flight_address="127.0.0.1:0") as served, flight.connect(served.addresses.flight) as client:
        wait_for(lambda: act(client, "health") == [{"status": "serving"}])
        assert json.loads(next(client.list_flights()).app_metadata)["model"]["name"] == "fake"


def test_both_doors_open_with_the_largest_message() -> None:
    with (
        fake_server(flight_address="127.0.0.1:0", max_message_mb=MAX_MESSAGE_MB) as served,
        flight.connect(served.addresses.flight) as client,
        Client(served.grpc) as other,
    ):
        assert act(client, "version")[0]["jserve"] == jserve.__version__
        assert [model.name for model in other.models()] == ["fake"]
