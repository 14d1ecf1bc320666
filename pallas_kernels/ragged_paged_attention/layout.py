"""How the KV cache lies in memory. Private to this package: every other room goes through the functions it exports.

The pool is ``[P, K, 2, page, Dh]``: in a page each KV head's keys are one contiguous matrix and its values the
next, so that attention reads matrices of whole heads, and the KV-head axis carries the ``tensor`` mesh axis, so
that a head's keys and values stay together on the device that owns the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

__all__ = ["CacheSpec", "cache_partition", "cache_shape", "gather_blocks", "read_pages", "store_tokens", "write_pages"]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """One kind of cache: what a token costs in every layer that shares it."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: DTypeLike

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return self.num_kv_heads * 2 * self.head_dim * jnp.dtype(self.dtype).itemsize


def cache_shape(spec: CacheSpec, num_pages: int, backend: str) -> tuple[int, ...]:
    """The pool's shape for ``num_pages`` pages (all layers together) on ``backend`` (cpu, gpu, tpu)."""
    del backend  # one layout so far
    return (num_pages, spec.num_kv_heads, 2, spec.page_size, spec.head_dim)


def cache_partition(axis: str | None) -> PartitionSpec:
    """How the pool is sharded when KV heads lie on the mesh axis ``axis``."""
    return PartitionSpec(None, axis, None, None, None)


def read_pages(cache: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Pages ``page_ids`` Int[N] in the canonical form ``[N * page, K, 2, Dh]``. Ids out of range give zeros."""
    ids = _in_range_or_past(cache, page_ids)
    pages = jnp.moveaxis(cache.at[ids].get(mode="fill", fill_value=0), 3, 1)
    return pages.reshape(-1, *pages.shape[2:])


def write_pages(cache: jax.Array, page_ids: jax.Array, tokens: jax.Array) -> jax.Array:
    """Store canonical ``tokens [N * page, K, 2, Dh]`` as pages ``page_ids`` Int[N]. Ids out of range are dropped."""
    pages = tokens.reshape(-1, cache.shape[3], *tokens.shape[1:]).astype(cache.dtype)
    return cache.at[_in_range_or_past(cache, page_ids)].set(jnp.moveaxis(pages, 1, 3), mode="drop")


def store_tokens(cache: jax.Array, page_ids: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Store token t's ``k[t], v[t]`` (each ``[T, K, Dh]``, in the cache's dtype) in slot ``slots[t]`` of page
    ``page_ids[t]``. Ids out of range are dropped."""
    # Indexed down to one row of Dh: around a wider window XLA on TPU lays the whole pool out anew, and back.
    page, slot = _in_range_or_past(cache, page_ids)[:, None, None], slots[:, None, None]
    head = jnp.arange(cache.shape[1], dtype=jnp.int32)[None, :, None]
    which = jnp.arange(2, dtype=jnp.int32)[None, None]
    return cache.at[page, head, which, slot].set(jnp.stack([k, v], axis=2), mode="drop")


def gather_blocks(cache: jax.Array, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of pages ``page_ids`` Int[B, N], all in range: each ``[B, K, N * page, Dh]``."""
    num_pages, num_kv_heads, _, page_size, head_dim = cache.shape
    rows = cache.reshape(num_pages * num_kv_heads * 2, page_size, head_dim)
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    keys = (page_ids[:, None] * num_kv_heads + head) * 2
    shape = (page_ids.shape[0], num_kv_heads, -1, head_dim)
    k, v = (rows.at[ids].get(mode="promise_in_bounds").reshape(shape) for ids in (keys, keys + 1))
    return k, v


def _in_range_or_past(cache: jax.Array, page_ids: jax.Array) -> jax.Array:
    """``page_ids`` with every id outside the pool turned into one past its end: jnp reads negative ids from the end."""
    return jnp.where((page_ids >= 0) & (page_ids < cache.shape[0]), page_ids, cache.shape[0])
