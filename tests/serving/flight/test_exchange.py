"""DoExchange through pyarrow's client: what goes in, what comes out, and what befalls the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from jserve.request import Delta, FinishReason, SamplingParams
from jserve.serving.flight.batch import PromptRow
from jserve.serving.flight.rows import RowRunner
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_frontend
from jserve.testing.fake_tokens import fake_logprob, fake_text, fake_token
from jserve.testing.waiting import wait_for

Serve = Callable[..., Any]

TEXT_TYPES = [
    pa.utf8(),
    pa.large_utf8(),
    pa.string_view(),
    pa.dictionary(pa.int8(), pa.utf8()),
    pa.dictionary(pa.int32(), pa.large_utf8()),
]


def joined(rows: list[dict[str, Any]], row_id: str, index: int = 0) -> str:
    return "".join(row["text"] for row in rows if row["id"] == row_id and row["index"] == index)


def ends(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last row of each id."""
    return {row["id"]: row for row in rows if row["finish_reason"] is not None}


def generate_command(**fields: Any) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(json.dumps(fields))


def run(
    client: flight.FlightClient, descriptor: flight.FlightDescriptor, batch: pa.RecordBatch
) -> list[dict[str, Any]]:
    writer, reader = client.do_exchange(descriptor)
    with writer:
        writer.begin(batch.schema)
        writer.write_batch(batch)
        writer.done_writing()
        rows: list[dict[str, Any]] = reader.read_all().to_pylist()
    return rows


def failure(served: Any, descriptor: flight.FlightDescriptor, batch: pa.RecordBatch) -> dict[str, Any]:
    """What extra_info says of a call that fails."""
    with pytest.raises(flight.FlightError) as caught:
        run(served.client, descriptor, batch)
    info: dict[str, Any] = json.loads(caught.value.extra_info)
    return info


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_of_every_type_gives_the_same_rows(serve: Serve, kind: pa.DataType, *, sliced: bool) -> None:
    served = serve()
    long = "a prompt longer than the twelve bytes of a view"
    batch = pa.record_batch(
        {
            "note": ["x", "y", "z", "w"],
            "prompt": pa.array(["dropped", long, None, "Grüße"]).cast(kind),
            "max_tokens": [1, 5, 5, 3],
        }
    )
    rows = served.exchange([batch.slice(1) if sliced else batch])
    first = 0 if sliced else 1
    assert joined(rows, str(first)) == fake_text(long, 5)
    assert joined(rows, str(first + 2)) == fake_text("Grüße", 3)
    null = ends(rows)[str(first + 1)]
    assert (null["finish_reason"], null["error_code"], null["text"], null["token_ids"]) == (
        "error",
        "JS-REQ-01",
        None,
        None,
    )
    assert null["error"] == "exactly one of prompt, token_ids, messages must be set; the row has none"
    assert len(served.engine.submitted) == (2 if sliced else 3)


def test_a_row_comes_back_whole(serve: Serve) -> None:
    served = serve(engine={"tokens_per_dispatch": 2})
    batch = pa.record_batch({"id": ["mine"], "prompt": ["hi"], "max_tokens": [5], "logprobs": [1]})
    rows = served.exchange([batch])
    ids = [token for row in rows for token in row["token_ids"]]
    assert ids == [fake_token(b"hi", 0, i) for i in range(5)]
    logprobs = [entry for row in rows for entry in row["logprobs"]]
    wanted = [fake_logprob(token, i, top=1, vocab_size=258) for i, token in enumerate(ids)]
    assert logprobs == [
        {
            "token_id": entry.token_id,
            "logprob": entry.logprob,
            "top": [{"token_id": token, "logprob": logprob} for token, logprob in entry.top],
        }
        for entry in wanted
    ]
    assert {row["id"] for row in rows} == {"mine"}
    assert [row["usage"] for row in rows[:-1]] == [None] * (len(rows) - 1)
    last = rows[-1]
    assert last["finish_reason"] == "length"
    assert last["usage"] == {"prompt_tokens": 2, "output_tokens": 5, "cached_tokens": 0}
    assert 0 <= last["timings"]["queue"] <= last["timings"]["ttft"] <= last["timings"]["total"]
    assert (last["error"], last["error_code"]) == (None, None)


