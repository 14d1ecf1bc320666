"""One pass of a model's layers over the tokens of a step, with the paged cache behind ``step.attend``.

On a CPU, attention is most of what a program costs to compile, and layers differ only in their weights, in where
their pages lie and in their windows. So there, neighbouring layers that ask the same of attention run as one loop with
one copy of it:

    for i in group:    q, k, v = switch(i, what layer i does before attend)(x)
                       seen    = attention(q, k, v, pages of layer i, window of layer i)
                       x       = switch(i, what layer i does after)(x, seen)

The halves come from tracing a layer twice: up to its call of ``attend``, and with the answer given. Weights stay where
they are: a switch reads those of its branch, where a loop over stacked weights would copy a slice of them.
A module in one piece has no layers to group: its attention is compiled once a layer. So it is where a layer has
transforms of NNX in it (``nnx.remat``, ``nnx.jit``): they take a module only in the very trace that it was merged in,
and that is the one around the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.errors import UnexpectedTracerError
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int32

from jserve.engine.state import CacheLayout
from jserve.models.contract import Query, Step
from pallas_kernels.ragged_paged_attention import cache_partition, ragged_paged_attention

__all__ = ["Batch", "Layers", "Pools"]

Pools = list[Array]
Stream = Float[Array, "T D"]
Heads = Float[Array, "T H Dh"]
Arrays = tuple[Heads, Float[Array, "T K Dh"] | None, Float[Array, "T K Dh"] | None, Float[Array, " H"] | None]
"""q, k, v and sinks of a Query."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one step, and where they belong in the kernel's terms."""

    positions: Int32[Array, " T"]
    valid: Bool[Array, " T"]
    page_table: Int32[Array, "S W"]
    kv_lens: Int32[Array, " S"]
    cu_q_lens: Int32[Array, " S+1"]
    distribution: Int32[Array, " 3"]


_NO_WINDOW = 2**31 - 1
"""Wider than any sequence: a layer without a window in a loop with some that have one."""


class _Asked(Exception):
    """Unwinds a layer at its call of ``attend``."""

    def __init__(self, query: Query) -> None:
        super().__init__()
        self.query = query


