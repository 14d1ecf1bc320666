"""Ragged paged attention in plain XLA operations, for any backend.

One online softmax over blocks of pages, entered in two ways, each with loops as long as the lengths ask:

- **rows**: tokens that stand alone (decode): runs of their pages, several at a time.
- **blocks**: a block of one sequence's queries at a time, as matrix products (prefill).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.layout import gather_blocks, store_tokens

__all__ = ["xla_ragged_paged_attention"]

# Chosen by measuring at Dh = 64 and page = 16 on two AVX2 cores.
_ROW_ITEMS = 16
_ROW_KEYS = 64
_ONE_ROW_KEYS = 256
_BLOCK_QUERIES = 64
_BLOCK_KEYS = 128

_Carry = tuple[jax.Array, ...]

_NEVER = -1e30
"""A logit that the softmax does not see; finite, so that differences of such logits are numbers."""


# Compiled into its caller; as a function of its own it is traced once for all layers of a model.
@partial(
    jax.jit,
    static_argnames=("scale", "soft_cap", "k_scale", "v_scale", "page_stride", "page_offset"),
)
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
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    page_stride: int = 1,
    page_offset: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The contract of ``ragged_paged_attention``: out ``[T, H, Dh]``, the new cache, lse float32 ``[T, H]``."""
    num_tokens, num_seqs = q.shape[0], page_table.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    real = jnp.arange(num_seqs, dtype=jnp.int32) < distribution[2]
    seq = jnp.sum((cu_q_lens[None, 1:] <= token[:, None]) & real[None], axis=1, dtype=jnp.int32)
    valid = (seq < distribution[2]) & (kv_lens.at[seq].get(mode="clip") > 0)
    seq = jnp.minimum(seq, num_seqs - 1)
    position = jnp.where(valid, kv_lens[seq] - cu_q_lens[seq + 1] + token, -1)
    pages = _Pages(
        table=page_table, size=cache.shape[3], stride=page_stride, offset=page_offset, num_pages=cache.shape[0]
    )

    if k is not None and v is not None:
        k = (k.astype(jnp.float32) / (1.0 if k_scale is None else k_scale)).astype(cache.dtype)
        v = (v.astype(jnp.float32) / (1.0 if v_scale is None else v_scale)).astype(cache.dtype)
        cache = store_tokens(cache, pages.of(seq, position), position % pages.size, k, v)

    attention = _Attention(
        cache=cache,
        pages=pages,
        logit_scale=scale * (1.0 if k_scale is None else k_scale),
        value_scale=1.0 if v_scale is None else v_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    # Rows can serve any token, and are the whole of a step with a token a sequence, that is of a decode program.
    # Longer steps take what the decode range starts with as rows, the rest as blocks.
    num_rows = min(num_tokens, num_seqs)
    if num_tokens == num_rows:
        out, lse = _attend_rows(attention, q, seq, position)
        return out.astype(q.dtype), cache, lse
    split = jnp.minimum(cu_q_lens[distribution[0]], num_rows)
    alone = jnp.where(token < split, position, -1)[:num_rows]
    out, lse = _attend_rows(attention, q[:num_rows], seq[:num_rows], alone)
    past = [(0, num_tokens - num_rows), (0, 0)]
    out, lse = jnp.pad(out, [*past, (0, 0)]), jnp.pad(lse, past, constant_values=-jnp.inf)
    first = jnp.maximum(cu_q_lens[:-1], split)
    end = jnp.where(real & (kv_lens > 0), cu_q_lens[1:], 0)
    out, lse = _attend_blocks(attention, q, first, end, kv_lens - cu_q_lens[1:], out, lse)
    return out.astype(q.dtype), cache, lse


@dataclass(frozen=True, kw_only=True)
class _Pages:
    """Which positions of the sequences lie here, and where: the page table and how its columns are dealt.

    A *place* is an index into the flattened table. Columns past a row's end are places of the next row, and are
    told by their positions, which are past ``end``.
    """

    table: jax.Array
    size: int
    """Positions of a page."""
    stride: int
    offset: int
    num_pages: int

    @property
    def end(self) -> int:
        """The position after the last that a table row can hold."""
        return (self.table.shape[1] * self.stride + self.offset) * self.size

    def of(self, seq: jax.Array, position: jax.Array) -> jax.Array:
        """The page of each position; negative where it is not here."""
        page = position // self.size - self.offset
        column = page if self.stride == 1 else page // self.stride
        here = (position >= 0) & (column >= 0) & (position < self.end) & (page == column * self.stride)
        return jnp.where(here, self.at(seq * self.table.shape[1] + column), -1)

    def at(self, place: jax.Array) -> jax.Array:
        """The page ids at these places; negative where the table names no page of the pool."""
        ids = self.table.reshape(-1).at[place].get(mode="clip")
        return jnp.where(ids < self.num_pages, ids, -1)

    def run(self, seq: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The columns that hold positions low..high: the first one's place and first position, and their number."""
        first = jnp.maximum(-((self.offset - low // self.size) // self.stride), 0)
        last = jnp.minimum((high // self.size - self.offset) // self.stride, self.table.shape[1] - 1)
        count = jnp.where(high < low, 0, jnp.maximum(last - first + 1, 0))
        return seq * self.table.shape[1] + first, (first * self.stride + self.offset) * self.size, count

    def positions(self, start: jax.Array, num_columns: int) -> jax.Array:
        """The positions ``[B, N * page]`` held in the N columns whose first position is ``start`` Int32 ``[B]``."""
        slot = jnp.arange(num_columns * self.size, dtype=jnp.int32)
        slot = slot // self.size * (self.stride * self.size) + slot % self.size
        return start[:, None] + slot[None]


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Everything that the queries of a call have in common."""

    cache: jax.Array
    pages: _Pages
    logit_scale: float
    value_scale: float
    window: int | jax.Array | None
    soft_cap: float | None
    sinks: jax.Array | None

    def lowest(self, position: jax.Array) -> jax.Array:
        """The lowest position that a query at ``position`` sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position - self.window + 1, 0)

    def grouped(self, q: jax.Array) -> jax.Array:
        """``q [N, H, Dh]`` as float32 ``[N, K, G, Dh]``, scaled: query heads by the KV head that they share."""
        num_kv_heads = self.cache.shape[1]
        return (q.astype(jnp.float32) * self.logit_scale).reshape(q.shape[0], num_kv_heads, -1, q.shape[2])

    def logits(
        self, q: jax.Array, position: jax.Array, place: jax.Array, start: jax.Array, num_columns: int
    ) -> tuple[jax.Array, jax.Array]:
        """The logits of B groups of Q queries with the keys of ``num_columns`` pages each, and the keys' values.

        Args:
          q: ``[B, K, G * Q, Dh]``. position: Int32 ``[B, Q]``, ascending in a group; -1: padding.
          place, start: Int32 ``[B]``, the place and the first position of each group's first page.

        Returns:
          Logits ``[B, K, G, Q, t]``, _NEVER where a query does not see the key, and values ``[B, K, t, Dh]``, zero
          where no query of the group does: what nobody sees may be anything, NaN too, and zero times NaN is NaN.
        """
        page_ids = self.pages.at(place[:, None] + jnp.arange(num_columns, dtype=jnp.int32)[None])
        keys, values = gather_blocks(self.cache, jnp.maximum(page_ids, 0))
        where = self.pages.positions(start, num_columns)
        here = jnp.repeat(page_ids >= 0, self.pages.size, axis=1) & (where < self.pages.end)
        some = here & (where >= self.lowest(position[:, :1])) & (where <= position[:, -1:])
        values = jnp.where(some[:, None, :, None], values.astype(jnp.float32), 0.0)
        seen = where[:, None] <= position[:, :, None]
        if self.window is not None:
            seen &= where[:, None] > position[:, :, None] - self.window
        seen = (here[:, None] & seen)[:, None, None]
        logits = _product("bkmd,bktd->bkmt", q, keys.astype(jnp.float32))
        logits = logits.reshape(*logits.shape[:2], -1, position.shape[1], logits.shape[3])
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return jnp.where(seen, logits, _NEVER), values

    def sweep(
        self, q: jax.Array, seq: jax.Array, position: jax.Array, num_keys: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One sequence's queries over all that they see, about ``num_keys`` positions a turn.

        Args:
          q: ``[Q, K, G, Dh]``, grouped. seq: Int32 scalar. position: Int32 ``[Q]``, ascending.

        Returns:
          top, total ``[Q, K, G]`` and acc ``[Q, K, G, Dh]``, as ``finish`` takes them.
        """
        num_columns = max(1, num_keys // self.pages.size)
        place, start, count = self.pages.run(seq, self.lowest(position[0]), position[-1])
        q = jnp.moveaxis(q, 0, 2)
        num_kv_heads, _, _, head_dim = q.shape
        flat = q.reshape(1, num_kv_heads, -1, head_dim)
        span = num_columns * self.pages.stride * self.pages.size

        def turn(carry: _Carry) -> _Carry:
            i, top, total, acc = carry
            here = (place + i * num_columns)[None], (start + i * span)[None]
            logits, values = self.logits(flat, position[None], *here, num_columns)
            logits = logits[0]
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - new_top[..., None])
            fade = jnp.exp(top - new_top)
            new = _product("kmt,ktd->kmd", weights.reshape(num_kv_heads, flat.shape[2], -1), values[0])
            total = total * fade + jnp.sum(weights, axis=-1)
            return i + 1, new_top, total, acc * fade[..., None] + new.reshape(acc.shape)

        # Like q and not of constants: inside shard_map a carry must vary over the mesh axes that its update does.
        zero = jnp.zeros_like(q[..., 0])
        begin: _Carry = (jnp.int32(0), zero + _NEVER, zero, jnp.zeros_like(q))
        _, top, total, acc = jax.lax.while_loop(lambda carry: carry[0] * num_columns < count, turn, begin)
        return jnp.moveaxis(top, 2, 0), jnp.moveaxis(total, 2, 0), jnp.moveaxis(acc, 2, 0)

    def finish(
        self, top: jax.Array, total: jax.Array, acc: jax.Array, active: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The softmax's result ``[N, H, Dh]`` and its lse ``[N, H]``, float32; zero and -inf where nothing is seen.

        Args:
          top, total: ``[N, K, G]``: the highest logit and the sum of exp(logit - top).
          acc: ``[N, K, G, Dh]``: the sum of exp(logit - top) times value.
          active: Bool ``[N]``: False for padding, which has no sink either.
        """
        # Where no key was seen, total counts keys that were never to be seen.
        total = jnp.where(top > _NEVER, total, 0.0)
        if self.sinks is not None:
            sink = self.sinks.astype(jnp.float32).reshape(1, *top.shape[1:])
            sink = jnp.where(active[:, None, None], sink, _NEVER)
            new_top = jnp.maximum(top, sink)
            fade = jnp.exp(top - new_top)
            total, acc, top = total * fade + jnp.exp(sink - new_top), acc * fade[..., None], new_top
        factor = jnp.where(top > _NEVER, self.value_scale / total, 0.0)
        lse = jnp.where(top > _NEVER, top + jnp.log(total), -jnp.inf)
        shape = (acc.shape[0], -1, acc.shape[3])
        return (acc * factor[..., None]).reshape(shape), lse.reshape(shape[:2])


def _attend_rows(
    attention: _Attention, q: jax.Array, seq: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each token of ``q [R, H, Dh]`` alone: out ``[R, H, Dh]`` and lse ``[R, H]``, float32. Position -1: padding.

    The work is a list of items, each a row and one run of its pages; a turn of the loop takes the next few.
    """
    q, num_rows, pages = attention.grouped(q), q.shape[0], attention.pages
    if num_rows == 1:
        return attention.finish(*attention.sweep(q, seq[0], position, _ONE_ROW_KEYS), position >= 0)
    num_items = min(num_rows, _ROW_ITEMS)
    num_columns = max(1, _ROW_KEYS // pages.size)
    span = num_columns * pages.stride * pages.size
    place, start, count = pages.run(seq, attention.lowest(position), position)
    items = -(-count // num_columns)
    ends = jnp.cumsum(items)
    # Of each row, so that item i of the list, if it is the row's, begins at the row's values plus i times the run's.
    begins = ends - items
    rows = jnp.stack([place - begins * num_columns, start - begins * span, position], axis=1)

    def turn(carry: _Carry) -> _Carry:
        done, top, total, acc = carry
        item = done + jnp.arange(num_items, dtype=jnp.int32)
        row = jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32)
        first, begin, at = rows.at[row].get(mode="fill", fill_value=-1).T
        here = jnp.minimum(row, num_rows - 1)
        logits, values = attention.logits(
            q[here], at[:, None], first + item * num_columns, begin + item * span, num_columns
        )
        logits = logits[:, :, :, 0]
        new_top = top.at[row].max(jnp.max(logits, axis=-1), mode="drop")
        weights = jnp.exp(logits - new_top[here][..., None])
        fade = jnp.exp(top - new_top)
        total = (total * fade).at[row].add(jnp.sum(weights, axis=-1), mode="drop")
        acc = (acc * fade[..., None]).at[row].add(_product("bkgt,bktd->bkgd", weights, values), mode="drop")
        return done + num_items, new_top, total, acc

    zero = jnp.zeros_like(q[..., 0])
    begin: _Carry = (jnp.int32(0), zero + _NEVER, zero, jnp.zeros_like(q))
    _, top, total, acc = jax.lax.while_loop(lambda carry: carry[0] < ends[-1], turn, begin)
    return attention.finish(top, total, acc, position >= 0)


def _attend_blocks(
    attention: _Attention,
    q: jax.Array,
    first: jax.Array,
    end: jax.Array,
    shift: jax.Array,
    out: jax.Array,
    lse: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Each sequence's tokens ``first[s]..end[s] - 1`` of ``q [T, H, Dh]``, a block at a time; token t's position is
    ``t + shift[s]``. The results replace those tokens' rows in ``out`` and ``lse``.
    """
    size = min(_BLOCK_QUERIES, q.shape[0])
    blocks = -(-jnp.maximum(end - first, 0) // size)
    ends = jnp.cumsum(blocks)

    def turn(carry: _Carry) -> _Carry:
        i, out, lse = carry
        seq = jnp.sum(ends <= i, dtype=jnp.int32)
        low = first[seq] + (i - ends[seq] + blocks[seq]) * size
        high = jnp.minimum(low + size, end[seq])
        # A block that would reach over the end of q starts earlier; what is not its own stays as it is.
        start = jnp.minimum(low, q.shape[0] - size)
        token = start + jnp.arange(size, dtype=jnp.int32)
        own = (token >= low) & (token < high)
        # Tokens that are not the block's own see what the nearest one of it does.
        position = jnp.clip(token, low, high - 1) + shift[seq]
        queries = attention.grouped(jax.lax.dynamic_slice_in_dim(q, start, size))
        new, new_lse = attention.finish(*attention.sweep(queries, seq, position, _BLOCK_KEYS), own)
        old, old_lse = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (out, lse))
        new, new_lse = jnp.where(own[:, None, None], new, old), jnp.where(own[:, None], new_lse, old_lse)
        out = jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)
        return i + 1, out, jax.lax.dynamic_update_slice_in_dim(lse, new_lse, start, 0)

    begin: _Carry = (jnp.int32(0), out, lse)
    _, out, lse = jax.lax.while_loop(lambda carry: carry[0] < ends[-1], turn, begin)
    return out, lse


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)