def test_token_ids_messages_and_choices(serve: Serve) -> None:
    served = serve()
    turn = [{"role": "user", "content": "hi"}]
    batch = pa.record_batch(
        {
            "token_ids": pa.array([[104, 105], None, None, [1], [99_999], None, None], pa.large_list(pa.int64())),
            "messages": pa.array([None, turn, None, turn, None, [None], [{"role": "user", "content": None}]]),
            "prompt": pa.array([None, None, "hi", None, None, None, None], pa.string_view()),
            "n": pa.array([1, 1, 2, 1, 1, 1, 1], pa.uint8()),
            "max_tokens": pa.array([3.0] * 7, pa.float32()),
        }
    )
    rows = served.exchange([batch])
    assert joined(rows, "0") == fake_text("hi", 3)
    chat = [256, *b"user: hi\nassistant:"]
    assert joined(rows, "1") == "".join(chr(fake_token(chat, 0, i)) for i in range(3))
    assert [joined(rows, "2", index) for index in (0, 1)] == [fake_text("hi", 3), fake_text("hi", 3, choice=1)]
    last = ends(rows)
    assert last["3"]["error"] == (
        "exactly one of prompt, token_ids, messages must be set; the row has token_ids and messages"
    )
    assert last["4"]["error"] == "prompt token id 99999 at position 0 is not in 0..257"
    assert last["5"]["error"] == last["6"]["error"] == "messages has a null inside; leave it out"
    assert len(served.engine.submitted) == 3


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("temperature", pa.array([-1.0]), "temperature is -1; allowed are 0 to 100"),
        ("temperature", pa.array([float("nan")]), "temperature is nan"),
        ("max_tokens", pa.array([2.5]), "max_tokens is 2.5; it must be a whole number"),
        ("max_tokens", pa.array([0], pa.int8()), "max_tokens is 0; it must be 1 or more"),
        ("n", pa.array([17], pa.int64()), "n is 17; allowed are 1 to 16"),
        ("seed", pa.array([-1], pa.int64()), "seed is -1; allowed are 0 to 18446744073709551615"),
        ("logprobs", pa.array([21]), "logprobs is 21; allowed are 0 to 20"),
        ("stop", pa.array([["x"] * 17]), "stop has 17 strings; at most 16 are allowed"),
        ("stop", pa.array([["x", None]]), "stop has a null inside; leave it out"),
        ("stop", pa.array(["x" * 257]), "stop[0] has 257 bytes; allowed are 1 to 256"),
        ("stop_token_ids", pa.array([[1] * 17]), "stop_token_ids has 17 ids; at most 16 are allowed"),
        ("id", pa.array(["x" * 129]), "id has 129 bytes; at most 128 are allowed"),
        ("max_tokens", pa.array([float("inf")]), "max_tokens is inf; it must be a whole number"),
    ],
)
def test_a_bad_value_fails_its_row_alone(serve: Serve, column: str, values: pa.Array, words: str) -> None:
    served = serve()
    both = pa.concat_arrays([values, pa.nulls(1, values.type)])
    limit = {} if column == "max_tokens" else {"max_tokens": [2, 2]}
    rows = served.exchange([pa.record_batch({"prompt": ["bad", "good"], column: both, **limit})])
    last = ends(rows)
    assert last["0"]["finish_reason"] == "error"
    assert words in last["0"]["error"]
    assert last["1"]["finish_reason"] == "length"


