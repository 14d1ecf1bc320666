"""Parameters as families declare them: random values, and the logical axes that they are sharded by."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from sharding.rules import Axes

__all__ = ["filled", "normal"]


def normal(shape: tuple[int, ...], axes: Axes, fan_in: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Param[Array]:
    """Normal values of deviation ``fan_in ** -0.5``."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return _param(value.astype(dtype), axes)


def filled(shape: tuple[int, ...], axes: Axes, value: float, *, dtype: DTypeLike) -> nnx.Param[Array]:
    """``value`` everywhere: 1 for the weight of a norm, 0 for a bias."""
    return _param(jnp.full(shape, value, dtype), axes)


def _param(value: Array, axes: Axes) -> nnx.Param[Array]:
    # Sharding at creation would want a mesh with axes of these very names; here they are only declared.
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)
