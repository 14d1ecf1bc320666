"""A Llama over the tensor axis, its attention on the paged cache, against the naive forward on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jserve.models.contract import Step
from jserve.models.llama import LlamaConfig
from jserve.models.naive import naive_logits
from jserve.models.registry import build_abstract, family
from jserve.testing.models import TINY_LLAMA, tiny_llama
from pallas_kernels.ragged_paged_attention import CacheSpec, cache_partition, cache_shape, ragged_paged_attention
from sharding import MeshSpec, param_shardings

PAGE, PAGES = 8, 12


class Paged:
    """Attention of one sequence at ``positions``, its pages in order; heads lie on the mesh's tensor axis."""

    def __init__(self, mesh, positions, cache):
        self.positions = positions
        self.mesh, self.cache = mesh, cache

    def answer(self, query):
        heads, pool = P(None, "tensor", None), cache_partition("tensor")
        table = jnp.arange(PAGES, dtype=jnp.int32)[None] + query.layer * PAGES
        kv_lens, cu_q_lens = self.positions[-1:] + 1, jnp.array([0, self.positions.shape[0]], jnp.int32)
        attention = jax.shard_map(
            partial(ragged_paged_attention, scale=query.scale),
            mesh=self.mesh,
            in_specs=(heads, heads, heads, pool, P(), P(), P(), P()),
            out_specs=(heads, pool),
        )
        out, self.cache = attention(
            query.q, query.k, query.v, self.cache, table, kv_lens, cu_q_lens, jnp.array([0, 0, 1])
        )
        return out


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def forward(graphdef, mesh, params, cache, tokens, start):
    model = nnx.merge(graphdef, params)
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    paged = Paged(mesh, positions, cache)
    step = Step(positions=positions, valid=jnp.ones(positions.shape, bool), answer=paged.answer)
    x = model.embed(tokens, step)
    for i in range(model.num_layers):
        x = model.layer(i, x, step)
    return model.logits(x), paged.cache


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ("tensor=2", {}),
        ("tensor=4", {"num_heads": 8, "num_kv_heads": 4, "tie_embeddings": True}),
        ("data=2,tensor=3", {"num_heads": 9, "num_kv_heads": 3, "vocab_size": 255, "intermediate_size": 96}),
    ],
)
def test_logits_equal_one_device(mesh, overrides):
    mesh = MeshSpec.parse(mesh).build()
    graphdef, params = tiny_llama(**overrides)
    config = LlamaConfig(**{**TINY_LLAMA, **overrides})
    _, abstract = build_abstract(family("llama"), config, jnp.float32)
    sharded = jax.device_put(params, param_shardings(abstract, mesh))
    assert sharded["layers"][0]["q"].addressable_shards[0].data.shape[0] == config.num_heads // mesh.shape["tensor"]
    spec = CacheSpec(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, page_size=PAGE, dtype=jnp.float32)
    cache = jnp.zeros(cache_shape(spec, config.num_layers * PAGES, "cpu"))
    cache = jax.device_put(cache, NamedSharding(mesh, cache_partition("tensor")))

    tokens = np.random.default_rng(0).integers(0, config.vocab_size, size=41)
    want = naive_logits(graphdef, params, tokens.tolist())
    start = 0
    for end in (20, 40, 41):  # a prompt in two chunks, and a token alone
        got, cache = forward(graphdef, mesh, sharded, cache, jnp.asarray(tokens[start:end], jnp.int32), start)
        np.testing.assert_allclose(got, want[start:end], rtol=1e-4, atol=1e-4)
        start = end
