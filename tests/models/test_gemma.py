"""What is Gemma's own: the scale of embeddings, zero-centred norms, capped logits, two rotary bases."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jserve.errors import UnsupportedModel
from jserve.models.contract import Step
from jserve.models.gemma import Gemma, GemmaConfig
from jserve.models.naive import naive_logits
from jserve.models.norms import rms_norm_plus_one
from jserve.models.rope import RopeScaling

CONFIG = GemmaConfig(
    vocab_size=32,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    windows=(4, None),
    query_pre_attn_scalar=16.0,
    max_position=128,
)
STEP = Step(positions=jnp.zeros(3, jnp.int32), valid=jnp.ones(3, bool), answer=lambda query: query.q)


def model(config=CONFIG, dtype=jnp.float32):
    return Gemma(config, dtype=dtype, rngs=nnx.Rngs(0))


def logits(config, tokens):
    graphdef, state = nnx.split(model(config))
    return np.asarray(naive_logits(graphdef, nnx.to_pure_dict(state), tokens))


def test_the_scale_of_embeddings_is_rounded_to_their_dtype():
    """The root of 48 is 6.928; in bfloat16 it is 6.9375, and so it was in training."""
    tokens = jnp.asarray([1, 2, 3], jnp.int32)
    wide, narrow = model(), model(dtype=jnp.bfloat16)
    np.testing.assert_allclose(wide.embed(tokens, STEP), wide.token_embedding.weight[...][tokens] * 48**0.5, rtol=1e-6)
    got = narrow.embed(tokens, STEP)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, narrow.token_embedding.weight[...][tokens] * jnp.bfloat16(6.9375))


def test_norms_add_one_to_their_weights_in_float32():
    """1 + 1/512 is no bfloat16."""
    x, weight = jnp.full((1, 4), 3.0, jnp.float32), jnp.full(4, 1 / 512, jnp.bfloat16)
    np.testing.assert_allclose(rms_norm_plus_one(x, weight, 1e-6), 1 + 1 / 512, rtol=1e-6)


def test_logits_stay_within_their_cap():
    free = logits(CONFIG, list(range(20)))
    capped = logits(dataclasses.replace(CONFIG, final_soft_cap=0.5), list(range(20)))
    np.testing.assert_allclose(capped, 0.5 * np.tanh(free / 0.5), rtol=1e-5, atol=1e-6)
    assert not np.allclose(free, logits(dataclasses.replace(CONFIG, attn_soft_cap=0.1), list(range(20))), atol=1e-3)


def test_layers_with_a_window_have_their_own_rotary_base_and_no_scaling():
    tokens = list(range(20))
    two = dataclasses.replace(CONFIG, rope_theta=1e6, local_rope_theta=1e4)
    local_only = dataclasses.replace(two, windows=(4, 4))
    assert not np.allclose(logits(two, tokens), logits(dataclasses.replace(two, local_rope_theta=1e6), tokens))
    np.testing.assert_array_equal(
        logits(local_only, tokens),
        logits(dataclasses.replace(local_only, rope_scaling=RopeScaling(kind="linear", factor=8.0)), tokens),
    )


def test_config_survives_json_and_is_checked():
    scaled = dataclasses.replace(CONFIG, rope_scaling=RopeScaling(kind="dynamic", factor=2.0))
    assert GemmaConfig.from_dict(json.loads(json.dumps(scaled.to_dict()))) == scaled
    assert scaled.for_length(99).rope_scaling.length == 99
    assert CONFIG.for_length(99) == CONFIG
    with pytest.raises(UnsupportedModel, match="1 attention windows are given for 2 layers; one each is wanted"):
        dataclasses.replace(CONFIG, windows=(4,))
    with pytest.raises(UnsupportedModel, match=r"attention windows of \[0\] tokens"):
        dataclasses.replace(CONFIG, windows=(0, None))
    with pytest.raises(UnsupportedModel, match=r"final_soft_cap is -1\.0; allowed are"):
        dataclasses.replace(CONFIG, final_soft_cap=-1.0)