def test_sampling_columns_reach_the_engine(serve: Serve) -> None:
    served = serve()
    columns = {
        "prompt": ["hi"],
        "temperature": pa.array([0], pa.int8()),
        "top_p": pa.array([0.5], pa.float16()),
        "top_k": pa.array([7.0]),
        "min_p": [0.25],
        "seed": pa.array([2**64 - 1], pa.uint64()),
        "max_tokens": [9],
        "min_tokens": [2],
        "stop_token_ids": pa.array([[5, 6]], pa.list_(pa.int16())),
        "ignore_eos": [True],
        "logprobs": pa.nulls(1),
    }
    served.exchange([pa.record_batch(columns)])
    sampling = served.engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 7, 0.25)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (2**64 - 1, 9, 2)
    assert (sampling.stop_ids, sampling.logprobs) == ((5, 6), None)


def test_a_stop_string_may_be_text_or_a_list(serve: Serve) -> None:
    served = serve()
    whole = fake_text("hi", 8)
    for stop in (pa.array([whole[3:5]], pa.large_utf8()), pa.array([[whole[3:5], "never"]])):
        rows = served.exchange([pa.record_batch({"prompt": ["hi"], "stop": stop, "include_stop": [False]})])
        assert joined(rows, "0") == whole[:3]
        assert ends(rows)["0"]["finish_reason"] == "stop"


def test_defaults_come_from_the_command(serve: Serve) -> None:
    served = serve()
    batch = pa.record_batch({"prompt": ["hi", "hi"], "max_tokens": [None, 2]})
    rows = run(served.client, generate_command(model="fake", max_tokens=4, seed=3, stop=["zz"]), batch)
    assert [joined(rows, "0"), joined(rows, "1")] == [fake_text("hi", 4), fake_text("hi", 2)]
    assert [request.sampling.seed for request in served.engine.submitted] == [3, 3]


@pytest.mark.parametrize(
    ("descriptor", "code", "words"),
    [
        (flight.FlightDescriptor.for_path("generate", "other"), "JS-REQ-04", "model 'other' is not served here"),
        (flight.FlightDescriptor.for_path("embed", "fake"), "JS-REQ-06", "no encoder is served here"),
        (flight.FlightDescriptor.for_path("translate", "fake"), "JS-REQ-04", "there is no flight"),
        (flight.FlightDescriptor.for_path("generate", "fake", "x"), "JS-REQ-04", "there is no flight"),
        (generate_command(model="fake", temprature=1), "JS-REQ-01", "unknown field 'temprature'"),
        (generate_command(top_k="5"), "JS-REQ-01", "got `str` - at `$.top_k`"),
        (generate_command(model=5), "JS-REQ-01", "model in the descriptor's command must be a string"),
        (flight.FlightDescriptor.for_command(b"[1]"), "JS-REQ-01", "is not a JSON object"),
        (flight.FlightDescriptor.for_command(b"{" * 10_000), "JS-REQ-01", "is not a JSON object"),
        (flight.FlightDescriptor.for_command(b" " * 100_000), "JS-REQ-01", "at most 65536 are allowed"),
    ],
)
def test_a_bad_descriptor_is_refused(serve: Serve, descriptor: flight.FlightDescriptor, code: str, words: str) -> None:
    info = failure(serve(), descriptor, pa.record_batch({"prompt": ["hi"]}))
    assert info["code"] == code
    assert words in info["message"]


