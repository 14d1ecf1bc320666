"""The one entry to ragged paged attention; it picks the implementation for the device."""

from __future__ import annotations

import jax

from pallas_kernels.ragged_paged_attention.xla import xla_ragged_paged_attention

__all__ = ["ragged_paged_attention"]


def ragged_paged_attention(
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
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    page_stride: int = 1,
    page_offset: int = 0,
    return_lse: bool = False,
) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]:
    """Write this step's K and V into the cache, then attend: decode, chunked prefill and mixed in one call.

    Shapes and meaning (T tokens, S sequences, H query heads, K KV heads, W pages a table row):
      q: Float ``[T, H, Dh]``, sequences one after another without padding inside.
      k, v: Float ``[T, K, Dh]``, or both None: nothing is written, the cache is read as it is.
      cache: the pool, of shape ``cache_shape(...)``; donate it, the result takes its place.
      page_table: Int32 ``[S, W]``, the page of each run of ``page_size`` positions. An id outside the pool is
        never read for a visible position, and a write to it is dropped.
      kv_lens: Int32 ``[S]``, tokens of each sequence after this step's write. 0: padding, whatever its q length.
      cu_q_lens: Int32 ``[S + 1]``, where each sequence's tokens start; its last tokens are the queries, so query
        i of sequence s has position ``kv_lens[s] - q_len[s] + i``.
      distribution: Int32 ``[3]``, the ends of the ranges of decode, chunked-prefill and mixed sequences; sequences
        from ``distribution[2]`` on are padding. It says what is fast: a wrong range is slower, not wrong.
      window: position p sees p - window + 1 .. p; a traced one, Int32 ``[]`` of 1 or more, serves calls that differ
        in nothing else. soft_cap: cap * tanh(logits / cap). sinks: Float ``[H]``, a
        logit more in each head's denominator. k_scale, v_scale: stored value times scale is the true one.
      page_stride, page_offset: column j of a table row is global page ``j * stride + offset``; positions on other
        pages are not seen here (their part is merged by lse).

    Returns:
      ``(out, cache)`` or ``(out, cache, lse)``: out ``[T, H, Dh]`` in q's dtype, rows of padding zero; lse float32
      ``[T, H]``, the natural log of the softmax denominator, -inf where nothing is seen.
      The cost grows with the real lengths, never with W. The pool is updated where it lies if it is donated and each
      next write depends on this call's out, as a model's layers do; XLA copies it otherwise.

    Raises:
      ValueError: shapes or options that do not fit together.
    """
    _check(q, k, v, cache, page_table, kv_lens, cu_q_lens)
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window is {window}; it must be 1 or more, or None")
    if page_stride < 1 or not 0 <= page_offset < page_stride:
        raise ValueError(f"page_stride is {page_stride} and page_offset {page_offset}; allowed: 0 <= offset < stride")
    out, cache, lse = xla_ragged_paged_attention(
        q,
        k,
        v,
        cache,
        page_table,
        kv_lens,
        cu_q_lens,
        distribution,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        page_stride=page_stride,
        page_offset=page_offset,
    )
    return (out, cache, lse) if return_lse else (out, cache)


def _check(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
) -> None:
    """Raise ValueError where the shapes of a call do not fit together."""
    num_kv_heads, head_dim = cache.shape[1], cache.shape[4]
    if q.ndim != 3 or q.shape[1] % num_kv_heads or q.shape[2] != head_dim:
        raise ValueError(
            f"q is {q.shape}; a cache of {num_kv_heads} heads of {head_dim} wants [T, n * {num_kv_heads}, {head_dim}]"
        )
    if (k is None) != (v is None):
        raise ValueError("k and v must both be given, or both be None")
    new = (q.shape[0], num_kv_heads, head_dim)
    if k is not None and v is not None and not k.shape == v.shape == new:
        raise ValueError(f"k is {k.shape} and v {v.shape}; both must be {new}")
    num_seqs = page_table.shape[0]
    if kv_lens.shape != (num_seqs,) or cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(
            f"kv_lens is {kv_lens.shape} and cu_q_lens {cu_q_lens.shape}; "
            f"a page table of {num_seqs} rows wants {(num_seqs,)} and {(num_seqs + 1,)}"
        )
