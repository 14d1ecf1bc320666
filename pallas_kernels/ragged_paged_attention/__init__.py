"""Attention over a paged KV cache for sequences of any mix of lengths: the public names."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.layout import (
    CacheSpec,
    cache_partition,
    cache_shape,
    read_pages,
    write_pages,
)

__all__ = [
    "CacheSpec",
    "cache_partition",
    "cache_shape",
    "ragged_paged_attention",
    "read_pages",
    "write_pages",
]
