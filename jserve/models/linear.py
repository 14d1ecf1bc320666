"""The one product of a parameter and activations: every projection of every family goes through it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

__all__ = ["linear"]


def linear(w: jax.Array, x: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """``x [T, *in]`` times ``w [*out, *in]``, a weight stored output-major, as checkpoints keep it: ``[T, *out]``.

    Sums are float32 whatever the operands' dtype (which must be one and the same); float32 operands are
    multiplied in full precision on every device. The result has ``out_dtype``, by default x's dtype.
    """
    inner = x.ndim - 1
    if inner < 1 or w.shape[-inner:] != x.shape[1:]:
        raise ValueError(f"weight {w.shape} [*out, *in] does not fit activations {x.shape} [T, *in]")
    # Flat matrices: a dot over several dimensions makes XLA on CPU transpose the activations, and in bfloat16 fail.
    width = math.prod(x.shape[1:])
    flat_w, flat_x = w.reshape(-1, width), x.reshape(-1, width)
    # The weight goes first: for a few rows XLA on CPU runs such a product about twice as fast as x @ w.T.
    product = jax.lax.dot_general(
        flat_w,
        flat_x,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    out = product.T.astype(x.dtype if out_dtype is None else out_dtype)
    return out.reshape(x.shape[0], *w.shape[: w.ndim - inner])
