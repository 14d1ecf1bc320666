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
    num_tokens,
    num_seqs=8,
    kv_heads=2,
    group=2,
    head_dim=8,
    page=8,
    width=6,
    dtype=jnp.float32,
    cache_dtype=None,
    decodes=None,
    seed=0,
):
    """The arguments of a step of ``num_tokens`` and ``num_seqs``, of which the given sequences are real.

    Slots that no sequence has written are NaN, and columns past a sequence's end name no page of the pool.
    """
    rng = np.random.default_rng(seed)
    real = len(q_lens)
    q_lens, kv_lens = (np.array([*lens, *[0] * (num_seqs - real)], np.int32) for lens in (q_lens, kv_lens))
    num_pages = num_seqs * width + 3
    table = np.full((num_seqs, width), num_pages + 7, np.int32)
    table[:, 1::2] = -1
    free = iter(rng.permutation(num_pages).tolist())
    pool = np.full((num_pages, page, kv_heads, 2, head_dim), np.nan, np.float32)
    for s, kv_len in enumerate(kv_lens):
        for column in range(-(-int(kv_len) // page)):
            table[s, column] = next(free)
            written = min(page, int(kv_len) - int(q_lens[s]) - column * page)
            if written > 0:
                pool[table[s, column], :written] = rng.normal(size=(written, kv_heads, 2, head_dim))
    cache_dtype = cache_dtype or dtype
    spec = CacheSpec(num_kv_heads=kv_heads, head_dim=head_dim, page_size=page, dtype=cache_dtype)
    cache = jnp.zeros(cache_shape(spec, num_pages, "cpu"), cache_dtype)
    cache = write_pages(cache, jnp.arange(num_pages), jnp.asarray(pool).reshape(-1, kv_heads, 2, head_dim))
    if decodes is None:
        decodes = next((i for i, n in enumerate(q_lens[:real]) if n != 1), real)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    return {
        "q": array(num_tokens, kv_heads * group, head_dim),
        "k": array(num_tokens, kv_heads, head_dim),
        "v": array(num_tokens, kv_heads, head_dim),
        "cache": cache,
        "page_table": jnp.asarray(table),
        "kv_lens": jnp.asarray(kv_lens),
        "cu_q_lens": jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        "distribution": jnp.array([decodes, decodes, real], jnp.int32),
    }


def check(step, *, tolerance=1e-5, **options):
    out, cache, lse = attend(**step, scale=0.3, **options, return_lse=True)
    want, want_cache, want_lse = reference_ragged_paged_attention(
        **{**step, "cache": canonical(step["cache"])}, scale=0.3, **options
    )
    assert out.dtype == want.dtype
    assert lse.dtype == jnp.float32
    out, want = (x.astype(jnp.float32) for x in (out, want))
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(canonical(cache).astype(jnp.float32), want_cache.astype(jnp.float32))
    return out, cache


# Query lengths, KV lengths and the step's number of tokens; with 8 tokens a step is of rows alone.
KINDS = {
    "decode": ([1, 1, 1, 1, 1], [17, 1, 8, 48, 33], 8),
    "short prefill": ([5, 2], [13, 2], 8),
    "prefill": ([20, 3, 40], [20, 3, 40], 80),
    "chunks": ([9, 16], [30, 48], 80),
    "mixed": ([1, 1, 1, 1, 1, 13, 1, 30], [5, 48, 8, 9, 1, 13, 20, 41], 80),
}
OPTIONS = {
    "plain": {},
    "window of one": {"window": 1},
    "window, sinks": {"window": 5, "sinks": True},
    "soft cap, scales": {"soft_cap": 2.0, "k_scale": 0.5, "v_scale": 3.0},
    "shard, sinks": {"page_stride": 2, "page_offset": 1, "sinks": True},
    "all": {"window": 11, "soft_cap": 3.0, "sinks": True, "k_scale": 2.0, "v_scale": 0.5, "page_stride": 3},
}
SHAPES = {
    "grouped": {},
    "one kv head": {"kv_heads": 1, "group": 5},
    "no groups": {"kv_heads": 3, "group": 1, "page": 16, "width": 3},
}


def pairwise(*axes):
    """Few cases in which every value of an axis meets every value of every other."""
    pairs = itertools.combinations(range(len(axes)), 2)
    wanted = {((a, x), (b, y)) for a, b in pairs for x in axes[a] for y in axes[b]}

    def met(case):
        return wanted & set(itertools.combinations(enumerate(case), 2))

    cases = []
    while wanted:
        cases.append(max(itertools.product(*axes), key=lambda case: len(met(case))))
        wanted -= met(cases[-1])
    return cases


@pytest.mark.parametrize(("kind", "options", "shape"), pairwise(KINDS, OPTIONS, SHAPES))
def test_equals_the_reference(kind, options, shape):
    q_lens, kv_lens, num_tokens = KINDS[kind]
    step = make_step(q_lens, kv_lens, num_tokens=num_tokens, **SHAPES[shape])
    options = dict(OPTIONS[options])
    if "sinks" in options:
        options["sinks"] = jnp.asarray(np.random.default_rng(5).normal(size=step["q"].shape[1]), jnp.float32)
    check(step, **options)


@st.composite
def sequences(draw):
    """Up to 8 sequences of at most 48 tokens that together ask at most 80 queries, decoding ones first."""
    lens = [(1, draw(st.integers(1, 48))) for _ in range(draw(st.integers(0, 4)))]
    for _ in range(draw(st.integers(0, 4))):
        kv_len = draw(st.integers(0, 48))
        q_len = draw(st.integers(0, min(kv_len, 80 - sum(q for q, _ in lens))))
        lens.append((q_len, kv_len))
    return lens


@settings(max_examples=40, deadline=None, derandomize=True)
@given(lens=sequences(), told=st.booleans(), seed=st.integers(0, 3))
def test_any_lengths(lens, told, seed):
    """``told``: whether the distribution tells of the decoding sequences."""
    decodes = next((i for i, (q_len, _) in enumerate(lens) if q_len != 1), len(lens)) if told else 0
    q_lens, kv_lens = [q for q, _ in lens], [kv for _, kv in lens]
    check(make_step(q_lens, kv_lens, num_tokens=80, decodes=decodes, seed=seed))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(kv_lens=st.lists(st.sampled_from([0, 1, 7, 8, 9, 16, 47, 48]), max_size=8))
def test_any_decode_lengths_at_page_edges(kv_lens):
    check(make_step([int(n > 0) for n in kv_lens], kv_lens, num_tokens=8))


def test_one_sequence():
    check(make_step([1], [300], num_tokens=1, num_seqs=1, width=40))
    check(make_step([1], [0], num_tokens=1, num_seqs=1, width=40))


@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_narrow_types(kind, cache_dtype):
    q_lens, kv_lens, num_tokens = KINDS[kind]
    step = make_step(q_lens, kv_lens, num_tokens=num_tokens, dtype=jnp.bfloat16, cache_dtype=cache_dtype)
    check(step, tolerance=1e-2, k_scale=0.25, v_scale=0.5)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_without_new_keys_the_cache_is_read_as_it_is(kind):
    q_lens, kv_lens, num_tokens = KINDS[kind]
    step = make_step(q_lens, kv_lens, num_tokens=num_tokens)
    out, cache = attend(**step, scale=0.3)
    again, _ = check({**step, "cache": cache, "k": None, "v": None})
    np.testing.assert_allclose(again, out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [8, 80])
def test_padding_is_zero_and_writes_nothing(num_tokens):
    """Tokens past the last sequence, a sequence of kv_len 0 with queries, and sequences past the distribution."""
    step = make_step([1, 2, 1], [9, 0, 5], num_tokens=num_tokens, decodes=1)
    step["distribution"] = step["distribution"].at[2].set(2)
    out, cache = check(step)
    np.testing.assert_array_equal(out[1:], np.zeros_like(out[1:]))
    changed = ~np.isclose(canonical(cache), canonical(step["cache"]), equal_nan=True).all(axis=(2, 3, 4))
    assert np.argwhere(changed).tolist() == [[int(step["page_table"][0, 1]), 0]]


@pytest.mark.parametrize("bad", [-1, -5, 51, 2**31 - 1, -(2**31)])
def test_page_ids_out_of_range_are_neither_written_nor_read(bad):
    step = make_step([1, 9], [9, 9], num_tokens=80)
    step["page_table"] = step["page_table"].at[:, 1].set(bad).at[1, 0].set(bad)
    assert step["cache"].shape[0] == 51
    out, cache = check(step)
    np.testing.assert_array_equal(cache, step["cache"])
    np.testing.assert_array_equal(out[1:10], np.zeros_like(out[1:10]))


def test_shards_of_pages_merge_by_lse():
    q_lens, kv_lens, num_tokens = KINDS["mixed"]
    step = make_step(q_lens, kv_lens, num_tokens=num_tokens)
    whole, _, whole_lse = attend(**step, scale=0.3, return_lse=True)
    parts = []
    for rank in range(2):
        table = step["page_table"][:, rank::2]
        parts.append(
            attend(**{**step, "page_table": table}, scale=0.3, page_stride=2, page_offset=rank, return_lse=True)
        )
    lse = jnp.logaddexp(parts[0][2], parts[1][2])
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-5)
    merged = sum(out * jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(part - lse))[..., None] for out, _, part in parts)
    np.testing.assert_allclose(merged, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"q": jnp.zeros((8, 3, 8))}, {}, r"q is \(8, 3, 8\); a cache of 2 heads of 8"),
        ({"k": None}, {}, "both be given, or both be None"),
        ({"v": jnp.zeros((8, 2, 4))}, {}, r"v \(8, 2, 4\); both must be \(8, 2, 8\)"),
        ({"kv_lens": jnp.zeros(7, jnp.int32)}, {}, r"a page table of 8 rows wants \(8,\) and \(9,\)"),
        ({}, {"window": 0}, "window is 0"),
        ({}, {"page_stride": 2, "page_offset": 2}, "0 <= offset < stride"),
    ],
)
def test_what_does_not_fit_is_refused(changes, options, words):
    step = make_step([1], [9], num_tokens=8)
    with pytest.raises(ValueError, match=words):
        ragged_paged_attention(**{**step, **changes}, scale=1.0, **options)
