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
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32, UInt32

from jserve.request import MAX_LOGPROBS

__all__ = ["Sampled", "SamplingRows", "sample"]

_NOISE = 0
"""What the noise is for: the last fold of the key, so that later uses draw other noise."""


class SamplingRows(NamedTuple):
    """One row a choice, as in plan.RowArrays. ``N`` is MAX_STOP_TOKENS."""

    key: UInt32[Array, "R 2"]
    choice: Int32[Array, " R"]
    position: Int32[Array, " R"]  # of the token to be chosen, in its sequence
    generated: Int32[Array, " R"]  # output tokens before this one
    temperature: Float32[Array, " R"]
    top_p: Float32[Array, " R"]
    min_p: Float32[Array, " R"]
    top_k: Int32[Array, " R"]
    min_tokens: Int32[Array, " R"]
    stop_ids: Int32[Array, "R N"]  # -1 where none is
    logprobs: Bool[Array, " R"]
    live: Bool[Array, " R"]  # rows whose token counts


class Sampled(NamedTuple):
    """What was chosen; ``L`` is MAX_LOGPROBS."""

    token: Int32[Array, " R"]
    logprob: Float32[Array, " R"]  # of the raw distribution; 0 where no row asked
    top_ids: Int32[Array, "R L"]  # most likely first
    top_logprobs: Float32[Array, "R L"]


def sample(logits: Float[Array, "R V"], rows: SamplingRows, *, vocab_size: int) -> Sampled:
    """Choose one token a row; ids from ``vocab_size`` on are never chosen or listed."""
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


def _when(flag: Bool[Array, ""], function: Callable[[Array], Array], x: Float32[Array, "R V"]) -> Float32[Array, "R V"]:
    return jax.lax.cond(flag, function, lambda x: x, x)


def _mask_stop_ids(
    logits: Float32[Array, "R V"], stop_ids: Int32[Array, "R N"], held: Bool[Array, " R"]
) -> Float32[Array, "R V"]:
    """-inf at the stop ids of the rows that may not end yet."""
    width = logits.shape[1]
    ids = jnp.where(held[:, None] & (stop_ids >= 0), stop_ids, width)
    return jax.vmap(lambda row, drop: row.at[drop].set(-jnp.inf, mode="drop"))(logits, ids)


def _draw(logits: Float32[Array, "R V"], rows: SamplingRows) -> Int32[Array, " R"]:
    """The argmax of the kept scores plus Gumbel noise."""
    scores = _kept_scores(logits, rows)
    return jnp.argmax(scores + _noise(rows, scores.shape[1]), axis=-1).astype(jnp.int32)


def _kept_scores(logits: Float32[Array, "R V"], rows: SamplingRows) -> Float32[Array, "R V"]:
    """Logits at temperature, the best one 0, and -inf where min_p, top_k or top_p cut."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    # Shifted first: the best score is 0 at every temperature, so it survives the smallest one without an overflow.
    scores = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    scores = jnp.where(scores >= jnp.log(rows.min_p)[:, None], scores, -jnp.inf)
    return jax.lax.fori_loop(0, 2, lambda limit, x: _limit(x, rows, by_mass=limit == 1), scores)


def _noise(rows: SamplingRows, width: int) -> Float32[Array, "R {width}"]:
    """Gumbel noise."""

    def row(
        key_data: UInt32[Array, " 2"], choice: Int32[Array, ""], position: Int32[Array, ""]
    ) -> Float32[Array, " V"]:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        for part in (choice, position, _NOISE):
            key = jax.random.fold_in(key, part)
        return jax.random.gumbel(key, (width,), jnp.float32)

    return jax.vmap(row)(rows.key, rows.choice, rows.position)


def _limit(scores: Float32[Array, "R V"], rows: SamplingRows, *, by_mass: Bool[Array, ""]) -> Float32[Array, "R V"]:
    """top_k, or ``by_mass`` top_p: the fewest best whose number, or probability, is enough. Compiled once for both."""
    active = rows.live & jnp.where(by_mass, rows.top_p < 1, rows.top_k > 0)
    need = jnp.where(by_mass, rows.top_p, rows.top_k.astype(jnp.float32))

    def keep(scores: Float32[Array, "R V"]) -> Float32[Array, "R V"]:
        weight = jnp.where(by_mass, jax.nn.softmax(scores, axis=-1), 1.0)
        return _keep_best(scores, weight, need, active)

    return _when(active.any(), keep, scores)


def _keep_best(
    scores: Float32[Array, "R V"],
    weight: Float32[Array, "R V"],
    need: Float32[Array, " R"],
    active: Bool[Array, " R"],
) -> Float32[Array, "R V"]:
    """Keep the fewest best scores of a row whose weights sum to ``need``; at least one; ties from the lowest id up."""
    keys = _ordered_bits(scores)

    def above(threshold: UInt32[Array, " R"]) -> Float32[Array, " R"]:
        return jnp.where(keys >= threshold[:, None], weight, 0.0).sum(axis=-1)

    def halve(
        _: Int32[Array, ""], bounds: tuple[UInt32[Array, " R"], UInt32[Array, " R"]]
    ) -> tuple[UInt32[Array, " R"], UInt32[Array, " R"]]:
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


def _ordered_bits(x: Float32[Array, "R V"]) -> UInt32[Array, "R V"]:
    """Keys in the order of the floats ``x``."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0 makes -0 and 0 one
    sign = jnp.uint32(0x80000000)
    return jnp.where((bits & sign) != 0, ~bits, bits | sign)


def _logprobs(
    logits: Float32[Array, "R V"], token: Int32[Array, " R"], listed: int
) -> tuple[Float32[Array, " R"], Int32[Array, "R L"], Float32[Array, "R L"]]:
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