@pytest.mark.parametrize(
    ("columns", "code", "words"),
    [
        ({"text": ["hi"]}, "JS-REQ-01", "no column holds prompts; send one of prompt, token_ids, messages (got text)"),
        ({"prompt": pa.nulls(1)}, "JS-REQ-01", "no column holds prompts"),
        ({"prompt": pa.array([b"hi"])}, "JS-REQ-06", "column prompt has type binary; allowed: string"),
        ({"token_ids": pa.array([[1.0]])}, "JS-REQ-06", "column token_ids has type list<item: double>"),
        ({"prompt": ["hi"], "n": ["1"]}, "JS-REQ-06", "column n has type string; allowed: an integer"),
        ({"prompt": ["hi"], "ignore_eos": [1]}, "JS-REQ-06", "column ignore_eos has type int64; allowed: bool"),
        ({"messages": pa.array([[{"role": "user", "text": "x"}]])}, "JS-REQ-06", "column messages has type"),
        ({"prompt": pa.RunEndEncodedArray.from_arrays([1], ["hi"])}, "JS-REQ-06", "column prompt has type run_end"),
        ({"prompt": ["hi"], **{f"c{i}": [0] for i in range(256)}}, "JS-REQ-01", "257 columns; at most 256"),
    ],
)
def test_a_schema_that_cannot_be_served_is_refused(
    serve: Serve, columns: dict[str, Any], code: str, words: str
) -> None:
    served = serve()
    info = failure(served, flight.FlightDescriptor.for_path("generate", "fake"), pa.record_batch(columns))
    assert info["code"] == code
    assert words in info["message"]
    assert served.engine.submitted == []


def test_a_column_that_stands_twice_is_refused(serve: Serve) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    info = failure(serve(), flight.FlightDescriptor.for_path("generate"), batch)
    assert (info["code"], info["message"]) == ("JS-REQ-01", "the schema has two columns prompt; keep one")


def test_metadata_tells_the_call_and_the_ignored_columns(serve: Serve) -> None:
    served = serve()
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    with writer:
        # Metadata alone, before the schema and between the batches.
        writer.write_metadata(b"hello")
        assert reader.schema.names[:4] == ["id", "index", "token_ids", "text"]
        batch = pa.record_batch({"prompt": ["hi"], "source": [1], "max_tokens": [1]})
        writer.begin(batch.schema)
        writer.write_batch(batch)
        first = reader.read_chunk()
        writer.write_metadata(b"more")
        writer.write_with_metadata(batch, b"even with a batch")
        second = reader.read_chunk()
        writer.done_writing()
        with pytest.raises(StopIteration):
            reader.read_chunk()
    about = json.loads(first.app_metadata.to_pybytes())
    assert about["ignored_columns"] == ["source"]
    assert about["call"].startswith("flight-")
    assert second.app_metadata is None
    assert [first.data.to_pylist()[0]["id"], second.data.to_pylist()[0]["id"]] == ["0", "1"]


def test_an_exchange_without_rows_ends_well(serve: Serve) -> None:
    served = serve()
    schema = pa.schema([("prompt", pa.utf8())])
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    with writer:
        writer.begin(schema)
        writer.write_batch(pa.record_batch([pa.array([], pa.utf8())], schema=schema))
        writer.done_writing()
        assert reader.read_all().num_rows == 0


def test_rows_stream_while_the_client_still_writes(serve: Serve) -> None:
    served = serve()
    batch = pa.record_batch({"prompt": ["hi"], "max_tokens": [2]})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    with writer:
        writer.begin(batch.schema)
        for number in range(3):
            writer.write_batch(batch)
            text = ""
            while len(text) < 2:
                (row,) = reader.read_chunk().data.to_pylist()
                assert row["id"] == str(number)
                text += row["text"]
            assert text == fake_text("hi", 2)
        writer.done_writing()


def test_many_batches_are_written_before_any_is_read(serve: Serve) -> None:
    served = serve(engine={"max_num_seqs": 32, "max_queue": 128, "tokens_per_dispatch": 4})
    batch = pa.record_batch({"prompt": ["hi"], "max_tokens": [2]})
    rows = served.exchange([batch] * 1500)
    assert sorted(int(row_id) for row_id in ends(rows)) == list(range(1500))
    assert {row["text"] for row in rows} == {fake_text("hi", 2)}


