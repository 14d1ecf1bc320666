"""`jserve generate` and `jserve bench` against real doors on a fake engine."""

import io
import json

import pytest

from jserve.cli.main import main
from jserve.client import Client
from jserve.request import SamplingParams
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def server():
    with fake_server(FakeEngine(), flight_address="127.0.0.1:0") as server:
        yield server


@pytest.fixture(params=["grpc", "flight"])
def door(server, request):
    """The options that reach one door."""
    address = server.grpc if request.param == "grpc" else server.addresses.flight
    return ["--address", address, *(["--flight"] if request.param == "flight" else [])]


def _expected(server, prompt):
    with Client(server.grpc) as client:
        deltas = list(client.generate(prompt, GREEDY))
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]


def test_a_prompt_is_one_user_turn(server, door, capsys):
    text, _ = _expected(server, [{"role": "user", "content": "hello"}])
    assert main(["generate", *door, "--temperature", "0", "--max-tokens", "12", "hello"]) == 0
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert captured.err == ""


def test_raw_is_the_text_itself(server, door, capsys):
    text, _ = _expected(server, "hello")
    assert main(["generate", *door, "--raw", "--temperature", "0", "--max-tokens", "12", "hello"]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_a_dash_reads_stdin(server, door, capsys, monkeypatch):
    text, _ = _expected(server, "two\nlines\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", *door, "--raw", "--temperature", "0", "--max-tokens", "12", "-"]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_json_is_an_object_a_delta_and_a_last_one_for_the_whole(server, door, capsys):
    text, ids = _expected(server, "hello")
    assert main(["generate", *door, "--raw", "--json", "--temperature", "0", "--max-tokens", "12", "hello"]) == 0
    *deltas, whole = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert whole["token_ids"] == ids == [token for delta in deltas for token in delta["token_ids"]]
    assert whole["text"] == text == "".join(delta["text"] for delta in deltas)
    assert whole["finish_reason"] == "length"
    assert whole["usage"] == {"prompt_tokens": 5, "output_tokens": 12, "cached_tokens": 0}
    assert set(whole["timings"]) == {"queue", "ttft", "total"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["x" * 100_000], "error JS-REQ-02: "),
        (["--max-tokens", "0", "hi"], "error JS-REQ-01: max_tokens is 0"),
        (["--temperature", "-1", "hi"], "error JS-REQ-01: temperature is -1"),
        (["--seed", "-1", "hi"], "error JS-REQ-01: "),
    ],
)
def test_a_refused_request_is_one_line(door, options, message, capsys):
    assert main(["generate", *door, *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_every_sampling_option_reaches_the_engine(server, door, capsys):
    options = ["--temperature", "0.5", "--top-p", "0.75", "--top-k", "7", "--min-p", "0.0625", "--seed", "3"]
    assert main(["generate", *door, *options, "--stop", "d", "--max-tokens", "26", "hi"]) == 0
    assert "d" not in capsys.readouterr().out
    sampling = server.engine.submitted[-1].sampling
    drawn = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed, sampling.max_tokens)
    assert drawn == (0.5, 0.75, 7, 0.0625, 3, 26)


def test_the_other_door_is_told_as_such(server, capsys):
    for options in (
        ["--address", server.addresses.flight.removeprefix("grpc://")],
        ["--address", server.grpc, "--flight"],
    ):
        assert main(["generate", *options, "hi"]) == 1
        assert "answers, but not this protocol" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--flight"]])
def test_no_server_is_said_in_one_line(flags, capsys):
    assert main(["generate", "--address", "127.0.0.1:9", *flags, "hi"]) == 1
    assert capsys.readouterr().err.startswith("error JS-NET-01: no jserve server answers at ")


def test_bench_counts_every_token(server, capsys):
    arguments = ["--streams", "3", "--requests", "7", "--prompt-tokens", "9", "--output-tokens", "5", "--json"]
    assert main(["bench", "--address", server.grpc, *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["streams"]) == (7, 3)
    assert figures["output_tokens_per_s"] * figures["seconds"] == pytest.approx(35)
    assert 0 < figures["ttft_ms"]["median"] <= figures["ttft_ms"]["p99"]
