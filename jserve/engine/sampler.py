"""From logits to tokens, all on the device, in one structure for every mix of options.

Order: masks -> temperature -> min_p -> top_k -> top_p. Greedy (temperature 0) is the exact argmax, lowest id on ties.
Noise is Gumbel noise keyed by (seed, choice, position, token id) alone: never by the row, the batch or the width of a
padded vocabulary. So a request draws the same tokens whoever its neighbours are.

top_k and top_p need no sort: the least kept score is found by bisecting the bits of a float, 32 passes of one
reduction, which also stays local on a sharded vocabulary. Ties at the edge are kept from the lowest id up, as a stable
sort would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jserve.request import MAX_LOGPROBS

__all__ = ["Sampled", "SamplingRows", "sample"]

_NOISE = 0
"""What the noise is for: the last fold of the key, so that later uses draw other noise."""


class SamplingRows(NamedTuple):
    """One row a choice, as in plan.RowArrays."""

    key: jax.Array  # UInt32[R, 2]
    choice: jax.Array  # Int32[R]
    position: jax.Array  # Int32[R], of the token to be chosen, in its sequence
    generated: jax.Array  # Int32[R], output tokens before this one
    temperature: jax.Array  # Float32[R]
    top_p: jax.Array  # Float32[R]
    min_p: jax.Array  # Float32[R]
    top_k: jax.Array  # Int32[R]
    min_tokens: jax.Array  # Int32[R]
    stop_ids: jax.Array  # Int32[R, N], -1 where none is
    logprobs: jax.Array  # Bool[R]
    live: jax.Array  # Bool[R], rows whose token counts


class Sampled(NamedTuple):
    token: jax.Array  # Int32[R]
    logprob: jax.Array  # Float32[R], of the raw distribution; 0 where no row asked
    top_ids: jax.Array  # Int32[R, MAX_LOGPROBS], most likely first
    top_logprobs: jax.Array  # Float32[R, MAX_LOGPROBS]


def sample(logits: jax.Array, rows: SamplingRows, *, vocab_size: int) -> Sampled:
    """Choose one token a row from ``logits`` Float[R, V]; ids from ``vocab_size`` on are never chosen or listed."""
    logits = logits.astype(jnp.float32)
    if vocab_size < logits.shape[1]:
        logits = jnp.where(jnp.arange(logits.shape[1])[None] < vocab_size, logits, -jnp.inf)

    held = rows.live & (rows.generated < rows.min_tokens)
    masked = _when(held.any(), lambda x: _mask_stop_ids(x, rows.stop_ids, held), logits)
    greedy = jnp.argmax(masked, axis=-1).astype(jnp.int32)
    drawn = rows.live & (rows.temperature > 0)
    token = jax.lax.cond(
        drawn.any(),
        lambda: jnp.where(drawn, _draw(masked, rows), greedy),
        lambda: greedy,
    )

    listed = min(MAX_LOGPROBS, vocab_size)
    logprob, top_ids, top_logprobs = jax.lax.cond(
        (rows.live & rows.logprobs).any(),
        lambda: _logprobs(logits, token, listed),
        lambda: (
            jnp.zeros(token.shape, jnp.float32),
            jnp.full((*token.shape, MAX_LOGPROBS), -1, jnp.int32),
            jnp.zeros((*token.shape, MAX_LOGPROBS), jnp.float32),
        ),
    )
    return Sampled(token=token, logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs)


def _when(flag: jax.Array, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return jax.lax.cond(flag, function, lambda x: x, x)


def _mask_stop_ids(logits: jax.Array, stop_ids: jax.Array, held: jax.Array) -> jax.Array:
    """-inf at the stop ids of the rows that may not end yet."""
    width = logits.shape[1]
    ids = jnp.where(held[:, None] & (stop_ids >= 0), stop_ids, width)
    return jax.vmap(lambda row, drop: row.at[drop].set(-jnp.inf, mode="drop"))(logits, ids)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Int32[R]: the argmax of the kept scores plus Gumbel noise."""
    scores = _kept_scores(logits, rows)
    return jnp.argmax(scores + _noise(rows, scores.shape[1]), axis=-1).astype(jnp.int32)