def test_64_exchanges_write_much_before_they_read(serve: Serve) -> None:
    """Full result or an early typed error; nothing hangs. Here all is served: the queue is shared patiently."""
    served = serve(engine={"max_num_seqs": 32, "max_queue": 256, "tokens_per_dispatch": 4})
    batch = pa.record_batch({"prompt": ["hi"], "max_tokens": [2]})

    def call(number: int) -> int | str:
        with flight.connect(served.location) as client:
            try:
                writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("generate"))
                with writer:
                    writer.begin(batch.schema)
                    for _ in range(50):
                        writer.write_batch(batch)
                    writer.done_writing()
                    rows: int = reader.read_all().num_rows
                return rows
            except flight.FlightUnavailableError as error:
                return str(json.loads(error.extra_info)["code"])

    with ThreadPoolExecutor(64) as pool:
        outcomes = list(pool.map(call, range(64)))
    assert set(outcomes) <= {50, "JS-LIM-02"}
    assert outcomes.count(50) >= 32
    assert served.engine.wait_idle(2)
    assert served.frontend.live == 0


def test_a_call_that_has_not_begun_is_refused_when_the_queue_is_full(serve: Serve) -> None:
    served = serve(engine={"max_num_seqs": 1, "max_queue": 1}, max_num_seqs=1, max_queue=2)
    served.engine.pause()
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    batch = pa.record_batch({"prompt": ["hi"] * 5, "max_tokens": [1] * 5})
    with writer:
        writer.begin(batch.schema)
        writer.write_batch(batch)
        wait_for(lambda: served.engine.live == 1)
        info = failure(served, flight.FlightDescriptor.for_path("generate"), batch)
        assert info["code"] == "JS-LIM-02"
        assert info["grpc_status"] == "RESOURCE_EXHAUSTED"
        assert info["retry_after_s"] > 0
        # The one that has begun waits for room, and is served whole.
        served.engine.resume()
        writer.done_writing()
        assert len(ends(reader.read_all().to_pylist())) == 5


def test_a_cancelled_call_ends_its_work(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02, "max_num_seqs": 4})
    batch = pa.record_batch({"prompt": ["hi"] * 100})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    writer.begin(batch.schema)
    writer.write_batch(batch)
    reader.read_chunk()
    wait_for(lambda: served.frontend.live > 4)
    reader.cancel()
    wait_for(lambda: served.engine.live == 0 and served.frontend.live == 0)
    assert len(served.engine.submitted) < 100


