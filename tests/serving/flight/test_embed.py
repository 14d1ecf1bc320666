"""Embedding over Flight: pyarrow's own client and ours on a real server."""

import json
import threading

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from jserve.client import FlightClient
from jserve.errors import DeadlineExceeded, InvalidRequest, NotFound, QueueFull, Unsupported
from jserve.request import SamplingParams
from jserve.testing.fake_encoder import FakeEncoder, fake_vector
from jserve.testing.fake_server import fake_encoder_server
from jserve.testing.waiting import wait_for
from jserve.wire.embeddings import embeddings_schema

EMBED = flight.FlightDescriptor.for_path("embed", "fake")
SCHEMA = embeddings_schema(4)


@pytest.fixture(scope="module")
def server():
    with fake_encoder_server() as server:
        yield server


@pytest.fixture
def client(server):
    with FlightClient(server.addresses.flight) as client:
        yield client


@pytest.fixture
def stock(server):
    with flight.connect(server.addresses.flight) as client:
        yield client


def texts(*values, kind=None, **columns):
    return pa.record_batch({"text": pa.array(values, kind or pa.utf8()), **columns})


def exchange(stock, batches, descriptor=EMBED):
    writer, reader = stock.do_exchange(descriptor)
    with writer:
        writer.begin(batches[0].schema)
        for batch in batches:
            writer.write(batch)
        writer.done_writing()
        return reader.read_all()


def vectors(table):
    return np.array(table["embedding"].to_pylist(), np.float32).reshape(len(table), 4)


def expected(values):
    return np.array([fake_vector(value.encode(), 4) for value in values], np.float32).reshape(len(values), 4)


def test_batches_of_all_sizes_bring_their_own_rows(stock):
    batches = [[f"{b}.{i}" for i in range(n)] for b, n in enumerate((10, 2, 10, 0, 300, 1))]
    table = exchange(stock, [texts(*batch) for batch in batches])
    flat = [text for batch in batches for text in batch]
    assert table.schema == SCHEMA
    np.testing.assert_array_equal(vectors(table), expected(flat))
    assert table["id"].to_pylist() == [str(i) for i in range(len(flat))]
    assert table["error"].null_count == len(flat)


def test_an_exchange_without_rows(stock):
    table = exchange(stock, [texts()])
    assert (len(table), table.schema) == (0, SCHEMA)


@pytest.mark.parametrize(
    "kind", [pa.utf8(), pa.large_utf8(), pa.string_view(), pa.dictionary(pa.int32(), pa.utf8())], ids=str
)
def test_every_type_of_text(stock, kind):
    table = exchange(stock, [texts("a", "bc", None, "a", kind=kind)])
    np.testing.assert_array_equal(vectors(table.filter(table["error"].is_null())), expected(["a", "bc", "a"]))


def test_a_row_fails_alone_and_ids_come_back(stock):
    long = "x" * (1 << 20)
    batch = texts("a", None, "", "x" * 20, long + "x", id=pa.array(["i", "j", None, "l", "m"]))
    rows = exchange(stock, [batch]).to_pylist()
    assert [row["id"] for row in rows] == ["i", "j", "2", "l", "m"]
    assert [row["error_code"] for row in rows] == [None, "JS-REQ-01", "JS-REQ-01", None, "JS-LIM-01"]
    assert rows[1]["error"] == "text is null; the row has nothing to embed"
    assert (rows[1]["embedding"], rows[1]["prompt_tokens"], rows[1]["truncated"]) == (None, None, None)
    assert (rows[3]["prompt_tokens"], rows[3]["truncated"]) == (16, True)
    assert rows[4]["error"].startswith("the text has 1048577 bytes")


def test_a_column_of_nulls_and_columns_nobody_knows(stock):
    rows = exchange(stock, [texts(None, None, kind=pa.null(), weight=pa.array([1.0, 2.0]))]).to_pylist()
    assert [row["error_code"] for row in rows] == ["JS-REQ-01"] * 2


def test_a_table_is_uploaded_and_fetched(stock):
    values = [f"t{i}" for i in range(100)]
    writer, metadata = stock.do_put(EMBED, texts("x").schema)
    ticket = flight.Ticket(metadata.read().to_pybytes())
    writer.write(texts(*values))
    writer.done_writing()
    info = stock.get_flight_info(flight.FlightDescriptor.for_command(ticket.ticket))
    assert info.schema == SCHEMA
    table = stock.do_get(ticket).read_all()
    np.testing.assert_array_equal(vectors(table), expected(values))
    writer.close()


def test_our_client_with_lists_and_tables(client):
    found = client.embed(["ab", "x" * 20])
    np.testing.assert_array_equal(found.values, expected(["ab", "x" * 16]))
    assert (found.prompt_tokens, found.truncated) == ((2, 16), (False, True))
    assert client.embed([]).values.shape == (0, 4)
    table = client.embed(pa.table({"text": ["ab", None], "id": [7, 8]}), model="fake")
    assert table["id"].to_pylist() == ["7", "8"]
    assert table["error_code"].to_pylist() == [None, "JS-REQ-01"]
    answers = list(client.embed_exchange([texts("a"), texts("b")]))
    np.testing.assert_array_equal(vectors(pa.Table.from_batches(answers)), expected(["a", "b"]))
    assert client.schema(verb="embed") == SCHEMA
    with pytest.raises(InvalidRequest, match="no token"):
        client.embed(["a", ""])
    for wrong in ("lone", [1]):
        with pytest.raises(InvalidRequest):
            client.embed(wrong)


