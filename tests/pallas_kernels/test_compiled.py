"""What the compiled program does with the pool, with meshes, and with the width of the page table."""

from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.ragged_paged_attention import (
    CacheSpec,
    cache_partition,
    cache_shape,
    ragged_paged_attention,
    write_pages,
)
from pallas_kernels.ragged_paged_attention.xla import xla_ragged_paged_attention

H, K, DH, PAGE = 4, 2, 16, 16
SPEC = CacheSpec(num_kv_heads=K, head_dim=DH, page_size=PAGE, dtype=jnp.float32)
LAYERS = 2


def layers(x, cache, table, kv_lens, cu_q_lens, distribution, *, attend=ragged_paged_attention):
    """Two layers of attention that share a flat pool: ``x [T, H, Dh]``."""
    pages = cache.shape[0] // LAYERS
    for layer in range(LAYERS):
        k, v = x[:, :K] + 1.0, x[:, K : 2 * K] - 1.0
        out, cache = attend(x, k, v, cache, table + layer * pages, kv_lens, cu_q_lens, distribution, scale=DH**-0.5)
        x = jnp.tanh(x + out)
    return x, cache


def decode(x, cache, table, kv_lens, steps, *, run=layers):
    """``steps`` tokens of every sequence in one loop, the pool its carry."""
    num_seqs = x.shape[0]
    cu_q_lens = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    distribution = jnp.full((3,), num_seqs, jnp.int32)

    def step(carry):
        i, x, cache, kv_lens = carry
        x, cache = run(x, cache, table, kv_lens + 1, cu_q_lens, distribution)
        return i + 1, x, cache, kv_lens + 1

    carry = (jnp.int32(0), x, cache, kv_lens)
    return jax.lax.while_loop(lambda carry: carry[0] < steps, step, carry)[1:3]


def arrays(num_seqs, num_pages, width, kv_lens):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_seqs, H, DH)), jnp.float32)
    cache = jnp.zeros(cache_shape(SPEC, LAYERS * num_pages, "cpu"))
    tokens = jnp.asarray(rng.normal(size=(LAYERS * num_pages * PAGE, K, 2, DH)), jnp.float32)
    table = jnp.asarray(rng.permutation(num_pages)[: num_seqs * width].reshape(num_seqs, width), jnp.int32)
    return x, write_pages(cache, jnp.arange(LAYERS * num_pages), tokens), table, jnp.asarray(kv_lens, jnp.int32)


def test_a_compiled_decode_loop_equals_steps_by_hand():
    x, cache, table, kv_lens = arrays(3, 8, 2, [0, 14, 16])
    got, got_cache = jax.jit(decode)(x, cache, table, kv_lens, 4)
    by_hand = jax.jit(layers)
    for i in range(4):
        x, cache = by_hand(x, cache, table, kv_lens + i + 1, jnp.arange(4), jnp.array([3, 3, 3]))
    np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_cache, cache, rtol=1e-5, atol=1e-5)


def compiled_sizes(function, *args):
    """Bytes of the temporaries and of the aliased arguments, the pool being argument 1."""
    memory = jax.jit(function, donate_argnums=1).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.alias_size_in_bytes


def abstract(num_tokens, num_seqs, num_pages=8192, width=64):
    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    x = jax.ShapeDtypeStruct((num_tokens, H, DH), jnp.float32)
    cache = jax.ShapeDtypeStruct(cache_shape(SPEC, LAYERS * num_pages, "cpu"), jnp.float32)
    return x, cache, ints(num_seqs, width), ints(num_seqs), ints(num_seqs + 1), ints(3)


POOL = LAYERS * 8192 * PAGE * SPEC.token_bytes


@pytest.mark.parametrize("num_seqs", [1, 2, 24])
def test_the_decode_loop_updates_the_pool_in_place(num_seqs):
    x, cache, table, kv_lens, _, _ = abstract(num_seqs, num_seqs)
    temporary, aliased = compiled_sizes(decode, x, cache, table, kv_lens, jax.ShapeDtypeStruct((), jnp.int32))
    assert aliased >= POOL
    assert temporary < POOL / 50


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(2, 1), (128, 1), (128, 8)])
def test_a_step_of_prefill_updates_the_pool_in_place(num_tokens, num_seqs):
    temporary, aliased = compiled_sizes(layers, *abstract(num_tokens, num_seqs))
    assert aliased >= POOL
    assert temporary < POOL / 50


def test_a_planted_copy_is_seen():
    def copying(x, k, v, cache, *rest, scale):
        _, new = ragged_paged_attention(x, k, v, cache, *rest, scale=scale)
        out, _ = ragged_paged_attention(x, None, None, cache, *rest, scale=scale)
        return out, new

    temporary, _ = compiled_sizes(partial(layers, attend=copying), *abstract(8, 8))
    assert temporary > POOL


