"""What stays on the device between dispatches: the caches, and where each running choice stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Int32

from jserve.models.contract import LayerCache
from pallas_kernels.ragged_paged_attention import CacheSpec, cache_partition, cache_shape

__all__ = ["CacheKind", "CacheLayout", "SlotState", "new_pools", "new_state", "state_shapes"]


class SlotState(NamedTuple):
    """One entry a slot; ``N`` is max_num_seqs. Between dispatches arrays lead with [data], 1 until meshes use it."""

    last_token: Int32[Array, "*data N"]  # the newest output token, not in the cache yet
    context: Int32[Array, "*data N"]  # tokens in the cache
    generated: Int32[Array, "*data N"]  # output tokens
    live: Bool[Array, "*data N"]  # False once a stop or length test ended the choice


@dataclass(frozen=True, kw_only=True)
class CacheKind:
    """Layers whose caches have one shape share one flat pool, page ids offset by ``index * num_pages``."""

    spec: CacheSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    kinds: tuple[CacheKind, ...]
    num_pages: int
    """Pages of one layer; a pool has ``num_pages`` times its layers."""
    page_size: int

    @classmethod
    def build(cls, layers: Sequence[LayerCache], *, num_pages: int, page_size: int) -> CacheLayout:
        groups: dict[tuple[int, int, str], list[int]] = {}
        for i, layer in enumerate(layers):
            groups.setdefault((layer.num_kv_heads, layer.head_dim, jnp.dtype(layer.dtype).name), []).append(i)
        kinds = tuple(
            CacheKind(
                spec=CacheSpec(num_kv_heads=heads, head_dim=size, page_size=page_size, dtype=jnp.dtype(dtype)),
                layers=tuple(members),
            )
            for (heads, size, dtype), members in groups.items()
        )
        return cls(kinds=kinds, num_pages=num_pages, page_size=page_size)

    def place(self, layer: int) -> tuple[int, int]:
        """The pool that holds a layer's cache, and the page at which the layer starts in it."""
        for pool, kind in enumerate(self.kinds):
            if layer in kind.layers:
                return pool, kind.layers.index(layer) * self.num_pages
        raise ValueError(f"layer {layer} has no cache")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, on all devices together."""
        return self.page_size * sum(kind.spec.token_bytes * len(kind.layers) for kind in self.kinds)

    @property
    def page_rows(self) -> int:
        """Rows that one page takes in the pool of most layers, a row being the K or V of one head."""
        return max(2 * kind.spec.num_kv_heads * len(kind.layers) for kind in self.kinds)

    def pool_shapes(self, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
        backend = mesh.devices.flat[0].platform
        sharding = NamedSharding(mesh, cache_partition("tensor"))
        return [
            jax.ShapeDtypeStruct(
                cache_shape(kind.spec, self.num_pages * len(kind.layers), backend),
                jnp.dtype(kind.spec.dtype),
                sharding=sharding,
            )
            for kind in self.kinds
        ]


def new_pools(layout: CacheLayout, mesh: Mesh) -> list[Array]:
    """Empty pools, made on their devices."""
    return [jnp.zeros(s.shape, s.dtype, device=s.sharding) for s in layout.pool_shapes(mesh)]


def state_shapes(num_slots: int, mesh: Mesh) -> Any:
    """A SlotState of ShapeDtypeStructs, whole on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())
    ints = jax.ShapeDtypeStruct((1, num_slots), jnp.int32, sharding=sharding)
    flags = jax.ShapeDtypeStruct((1, num_slots), jnp.bool, sharding=sharding)
    shapes: Any = SlotState
    return shapes(last_token=ints, context=ints, generated=ints, live=flags)


def new_state(num_slots: int, mesh: Mesh) -> SlotState:
    return SlotState(*(jnp.zeros(s.shape, s.dtype, device=s.sharding) for s in state_shapes(num_slots, mesh)))
