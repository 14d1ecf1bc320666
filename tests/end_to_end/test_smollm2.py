"""The real 135M model through every door, beside what Hugging Face transformers made of the same weights."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from jserve import LLM, SamplingParams
from jserve.client import Client, FlightClient
from jserve.config import DEFAULT_MODEL, ServeConfig
from jserve.engine.compiles import compilations
from jserve.errors import MeshError
from jserve.load import load
from jserve.serving.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CASES = json.loads((Path(__file__).parents[1] / "oracle/data/smollm2_greedy.json").read_text())["cases"]
SETTINGS = {"model": DEFAULT_MODEL, "dtype": "float32", "max_num_seqs": 8, "max_num_tokens": 64}
NEAR = 1e-4
"""Where the two best scores differ by less, either is right, and what follows may differ."""


def greedy(case):
    return SamplingParams(temperature=0, max_tokens=len(case["output_ids"]))


def prompt_of(case):
    prompt = case["prompt"]
    return [dict(turn) for turn in prompt] if isinstance(prompt[0], dict) else prompt


def check(case, token_ids):
    """Equal to the oracle's ids, but for what follows a near tie."""
    for i, (got, want) in enumerate(zip(token_ids, case["output_ids"], strict=True)):
        if got != want:
            assert case["margins"][i] < NEAR, f"{case['name']}: token {i} is {got}, not {want}"
            return


@pytest.fixture(scope="module")
def loaded():
    model = load(ServeConfig(**SETTINGS))
    yield model
    model.close()


@pytest.fixture(scope="module")
def doors(loaded):
    config = ServeConfig(**SETTINGS, grpc_address="127.0.0.1:0", flight_address="127.0.0.1:0", metrics_address="")
    server = Server(config, loaded.frontend, loaded.engine, loaded.metrics)
    addresses = server.start()
    yield addresses
    server.stop()


def gather(deltas, n=1):
    tokens = [[] for _ in range(n)]
    for delta in deltas:
        assert delta.error is None or not delta.error
        tokens[delta.index].extend(delta.token_ids)
    return tokens[0] if n == 1 else tokens


def run_python(loaded, cases):
    streams = [loaded.frontend.open_sync(prompt_of(case), greedy(case)) for case in cases]
    return [gather(delta for deltas in stream for delta in deltas) for stream in streams]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_alone(loaded, case):
    assert loaded.frontend.tokenize_sync(prompt_of(case)) == case["prompt_ids"]
    check(case, run_python(loaded, [case])[0])


@pytest.mark.parametrize("size", [3, 8])
def test_in_batches(loaded, size):
    for start in range(0, len(CASES), size):
        batch = CASES[start : start + size]
        for case, tokens in zip(batch, run_python(loaded, batch), strict=True):
            check(case, tokens)


def test_over_grpc(doors):
    with Client(doors.grpc) as client:
        for case in CASES:
            check(case, gather(client.generate(prompt_of(case), greedy(case))))


def test_over_flight(doors):
    with FlightClient(doors.flight) as client:
        for case in CASES:
            check(case, gather(client.generate(prompt_of(case), greedy(case))))
        raw = [case for case in CASES if isinstance(case["prompt"], str)]
        table = pa.table(
            {
                "prompt": [case["prompt"] for case in raw],
                "max_tokens": [len(case["output_ids"]) for case in raw],
                "temperature": [0.0] * len(raw),
            }
        )
        for case, row in zip(raw, client.table(table).to_pylist(), strict=True):
            check(case, row["token_ids"])


def test_a_seeded_draw_is_the_same_with_seven_neighbours(loaded):
    def ask(prompt, seed):
        return loaded.frontend.open_sync(prompt, SamplingParams(temperature=1, top_p=0.9, seed=seed, max_tokens=32))

    def tokens(stream):
        return gather(delta for deltas in stream for delta in deltas)

    solo = tokens(ask("Once upon a time", 7))
    streams = [ask(case["prompt_ids"][:300], i) for i, case in enumerate(CASES[:7])]
    crowd = tokens(ask("Once upon a time", 7))
    for stream in streams:
        tokens(stream)
    assert crowd == solo


def test_64_streams_at_once_equal_solo_and_leave_nothing(loaded, doors):
    cases = [case for case in CASES if len(case["prompt_ids"]) < 100]
    jobs = [cases[i % len(cases)] for i in range(64)]
    before = compilations.count
    with Client(doors.grpc) as client, ThreadPoolExecutor(64) as pool:
        gate = threading.Barrier(64)

        def ask(case):
            gate.wait()
            return gather(client.generate(prompt_of(case), greedy(case)))

        for case, tokens in zip(jobs, pool.map(ask, jobs), strict=True):
            check(case, tokens)
    stats = loaded.engine.stats()
    assert (stats.pages_in_use, stats.running, stats.waiting) == (0, 0, 0)
    assert compilations.count == before
    assert stats.compilations == 0


def test_chunked_at_16():
    with LLM(**{**SETTINGS, "max_num_seqs": 4, "max_num_tokens": 16}) as llm:
        cases = [case for case in CASES if len(case["prompt_ids"]) < 600]
        for case, out in zip(
            cases, llm.generate([prompt_of(c) for c in cases], [greedy(c) for c in cases]), strict=True
        ):
            check(case, out.token_ids)


def test_on_three_devices_and_not_on_two():
    cases = [case for case in CASES if len(case["prompt_ids"]) < 100][:4]
    with LLM(**{**SETTINGS, "max_num_seqs": 2, "max_num_tokens": 32}, mesh="tensor=3") as llm:
        for case, out in zip(
            cases, llm.generate([prompt_of(c) for c in cases], [greedy(c) for c in cases]), strict=True
        ):
            check(case, out.token_ids)
    with pytest.raises(MeshError, match=r"tensor=2 does not divide.*heads 9.*kv_heads 3"):
        LLM(**SETTINGS, mesh="tensor=2")
