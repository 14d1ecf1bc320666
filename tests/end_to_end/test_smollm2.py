"""The real 135M model through every door, beside what Hugging Face transformers made of the same weights."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pyarrow as pa
import pytest
from greedy import check, check_all, gather, greedy, how_many, prompt_of, read_cases

from jserve import LLM, SamplingParams
from jserve.checkpoints.convert import convert
from jserve.checkpoints.open import open_checkpoint
from jserve.client import Client, FlightClient, PromptRequest
from jserve.config import DEFAULT_MODEL, ServeConfig
from jserve.engine.compiles import compilations
from jserve.errors import MeshError
from jserve.load import load
from jserve.serving.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CASES = read_cases("smollm2_greedy.json")
SETTINGS = {"model": DEFAULT_MODEL, "dtype": "float32", "max_num_seqs": 8, "max_num_tokens": 64}
HOW = "SmolLM2-135M: greedy ids of transformers"
FEWER = [case for case in CASES if case["name"] != "long_2000"]


def verified(source, cases):
    """A row for the table in docs/models.md."""
    return pytest.mark.verifies("Llama 2 and 3", source, f"{HOW}, {how_many(cases)}")


@pytest.fixture(scope="module")
def loaded():
    model = load(ServeConfig(**SETTINGS))
    yield model
    model.close()


@contextmanager
def serving(loaded):
    """The addresses of a server in front of a loaded model."""
    config = ServeConfig(**SETTINGS, grpc_address="127.0.0.1:0", flight_address="127.0.0.1:0", metrics_address="")
    server = Server(config, loaded.frontend, loaded.engine, loaded.metrics)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def doors(loaded):
    with serving(loaded) as addresses:
        yield addresses


def run_python(loaded, cases):
    streams = [loaded.frontend.open_sync(prompt_of(case), greedy(case)) for case in cases]
    return [gather(delta for deltas in stream for delta in deltas) for stream in streams]


def run_grpc(doors, cases):
    """All on one call, every request open at once."""
    tokens = {case["name"]: [] for case in cases}
    requests = [PromptRequest(request_id=c["name"], prompt=prompt_of(c), params=greedy(c)) for c in cases]
    with Client(doors.grpc) as client:
        for delta in client.generate_stream(requests, window=len(cases)):
            assert not delta.error
            tokens[delta.request_id].extend(delta.token_ids)
    return list(tokens.values())


def run_flight(doors, cases):
    """All as one table: of texts where every prompt is one, else of token ids."""
    texts = all(isinstance(case["prompt"], str) for case in cases)
    table = pa.table(
        {
            **({"prompt": [c["prompt"] for c in cases]} if texts else {"token_ids": [c["prompt_ids"] for c in cases]}),
            "max_tokens": [len(case["output_ids"]) for case in cases],
            "temperature": [0.0] * len(cases),
        }
    )
    with FlightClient(doors.flight) as client:
        rows = client.table(table).to_pylist()
    assert not any(row["error"] for row in rows)
    return [row["token_ids"] for row in rows]


@verified("GGUF", CASES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
async def test_alone(loaded, case):
    assert await loaded.frontend.tokenize(prompt_of(case)) == case["prompt_ids"]
    check(case, run_python(loaded, [case])[0])


@pytest.mark.parametrize(
    "to",
    [
        pytest.param("safetensors", marks=verified("safetensors", FEWER)),
        pytest.param("orbax", marks=verified("Orbax", FEWER)),
    ],
)
def test_converted(tmp_path, to):
    convert(DEFAULT_MODEL, tmp_path / "smollm2", to=to)
    tokenizer = open_checkpoint(str(tmp_path / "smollm2")).tokenizer
    for text in read_cases("smollm2_tokenize.json"):
        assert tokenizer.encode(text["text"], add_special=True) == text["ids"], text["text"]
    with LLM(**{**SETTINGS, "model": str(tmp_path / "smollm2")}) as llm:
        outs = llm.generate([prompt_of(case) for case in FEWER], [greedy(case) for case in FEWER])
    check_all(FEWER, [out.token_ids for out in outs])


@pytest.mark.parametrize("size", [3, 8])
def test_in_batches(loaded, size):
    for start in range(0, len(CASES), size):
        batch = CASES[start : start + size]
        check_all(batch, run_python(loaded, batch))


@pytest.mark.parametrize("size", [3, 8])
def test_a_batch_over_grpc(doors, size):
    check_all(CASES[-size:], run_grpc(doors, CASES[-size:]))


@pytest.mark.parametrize("size", [3, 8])
def test_a_batch_over_flight(doors, size):
    check_all(CASES[-size:], run_flight(doors, CASES[-size:]))


def test_over_grpc(doors):
    with Client(doors.grpc) as client:
        for case in CASES:
            check(case, gather(client.generate(prompt_of(case), greedy(case))))


def test_over_flight(doors):
    with FlightClient(doors.flight) as client:
        for case in CASES:
            check(case, gather(client.generate(prompt_of(case), greedy(case))))
    texts = [case for case in CASES if isinstance(case["prompt"], str) and len(case["prompt_ids"]) < 100]
    check_all(texts, run_flight(doors, texts))


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


def solo(loaded, name, prompt_ids, count):
    """A case for ``check`` out of what the engine answers a prompt that runs alone."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2)
    stream = loaded.frontend.open_sync(prompt_ids, params)
    entries = [entry for deltas in stream for delta in deltas for entry in delta.logprobs or ()]
    assert len(entries) == count
    return {
        "name": name,
        "prompt": prompt_ids,
        "prompt_ids": prompt_ids,
        "output_ids": [entry.token_id for entry in entries],
        "margins": [entry.top[0][1] - entry.top[1][1] for entry in entries],
    }


