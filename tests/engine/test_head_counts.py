"""More devices than, or not a divisor of, a model's heads: equal to one device, or refused with the numbers."""

import pytest
from flax import nnx
from harness import make_engine, request, run

from jserve.models.gemma import Gemma, GemmaConfig
from jserve.testing.models import tiny_llama

NINE = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 8, "intermediate_size": 48, "vocab_size": 258}
"""The heads of SmolLM2-135M."""
ONE = GemmaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=8,
    windows=(16, None),
    query_pre_attn_scalar=8.0,
    qk_norm=True,
    max_position=128,
)
"""The heads of Gemma 3 270M."""
PROMPTS = [[3, 1, 4, 1, 5], [9] * 40, [2, 7, 1, 8] * 5]


def greedy(store, mesh, model):
    engine = make_engine(store, mesh=mesh, model=model)
    try:
        return [heard.tokens[0] for heard in run(engine, *(request(i, ids) for i, ids in enumerate(PROMPTS)))]
    finally:
        engine.close()


@pytest.mark.slow
def test_nine_heads_that_share_three(store):
    model = tiny_llama(**NINE)
    assert greedy(store, "tensor=3", model) == greedy(store, "", model)
    for size in (2, 4):
        with pytest.raises(ValueError, match=rf"tensor={size} does not divide heads 9 .*, kv_heads 3 .*may be 1, 3"):
            make_engine(store, mesh=f"tensor={size}", model=model)


def test_heads_that_share_one(store):
    graphdef, state = nnx.split(Gemma(ONE, dtype="float32", rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"tensor=2 does not divide kv_heads 1 \(such as .*\); tensor may be 1$"):
        make_engine(store, mesh="tensor=2", model=(graphdef, nnx.to_pure_dict(state)))
