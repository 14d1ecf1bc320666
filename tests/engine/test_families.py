"""Every family through the paged engine, in chunks, against what transformers says (tests/oracle/make_families.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_engine, request, run

from jserve.checkpoints.hf.families import HF_FAMILIES, hf_family
from jserve.checkpoints.key_map import plan_leaves
from jserve.checkpoints.lazy import LazyArray
from jserve.checkpoints.tree import flatten, unflatten_like
from jserve.models.naive import naive_logits
from jserve.models.registry import build_abstract, family
from jserve.testing.weights import random_weights

DATA = Path(__file__).parent.parent / "oracle" / "data" / "families"
LOGITS = np.load(DATA / "logits.npz")
CASES = sorted(path.stem for path in DATA.glob("*.json"))
QUICK = ["gemma3", "gpt2", "mixtral", "phi3_longrope", "qwen2_window"]
"""Between them every module, and everything that a family asks of attention and of rotation."""


def verified(case):
    """The case, with its row for the table in docs/models.md."""
    model_type = json.loads((DATA / f"{case}.json").read_text())["config"]["model_type"]
    how = "tiny random models: greedy ids and logits of transformers at 8, 500 and 4,000 tokens or the model's limit"
    row = pytest.mark.verifies(HF_FAMILIES[model_type].family, "Hugging Face tensors and config.json", how)
    return pytest.param(case, marks=row)


class Oracle:
    """What transformers says of one tiny model, and that model as ours."""

    def __init__(self, case):
        found = json.loads((DATA / f"{case}.json").read_text())
        kind = hf_family(found["config"])
        self.config = kind.config(found["config"])
        config = self.config.for_length(found["length"] or self.config.max_position)
        self.graphdef, state = build_abstract(family(kind.family), config, jnp.float32)
        shapes = {name: tuple(shape) for name, shape in found["shapes"].items()}
        weights = random_weights(shapes, found["seed"], kind=found["config"]["model_type"])
        leaves = plan_leaves(
            kind.key_map,
            {n: LazyArray.whole(w.shape, w.dtype, lambda w=w: w) for n, w in weights.items()},
            {path: tuple(leaf.shape) for path, leaf in flatten(state).items()},
            where=case,
        )
        values = {path: jnp.asarray(leaf.read()) for path, leaf in leaves.items()}
        self.params = unflatten_like(state, values)
        self.prompts = [
            (
                np.random.default_rng([found["seed"], one["length"]]).integers(0, 256, one["length"]).tolist(),
                one["greedy"],
                LOGITS[f"{case}/{one['length']}"],
            )
            for one in found["prompts"]
        ]


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
        for prompt, greedy, logits in prompts:
            (heard,) = run(engine, request(len(prompt), prompt, len(greedy), logprobs=5))
            assert heard.tokens[0] == greedy, len(prompt)
            want = np.asarray(jax.nn.log_softmax(logits, axis=-1))
            for given, row in zip(heard.logprobs[0][::4], want, strict=True):
                assert given.logprob == pytest.approx(row[given.token_id], abs=1e-4)
                for token, logprob in given.top:
                    assert logprob == pytest.approx(row[token], abs=1e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("case", QUICK)
def test_greedy_ids_and_logprobs_equal_transformers(case, store):
    """Prompts of 8 and 500 tokens."""
    oracle = Oracle(case)
    check_through_the_engine(oracle, oracle.prompts[:2], store)


@pytest.mark.slow
@pytest.mark.parametrize("case", [verified(case) for case in CASES])
def test_greedy_ids_and_logprobs_equal_transformers_at_any_length(case, store):
    """Prompts of 8, 500 and 4,000 tokens, or the model's limit."""
    oracle = Oracle(case)
    check_through_the_engine(oracle, oracle.prompts, store)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """The whole row, also where two tokens are equally far from being chosen."""
    oracle = Oracle(case)
    for prompt, greedy, logits in oracle.prompts[:2]:
        got = naive_logits(oracle.graphdef, oracle.params, prompt + greedy[:-1])[-len(greedy) :: 4]
        np.testing.assert_allclose(got, logits, rtol=0, atol=1e-4, err_msg=f"{len(prompt)}")
