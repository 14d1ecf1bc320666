"""A mixture of experts: each token goes through a few of many feed-forwards, those that a router gives most weight."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jserve.errors import UnsupportedModel
from jserve.models.config import check_size
from jserve.models.linear import grouped_linear, linear
from jserve.models.params import normal

__all__ = ["Experts", "ExpertsConfig"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """How many experts there are, and how a token chooses."""

    count: int
    per_token: int
    normalize: bool
    """The weights of a token's experts are divided by their sum; otherwise they are what the router gave of 1."""

    def __post_init__(self) -> None:
        check_size("the number of experts", self.count)
        if not 1 <= self.per_token <= self.count:
            raise UnsupportedModel(f"a token goes to {self.per_token} of {self.count} experts; allowed: 1 to all")


class Experts(nnx.Module):
    """E gated feed-forwards (SwiGLU) and their router, in the place of one feed-forward."""

    def __init__(
        self, config: ExpertsConfig, *, hidden_size: int, intermediate_size: int, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        E, D, F = config.count, hidden_size, intermediate_size
        self.config = config
        # Every device routes for itself: a router cut by experts would have to be gathered for each top_k.
        self.router = normal((E, D), (None, "embed"), D, dtype=dtype, rngs=rngs)
        self.gate = normal((E, F, D), ("experts", "mlp", "embed"), D, dtype=dtype, rngs=rngs)
        self.up = normal((E, F, D), ("experts", "mlp", "embed"), D, dtype=dtype, rngs=rngs)
        self.down = normal((E, D, F), ("experts", "embed", "mlp"), F, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Each token's experts, added up by the router's weights in float32. Tokens do not depend on each other."""
        weights, chosen = self._route(x)
        # One row for each token and expert, sorted by expert.
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        rows = x[order // self.config.per_token]
        sizes = jnp.bincount(chosen.reshape(-1), length=self.config.count).astype(jnp.int32)
        gate, up = grouped_linear(self.gate[...], rows, sizes), grouped_linear(self.up[...], rows, sizes)
        out = grouped_linear(self.down[...], jax.nn.silu(gate) * up, sizes)
        # Back to the order of tokens.
        out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*chosen.shape, -1)
        return jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)

    def _route(self, x: Float[Array, "T D"]) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"]]:
        """Each token's experts and their weights."""
        given = jax.nn.softmax(linear(self.router[...], x, out_dtype=jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(given, self.config.per_token)
        if self.config.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen
