"""What the engine asks of an encoder: a model that reads whole texts and makes no tokens.

Token-major like a decoder (``jserve.models.contract``), but bidirectional and without a cache: each token sees every
real token of its own text.

    class MyEncoder(nnx.Module):
        num_layers: int
        def embed(self, tokens, step): ...    # Int32[T] -> Float[T, D]
        def layer(self, i, x, step): ...      # Float[T, D] -> Float[T, D], calls step.attend(i, q, k, v, scale=...)

What the last layer returns are the hidden states that texts' vectors are pooled from. Each layer calls ``step.attend``
exactly once, with its own number i; nothing else calls it. Rows of tokens of padding may hold anything, NaN too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int32

from jserve.errors import UnsupportedModel

__all__ = ["EncoderQuery", "EncoderStep", "run_encoder", "trace_encoder"]


@dataclass(frozen=True, kw_only=True)
class EncoderQuery:
    """One call of ``attend``."""

    layer: int
    q: Float[Array, "T H Dh"]
    k: Float[Array, "T K Dh"]
    v: Float[Array, "T K Dh"]
    scale: float


@dataclass(frozen=True, kw_only=True)
class EncoderStep:
    """One pass of the model over the tokens of several texts."""

    positions: Int32[Array, " T"]
    """Each token's position in its own text."""
    valid: Bool[Array, " T"]
    """False for tokens of padding."""
    answer: Callable[[EncoderQuery], Float[Array, "T H Dh"]]
    """What stands behind ``attend``."""

    def attend(
        self,
        i: int,
        q: Float[Array, "T H Dh"],
        k: Float[Array, "T K Dh"],
        v: Float[Array, "T K Dh"],
        *,
        scale: float,
    ) -> Float[Array, "T H Dh"]:
        """What each token's q sees of its own text, before and behind it."""
        return self.answer(EncoderQuery(layer=i, q=q, k=k, v=v, scale=scale))


def run_encoder(model: Any, tokens: Int32[Array, " T"], step: EncoderStep) -> Float[Array, "T D"]:
    """The hidden states of an encoder: embed, then every layer."""
    x = model.embed(tokens, step)
    for i in range(model.num_layers):
        x = model.layer(i, x, step)
    return x


def trace_encoder(graphdef: Any, params: Any) -> int:
    """Run the model abstractly once; the width D of its hidden states.

    ``params`` is the module's pure dict of arrays or ShapeDtypeStructs. Nothing is computed. Raises UnsupportedModel
    for a module that does not keep the contract.
    """
    asked: list[int] = []
    rule = "each layer must call step.attend exactly once, with its own number"

    def record(query: EncoderQuery) -> Float[Array, "T H Dh"]:
        asked.append(query.layer)
        return query.q

    def run(tokens: Int32[Array, " T"], leaves: Any) -> Float[Array, "T D"]:
        model = nnx.merge(graphdef, leaves)
        absent = [name for name in ("num_layers", "embed", "layer") if not hasattr(model, name)]
        if absent:
            raise UnsupportedModel(
                f"{type(model).__name__} has no {', '.join(absent)}; see jserve.models.encoder_contract"
            )
        step = EncoderStep(positions=jnp.zeros_like(tokens), valid=jnp.ones(tokens.shape, bool), answer=record)
        x = run_encoder(model, tokens, step)
        if asked != list(range(model.num_layers)):
            raise UnsupportedModel(f"the {model.num_layers} layers called step.attend with the numbers {asked}; {rule}")
        return x

    out = jax.eval_shape(run, jax.ShapeDtypeStruct((1,), jnp.int32), params)
    return int(out.shape[-1])
