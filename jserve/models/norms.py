"""Norms, in float32 whatever the activations' dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

__all__ = ["layer_norm", "rms_norm", "rms_norm_plus_one"]


def rms_norm(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
    """x over its root mean square, in float32, times weight; in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * _along(weight, x)).astype(x.dtype)


def rms_norm_plus_one(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
    """``rms_norm`` by 1 + weight, a sum that bfloat16 would round: weights are stored as what they differ from 1."""
    return rms_norm(x, 1.0 + weight.astype(jnp.float32), eps)


def layer_norm(
    x: Float[Array, "*T D"], weight: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*T D"]:
    """x without its mean, over its deviation, times weight plus bias, in float32; in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * _along(weight, x) + _along(bias, x)).astype(x.dtype)


def _along(weight: Float[Array, " D"], x: Float[Array, "*T D"]) -> Float[Array, "*ones D"]:
    return weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
