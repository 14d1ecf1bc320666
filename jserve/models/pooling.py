"""How a text's hidden states become its vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32

__all__ = ["Pooling", "pool"]

_NORM_FLOOR = 1e-12
"""Least length that a vector is divided by."""


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How a text's hidden states become its vector, in float32."""

    how: Literal["mean", "cls"]
    """mean: over all tokens of the text, [CLS] and [SEP] too. cls: its first token's."""
    normalize: bool
    """Scale the vector to length 1."""


def pool(x: Float[Array, "S L D"], valid: Bool[Array, "S L"], pooling: Pooling) -> Float32[Array, "S D"]:
    """One vector a text."""
    if pooling.how == "cls":
        vectors = x[:, 0].astype(jnp.float32)
    else:
        total = jnp.where(valid[:, :, None], x.astype(jnp.float32), 0.0).sum(axis=1)
        vectors = total / jnp.maximum(valid.sum(axis=1), 1).astype(jnp.float32)[:, None]
    if pooling.normalize:
        size = jnp.sqrt(jnp.sum(vectors * vectors, axis=1, keepdims=True))
        vectors = vectors / jnp.maximum(size, _NORM_FLOOR)
    return vectors