def test_what_is_served(stock, client):
    (info,) = stock.list_flights()
    assert info.schema == SCHEMA
    assert [part.decode() for part in info.descriptor.path] == ["embed", "fake"]
    about = json.loads(info.app_metadata)
    assert about["model"]["kind"] == "encoder"
    assert about["model"]["dimensions"] == 4
    assert about["input_columns"] == {"text": "string", "id": "string"}
    assert stock.get_schema(EMBED).schema == SCHEMA
    assert client.models()[0].dimensions == 4


def test_what_is_not_served(client, stock):
    with pytest.raises(Unsupported, match="is an encoder"):
        list(client.generate("a", SamplingParams(max_tokens=1)))
    with pytest.raises(NotFound, match="'other' is not served here"):
        client.embed(["a"], model="other")
    for command, words in (
        ({"verb": "sing"}, "verb in the descriptor's command is 'sing'; known are generate, embed"),
        ({"verb": "embed", "temperature": 0}, "unknown field 'temperature'; embed knows verb and model"),
    ):
        with pytest.raises(pa.ArrowInvalid, match=words):
            stock.get_schema(flight.FlightDescriptor.for_command(json.dumps(command)))
    with pytest.raises((pa.ArrowInvalid, flight.FlightError), match="no column holds texts; send one called text"):
        exchange(stock, [pa.record_batch({"prompt": ["a"]})])


def test_a_full_queue_refuses_who_has_not_begun_and_a_deadline_ends_a_call():
    with (
        FakeEncoder(max_queue=2) as engine,
        fake_encoder_server(engine) as server,
        FlightClient(server.addresses.flight) as client,
    ):
        engine.paused.set()
        done = []
        first = threading.Thread(target=lambda: done.extend(client.embed_exchange([texts(*"abcdefgh")])))
        first.start()
        wait_for(lambda: engine.stats().waiting == 2)
        with pytest.raises(QueueFull):
            list(client.embed_exchange([texts("x")]))
        engine.resume()
        first.join()
        np.testing.assert_array_equal(vectors(pa.Table.from_batches(done)), expected("abcdefgh"))
        engine.paused.set()
        with pytest.raises(DeadlineExceeded):
            list(client.embed_exchange([texts("y")], timeout=0.2))
        wait_for(lambda: engine.stats().waiting == 0)


def test_who_leaves_is_not_computed():
    with FakeEncoder() as engine, fake_encoder_server(engine) as server:
        engine.paused.set()
        with flight.connect(server.addresses.flight) as stock:
            writer, reader = stock.do_exchange(EMBED)
            writer.begin(texts("a").schema)
            writer.write(texts("a", "b"))
            wait_for(lambda: engine.stats().waiting == 2)
            reader.cancel()
            wait_for(lambda: engine.stats().waiting == 0)
            with pytest.raises(flight.FlightCancelledError):
                writer.close()
        assert engine.computed == []


def test_a_call_can_be_cancelled():
    with (
        FakeEncoder() as engine,
        fake_encoder_server(engine) as server,
        flight.connect(server.addresses.flight) as stock,
    ):
        writer, reader = stock.do_exchange(EMBED)
        with writer:
            writer.begin(texts("c").schema)
            writer.write(texts("c"))
            call_id = json.loads(reader.read_chunk().app_metadata.to_pybytes())["call"]
            engine.paused.set()
            writer.write(texts("d", "e"))
            wait_for(lambda: engine.stats().waiting == 2)
            body = json.dumps({"request_id": call_id}).encode()
            (answer,) = stock.do_action(flight.Action("cancel", body))
            assert json.loads(answer.body.to_pybytes()) == {"cancelled": True}
            writer.write(texts("f"))
            writer.done_writing()
            rows = reader.read_all().to_pylist()
        assert [(row["id"], row["error_code"]) for row in rows] == [(i, "JS-REQ-08") for i in "123"]
        assert engine.computed == [(99,)]


def test_a_drain_lets_rows_end_that_have_begun_and_refuses_later_ones(monkeypatch):
    with (
        FakeEncoder() as engine,
        fake_encoder_server(engine) as server,
        flight.connect(server.addresses.flight) as stock,
    ):
        preparer, go = server.frontend._preparer, threading.Event()
        prepare = preparer.prepare
        # Some of the rows wait for a worker when the drain comes.
        monkeypatch.setattr(preparer, "prepare", lambda chunk: prepare(chunk) if go.wait(20) else [])
        values = [f"t{i}" for i in range(200)]
        writer, reader = stock.do_exchange(EMBED)
        writer.begin(texts("x").schema)
        writer.write(texts(*values))
        wait_for(lambda: sum(len(call.results) for call in list(server.frontend._calls)) == len(values))
        drain = threading.Thread(target=server.server.drain, args=(20.0,))
        drain.start()
        wait_for(lambda: server.server.health == "draining")
        writer.write(texts("later"))
        wait_for(lambda: server.server._flight._calls._draining)
        go.set()
        rows = []
        with pytest.raises(flight.FlightUnavailableError, match="shutting down"):
            rows.extend(row for chunk in reader for row in chunk.data.to_pylist())
        assert [row["id"] for row in rows] == [str(i) for i in range(len(values))]
        assert {row["error"] for row in rows} == {None}
        drain.join()
