"""Norms, in float32 whatever the activations' dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jserve.models.params import filled

__all__ = ["LayerNorm", "rms_norm", "rms_norm_plus_one"]


def rms_norm(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
    """x over its root mean square, in float32, times weight; in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * _along(weight, x)).astype(x.dtype)


def rms_norm_plus_one(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
    """``rms_norm`` by 1 + weight, a sum that bfloat16 would round: weights are stored as what they differ from 1."""
    return rms_norm(x, 1.0 + weight.astype(jnp.float32), eps)


class LayerNorm(nnx.Module):
    """x without its mean, over its deviation, times weight plus bias, in float32; in x's dtype."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: DTypeLike) -> None:
        self.eps = eps
        self.weight = filled((hidden_size,), ("embed",), 1.0, dtype=dtype)
        self.bias = filled((hidden_size,), ("embed",), 0.0, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * _along(self.weight[...], x) + _along(self.bias[...], x)).astype(x.dtype)


def _along(weight: Float[Array, " D"], x: Float[Array, "*T D"]) -> Float[Array, "*ones D"]:
    return weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
