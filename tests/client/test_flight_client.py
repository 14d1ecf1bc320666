"""FlightClient against a real server on the fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from jserve.client import FlightClient
from jserve.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    JserveError,
    MessageTooLarge,
    NotFound,
    PromptTooLong,
    QueueFull,
    Unreachable,
    Unsupported,
)
from jserve.request import FinishReason, SamplingParams, ServedModel, TokenLogprob
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import FakeServer, fake_server
from jserve.testing.fake_tokens import fake_logprob, fake_text
from jserve.testing.waiting import wait_for
from jserve.wire.columns import OUTPUT, prompts_to_batch


@pytest.fixture
def served() -> Iterator[FakeServer]:
    engine = FakeEngine(token_delay_s=0.005)
    with fake_server(engine, grpc_address="", flight_address="127.0.0.1:0", max_message_mb=2) as server:
        yield server


@pytest.fixture
def client(served: FakeServer) -> Iterator[FlightClient]:
    with FlightClient(served.addresses.flight or "") as client:
        yield client


def test_generate_streams_deltas(client: FlightClient) -> None:
    params = SamplingParams(max_tokens=6, logprobs=1, seed=2**63, stop=("never",))
    deltas = list(client.generate("hi", params, request_id="mine"))
    assert len(deltas) > 1
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert "".join(delta.text for delta in deltas) == fake_text("hi", 6)
    ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert logprobs == [fake_logprob(token, i, top=1, vocab_size=258) for i, token in enumerate(ids)]
    assert isinstance(logprobs[0], TokenLogprob)
    last = deltas[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (2, 6)
    assert last.timings is not None
    assert [delta.usage for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_every_kind_of_prompt(client: FlightClient, served: FakeServer) -> None:
    params = SamplingParams(max_tokens=1)
    for prompt in ("hi", [104, 105], [{"role": "user", "content": "hi"}]):
        list(client.generate(prompt, params))
    chat = (256, *b"user: hi\nassistant:")
    assert [request.prompt_ids for request in served.engine.submitted] == [(104, 105), (104, 105), chat]


def test_every_sampling_field_arrives(client: FlightClient, served: FakeServer) -> None:
    params = SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=0,
        n=2,
        max_tokens=4,
        min_tokens=2,
        stop=("a", "b"),
        include_stop=True,
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=0,
    )
    list(client.generate("hi", params))
    list(client.exchange([prompts_to_batch([("x", "hi", SamplingParams())])], params=params))
    by_row, by_default = (request.sampling for request in served.engine.submitted)
    assert by_row == by_default
    assert (by_row.temperature, by_row.top_p, by_row.top_k, by_row.min_p, by_row.seed) == (0.0, 0.5, 3, 0.25, 0)
    assert (by_row.n, by_row.max_tokens, by_row.min_tokens, by_row.logprobs) == (2, 4, 2, 0)
    assert by_row.stop_ids == (1, 2)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("x" * 600, SamplingParams(), PromptTooLong),
        ("hi", SamplingParams(temperature=-1.0), InvalidRequest),
        ("hi", SamplingParams(seed=-1), InvalidRequest),
        ([1, 2**40], SamplingParams(), InvalidRequest),
        ([{"role": "nobody", "content": "x"}], SamplingParams(), InvalidRequest),
        ([{"role": "user", "content": "x", "name": "y"}], SamplingParams(), InvalidRequest),
        ("x" * (3 << 20), SamplingParams(), MessageTooLarge),
        ("x" * (6 << 20), SamplingParams(), MessageTooLarge),
    ],
)
def test_errors_come_back_as_their_classes(
    client: FlightClient, prompt: str, params: SamplingParams, error: type[JserveError]
) -> None:
    with pytest.raises(error):
        list(client.generate(prompt, params))


def test_an_unknown_model(client: FlightClient) -> None:
    with pytest.raises(NotFound, match="model 'other' is not served here; served is 'fake'"):
        list(client.generate("hi", model="other"))
    with pytest.raises(NotFound):
        client.schema(model="other")


def test_a_deadline(client: FlightClient, served: FakeServer) -> None:
    served.engine.token_delay_s = 0.05
    with pytest.raises(DeadlineExceeded):
        list(client.generate("hi", timeout=0.3))
    wait_for(lambda: served.engine.live == 0)


def test_no_server() -> None:
    with FlightClient("127.0.0.1:1") as client, pytest.raises(Unreachable, match="no jserve server answers at"):
        client.health(timeout=5)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "grpc://", "grpc+tls://x:1", "127.0.0.1"])
def test_a_bad_address(address: str) -> None:
    with pytest.raises(ConfigError, match="give host:port"):
        FlightClient(address)


@pytest.mark.parametrize("size", [0, 2048])
def test_a_message_size_that_grpc_cannot_have(size: int) -> None:
    with pytest.raises(ConfigError, match=f"max_message_mb is {size}; gRPC allows 1 to 2047"):
        FlightClient(max_message_mb=size)


def test_leaving_the_iteration_cancels(client: FlightClient, served: FakeServer) -> None:
    deltas = client.generate("hi")
    next(deltas)
    assert served.engine.live == 1
    deltas.close()
    wait_for(lambda: served.engine.live == 0)


def test_an_exchange_of_many_batches(client: FlightClient, served: FakeServer) -> None:
    served.engine.token_delay_s = 0.0
    batches = (
        prompts_to_batch([(f"{i}-{j}", f"p{i}", SamplingParams(max_tokens=2)) for j in range(3)]) for i in range(50)
    )
    texts: dict[str, str] = {}
    for answer in client.exchange(batches):
        assert answer.schema == OUTPUT
        for row in answer.select(["id", "text"]).to_pylist():
            texts[row["id"]] = texts.get(row["id"], "") + row["text"]
    assert texts == {f"{i}-{j}": fake_text(f"p{i}", 2) for i in range(50) for j in range(3)}


def test_an_exchange_that_is_left_stops_reading_its_source(client: FlightClient, served: FakeServer) -> None:
    given = 0

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal given
        while True:
            given += 1
            yield prompts_to_batch([(str(given), "hi", SamplingParams(max_tokens=100))])

    answers = client.exchange(source())
    next(answers)
    answers.close()
    wait_for(lambda: served.frontend.live == 0)
    seen = given
    time.sleep(0.05)
    assert given == seen


def test_an_error_of_the_source_is_raised_after_the_answers(client: FlightClient) -> None:
    def source() -> Iterator[pa.RecordBatch]:
        yield prompts_to_batch([("a", "hi", SamplingParams(max_tokens=1))])
        raise LookupError("the file is gone")

    answers = client.exchange(source())
    assert next(answers).column("id").to_pylist() == ["a"]
    with pytest.raises(LookupError, match="the file is gone"):
        list(answers)


def test_an_exchange_without_batches(client: FlightClient) -> None:
    assert list(client.exchange([])) == []


def test_a_table(client: FlightClient) -> None:
    table = pa.table({"id": ["x", "y"], "prompt": ["hi", None], "note": [1, 2]})
    results = client.table(table, params=SamplingParams(max_tokens=3))
    assert results.schema == OUTPUT
    assert results.column("text").to_pylist() == [fake_text("hi", 3), None]
    assert results.column("error_code").to_pylist() == [None, "JS-REQ-01"]


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (pa.table({"text": ["hi"]}), InvalidRequest),
        (pa.table({"prompt": [1.5]}), Unsupported),
        (pa.table({"prompt": ["x" * 1000] * 3000}), MessageTooLarge),
    ],
    ids=["no prompts", "numbers", "too large"],
)
def test_a_table_that_is_refused(client: FlightClient, table: pa.Table, error: type[JserveError]) -> None:
    with pytest.raises(error):
        client.table(table)


def test_a_full_queue_says_when_to_try_again() -> None:
    with (
        fake_server(FakeEngine(max_num_seqs=1, max_queue=1), grpc_address="", flight_address="127.0.0.1:0") as served,
        FlightClient(served.addresses.flight or "") as client,
    ):
        served.engine.pause()
        first = client.generate("a")
        waiting = prompts_to_batch([("w", "hi", SamplingParams(max_tokens=1))])
        holder = threading.Thread(target=lambda: list(first))
        holder.start()
        wait_for(lambda: served.engine.live == 1)
        with pytest.raises(QueueFull) as caught:
            list(client.exchange([waiting]))
        assert caught.value.retry_after_s == 1.0
        served.engine.resume()
        holder.join()


def test_what_is_served(client: FlightClient) -> None:
    assert client.health() == "serving"
    assert client.schema() == OUTPUT
    (model,) = client.models()
    assert isinstance(model, ServedModel)
    assert (model.name, model.max_model_len) == ("fake", 512)
