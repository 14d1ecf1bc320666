"""Ragged paged attention in plain XLA operations, for any backend.

One online softmax over blocks of pages, entered in two ways, each with loops as long as the lengths ask:

- **rows**: tokens that stand alone (decode), a few at a time, those that see most first.
- **blocks**: a block of one sequence's queries at a time, as matrix products (prefill).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.layout import gather_blocks, store_tokens

__all__ = ["xla_ragged_paged_attention"]

# Chosen by measuring at Dh = 64 and page = 16 on two AVX2 cores: a turn of a loop costs about 15 us before any
# work, and the keys and values of a turn should stay in a core's L2 cache.
_ROWS = 4
_ROW_KEYS = 64
_ONE_ROW_KEYS = 256
_BLOCK_QUERIES = 64
_BLOCK_KEYS = 128

_Carry = tuple[jax.Array, ...]

_NEVER = -1e30
"""A logit that the softmax does not see; finite, so that differences of such logits are numbers."""


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
    """The contract of ``ragged_paged_attention``: out ``[T, H, Dh]``, the new cache, lse float32 ``[T, H]``."""
    num_tokens, num_seqs = q.shape[0], page_table.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    real = jnp.arange(num_seqs, dtype=jnp.int32) < distribution[2]
    seq = jnp.sum((cu_q_lens[None, 1:] <= token[:, None]) & real[None], axis=1, dtype=jnp.int32)
    valid = (seq < distribution[2]) & (kv_lens.at[seq].get(mode="clip") > 0)
    seq = jnp.minimum(seq, num_seqs - 1)
    position = kv_lens[seq] - cu_q_lens[seq + 1] + token
    pages = _Pages(
        page_table=page_table, size=cache.shape[3], stride=page_stride, offset=page_offset, num_pages=cache.shape[0]
    )

    if k is not None and v is not None:
        column, here = pages.column(position)
        page_ids = jnp.where(here & valid, pages.at(seq, column), -1)
        k = (k.astype(jnp.float32) / (1.0 if k_scale is None else k_scale)).astype(cache.dtype)
        v = (v.astype(jnp.float32) / (1.0 if v_scale is None else v_scale)).astype(cache.dtype)
        cache = store_tokens(cache, page_ids, position % pages.size, k, v)

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
        out, lse = _attend_rows(attention, q, seq, position, valid)
        return out, cache, lse
    split = jnp.minimum(cu_q_lens[distribution[0]], num_rows)
    alone = valid[:num_rows] & (token[:num_rows] < split)
    rows = _attend_rows(attention, q[:num_rows], seq[:num_rows], position[:num_rows], alone)
    past = [(0, num_tokens - num_rows), (0, 0)]
    start = jnp.pad(rows[0], [*past, (0, 0)]), jnp.pad(rows[1], past, constant_values=-jnp.inf)
    first = jnp.maximum(cu_q_lens[:-1], split)
    end = jnp.where(real & (kv_lens > 0), cu_q_lens[1:], 0)
    out, lse = _attend_blocks(attention, q, first, end, kv_lens - cu_q_lens[1:], *start)
    return out, cache, lse


@dataclass(frozen=True, kw_only=True)
class _Pages:
    """Which positions of the sequences lie here, and where: the page table and how its columns are dealt."""

    page_table: jax.Array
    size: int
    """Positions of a page."""
    stride: int
    offset: int
    num_pages: int

    def column(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The table column of each position, and whether there is one here."""
        column, rest = jnp.divmod(position // self.size - self.offset, self.stride)
        return column, (rest == 0) & (column >= 0) & (column < self.page_table.shape[1]) & (position >= 0)

    def columns(self, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first column that is here of the positions low..high, and the number of columns."""
        first = jnp.maximum(-((self.offset - low // self.size) // self.stride), 0)
        last = jnp.minimum((high // self.size - self.offset) // self.stride, self.page_table.shape[1] - 1)
        return first, jnp.maximum(jnp.where(high < low, 0, last - first + 1), 0)

    def at(self, seq: jax.Array, column: jax.Array) -> jax.Array:
        """The page ids in a table row; for columns out of range anything."""
        return self.page_table.at[seq, column].get(mode="clip")

    def position(self, column: jax.Array) -> jax.Array:
        """The positions ``[B, N, page]`` that pages in columns ``[B, N]`` hold."""
        first = (column * self.stride + self.offset) * self.size
        return first[:, :, None] + jnp.arange(self.size, dtype=jnp.int32)[None, None]


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Everything that the queries of a call have in common."""

    cache: jax.Array
    pages: _Pages
    logit_scale: float
    value_scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None

    def lowest(self, position: jax.Array) -> jax.Array:
        """The lowest position that a query at ``position`` sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position - self.window + 1, 0)

    def __call__(
        self, q: jax.Array, seq: jax.Array, position: jax.Array, low: jax.Array, high: jax.Array, num_keys: int
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with B groups of Q queries, each group of one sequence, to about ``num_keys`` positions a turn.

        Args:
          q: ``[B, Q, H, Dh]``. seq: Int32 ``[B]``. position: Int32 ``[B, Q]``.
          low, high: Int32 ``[B]``: the lowest and highest position that a group sees; high < low: nothing.

        Returns:
          Float32 ``[B, Q, H, Dh]`` and the lse ``[B, Q, H]``; zero and -inf where nothing is seen.
        """
        num_groups, num_queries, num_heads, head_dim = q.shape
        num_kv_heads = self.cache.shape[1]
        pages, columns_a_turn = self.pages, max(1, num_keys // self.pages.size)
        shape = (num_groups, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
        q = (q.astype(jnp.float32) * self.logit_scale).reshape(shape).transpose(0, 2, 3, 1, 4)
        first, count = pages.columns(low, high)
        turns = jnp.max(-(-count // columns_a_turn))

        def turn(carry: _Carry) -> _Carry:
            i, top, total, acc = carry
            nth = i * columns_a_turn + jnp.arange(columns_a_turn, dtype=jnp.int32)
            column = first[:, None] + nth[None]
            page_ids = pages.at(seq[:, None], column)
            here = (nth[None] < count[:, None]) & (page_ids >= 0) & (page_ids < pages.num_pages)
            keys, values = gather_blocks(self.cache, jnp.where(here, page_ids, 0))
            where = pages.position(column)
            some = here[..., None] & (where >= low[:, None, None]) & (where <= high[:, None, None])
            where, some = where.reshape(num_groups, 1, -1), some.reshape(num_groups, 1, -1)
            seen = some & (where <= position[..., None]) & (where >= self.lowest(position)[..., None])
            seen = seen[:, None, None]
            # What nobody sees may be anything, NaN too; zero times NaN would be NaN.
            values = jnp.where(some[..., None], values.astype(jnp.float32), 0.0)

            logits = _product("bkgqd,bktd->bkgqt", q, keys.astype(jnp.float32))
            if self.soft_cap is not None:
                logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
            logits = jnp.where(seen, logits, _NEVER)
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
            weights = jnp.where(seen, jnp.exp(logits - new_top[..., None]), 0.0)
            fade = jnp.exp(top - new_top)
            total = total * fade + jnp.sum(weights, axis=-1)
            acc = acc * fade[..., None] + _product("bkgqt,bktd->bkgqd", weights, values)
            return i + 1, new_top, total, acc

        # Like q and not of constants: inside shard_map a carry must vary over the mesh axes that its update does.
        top, total = jnp.full_like(q[..., 0], _NEVER), jnp.zeros_like(q[..., 0])
        start: _Carry = (jnp.int32(0), top, total, jnp.zeros_like(q))
        _, top, total, acc = jax.lax.while_loop(lambda carry: carry[0] < turns, turn, start)
        if self.sinks is not None:
            sink = self.sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1)
            sink = jnp.where((low <= high)[:, None, None, None], sink, _NEVER)
            new_top = jnp.maximum(top, sink)
            fade = jnp.exp(top - new_top)
            total, acc, top = total * fade + jnp.exp(sink - new_top), acc * fade[..., None], new_top
        acc = acc * (self.value_scale / jnp.where(total > 0, total, 1.0))[..., None]
        lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
        out = acc.transpose(0, 3, 1, 2, 4).reshape(num_groups, num_queries, num_heads, head_dim)
        return out, lse.transpose(0, 3, 1, 2).reshape(num_groups, num_queries, num_heads)


def _attend_rows(
    attention: _Attention, q: jax.Array, seq: jax.Array, position: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each token of ``q [R, H, Dh]`` alone: out ``[R, H, Dh]`` in q's dtype, lse ``[R, H]``; inactive rows see nothing.

    Rows are taken _ROWS at a time in order of how much they see, so that those of one loop are of like lengths.
    """
    num_rows, dtype = q.shape[0], q.dtype
    low = attention.lowest(position)
    high = jnp.where(active, position, -1)
    if num_rows <= _ROWS:
        num_keys = _ONE_ROW_KEYS if num_rows == 1 else _ROW_KEYS
        out, lse = attention(q[:, None], seq, position[:, None], low, high, num_keys)
        return out[:, 0].astype(dtype), lse[:, 0]
    _, count = attention.pages.columns(low, high)
    order = jnp.argsort(count, descending=True)
    order = jnp.pad(order, (0, -num_rows % _ROWS), constant_values=num_rows)
    some = jnp.sum(count > 0)

    def turn(carry: _Carry) -> _Carry:
        done, out, lse = carry
        rows = jax.lax.dynamic_slice(order, (done,), (_ROWS,))
        here = jnp.minimum(rows, num_rows - 1)
        top = jnp.where(rows < num_rows, high[here], -1)
        new, new_lse = attention(q[here][:, None], seq[here], position[here][:, None], low[here], top, _ROW_KEYS)
        out = out.at[rows].set(new[:, 0].astype(dtype), mode="drop", unique_indices=True)
        return done + _ROWS, out, lse.at[rows].set(new_lse[:, 0], mode="drop", unique_indices=True)

    start: _Carry = (jnp.int32(0), jnp.zeros_like(q), jnp.full_like(q[..., 0], -jnp.inf, dtype=jnp.float32))
    _, out, lse = jax.lax.while_loop(lambda carry: carry[0] < some, turn, start)
    return out, lse


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
        position = token + shift[seq]
        new, new_lse = attention(
            jax.lax.dynamic_slice_in_dim(q, start, size)[None],
            seq[None],
            position[None],
            attention.lowest(low + shift[seq])[None],
            (high - 1 + shift[seq])[None],
            _BLOCK_KEYS,
        )
        old = jax.lax.dynamic_slice_in_dim(out, start, size)
        old_lse = jax.lax.dynamic_slice_in_dim(lse, start, size)
        new = jnp.where(own[:, None, None], new[0].astype(out.dtype), old)
        new_lse = jnp.where(own[:, None], new_lse[0], old_lse)
        out = jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)
        return i + 1, out, jax.lax.dynamic_update_slice_in_dim(lse, new_lse, start, 0)

    carry: _Carry = (jnp.int32(0), out, lse)
    _, out, lse = jax.lax.while_loop(lambda carry: carry[0] < ends[-1], turn, carry)
    return out, lse


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)
