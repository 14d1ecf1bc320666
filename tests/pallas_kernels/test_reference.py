"""The oracle against dense softmax attention written another way."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.reference import reference_ragged_paged_attention

K, GROUP, DH, PAGE = 2, 3, 8, 8


def dense(q, k, v, *, scale, window=None, soft_cap=None, sinks=None):
    """Causal attention of one sequence: q [n, H, Dh] are the last n of len(k) positions."""
    n, m = len(q), len(k)
    positions = np.arange(m - n, m)
    mask = np.arange(m)[None] <= positions[:, None]
    if window is not None:
        mask &= np.arange(m)[None] > positions[:, None] - window
    logits = np.einsum("ihd,jhd->hij", q, np.repeat(k, GROUP, axis=1)) * scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    logits = np.where(mask, logits, -np.inf)
    if sinks is not None:
        logits = np.concatenate([logits, np.broadcast_to(sinks[:, None, None], (*logits.shape[:2], 1))], axis=-1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    lse = np.log(weights.sum(-1)) + logits.max(-1)
    weights = (weights / weights.sum(-1, keepdims=True))[..., :m]
    return np.einsum("hij,jhd->ihd", weights, np.repeat(v, GROUP, axis=1)), lse.T


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"soft_cap": 2.0}, {"sinks": True}])
def test_reference_equals_dense_attention(options):
    rng = np.random.default_rng(1)
    history, q_lens = [12, 0, 7], [1, 9, 4]
    sinks = rng.normal(size=K * GROUP).astype(np.float32) if options.get("sinks") else None
    options = {**options, "sinks": sinks}
    keys = [rng.normal(size=(h + n, K, DH)).astype(np.float32) for h, n in zip(history, q_lens, strict=True)]
    values = [rng.normal(size=k.shape).astype(np.float32) for k in keys]
    queries = [rng.normal(size=(n, K * GROUP, DH)).astype(np.float32) for n in q_lens]
    pool = np.full((9, PAGE, K, 2, DH), np.nan, np.float32)
    table = np.array([[8, 1, 99], [2, 7, 99], [4, 3, 99]], np.int32)
    for s, h in enumerate(history):
        for p in range(h):
            pool[table[s, p // PAGE], p % PAGE, :, 0] = keys[s][p]
            pool[table[s, p // PAGE], p % PAGE, :, 1] = values[s][p]
    step_k = np.concatenate([k[h:] for k, h in zip(keys, history, strict=True)])
    step_v = np.concatenate([v[h:] for v, h in zip(values, history, strict=True)])
    out, cache, lse = reference_ragged_paged_attention(
        jnp.asarray(np.concatenate(queries)),
        jnp.asarray(step_k),
        jnp.asarray(step_v),
        jnp.asarray(pool),
        jnp.asarray(table),
        jnp.asarray([len(k) for k in keys]),
        jnp.asarray(np.cumsum([0, *q_lens])),
        jnp.asarray([1, 3, 3]),
        scale=0.3,
        **{**options, "sinks": None if sinks is None else jnp.asarray(sinks)},
    )
    start = 0
    for s, n in enumerate(q_lens):
        want, want_lse = dense(queries[s], keys[s], values[s], scale=0.3, **options)
        np.testing.assert_allclose(out[start : start + n], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse[start : start + n], want_lse, rtol=1e-5, atol=1e-5)
        start += n
    assert np.isfinite(np.asarray(cache)[table[0, 0]]).all()


def test_padding_is_zero_and_writes_nothing():
    cache = jnp.zeros((2, PAGE, K, 2, DH))
    ones = jnp.ones((3, K, DH))
    out, after, lse = reference_ragged_paged_attention(
        jnp.ones((3, K * GROUP, DH)),
        ones,
        ones,
        cache,
        jnp.array([[0], [99], [1]]),
        jnp.array([0, 1, 1]),
        jnp.array([0, 1, 2, 3]),
        jnp.array([2, 2, 2]),
        scale=1.0,
    )
    assert float(jnp.abs(after).sum()) == 0.0
    assert float(jnp.abs(out).sum()) == 0.0
    assert bool(jnp.isneginf(lse).all())