def test_heads_over_the_tensor_axis():
    mesh = jax.make_mesh((2,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    heads, pool = P(None, "tensor", None), cache_partition("tensor")

    def attend(q, k, v, cache, *rest, scale):
        body = partial(ragged_paged_attention, scale=scale)
        specs = (heads, heads, heads, pool, P(), P(), P(), P())
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(heads, pool))(q, k, v, cache, *rest)

    sharded = partial(layers, attend=attend)
    x, cache, table, kv_lens = arrays(3, 8, 2, [0, 14, 16])
    cache = jax.device_put(cache, jax.NamedSharding(mesh, pool))
    got, got_cache = jax.jit(partial(decode, run=sharded))(x, cache, table, kv_lens, 4)
    want, want_cache = jax.jit(decode)(x, np.asarray(cache), table, kv_lens, 4)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_cache, want_cache, rtol=1e-5, atol=1e-5)

    mixed = (jnp.concatenate([x] * 4), cache, table, jnp.array([1, 20, 12]), jnp.array([0, 1, 4, 12]))
    got, got_cache = jax.jit(sharded)(*mixed, jnp.array([1, 3, 3]))
    want, want_cache = jax.jit(layers)(mixed[0], np.asarray(cache), *mixed[2:], jnp.array([1, 3, 3]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_cache, want_cache, rtol=1e-5, atol=1e-5)


def test_the_sharded_decode_loop_updates_each_part_in_place():
    mesh = jax.make_mesh((2,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    heads, pool = P(None, "tensor", None), cache_partition("tensor")
    specs = (heads, pool, P(), P(), P())
    x, cache, table, kv_lens, _, _ = abstract(8, 8)
    cache = jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=jax.NamedSharding(mesh, pool))

    def run(x, cache, table, kv_lens, cu_q_lens, distribution):
        pages = cache.shape[0] // LAYERS
        for layer in range(LAYERS):
            rest = (table + layer * pages, kv_lens, cu_q_lens, distribution)
            out, cache = ragged_paged_attention(x, x[:, :1], x[:, 1:2], cache, *rest, scale=0.25)
            x = jnp.tanh(x + out)
        return x, cache

    body = jax.shard_map(partial(decode, run=run), mesh=mesh, in_specs=specs, out_specs=(heads, pool))
    temporary, aliased = compiled_sizes(body, x, cache, table, kv_lens, jax.ShapeDtypeStruct((), jnp.int32))
    assert aliased >= POOL / 2
    assert temporary < POOL / 2 / 50


def intermediate_sizes(jaxpr):
    """The sizes of everything that a jaxpr computes, loops included; a reshape computes nothing."""
    sizes = []
    for equation in jaxpr.eqns:
        inner = [sub for value in equation.params.values() for sub in _jaxprs(value)]
        for sub in inner:
            sizes += intermediate_sizes(sub)
        if not inner and equation.primitive.name != "reshape":
            sizes += [variable.aval.size for variable in equation.outvars]
    return sizes


def _jaxprs(value):
    if isinstance(value, jax.extend.core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, jax.extend.core.Jaxpr):
        return [value]
    return [sub for item in value for sub in _jaxprs(item)] if isinstance(value, (tuple, list)) else []


@pytest.mark.parametrize("num_tokens", [8, 64])
def test_nothing_computed_is_as_wide_as_the_table(num_tokens):
    def sizes(width):
        attend = partial(ragged_paged_attention, scale=1.0)
        x, *rest = abstract(num_tokens, 8, width=width)
        kv = jax.ShapeDtypeStruct((num_tokens, K, DH), jnp.float32)
        return intermediate_sizes(jax.make_jaxpr(attend)(x, kv, kv, *rest).jaxpr)

    assert sizes(4) == sizes(4096)
    assert len(sizes(4)) > 100


@pytest.fixture
def count_turns(monkeypatch):
    """The turns that all loops of a step of 4 sequences take together."""
    turns, plain_loop = [], jax.lax.while_loop

    def loop(condition, body, carry):
        done, carry = plain_loop(
            lambda state: condition(state[1]), lambda state: (state[0] + 1, body(state[1])), (jnp.int32(0), carry)
        )
        jax.debug.callback(lambda count: turns.append(int(count)), done)
        return carry

    monkeypatch.setattr(jax.lax, "while_loop", loop)
    xla_ragged_paged_attention.clear_cache()
    attend = jax.jit(partial(ragged_paged_attention, scale=1.0), static_argnames="window")

    def count(q_lens, kv_lens, *, width=20, **options):
        turns.clear()
        num_tokens = 4 if max(q_lens) < 2 else 128
        x, k = jnp.zeros((num_tokens, H, DH)), jnp.zeros((num_tokens, K, DH))
        table = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (4, width))
        cache = jnp.zeros(cache_shape(SPEC, 64, "cpu"))
        rest = (jnp.array(kv_lens), jnp.cumsum(jnp.array([0, *q_lens])), jnp.array([q_lens.count(1), 4, 4]))
        jax.block_until_ready(attend(x, k, k, cache, table, *rest, **options))
        jax.effects_barrier()
        return sum(turns)

    yield count
    xla_ragged_paged_attention.clear_cache()


def test_turns_follow_the_lengths_and_not_the_table(count_turns):
    rows = [1, 1, 1, 1]
    assert count_turns(rows, [0, 0, 0, 0]) == 0
    assert count_turns(rows, [64, 64, 64, 64]) == 1
    assert count_turns(rows, [64, 64, 64, 64], width=2000) == 1
    assert count_turns(rows, [256, 256, 256, 256]) == 4
    assert count_turns(rows, [256, 1, 1, 1]) == 2
    assert count_turns(rows, [256, 256, 256, 256], window=32) == 1
    # Blocks of 64 queries, each a turn of the outer loop, against runs of 128 keys.
    assert count_turns([128, 0, 0, 0], [128, 0, 0, 0]) == 2 + (1 + 1)
    assert count_turns([128, 0, 0, 0], [128, 0, 0, 0], width=2000) == 2 + (1 + 1)
    assert count_turns([64, 0, 0, 0], [320, 0, 0, 0]) == 1 + 3
    assert count_turns([64, 0, 0, 0], [320, 0, 0, 0], window=16) == 1 + 1
    assert count_turns([1, 64, 0, 0], [64, 64, 0, 0]) == 1 + (1 + 1)
