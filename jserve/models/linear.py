"""The products of a parameter and activations: every projection of every family goes through one of them."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

__all__ = ["grouped_linear", "linear"]


# Compiled into its caller; as a function of its own it is traced once for all layers of a model.
@partial(jax.jit, static_argnames="out_dtype")
def linear(
    w: Float[Array, " ..."],
    x: Float[Array, "T *in"],
    bias: Float[Array, " *out"] | None = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, " T *out"]:
    """``x [T, *in]`` times ``w [*out, *in]``, a weight stored output-major, as checkpoints keep it: ``[T, *out]``.

    Sums, that with ``bias`` included, are float32 whatever the operands' dtype (which must be one and the same);
    float32 operands are multiplied in full precision on every device. The result has ``out_dtype``, by default x's
    dtype.
    """
    inner = x.ndim - 1
    if inner < 1 or w.shape[-inner:] != x.shape[1:]:
        raise ValueError(f"weight {w.shape} [*out, *in] does not fit activations {x.shape} [T, *in]")
    # As matrices: for a dot over several dimensions XLA on CPU would transpose a copy.
    width = math.prod(x.shape[1:])
    matrices = w.reshape(-1, width), x.reshape(-1, width)
    if w.dtype == jnp.float32:
        out = jax.lax.platform_dependent(*matrices, cpu=_weight_first, default=_plain)
    else:
        out = _plain(*matrices)
    out = out.reshape(x.shape[0], *w.shape[: w.ndim - inner])
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None]
    return out.astype(x.dtype if out_dtype is None else out_dtype)


@jax.jit
def grouped_linear(
    w: Float[Array, "E out in"], x: Float[Array, "R in"], group_sizes: Int32[Array, " E"]
) -> Float[Array, "R out"]:
    """As ``linear``, but the first ``group_sizes[0]`` rows of x times ``w[0]``, the next times ``w[1]``, and so on.

    The sizes add up to R. On TPU and GPU the cost is that of R rows; on a CPU XLA multiplies every row by every
    group's weight.
    """
    return jax.lax.ragged_dot_general(
        x,
        w,
        group_sizes,
        _ROWS_BY_GROUP,
        precision=jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)


_ROWS_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def _plain(w: Float[Array, "out in"], x: Float[Array, "T in"]) -> Float32[Array, "T out"]:
    return _dot(x, w, contract=(1, 1))


def _weight_first(w: Float[Array, "out in"], x: Float[Array, "T in"]) -> Float32[Array, "T out"]:
    """As ``_plain``, twice as fast on CPU for 2 to 64 rows: there the large operand wants to be the left one.

    The barriers keep XLA from folding the transposes into the dot, which would put the activations first again.
    """
    columns = jax.lax.optimization_barrier(x.T)
    return jax.lax.optimization_barrier(_dot(w, columns, contract=(1, 0))).T


def _dot(a: Float[Array, "_ _"], b: Float[Array, "_ _"], *, contract: tuple[int, int]) -> Float32[Array, "_ _"]:
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
