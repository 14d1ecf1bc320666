"""BERT against transformers, text by text; and the contract of encoders."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jserve.checkpoints.hf.folder import open_hf
from jserve.engine.encoder.program import attention
from jserve.errors import UnsupportedModel
from jserve.models.bert import BertConfig, BertLayer
from jserve.models.encoder_contract import EncoderStep, run_encoder, trace_encoder
from jserve.models.pooling import Pooling, pool
from jserve.testing.models import TINY_BERT, tiny_bert

TINY = Path(__file__).parent.parent / "oracle" / "data" / "tiny_bert"
EXPECTED = np.load(TINY / "expected.npz")
TEXTS = len(EXPECTED["texts"])


@pytest.fixture(scope="module")
def tiny():
    checkpoint = open_hf(TINY, source="tiny")
    graphdef, state = checkpoint.abstract("float32")
    return graphdef, checkpoint.restore(state)


def hidden_states(graphdef, params, ids):
    valid = jnp.ones((1, len(ids)), bool)
    step = EncoderStep(
        positions=jnp.arange(len(ids), dtype=jnp.int32), valid=valid[0], answer=lambda query: attention(query, valid)
    )
    return run_encoder(nnx.merge(graphdef, params), jnp.asarray(ids, jnp.int32), step)


@pytest.mark.parametrize("i", range(TEXTS))
def test_hidden_states_are_those_of_transformers(tiny, i):
    hidden = hidden_states(*tiny, EXPECTED[f"ids_{i}"])
    np.testing.assert_allclose(hidden, EXPECTED[f"hidden_{i}"], atol=1e-5)


@pytest.mark.parametrize("i", range(TEXTS))
def test_pooling(i):
    hidden = jnp.asarray(EXPECTED[f"hidden_{i}"])
    # Two rows of padding behind, which hold what no padding should.
    x = jnp.concatenate([hidden, jnp.full((2, hidden.shape[1]), jnp.nan)])[None]
    valid = (jnp.arange(x.shape[1]) < len(hidden))[None]
    mean = pool(x, valid, Pooling(how="mean", normalize=True))
    np.testing.assert_allclose(mean[0], EXPECTED[f"mean_{i}"], atol=1e-6)
    cls = pool(x, valid, Pooling(how="cls", normalize=False))
    np.testing.assert_array_equal(cls[0], EXPECTED[f"cls_{i}"])


def test_the_width_is_traced():
    assert trace_encoder(*tiny_bert()) == TINY_BERT["hidden_size"]


class Whole(nnx.Module):
    """An encoder whose layers ask as ``asked`` says."""

    def __init__(self, asked):
        self.num_layers = 2
        self.asked = asked

    def embed(self, tokens, step):
        return jnp.zeros((tokens.shape[0], 4))

    def layer(self, i, x, step):
        for number in self.asked[i]:
            step.attend(number, x[:, None], x[:, None], x[:, None], scale=1.0)
        return x


@pytest.mark.parametrize("asked", [((0,), ()), ((0, 0), (1,)), ((1,), (0,)), ((), ())])
def test_a_layer_asks_once_with_its_own_number(asked):
    with pytest.raises(UnsupportedModel, match="exactly once, with its own number"):
        trace_encoder(*nnx.split(Whole(asked)))


def test_what_is_absent_is_named():
    class Nothing(nnx.Module):
        pass

    with pytest.raises(UnsupportedModel, match="Nothing has no num_layers, embed, layer"):
        trace_encoder(*nnx.split(Nothing()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 5}, "hidden_size 32 is not a multiple of num_heads 5"),
        ({"max_position": 0}, "max_position is 0"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0"),
    ],
)
def test_configs_that_cannot_be(change, words):
    with pytest.raises(UnsupportedModel, match=words):
        BertConfig(**{**TINY_BERT, **change})


def test_bfloat16_stays_near(tiny):
    graphdef, params = tiny
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    hidden = hidden_states(graphdef, low, EXPECTED["ids_2"])
    assert hidden.dtype == jnp.bfloat16
    vector, expected = np.asarray(hidden, np.float32).mean(0), EXPECTED["hidden_2"].mean(0)
    assert vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected) > 0.999


def test_biases_are_added_before_a_product_is_rounded():
    """In bfloat16. Multiples of powers of 2, so that every order of summing gives the same float32."""
    D, H = TINY_BERT["hidden_size"], TINY_BERT["num_heads"]
    layer = BertLayer(BertConfig(**TINY_BERT), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-8, 9, (5, D)) / 4, jnp.bfloat16)
    for name in "qkv":
        getattr(layer, name)[...] = jnp.asarray(rng.integers(-8, 9, (H, D // H, D)) / 4, jnp.bfloat16)
        getattr(layer, f"{name}_bias")[...] = jnp.asarray(rng.integers(-255, 256, (H, D // H)) / 16, jnp.bfloat16)
    asked = []

    def answer(query):
        asked.append(query)
        return query.v

    layer(0, x, EncoderStep(positions=jnp.arange(5, dtype=jnp.int32), valid=jnp.ones(5, bool), answer=answer))
    for name in "qkv":
        w, bias = (np.asarray(getattr(layer, part)[...], np.float32) for part in (name, f"{name}_bias"))
        wanted = jnp.asarray(np.einsum("td,hkd->thk", np.asarray(x, np.float32), w) + bias, jnp.bfloat16)
        np.testing.assert_array_equal(getattr(asked[0], name), wanted, err_msg=name)
