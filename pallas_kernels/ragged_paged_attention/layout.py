"""How the KV cache lies in memory. Private to this package: every other room goes through these functions.

The pool is ``[P, page, K, 2, Dh]``: a page is one contiguous block of tokens, and the KV-head axis carries
the ``tensor`` mesh axis, so that a head's K and V stay together on the device that owns the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

__all__ = ["CacheSpec", "cache_partition", "cache_shape", "read_pages", "write_pages"]


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
    return (num_pages, spec.page_size, spec.num_kv_heads, 2, spec.head_dim)


def cache_partition(axis: str | None) -> PartitionSpec:
    """How the pool is sharded when KV heads lie on the mesh axis ``axis``."""
    return PartitionSpec(None, None, axis, None, None)


def read_pages(cache: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Pages ``page_ids`` Int[N] in the canonical form ``[N * page, K, 2, Dh]``. Ids out of range give zeros."""
    pages = cache.at[page_ids].get(mode="fill", fill_value=0)
    return pages.reshape(-1, *cache.shape[2:])


def write_pages(cache: jax.Array, page_ids: jax.Array, tokens: jax.Array) -> jax.Array:
    """Store canonical ``tokens [N * page, K, 2, Dh]`` as pages ``page_ids`` Int[N]. Ids out of range are dropped."""
    pages = tokens.reshape(-1, *cache.shape[1:]).astype(cache.dtype)
    in_range = (page_ids >= 0) & (page_ids < cache.shape[0])
    ids = jnp.where(in_range, page_ids, cache.shape[0])
    return cache.at[ids].set(pages, mode="drop")
