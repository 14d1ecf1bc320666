"""The compiled program of an encoder: tokens of several texts to one vector a text, in one device call.

Nothing of a text's vector comes from another row, and nothing from padding: keys of padding are masked and their
values zeroed, and pooling adds only what is real. So NaN in a padded row stays there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

from jserve.models.encoder_contract import EncoderQuery, EncoderStep, run_encoder
from jserve.models.pooling import Pooling, pool

__all__ = ["EncoderProgram", "attention"]


@dataclass(frozen=True, kw_only=True)
class EncoderProgram:
    """Builds the function that is compiled for each shape."""

    graphdef: Any
    pooling: Pooling

    def __call__(self, params: Any, tokens: Int32[Array, "S L"], lengths: Int32[Array, " S"]) -> Float32[Array, "S D"]:
        """``lengths`` are the real tokens of each row, first in it; 0 for a row of padding."""
        num_texts, length = tokens.shape
        place = jnp.arange(length, dtype=jnp.int32)
        valid = place[None] < lengths[:, None]

        def answer(query: EncoderQuery) -> Float[Array, "T H Dh"]:
            return attention(query, valid)

        step = EncoderStep(positions=jnp.tile(place, num_texts), valid=valid.reshape(-1), answer=answer)
        x = run_encoder(nnx.merge(self.graphdef, params), tokens.reshape(-1), step)
        return pool(x.reshape(num_texts, length, -1), valid, self.pooling)


def attention(query: EncoderQuery, valid: Bool[Array, "S L"]) -> Float[Array, "T H Dh"]:
    """Each of the S texts by itself, ``T = S * L``; softmax and sums in float32."""
    num_texts, length = valid.shape
    num_kv_heads, head_dim = query.k.shape[1:]

    def by_head(x: Float[Array, "T _ Dh"]) -> Float[Array, "S K _ Dh"]:
        # Query heads that share a KV head stand one after the other: four axes compile and run quicker than five.
        grouped = x.reshape(num_texts, length, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
        return grouped.reshape(num_texts, num_kv_heads, -1, head_dim)

    q, k, v = by_head(query.q), by_head(query.k), by_head(query.v)
    v = jnp.where(valid[:, None, :, None], v, jnp.zeros((), v.dtype))
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum("sktd,skud->sktu", q, k, precision=precision, preferred_element_type=jnp.float32)
    # Finite, so that a row which sees nothing stays finite too.
    scores = jnp.where(valid[:, None, None, :], scores * query.scale, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("sktu,skud->sktd", weights, v, precision=precision, preferred_element_type=jnp.float32)
    out = out.astype(query.q.dtype).reshape(num_texts, num_kv_heads, -1, length, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(query.q.shape)