def test_64_streams_at_once_equal_solo_and_leave_nothing(loaded, doors):
    short = [case for case in CASES if len(case["prompt_ids"]) < 100]
    middle = next(case for case in CASES if 300 <= len(case["prompt_ids"]) < 1000)
    ids = max((case["prompt_ids"] for case in CASES), key=len)
    mixed = [middle, *(solo(loaded, f"first_{n}", ids[:n], 16) for n in (300, 700, 1000))]
    # Every eighth prompt is one of 300 to 1,000 tokens.
    jobs = [mixed[i // 8 % len(mixed)] if i % 8 == 0 else short[i % len(short)] for i in range(64)]
    before = compilations.count
    with Client(doors.grpc) as client, ThreadPoolExecutor(64) as pool:
        gate = threading.Barrier(64)

        def ask(case):
            gate.wait()
            return gather(client.generate(prompt_of(case), greedy(case)))

        check_all(jobs, pool.map(ask, jobs))
    stats = loaded.engine.stats()
    assert (stats.pages_in_use, stats.running, stats.waiting) == (0, 0, 0)
    assert compilations.count == before
    assert stats.compilations == 0


def test_chunked_at_16():
    """Everything at once through Python, then the longest, the longest chat and a few more through each door."""
    model = load(ServeConfig(**{**SETTINGS, "max_num_seqs": 4, "max_num_tokens": 16}))
    try:
        check_all(CASES, run_python(model, CASES))
        few = sorted(CASES, key=lambda case: len(case["prompt_ids"]))[-4:]
        with serving(model) as doors:
            check_all(few, run_grpc(doors, few))
            check_all(few, run_flight(doors, few))
    finally:
        model.close()


def test_on_three_devices_and_not_on_two_or_four():
    with LLM(**SETTINGS, mesh="tensor=3") as llm:
        outs = llm.generate([prompt_of(case) for case in CASES], [greedy(case) for case in CASES])
        check_all(CASES, [out.token_ids for out in outs])
    for size in (2, 4):
        with pytest.raises(MeshError, match=rf"tensor={size} does not divide.*heads 9.*kv_heads 3.*tensor may be 1, 3"):
            LLM(**SETTINGS, mesh=f"tensor={size}")
