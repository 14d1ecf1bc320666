"""The Llama family against a forward pass written in numpy, float64."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jserve.errors import UnsupportedModel
from jserve.models.contract import LayerCache, trace_layer_caches
from jserve.models.llama import LlamaConfig
from jserve.models.naive import naive_generate, naive_logits
from jserve.models.registry import build_abstract, family
from jserve.models.rope import RopeScaling
from jserve.testing.models import TINY_LLAMA, tiny_llama

SCALING = RopeScaling(kind="llama3", factor=8.0, original_max_position=32)


def numpy_llama(config, params, tokens):
    p = jax.tree.map(lambda a: np.asarray(a.astype(jnp.float32)).astype(np.float64), params)
    n, half = len(tokens), config.head_dim // 2

    def norm(x, w):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * w

    frequencies = 1.0 / config.rope_theta ** (np.arange(half) * 2 / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        ratio = scaling.original_max_position / (2 * np.pi / frequencies)
        smooth = np.clip((ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
        frequencies = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    turn = np.exp(1j * np.arange(n)[:, None] * frequencies)[:, None]

    def rope(x):
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = p["token_embedding"]["weight"][tokens]
    for layer in p["layers"].values():
        h = norm(x, layer["attn_norm"])
        q, k, v = (np.einsum("td,hed->the", h, layer[name]) for name in "qkv")
        q, k = rope(q), rope(k)
        seen = np.zeros_like(q)
        for head in range(config.num_heads):
            kv = head // (config.num_heads // config.num_kv_heads)
            scores = q[:, head] @ k[:, kv].T / np.sqrt(config.head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            seen[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
        x = x + np.einsum("the,dhe->td", seen, layer["o"])
        h = norm(x, layer["mlp_norm"])
        gate = h @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"].T)) @ layer["down"].T
    head = p["token_embedding"]["weight"] if config.tie_embeddings else p["head"]
    return norm(x, p["norm"]) @ head.T


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_embeddings": True},
        {"num_kv_heads": 1, "rms_norm_eps": 1e-2},
        {"num_kv_heads": 4, "rope_theta": 100.0},
        {"rope_scaling": SCALING, "rope_theta": 500000.0},
    ],
)
def test_logits_equal_numpy(overrides):
    graphdef, params = tiny_llama(**overrides)
    tokens = np.random.default_rng(0).integers(0, 256, size=40)
    want = numpy_llama(LlamaConfig(**{**TINY_LLAMA, **overrides}), params, tokens)
    got = naive_logits(graphdef, params, tokens.tolist())
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near_and_gives_float32_logits():
    graphdef, params = tiny_llama(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    tokens = list(range(20))
    got = naive_logits(graphdef, params, tokens)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, numpy_llama(LlamaConfig(**TINY_LLAMA), params, tokens), atol=0.2)


def test_tied_has_no_head():
    _, untied = tiny_llama()
    _, tied = tiny_llama(tie_embeddings=True)
    assert untied.keys() - tied.keys() == {"head"}


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_text_is_repeatable_and_wanders(tied):
    ids = [naive_generate(*tiny_llama(tie_embeddings=tied), [1, 2, 3], 32) for _ in range(2)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) > 15


def test_naive_generate_feeds_each_token_back():
    graphdef, params = tiny_llama()
    prompt = [7, 8, 9]
    ids = naive_generate(graphdef, params, prompt, 4)
    for n in range(4):
        assert int(jnp.argmax(naive_logits(graphdef, params, prompt + ids[:n])[-1])) == ids[n]
    assert naive_generate(graphdef, params, prompt, 0) == []


def test_abstract_build_is_the_same_graph_without_arrays():
    graphdef, state = build_abstract(family("llama"), LlamaConfig(**TINY_LLAMA), jnp.bfloat16)
    concrete, params = tiny_llama(dtype=jnp.bfloat16)
    assert graphdef == concrete
    abstract = nnx.to_pure_dict(state)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for leaf, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)


def test_the_engine_can_trace_its_cache():
    graphdef, state = build_abstract(family("llama"), LlamaConfig(**TINY_LLAMA), jnp.float32)
    caches, vocab = trace_layer_caches(graphdef, nnx.to_pure_dict(state))
    one = LayerCache(num_kv_heads=2, head_dim=16, num_heads=4, dtype=jnp.dtype(jnp.float32))
    assert caches == [one, one]
    assert vocab == 256


def test_unknown_family_names_the_known_ones():
    with pytest.raises(
        UnsupportedModel, match="model family 'gpt5' is not built; built: bert, gemma2, gemma3, gpt2, llama, mistral"
    ):
        family("gpt5")


def test_config_survives_json():
    config = LlamaConfig(**TINY_LLAMA, rope_scaling=SCALING, tie_embeddings=True)
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert LlamaConfig.from_dict(TINY_LLAMA) == LlamaConfig(**TINY_LLAMA)


def test_config_refuses_what_it_does_not_know():
    with pytest.raises(UnsupportedModel, match=r"unknown \['attention_bias'\]; known: experts, head_dim, "):
        LlamaConfig.from_dict({**TINY_LLAMA, "attention_bias": True})
    with pytest.raises(UnsupportedModel, match=r"unknown \['rope_scaling.beta'\]"):
        LlamaConfig.from_dict({**TINY_LLAMA, "rope_scaling": {"kind": "linear", "factor": 2.0, "beta": 1.0}})
    with pytest.raises(UnsupportedModel, match="missing required field `head_dim`"):
        LlamaConfig.from_dict({name: value for name, value in TINY_LLAMA.items() if name != "head_dim"})
    with pytest.raises(UnsupportedModel, match=r"Expected `int`, got `str` - at `\$.num_heads`"):
        LlamaConfig.from_dict({**TINY_LLAMA, "num_heads": "4"})
    with pytest.raises(UnsupportedModel, match="num_heads 4 is not a multiple of num_kv_heads 3"):
        LlamaConfig(**{**TINY_LLAMA, "num_kv_heads": 3})
    with pytest.raises(UnsupportedModel, match="head_dim 15 is odd"):
        dataclasses.replace(LlamaConfig(**TINY_LLAMA), head_dim=15)