def test_a_killed_client_takes_its_work_with_it(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02, "max_num_seqs": 4})
    script = f"""
import time, pyarrow as pa, pyarrow.flight as flight
client = flight.connect("{served.location}")
writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("generate"))
batch = pa.record_batch({{"prompt": ["hi"] * 100}})
writer.begin(batch.schema)
writer.write_batch(batch)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as client:
        wait_for(lambda: served.frontend.live > 4)
        client.kill()
        wait_for(lambda: served.engine.live == 0 and served.frontend.live == 0)
    assert len(served.engine.submitted) < 100


def test_a_deadline_ends_the_work(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.02})
    writer, reader = served.client.do_exchange(
        flight.FlightDescriptor.for_path("generate"), flight.FlightCallOptions(timeout=0.3)
    )
    batch = pa.record_batch({"prompt": ["hi"]})
    writer.begin(batch.schema)
    writer.write_batch(batch)
    with pytest.raises(flight.FlightTimedOutError):
        reader.read_all()
    (request,) = served.engine.submitted
    assert 0.2 < request.deadline - request.arrival <= 0.3
    wait_for(lambda: served.engine.live == 0)


def cancelled(served: Any, request_id: str) -> bool:
    (result,) = served.client.do_action(flight.Action("cancel", json.dumps({"request_id": request_id}).encode()))
    answer: bool = json.loads(result.body.to_pybytes())["cancelled"]
    return answer


def test_rows_are_cancelled_by_their_request_id(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.01})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    with writer:
        batch = pa.record_batch({"prompt": ["a", "b", "c"]})
        writer.begin(batch.schema)
        writer.write_batch(batch)
        chunk = reader.read_chunk()
        call = json.loads(chunk.app_metadata.to_pybytes())["call"]
        rows = chunk.data.to_pylist()
        assert cancelled(served, f"{call}-1")
        while "1" not in ends(rows):
            rows += reader.read_chunk().data.to_pylist()
        assert set(ends(rows)) == {"1"}
        assert (ends(rows)["1"]["finish_reason"], ends(rows)["1"]["error_code"]) == ("cancelled", "JS-REQ-08")
        assert not cancelled(served, f"{call}-1")
        assert not cancelled(served, f"{call}-77")
        assert not cancelled(served, "flight-0000-1")
        assert cancelled(served, call)
        writer.done_writing()
        rows += reader.read_all().to_pylist()
    assert {end["finish_reason"] for end in ends(rows).values()} == {"cancelled"}


def test_cancelling_a_call_ends_the_rows_that_have_not_begun_too(serve: Serve) -> None:
    served = serve(engine={"token_delay_s": 0.01, "max_num_seqs": 2}, limits={"rows_in_flight": 4})
    batch = pa.record_batch({"prompt": ["a"] * 200})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    with writer:
        writer.begin(batch.schema)
        writer.write_batch(batch)
        chunk = reader.read_chunk()
        call = json.loads(chunk.app_metadata.to_pybytes())["call"]
        assert cancelled(served, call)
        # What comes after it belongs to the same call.
        writer.write_batch(batch.slice(0, 10))
        writer.done_writing()
        rows = chunk.data.to_pylist() + reader.read_all().to_pylist()
    last = ends(rows)
    assert sorted(map(int, last)) == list(range(210))
    assert {(row["finish_reason"], row["error_code"]) for row in last.values()} == {("cancelled", "JS-REQ-08")}
    assert len(served.engine.submitted) <= 5


def test_a_row_is_cancelled_while_it_waits_for_the_engine(serve: Serve) -> None:
    served = serve(engine={"max_num_seqs": 1, "max_queue": 1})
    served.engine.pause()
    # The first row fails at once, and so tells the call's id.
    batch = pa.record_batch({"prompt": [None, "a", "b", "c"], "max_tokens": [3] * 4})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    with writer:
        writer.begin(batch.schema)
        writer.write_batch(batch)
        writer.done_writing()
        call = json.loads(reader.read_chunk().app_metadata.to_pybytes())["call"]
        (runner,) = served.door._service._runners.values()
        wait_for(lambda: runner._opening == 2 and len(served.engine.submitted) == 1)
        assert not cancelled(served, f"{call}-3")
        assert cancelled(served, f"{call}-2")
        (row,) = reader.read_chunk().data.to_pylist()
        assert (row["id"], row["finish_reason"], row["error_code"]) == ("2", "cancelled", "JS-REQ-08")
        served.engine.resume()
        last = ends(reader.read_all().to_pylist())
    assert {row_id: row["finish_reason"] for row_id, row in last.items()} == {"1": "length", "3": "length"}


async def test_a_row_that_is_cancelled_while_it_opens_never_runs() -> None:
    with FakeEngine() as engine:
        engine.pause()
        frontend = fake_frontend(engine)
        runner = RowRunner(frontend, call_id="call", model="", width=1, deadline=None, patient=True)
        made: list[Delta] = []

        async def rows() -> AsyncIterator[PromptRow]:
            yield PromptRow(number=0, id="0", prompt="a", params=SamplingParams(max_tokens=3))

        async def sink(row: PromptRow, deltas: Sequence[Delta]) -> None:
            made.extend(deltas)

        running = asyncio.create_task(runner.run(rows(), sink))
        async with asyncio.timeout(20):
            while runner.idle:
                await asyncio.sleep(0)
        assert engine.submitted == []
        assert runner.cancel(0)
        await running
        assert [delta.finish_reason for delta in made] == [FinishReason.CANCELLED]
        await asyncio.to_thread(frontend.close)


def test_output_is_split_for_small_clients(serve: Serve) -> None:
    """5 MB and more come in messages of at most 3 MiB, and say the same."""
    served = serve(engine={"max_model_len": 40_000, "tokens_per_dispatch": 8192}, outbox_bytes=1 << 30)
    tokens = 20_000
    batch = pa.record_batch({"prompt": ["hi"] * 2, "max_tokens": [tokens] * 2, "logprobs": [20] * 2})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    text = ["", ""]
    total = 0
    with writer:
        writer.begin(batch.schema)
        writer.write_batch(batch)
        writer.done_writing()
        for chunk in reader:
            assert chunk.data.nbytes < 3 << 20
            total += chunk.data.nbytes
            for row in chunk.data.select(["id", "text", "error"]).to_pylist():
                assert row["error"] is None
                text[int(row["id"])] += row["text"]
    assert total > 5 << 20
    assert text == [fake_text("hi", tokens)] * 2


def test_a_slow_reader_holds_up_itself_only(serve: Serve) -> None:
    served = serve(
        engine={"tokens_per_dispatch": 64, "max_model_len": 4096, "max_num_seqs": 64},
        limits={"outbox_bytes": 64 << 10},
    )
    submitted = served.engine.submitted
    batch = pa.record_batch({"prompt": ["hi"] * 4000, "max_tokens": [500] * 4000, "logprobs": [20] * 4000})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    writer.begin(batch.schema)
    writer.write_batch(batch)
    begun = served.held_up()
    assert begun < 1000
    # Others are served meanwhile.
    other = pa.record_batch({"prompt": ["hi"], "max_tokens": [3]})
    with flight.connect(served.location) as client:
        assert joined(run(client, flight.FlightDescriptor.for_path("generate"), other), "0") == fake_text("hi", 3)
    assert len(submitted) == begun + 1
    # And when it reads, it goes on where it was, with nothing lost.
    rows = 0
    while len(submitted) == begun + 1:
        for row in reader.read_chunk().data.select(["id", "finish_reason"]).to_pylist():
            rows += row["finish_reason"] == "length"
    assert rows > 0
    reader.cancel()
    wait_for(lambda: served.frontend.live == 0)


def test_a_client_that_neither_reads_nor_lets_up_is_told(serve: Serve) -> None:
    served = serve(
        engine={"tokens_per_dispatch": 64, "max_model_len": 4096, "max_num_seqs": 64},
        limits={"outbox_bytes": 64 << 10, "waiting_rows": 100, "stall_s": 0.4},
    )
    batch = pa.record_batch({"prompt": ["hi"], "max_tokens": [2000], "logprobs": [5]})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    writer.begin(batch.schema)
    # Far more than fits between the two: the server must take it before it is heard.
    for _ in range(20_000):
        writer.write_batch(batch)
    writer.done_writing()
    with pytest.raises(flight.FlightError) as caught:
        reader.read_all()
    assert json.loads(caught.value.extra_info)["code"] == "JS-LIM-03"
    wait_for(lambda: served.frontend.live == 0)
    assert len(served.engine.submitted) < 1000


def test_a_bad_batch_is_told_to_a_client_that_writes_all_before_it_reads(serve: Serve) -> None:
    served = serve(engine={"tokens_per_dispatch": 64, "max_model_len": 4096, "max_num_seqs": 64})
    good = pa.record_batch({"prompt": ["hi"] * 2000, "max_tokens": [400] * 2000, "logprobs": [20] * 2000})
    bad = pa.record_batch({"prompt": ["hi"] * 70_000, "max_tokens": [1] * 70_000, "logprobs": [0] * 70_000})
    writer, reader = served.client.do_exchange(flight.FlightDescriptor.for_path("generate"))
    writer.begin(good.schema)
    writer.write_batch(good)
    served.held_up()
    writer.write_batch(bad)
    with contextlib.suppress(flight.FlightError):
        for _ in range(100):
            writer.write_batch(good)
        writer.done_writing()
    with pytest.raises(flight.FlightError) as caught:
        reader.read_all()
    assert json.loads(caught.value.extra_info)["code"] == "JS-LIM-01"
    assert len(served.engine.submitted) < 2000
