"""The oracle: ragged paged attention in plain numpy-like jnp, one sequence and one token at a time.

It is written to be read, not to be fast, and works on the canonical cache ``[P, page, K, 2, Dh]``
(K at index 0, V at index 1 of the next-to-last axis), whatever layout the kernels keep.
Not traceable: lengths are read on the host.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["reference_ragged_paged_attention"]


def reference_ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    page_stride: int = 1,
    page_offset: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The contract of ``ragged_paged_attention`` on the canonical cache.

    Args:
      q: ``[T, H, Dh]``. k, v: ``[T, K, Dh]``, or None to attend to what the cache holds already.
      cache: ``[P, page, K, 2, Dh]``.
      page_table: Int ``[S, W]``; kv_lens: Int ``[S]``; cu_q_lens: Int ``[S + 1]``; distribution: Int ``[3]``.

    Returns:
      out ``[T, H, Dh]`` in q's dtype, the new cache, lse float32 ``[T, H]`` (-inf where nothing is seen).
    """
    num_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads = cache.shape[:3]
    group = num_heads // num_kv_heads
    table, lens, starts = np.asarray(page_table), np.asarray(kv_lens), np.asarray(cu_q_lens)
    num_seqs = int(np.asarray(distribution)[2])
    pool = np.array(cache.astype(jnp.float32))
    out = np.zeros((num_tokens, num_heads, head_dim), np.float32)
    lse = np.full((num_tokens, num_heads), -np.inf, np.float32)

    def slot_of(seq: int, position: int) -> tuple[int, int] | None:
        """The page and the slot in it that hold a position here; None where another shard holds it."""
        page = position // page_size
        if (page - page_offset) % page_stride or page < page_offset:
            return None
        local = (page - page_offset) // page_stride
        if not 0 <= local < table.shape[1]:
            return None
        page_id = int(table[seq, local])
        return (page_id, position % page_size) if 0 <= page_id < num_pages else None

    def stored(x: jax.Array, factor: float | None) -> np.ndarray:
        """The values as the cache's dtype keeps them."""
        scaled = x.astype(jnp.float32) / (1.0 if factor is None else factor)
        return np.array(scaled.astype(cache.dtype).astype(jnp.float32))

    new_k = None if k is None else stored(k, k_scale)
    new_v = None if v is None else stored(v, v_scale)
    queries = np.array(q.astype(jnp.float32))
    sink_logits = None if sinks is None else np.array(sinks.astype(jnp.float32))

    for seq in range(num_seqs):
        q_len = int(starts[seq + 1] - starts[seq])
        first = int(lens[seq]) - q_len
        if new_k is not None and new_v is not None and lens[seq] > 0:
            for i in range(q_len):
                where = slot_of(seq, first + i)
                if where is not None:
                    pool[where[0], where[1], :, 0] = new_k[starts[seq] + i]
                    pool[where[0], where[1], :, 1] = new_v[starts[seq] + i]
        for i in range(q_len if lens[seq] > 0 else 0):
            position, row = first + i, int(starts[seq]) + i
            low = 0 if window is None else max(0, position - window + 1)
            slots = [slot_of(seq, p) for p in range(low, position + 1)]
            seen = [s for s in slots if s is not None]
            for head in range(num_heads):
                kv_head = head // group
                keys = np.array([pool[p, s, kv_head, 0] for p, s in seen]).reshape(-1, head_dim)
                values = np.array([pool[p, s, kv_head, 1] for p, s in seen]).reshape(-1, head_dim)
                logits = keys @ queries[row, head] * (scale * (k_scale or 1.0))
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                everything = logits if sink_logits is None else np.append(logits, sink_logits[head])
                if everything.size == 0:
                    continue
                top = everything.max()
                total = np.exp(everything - top).sum()
                lse[row, head] = top + np.log(total)
                out[row, head] = (np.exp(logits - top) / total) @ values * (v_scale or 1.0)
    return jnp.asarray(out).astype(q.dtype), jnp.asarray(pool).astype(cache.dtype), jnp.asarray(lse)