def _kept_scores(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Float32[R, V]: logits at temperature, the best one 0, and -inf where min_p, top_k or top_p cut."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    # Shifted first: the best score is 0 at every temperature, so it survives the smallest one without an overflow.
    scores = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    scores = jnp.where(scores >= jnp.log(rows.min_p)[:, None], scores, -jnp.inf)
    return jax.lax.fori_loop(0, 2, lambda limit, x: _limit(x, rows, by_mass=limit == 1), scores)


def _noise(rows: SamplingRows, width: int) -> jax.Array:
    """Gumbel noise Float32[R, width]."""

    def row(key_data: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        for part in (choice, position, _NOISE):
            key = jax.random.fold_in(key, part)
        return jax.random.gumbel(key, (width,), jnp.float32)

    return jax.vmap(row)(rows.key, rows.choice, rows.position)


def _limit(scores: jax.Array, rows: SamplingRows, *, by_mass: jax.Array) -> jax.Array:
    """top_k, or ``by_mass`` top_p: the fewest best whose number, or probability, is enough. Compiled once for both."""
    active = rows.live & jnp.where(by_mass, rows.top_p < 1, rows.top_k > 0)
    need = jnp.where(by_mass, rows.top_p, rows.top_k.astype(jnp.float32))

    def keep(scores: jax.Array) -> jax.Array:
        weight = jnp.where(by_mass, jax.nn.softmax(scores, axis=-1), 1.0)
        return _keep_best(scores, weight, need, active)

    return _when(active.any(), keep, scores)


def _keep_best(scores: jax.Array, weight: jax.Array, need: jax.Array, active: jax.Array) -> jax.Array:
    """Keep the fewest best scores of a row whose weights sum to ``need``; at least one; ties from the lowest id up."""
    keys = _ordered_bits(scores)

    def above(threshold: jax.Array) -> jax.Array:
        return jnp.where(keys >= threshold[:, None], weight, 0.0).sum(axis=-1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the sum at low reaches need; above high it does not
        middle = low + (high - low) // jnp.uint32(2) + (high - low) % jnp.uint32(2)
        reaches = above(middle) >= need
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle - jnp.uint32(1))

    low = jnp.zeros(scores.shape[0], jnp.uint32)
    edge, _ = jax.lax.fori_loop(0, 32, halve, (low, keys.max(axis=-1)))
    better = keys > edge[:, None]
    tied = keys == edge[:, None]
    missing = need - jnp.where(better, weight, 0.0).sum(axis=-1)
    each = jnp.where(tied, weight, 0.0).max(axis=-1)
    # Of n equal weights the first ceil(missing / each) are needed; at least one survives need = 0.
    count = jnp.maximum(jnp.ceil(missing / jnp.where(each > 0, each, 1.0)), 1.0)
    kept_ties = tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= count[:, None].astype(jnp.int32))
    return jnp.where(better | kept_ties | ~active[:, None], scores, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """UInt32 keys in the order of the floats ``x``."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0 makes -0 and 0 one
    sign = jnp.uint32(0x80000000)
    return jnp.where((bits & sign) != 0, ~bits, bits | sign)


def _logprobs(logits: jax.Array, token: jax.Array, listed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Natural log-softmax of the raw logits: the chosen token's and the ``listed`` best."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - total
    best, ids = jax.lax.top_k(logits, listed)
    pad = [(0, 0), (0, MAX_LOGPROBS - listed)]
    return (
        chosen,
        jnp.pad(ids.astype(jnp.int32), pad, constant_values=-1),
        jnp.pad(best - total[:, None], pad, constant_values=0.0),
    )
