"""The XLA path equals the oracle, whatever the lengths, the shapes and the options."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import (
    CacheSpec,
    cache_shape,
    ragged_paged_attention,
    read_pages,
    write_pages,
)
from pallas_kernels.ragged_paged_attention.reference import reference_ragged_paged_attention

attend = jax.jit(
    ragged_paged_attention,
    static_argnames=(
        "scale", "window", "soft_cap", "k_scale", "v_scale", "page_stride", "page_offset", "return_lse"
    ),
)  # fmt: skip


def canonical(cache):
    num_pages, num_kv_heads, _, page, head_dim = cache.shape
    tokens = read_pages(cache, jnp.arange(num_pages))
    return tokens.reshape(num_pages, page, num_kv_heads, 2, head_dim)


def make_step(
    q_lens,
    kv_lens,
    *,
    kv_heads=2,
    group=2,
    head_dim=8,
    page=8,
    width=6,
    decodes=None,
    padding_tokens=0,
    padding_seqs=0,
    dtype=jnp.float32,
    seed=0,
):
    """The arguments of a step. What no sequence has written is NaN; table columns past a sequence's end name no page."""
    rng = np.random.default_rng(seed)
    num_seqs = len(q_lens) + padding_seqs
    q_lens, kv_lens = (np.array([*lens, *[0] * padding_seqs], np.int32) for lens in (q_lens, kv_lens))
    if decodes is None:
        decodes = next((i for i, n in enumerate(q_lens) if n != 1), num_seqs)
    num_pages = num_seqs * width + 3
    table = np.full((num_seqs, width), num_pages + 7, np.int32)
    free = iter(rng.permutation(num_pages).tolist())
    pool = np.full((num_pages, page, kv_heads, 2, head_dim), np.nan, np.float32)
    for s, kv_len in enumerate(kv_lens):
        for column in range(-(-int(kv_len) // page)):
            table[s, column] = next(free)
            written = min(page, int(kv_len) - int(q_lens[s]) - column * page)
            if written > 0:
                pool[table[s, column], :written] = rng.normal(size=(written, kv_heads, 2, head_dim))
    spec = CacheSpec(num_kv_heads=kv_heads, head_dim=head_dim, page_size=page, dtype=dtype)
    cache = jnp.zeros(cache_shape(spec, num_pages, "cpu"), dtype)
    cache = write_pages(cache, jnp.arange(num_pages), jnp.asarray(pool).reshape(-1, kv_heads, 2, head_dim))
    num_tokens = int(q_lens.sum()) + padding_tokens

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(jnp.bfloat16 if dtype == jnp.bfloat16 else dtype)

    return {
        "q": array(num_tokens, kv_heads * group, head_dim),
        "k": array(num_tokens, kv_heads, head_dim),
        "v": array(num_tokens, kv_heads, head_dim),
        "cache": cache,
        "page_table": jnp.asarray(table),
        "kv_lens": jnp.asarray(kv_lens),
        "cu_q_lens": jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        "distribution": jnp.array([decodes, decodes, num_seqs - padding_seqs], jnp.int32),
    }


def check(step, *, tolerance=1e-5, **options):
    out, cache, lse = attend(**step, scale=0.3, **options, return_lse=True)
    want, want_cache, want_lse = reference_ragged_paged_attention(
        **{**step, "cache": canonical(step["cache"])}, scale=0.3, **options
    )
    assert out.dtype == want.dtype
    out, want = (x.astype(jnp.float32) for x in (out, want))
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(canonical(cache).astype(jnp.float32), want_cache.astype(jnp.float32))
    return out


KINDS = {
    "decode": ([1, 1, 1], [17, 1, 8]),
    "many decodes": ([1] * 7, [9, 1, 40, 16, 33, 2, 24]),
    "prefill": ([20, 3], [20, 3]),
    "chunk": ([9, 16], [30, 48]),
    "mixed": ([1, 1, 1, 1, 1, 13, 1, 30], [5, 48, 8, 9, 1, 13, 20, 41]),
}
OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "scales": {"k_scale": 0.5, "v_scale": 3.0},
    "shard": {"page_stride": 2, "page_offset": 1},
    "all": {"window": 11, "soft_cap": 3.0, "sinks": True, "k_scale": 2.0, "v_scale": 0.5},
}
SHAPES = {
    "gqa": {},
    "mqa": {"kv_heads": 1, "group": 5},
    "mha": {"kv_heads": 3, "group": 1},
    "page 16": {"page": 16, "width": 3},
    "padding": {"padding_tokens": 3, "padding_seqs": 2},
}


def pairwise(*axes):
    """Few cases in which every two values of two axes meet."""
    wanted = {
        ((a, x), (b, y)) for a, b in itertools.combinations(range(len(axes)), 2) for x in axes[a] for y in axes[b]
    }
    cases = []
    while wanted:
        best = max(
            itertools.product(*axes),
            key=lambda case: sum(pair in wanted for pair in itertools.combinations(enumerate(case), 2)),
        )
        wanted -= set(itertools.combinations(enumerate(best), 2))
        cases.append(best)
    return cases


@pytest.mark.parametrize(("kind", "options", "shape"), pairwise(KINDS, OPTIONS, SHAPES))
def test_equals_the_reference(kind, options, shape):
    step = make_step(*KINDS[kind], **SHAPES[shape])
    options = dict(OPTIONS[options])
    if options.get("sinks"):
        options["sinks"] = jnp.asarray(np.random.default_rng(5).normal(size=step["q"].shape[1]), jnp.float32)
    check(step, **options)


def test_without_new_keys_the_cache_is_read_as_it_is():
    step = make_step(*KINDS["mixed"])
    out, cache = attend(**step, scale=0.3)
    again = check({**step, "cache": cache, "k": None, "v": None})
    np.testing.assert_allclose(again, out, rtol=1e-6, atol=1e-6)
