"""Ragged paged attention in plain XLA operations, for any backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["xla_ragged_paged_attention"]


def xla_ragged_paged_attention(
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
    """``ragged_paged_attention`` with every visible position gathered per query: out, cache and lse."""
    num_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads = cache.shape[:3]
    num_seqs, width = page_table.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.clip(jnp.searchsorted(cu_q_lens, token, side="right") - 1, 0, num_seqs - 1).astype(jnp.int32)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    position = kv_lens[seq] - q_lens[seq] + token - cu_q_lens[seq]
    valid = (token < cu_q_lens[num_seqs]) & (seq < distribution[2]) & (kv_lens[seq] > 0) & (position >= 0)

    if k is not None and v is not None:
        column, rest = jnp.divmod(position // page_size - page_offset, page_stride)
        here = valid & (rest == 0) & (column >= 0) & (column < width)
        page = page_table[seq, jnp.clip(column, 0, width - 1)]
        page = jnp.where(here & (page >= 0) & (page < num_pages), page, num_pages)
        new = jnp.stack([k / (k_scale or 1.0), v / (v_scale or 1.0)], axis=2).astype(cache.dtype)
        cache = cache.at[page, position % page_size].set(new, mode="drop")

    pages = cache.at[page_table].get(mode="fill", fill_value=0)
    tokens = pages.reshape(num_seqs, width * page_size, num_kv_heads, 2, head_dim).astype(jnp.float32)
    slot = jnp.arange(width * page_size, dtype=jnp.int32)
    where = (slot // page_size * page_stride + page_offset) * page_size + slot % page_size
    seen = (where[None] <= position[:, None]) & valid[:, None]
    if window is not None:
        seen &= where[None] > position[:, None] - window
    tokens = jnp.where(jnp.isnan(tokens), 0.0, tokens)
    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    logits = jnp.einsum("tkgd,tskd->tkgs", grouped, tokens[seq, :, :, 0]) * (scale * (k_scale or 1.0))
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf).reshape(num_tokens, num_heads, -1)
    top = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, None]
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True) + (0.0 if sinks is None else jnp.exp(sink - top))
    grouped = (weights / jnp.where(total == 0, 1.0, total)).reshape(num_tokens, num_kv_heads, -1, slot.size)
    out = jnp.einsum("tkgs,tskd->tkgd", grouped, tokens[seq, :, :, 1]).reshape(q.shape) * (v_scale or 1.0)
    lse = jnp.where(valid[:, None], (top + jnp.log(total))[..., 0], -jnp.inf)
    return jnp.where(valid[:, None, None], out, 0.0).astype(q.dtype), cache, lse