@dataclass(frozen=True, kw_only=True)
class Layers:
    """All layers of one model over one batch."""

    model: Any
    batch: Batch
    layout: CacheLayout
    mesh: Mesh
    grouped: bool = True
    """False where no layer may be cut in two."""

    @property
    def outside(self) -> Step:
        """The step for what is no layer: nothing to attend to."""

        def refuse(_: Query) -> Heads:
            raise ValueError("step.attend may be called by a layer only")

        return self._step(refuse)

    def __call__(self, x: Stream, pools: Pools) -> tuple[Stream, Pools]:
        """x through every layer; the pools with this step's K and V written."""
        pools = list(pools)
        asked = [self._asked(i, x) for i in range(self.model.num_layers)]
        for (pool, alike), members in groupby(range(self.model.num_layers), key=lambda i: asked[i][:2]):
            layers = list(members)
            if alike is None or len(layers) == 1:
                for i in layers:
                    x, pools[pool] = self._whole(i, x, pools[pool])
            else:
                x, pools[pool] = self._loop(layers, [asked[i][2] for i in layers], x, pools[pool])
        return x, pools

    def in_one_piece(self, tokens: Int32[Array, " T"], pools: Pools) -> tuple[Float[Array, "T V"], Pools]:
        """The logits of every row, of a module in one piece; the pools with this step's K and V written."""
        pools = list(pools)

        def answer(query: Query) -> Heads:
            pool, first_page = self.layout.place(query.layer)
            seen, pools[pool] = self._attention(
                _arrays(query), _options(query), pools[pool], jnp.asarray(first_page, jnp.int32)
            )
            return seen

        return self.model(tokens, self.batch.positions, self._step(answer).attend), pools

    def _asked(self, i: int, x: Stream) -> tuple[int, tuple[Any, ...] | None, dict[str, Any]]:
        """Layer i's pool, what must be alike to share a loop, and its options; None for the second where the layer
        cannot or need not be cut in two."""
        pool = self.layout.place(i)[0]
        options: dict[str, Any] = {}
        if not self.grouped or self.mesh.devices.flat[0].platform != "cpu":
            return pool, None, options

        def before(x: Stream) -> Arrays:
            query = self._ask(i, x)
            options.update(_options(query))
            return _arrays(query)

        try:
            shapes = jax.eval_shape(before, x)
        except UnexpectedTracerError:  # a layer that traces inside itself, such as one that is rematerialized
            return pool, None, options
        alike = [(name, value) for name, value in options.items() if name != "window"]
        return pool, (tuple(alike), tuple(s and (s.shape, s.dtype) for s in shapes)), options

    def _whole(self, i: int, x: Stream, pool: Array) -> tuple[Stream, Array]:
        """Layer i in one piece."""
        written = []

        def answer(query: Query) -> Heads:
            first_page = jnp.int32(self.layout.place(i)[1])
            seen, new_pool = self._attention(_arrays(query), _options(query), pool, first_page)
            written.append(new_pool)
            return seen

        x = self.model.layer(i, x, self._step(answer))
        (pool,) = written  # a layer asks once: the contract
        return x, pool

    def _loop(self, layers: list[int], asked: list[dict[str, Any]], x: Stream, pool: Array) -> tuple[Stream, Array]:
        """Layers that ask the same, but for their windows, as one loop."""
        first_pages = jnp.asarray([self.layout.place(i)[1] for i in layers], jnp.int32)
        windows = [options["window"] for options in asked]
        wide = jnp.asarray([_NO_WINDOW if window is None else window for window in windows], jnp.int32)

        def before(i: int) -> Callable[[Stream], Arrays]:
            return lambda x: _arrays(self._ask(i, x))

        def after(i: int) -> Callable[[Stream, Heads], Stream]:
            return lambda x, seen: self.model.layer(i, x, self._step(lambda _: seen))

        befores, afters = [before(i) for i in layers], [after(i) for i in layers]

        def body(at: Int32[Array, ""], carry: tuple[Stream, Array]) -> tuple[Stream, Array]:
            x, pool = carry
            options = asked[0] if len(set(windows)) == 1 else {**asked[0], "window": wide[at]}
            seen, pool = self._attention(jax.lax.switch(at, befores, x), options, pool, first_pages[at])
            return jax.lax.switch(at, afters, x, seen), pool

        return jax.lax.fori_loop(0, len(layers), body, (x, pool))

    def _ask(self, i: int, x: jax.Array) -> Query:
        """What layer i wants to know of attention."""

        def ask(query: Query) -> Heads:
            raise _Asked(query)

        try:
            self.model.layer(i, x, self._step(ask))
        except _Asked as asked:
            return asked.query
        raise ValueError(f"layer {i} returned without calling step.attend")

    def _step(self, answer: Callable[[Query], Heads]) -> Step:
        return Step(positions=self.batch.positions, valid=self.batch.valid, answer=answer)

    def _attention(
        self, arrays: Arrays, options: dict[str, Any], pool: Array, first_page: Int32[Array, ""]
    ) -> tuple[Heads, Array]:
        """The kernel, with heads sharded over ``tensor``; a layer's pages begin at ``first_page`` of the flat pool."""
        batch, window = self.batch, options["window"]
        options = {name: value for name, value in options.items() if name != "window"}
        # Ids that name no page stay out of the pool.
        table = jnp.where(batch.page_table >= 0, batch.page_table + first_page, pool.shape[0])

        def kernel(
            q: Heads,
            k: Float[Array, "T K Dh"] | None,
            v: Float[Array, "T K Dh"] | None,
            cache: Array,
            sinks: Float[Array, " H"] | None,
            window: int | Int32[Array, ""] | None,
            *where: Int32[Array, " ..."],
        ) -> tuple[Array, ...]:
            return ragged_paged_attention(q, k, v, cache, *where, sinks=sinks, window=window, **options)

        if self.mesh.shape["tensor"] > 1:
            heads, cache, whole = PartitionSpec(None, "tensor", None), cache_partition("tensor"), PartitionSpec()
            kernel = jax.shard_map(
                kernel,
                mesh=self.mesh,
                in_specs=(heads, heads, heads, cache, PartitionSpec("tensor"), whole, whole, whole, whole, whole),
                out_specs=(heads, cache),
                check_vma=False,
            )
        where = (table, batch.kv_lens, batch.cu_q_lens, batch.distribution)
        q, k, v, sinks = arrays
        seen, pool = kernel(q, k, v, pool, sinks, window, *where)
        return seen, pool


def _arrays(query: Query) -> Arrays:
    return query.q, query.k, query.v, query.sinks


def _options(query: Query) -> dict[str, Any]:
    return {"scale": query.scale, "window": query.window, "soft_cap": query.soft_cap}
