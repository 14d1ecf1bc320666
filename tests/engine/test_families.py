"""Every family through the paged engine, in chunks, against what transformers says (tests/oracle/make_families.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CASES, FAMILY_NAMES, lengths, read_tiny
from harness import make_engine, request, run

from jserve import LLM, SamplingParams
from jserve.checkpoints.hf.folder import open_hf
from jserve.models.naive import naive_logits

QUICK = ["gemma3", "gpt2", "mixtral", "phi3_longrope", "qwen2_window"]
"""Between them every module, and everything that a family asks of attention and of rotation."""


def verified(case):
    """The case, with its row for the table in docs/models.md."""
    how = f"random weights: log-probabilities and greedy ids of transformers at {lengths(read_tiny(case).prompts)}"
    return pytest.param(case, marks=pytest.mark.verifies(FAMILY_NAMES[case], "safetensors", how))


class Oracle:
    """What transformers says of one tiny model, and that model as ours, out of a folder as it saves them."""

    def __init__(self, case, folder):
        tiny = read_tiny(case)
        checkpoint = open_hf(tiny.write(folder / case), source=case)
        self.config, self.prompts = checkpoint.config, tiny.prompts
        self.graphdef, state = checkpoint.abstract(jnp.float32, length=tiny.length)
        self.params = checkpoint.restore(state)


def check_through_the_engine(oracle, prompts, store):
    """In chunks of 31 tokens."""
    engine = make_engine(
        store,
        model=(oracle.graphdef, oracle.params),
        max_len=oracle.config.max_position,
        max_num_seqs=1,
        max_num_tokens=32,
        num_pages=256,
        page_size=16,
    )
    try:
        for prompt in prompts:
            (heard,) = run(engine, request(len(prompt.ids), prompt.ids, len(prompt.greedy), logprobs=5))
            assert heard.tokens[0] == prompt.greedy, len(prompt.ids)
            want = np.asarray(jax.nn.log_softmax(prompt.logits, axis=-1))
            for given, row in zip(heard.logprobs[0][::4], want, strict=True):
                assert given.logprob == pytest.approx(row[given.token_id], abs=1e-4)
                for token, logprob in given.top:
                    assert logprob == pytest.approx(row[token], abs=1e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("case", QUICK)
def test_greedy_ids_and_logprobs_equal_transformers(case, store, tmp_path):
    """Prompts of 8 and 500 tokens."""
    oracle = Oracle(case, tmp_path)
    check_through_the_engine(oracle, oracle.prompts[:2], store)


@pytest.mark.slow
@pytest.mark.parametrize("case", [verified(case) for case in CASES])
def test_greedy_ids_and_logprobs_equal_transformers_at_any_length(case, store, tmp_path):
    """Prompts of 8, 500 and 4,000 tokens, or the model's limit."""
    oracle = Oracle(case, tmp_path)
    check_through_the_engine(oracle, oracle.prompts, store)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    """The whole row, also where two tokens are equally far from being chosen."""
    oracle = Oracle(case, tmp_path)
    for prompt in oracle.prompts[:2]:
        got = naive_logits(oracle.graphdef, oracle.params, prompt.ids + prompt.greedy[:-1])[-len(prompt.greedy) :: 4]
        np.testing.assert_allclose(got, prompt.logits, rtol=0, atol=1e-4, err_msg=f"{len(prompt.ids)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "other"), [("llama_dynamic", 64), ("phi3_longrope", 64), ("phi3_longrope_short", 512)]
)
def test_a_scaling_is_chosen_once_by_max_model_len(case, other, tmp_path):
    """From the settings of a server on, for prompts of any length. With another limit the ids are others."""
    tiny = read_tiny(case)
    folder = str(tiny.write(tmp_path / case))
    settings = {"dtype": "float32", "max_num_seqs": 1, "max_num_tokens": 32, "program_store": False}
    with LLM(folder, max_model_len=tiny.length, **settings) as llm:
        for prompt in tiny.prompts:
            (out,) = llm.generate(prompt.ids, SamplingParams(temperature=0, max_tokens=len(prompt.greedy)))
            assert out.token_ids == prompt.greedy, len(prompt.ids)
    with LLM(folder, max_model_len=other, **settings) as llm:
        prompt = tiny.prompts[0]
        (out,) = llm.generate(prompt.ids, SamplingParams(temperature=0, max_tokens=len(prompt.greedy)))
        assert out.token_ids != prompt.greedy
