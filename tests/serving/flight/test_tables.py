"""DoPut takes a table of prompts, DoGet gives the table of results: once, in order, for a while."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from jserve.serving.outbox import LOGPROB_BYTES, TOKEN_BYTES, TOP_LOGPROB_BYTES
from jserve.testing.fake_tokens import fake_text
from jserve.testing.waiting import wait_for

Serve = Callable[..., Any]

GENERATE = flight.FlightDescriptor.for_path("generate", "fake")


def put(client: flight.FlightClient, table: pa.Table, *, max_chunksize: int | None = None) -> bytes:
    """Upload a table; its ticket."""
    writer, answers = client.do_put(GENERATE, table.schema)
    with writer:
        writer.write_table(table, max_chunksize=max_chunksize)
        writer.done_writing()
        ticket: bytes = answers.read().to_pybytes()
        assert answers.read() is None
    return ticket


def get(client: flight.FlightClient, ticket: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.do_get(flight.Ticket(ticket)).read_all().to_pylist()
    return rows


def code(caught: pytest.ExceptionInfo[flight.FlightError]) -> str:
    return str(json.loads(caught.value.extra_info)["code"])


def test_results_come_in_the_order_of_the_prompts(serve: Serve) -> None:
    served = serve(engine={"max_num_seqs": 4, "tokens_per_dispatch": 2})
    lengths = [9, 1, 5, 3, 7, 2]
    table = pa.table({"prompt": [f"p{i}" for i in range(6)], "max_tokens": lengths, "note": ["-"] * 6})
    rows = get(served.client, put(served.client, table, max_chunksize=2))
    assert [row["id"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [row["text"] for row in rows] == [fake_text(f"p{i}", n) for i, n in enumerate(lengths)]
    assert [len(row["token_ids"]) for row in rows] == lengths
    assert {row["finish_reason"] for row in rows} == {"length"}
    assert [row["usage"]["output_tokens"] for row in rows] == lengths


def test_one_row_a_prompt_and_choice(serve: Serve) -> None:
    served = serve()
    table = pa.table(
        {
            "id": ["same", "bad", "same"],
            "prompt": ["hi", None, "ho"],
            "n": [2, 1, 1],
            "max_tokens": [3, 3, 2],
            "logprobs": [0, None, None],
        }
    )
    rows = get(served.client, put(served.client, table))
    assert [(row["id"], row["index"]) for row in rows] == [("same", 0), ("same", 1), ("bad", 0), ("same", 0)]
    assert [row["text"] for row in rows] == [
        fake_text("hi", 3),
        fake_text("hi", 3, choice=1),
        None,
        fake_text("ho", 2),
    ]
    assert [len(row["logprobs"]) if row["logprobs"] else None for row in rows] == [3, 3, None, None]
    # What a prompt used stands once, on its first choice.
    assert [row["usage"] and row["usage"]["output_tokens"] for row in rows] == [6, None, 0, 2]
    assert [row["timings"] is not None for row in rows] == [True, False, True, True]
    assert (rows[2]["finish_reason"], rows[2]["error_code"]) == ("error", "JS-REQ-01")


def test_results_stream_while_later_rows_are_computed(serve: Serve) -> None:
    served = serve(engine={"max_num_seqs": 1, "token_delay_s": 0.02}, max_num_seqs=1)
    ticket = put(served.client, pa.table({"prompt": ["a", "b"], "max_tokens": [1, 100]}))
    reader = served.client.do_get(flight.Ticket(ticket))
    assert reader.read_chunk().data.column("id").to_pylist() == ["0"]
    assert served.engine.live > 0
    assert reader.read_chunk().data.column("id").to_pylist() == ["1"]


def test_rows_are_computed_while_the_table_is_uploaded(serve: Serve) -> None:
    served = serve()
    table = pa.table({"prompt": ["a"], "max_tokens": [2]})
    writer, answers = served.client.do_put(GENERATE, table.schema)
    with writer:
        ticket = answers.read().to_pybytes()
        writer.write_table(table)
        reader = served.client.do_get(flight.Ticket(ticket))
        assert reader.read_chunk().data.column("text").to_pylist() == [fake_text("a", 2)]
        writer.write_table(table)
        assert reader.read_chunk().data.column("id").to_pylist() == ["1"]
        writer.done_writing()
        with pytest.raises(StopIteration):
            reader.read_chunk()


def test_a_ticket_is_good_for_one_fetch(serve: Serve) -> None:
    served = serve()
    ticket = put(served.client, pa.table({"prompt": ["a"], "max_tokens": [2]}))
    assert len(get(served.client, ticket)) == 1
    with pytest.raises(flight.FlightError, match="this ticket was used") as caught:
        get(served.client, ticket)
    assert code(caught) == "JS-REQ-04"


@pytest.mark.parametrize(
    ("ticket", "code_wanted", "words"),
    [
        (b'{"table": "guess"}', "JS-REQ-04", "this ticket is not known here"),
        (b'{"table": "guess", "rows": 1}', "JS-REQ-01", "unknown field 'rows'"),
        (b'{"tabel": "guess"}', "JS-REQ-01", "unknown field 'tabel'"),
        (b'{"table": 5}', "JS-REQ-01", "a ticket is what DoPut answered"),
        (b"\xff\xfe", "JS-REQ-01", "the ticket is not a JSON object"),
        (b"", "JS-REQ-01", "the ticket is not a JSON object"),
    ],
)
def test_a_bad_ticket_is_refused(serve: Serve, ticket: bytes, code_wanted: str, words: str) -> None:
    with pytest.raises(flight.FlightError, match=words) as caught:
        get(serve().client, ticket)
    assert code(caught) == code_wanted


def test_tickets_cannot_be_guessed(serve: Serve) -> None:
    served = serve()
    tokens = {json.loads(put(served.client, pa.table({"prompt": ["a"], "max_tokens": [1]})))["table"] for _ in range(3)}
    assert len(tokens) == 3
    assert all(len(token) == 43 for token in tokens)


def test_a_table_that_nobody_fetches_expires(serve: Serve) -> None:
    served = serve(limits={"table_ttl_s": 0.2})
    ticket = put(served.client, pa.table({"prompt": ["a"], "max_tokens": [2]}))
    time.sleep(0.6)
    with pytest.raises(flight.FlightError, match="this ticket has expired") as caught:
        get(served.client, ticket)
    assert code(caught) == "JS-REQ-04"


def test_a_table_in_work_does_not_expire(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.01, "max_num_seqs": 1}, limits={"table_ttl_s": 0.5, "rows_in_flight": 1})
    ticket = put(served.client, pa.table({"prompt": ["a"] * 12, "max_tokens": [12] * 12}))
    time.sleep(1.2)
    assert len(get(served.client, ticket)) == 12


def test_an_upload_that_brings_nothing_gives_its_table_up(serve: Serve) -> None:
    served = serve(limits={"upload_stall_s": 0.3, "max_tables": 1})
    table = pa.table({"prompt": ["a"], "max_tokens": [1]})
    writer, answers = served.client.do_put(GENERATE, table.schema)
    ticket = answers.read().to_pybytes()
    for _ in range(3):
        writer.write_table(table)
        time.sleep(0.15)
    with pytest.raises(flight.FlightUnavailableError, match="1 tables wait to be fetched"):
        put(served.client, table)
    wait_for(lambda: not len(served.door._store))
    with pytest.raises(flight.FlightError, match="this ticket is void"):
        get(served.client, ticket)
    assert len(get(served.client, put(served.client, table))) == 1
    with pytest.raises(flight.FlightError, match=r"the upload brought no batch for 0\.3 s") as caught:
        writer.close()
    assert code(caught) == "JS-REQ-07"


def test_a_fetch_that_reads_nothing_gives_its_table_up(serve: Serve) -> None:
    served = serve(
        engine={"tokens_per_dispatch": 500, "max_model_len": 4096}, limits={"table_ttl_s": 0.4, "max_tables": 1}
    )
    rows = 40
    columns = {"prompt": ["a"] * rows, "max_tokens": [2000] * rows, "logprobs": [20] * rows}
    ticket = put(served.client, pa.table(columns))
    reader = served.client.do_get(flight.Ticket(ticket))
    wait_for(lambda: not len(served.door._store))
    with pytest.raises(flight.FlightError, match=r"has expired: for 0\.4 s its client reads nothing") as caught:
        reader.read_all()
    assert code(caught) == "JS-REQ-04"
    assert len(get(served.client, put(served.client, pa.table({"prompt": ["a"], "max_tokens": [1]})))) == 1


def test_only_so_many_tables_wait(serve: Serve) -> None:
    served = serve(limits={"max_tables": 2})
    table = pa.table({"prompt": ["a"], "max_tokens": [1]})
    first = put(served.client, table)
    put(served.client, table)
    with pytest.raises(flight.FlightUnavailableError, match="2 tables wait to be fetched") as caught:
        put(served.client, table)
    assert json.loads(caught.value.extra_info)["retry_after_s"] == 10.0
    get(served.client, first)
    put(served.client, table)


def test_a_table_is_bounded_in_bytes(serve: Serve) -> None:
    served = serve(max_message_mb=1)
    served.engine.pause()
    table = pa.table({"prompt": ["x" * 400] * 8000, "max_tokens": [1] * 8000})
    with pytest.raises(flight.FlightError, match="the table has more than 1048576 bytes; split it") as caught:
        put(served.client, table, max_chunksize=500)
    assert code(caught) == "JS-LIM-01"
    served.engine.resume()
    wait_for(lambda: served.frontend.live == 0)


def test_dictionaries_count_as_bytes_of_the_table(serve: Serve) -> None:
    """Each batch is small and keeps a dictionary of its own."""
    served = serve(max_message_mb=1)
    served.engine.pause()
    batches = [
        pa.record_batch({"prompt": pa.array([f"{i}" + "x" * 100_000]).dictionary_encode(), "max_tokens": [1]})
        for i in range(12)
    ]
    with pytest.raises(flight.FlightError, match="the table has more than 1048576 bytes; split it") as caught:
        put(served.client, pa.Table.from_batches(batches))
    assert code(caught) == "JS-LIM-01"
    ticket = put(served.client, pa.Table.from_batches(batches[:10]))
    served.engine.resume()
    assert len(get(served.client, ticket)) == 10


def test_all_tables_together_are_bounded_in_bytes(serve: Serve) -> None:
    served = serve(limits={"tables_bytes": 1_000_000, "rows_in_flight": 2})
    served.engine.pause()
    table = pa.table({"prompt": ["x" * 400] * 1000, "max_tokens": [1] * 1000})
    put(served.client, table)
    put(served.client, table)
    with pytest.raises(flight.FlightUnavailableError, match="1000000 bytes together") as caught:
        put(served.client, table)
    assert code(caught) == "JS-LIM-02"


def test_a_table_pauses_when_its_window_is_full(serve: Serve) -> None:
    served = serve(
        engine={"max_num_seqs": 4, "tokens_per_dispatch": 8}, limits={"table_window_bytes": 50_000, "rows_in_flight": 4}
    )
    rows = 500
    ticket = put(served.client, pa.table({"prompt": ["hi"] * rows, "max_tokens": [20] * rows}))
    assert 20 < served.held_up() < 150
    assert [row["text"] for row in get(served.client, ticket)] == [fake_text("hi", 20)] * rows


def test_the_window_counts_what_results_take_in_memory(serve: Serve) -> None:
    """With logprobs that is 16 times what they take in a message."""
    window = 1 << 20
    served = serve(engine={"tokens_per_dispatch": 50}, limits={"table_window_bytes": window, "rows_in_flight": 2})
    rows = 60
    columns = {"prompt": ["hi"] * rows, "max_tokens": [50] * rows, "logprobs": [20] * rows}
    ticket = put(served.client, pa.table(columns))
    row_bytes = 50 * (TOKEN_BYTES + LOGPROB_BYTES + 20 * TOP_LOGPROB_BYTES)
    # Two run when the window fills, and one waits for its turn.
    assert window / row_bytes - 1 < served.held_up() < window / row_bytes + 4
    assert len(get(served.client, ticket)) == rows


def test_the_results_of_all_tables_together_are_bounded(serve: Serve) -> None:
    served = serve(engine={"tokens_per_dispatch": 50}, limits={"results_bytes": 1 << 20, "rows_in_flight": 2})
    rows = 30
    columns = {"prompt": ["hi"] * rows, "max_tokens": [50] * rows, "logprobs": [20] * rows}
    tickets = [put(served.client, pa.table(columns)) for _ in range(4)]
    assert served.held_up() < 20
    # Full or not, what is fetched is computed; and what is fetched or dropped makes room for the others.
    assert [row["id"] for row in get(served.client, tickets[3])] == [str(i) for i in range(rows)]
    reader = served.client.do_get(flight.Ticket(tickets[2]))
    assert reader.read_chunk().data.num_rows > 0
    reader.cancel()
    for ticket in tickets[:2]:
        assert len(get(served.client, ticket)) == rows
    wait_for(lambda: served.door._store.budget.held == 0)


def test_leaving_a_fetch_ends_the_work(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02, "max_num_seqs": 2})
    ticket = put(served.client, pa.table({"prompt": ["a"] * 50, "max_tokens": [1] + [400] * 49}))
    reader = served.client.do_get(flight.Ticket(ticket))
    reader.read_chunk()
    reader.cancel()
    wait_for(lambda: served.frontend.live == 0)
    assert len(served.engine.submitted) < 50


def test_a_failed_upload_voids_its_ticket(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02}, limits={"batch_rows": 10})
    table = pa.table({"prompt": ["a"] * 10})
    writer, answers = served.client.do_put(GENERATE, table.schema)
    ticket = answers.read().to_pybytes()
    writer.write_table(table)
    writer.write_batch(pa.record_batch({"prompt": ["b"] * 11}))
    writer.done_writing()
    with pytest.raises(flight.FlightError, match="batch 2 has 11 rows; at most 10") as caught:
        writer.close()
    assert code(caught) == "JS-LIM-01"
    with pytest.raises(flight.FlightError, match="this ticket is void"):
        get(served.client, ticket)
    wait_for(lambda: served.frontend.live == 0)


def test_an_upload_that_is_broken_off_is_forgotten(serve: Serve, messages: Callable[..., list[bytes]]) -> None:
    served = serve(engine={"token_delay_s": 0.02})
    failure = served.raw("DoPut", [*messages(pa.record_batch({"prompt": ["a"] * 10})), b"not a message"])
    assert (failure.status, failure.code) == ("INVALID_ARGUMENT", "JS-REQ-01")
    wait_for(lambda: served.frontend.live == 0)


def test_a_table_is_described_and_cancelled(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02})
    ticket = put(served.client, pa.table({"prompt": ["a"] * 3}))
    info = served.client.get_flight_info(flight.FlightDescriptor.for_command(ticket))
    assert info.endpoints == [flight.FlightEndpoint(ticket, [])]
    assert json.loads(info.app_metadata) == {"rows": 3, "uploading": False}
    # A CancelFlightInfoRequest is the info as field 1, as a Ticket is its bytes.
    request = flight.Ticket(info.serialize()).serialize()
    action = flight.Action("CancelFlightInfo", request)
    assert [result.body.to_pybytes() for result in served.client.do_action(action)] == [b"\x08\x01"]
    assert [result.body.to_pybytes() for result in served.client.do_action(action)] == [b"\x08\x03"]
    wait_for(lambda: served.frontend.live == 0)
    with pytest.raises(flight.FlightError, match="this ticket was cancelled"):
        get(served.client, ticket)


def test_the_info_of_a_table_tells_the_ignored_columns(serve: Serve) -> None:
    served = serve()
    ticket = put(served.client, pa.table({"prompt": ["a"], "max_tokens": [1], "temprature": [0.0]}))
    info = served.client.get_flight_info(flight.FlightDescriptor.for_command(ticket))
    assert json.loads(info.app_metadata) == {"rows": 1, "uploading": False, "ignored_columns": ["temprature"]}


def test_a_table_that_is_cancelled_ends_its_fetch(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02})
    ticket = put(served.client, pa.table({"prompt": ["a", "b"], "max_tokens": [1, 400]}))
    reader = served.client.do_get(flight.Ticket(ticket))
    assert reader.read_chunk().data.column("id").to_pylist() == ["0"]
    info = served.client.get_flight_info(flight.FlightDescriptor.for_command(ticket))
    list(served.client.do_action(flight.Action("CancelFlightInfo", flight.Ticket(info.serialize()).serialize())))
    with pytest.raises(flight.FlightError, match="this ticket was cancelled") as caught:
        reader.read_chunk()
    assert code(caught) == "JS-REQ-04"


def test_an_empty_table_gives_an_empty_table(serve: Serve) -> None:
    served = serve()
    table = pa.table({"prompt": pa.array([], pa.utf8())})
    assert get(served.client, put(served.client, table)) == []


def test_a_failing_engine_fails_the_rows(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02, "max_num_seqs": 1})
    ticket = put(served.client, pa.table({"prompt": ["a", "b"]}))
    wait_for(lambda: served.engine.live > 0)
    served.engine.fail("broken")
    rows = get(served.client, ticket)
    assert [(row["finish_reason"], row["error_code"]) for row in rows] == [("error", "JS-SRV-02")] * 2


def test_a_draining_frontend_ends_a_table_after_its_running_rows(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02, "max_num_seqs": 1}, limits={"rows_in_flight": 1})
    ticket = put(served.client, pa.table({"prompt": ["a", "b", "c"], "max_tokens": [10] * 3}))
    wait_for(lambda: served.engine.live > 0)
    served.frontend.refuse("the server is going")
    reader = served.client.do_get(flight.Ticket(ticket))
    assert reader.read_chunk().data.column("finish_reason").to_pylist() == ["length"]
    with pytest.raises(flight.FlightUnavailableError, match="the server is going") as caught:
        reader.read_chunk()
    assert code(caught) == "JS-SRV-01"
