"""What the engine asks of a model, and how it learns what cache the model needs.

A servable decoder is a Flax NNX module, ragged and token-major: the ``T`` tokens of all sequences of a step lie
on one axis; there is no batch axis and no padding inside a sequence.

    class MyModel(nnx.Module):
        num_layers: int
        def embed(self, tokens, step): ...    # Int[T] -> Float[T, D]
        def layer(self, i, x, step): ...      # Float[T, D] -> Float[T, D], calls step.attend(i, q, k, v, scale=...)
        def logits(self, x): ...              # Float[R, D] -> Float[R, V]

Each layer calls ``step.attend`` exactly once, with its own number i; nothing else calls it. A layer has one cache, and
the engine cuts layers in two at that call.
Each parameter declares logical axes once (see ``sharding.rules.LOGICAL_AXES``) as ``nnx.Param`` metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jserve.errors import UnsupportedModel

__all__ = ["Decoder", "LayerCache", "Query", "Step", "trace_layer_caches"]


@dataclass(frozen=True, kw_only=True)
class Query:
    """One call of ``attend``."""

    layer: int
    q: jax.Array  # [T, H, Dh]
    k: jax.Array | None  # [T, K, Dh], to be written to the layer's cache
    v: jax.Array | None  # [T, K, Dh]
    sinks: jax.Array | None  # [H]
    scale: float
    window: int | None
    soft_cap: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One pass of the model over the tokens of a step."""

    positions: jax.Array
    """Int32[T]: each token's position in its own sequence."""
    valid: jax.Array
    """Bool[T]: False for tokens of padding."""
    answer: Callable[[Query], jax.Array]
    """What stands behind ``attend``: the engine's paged cache, say, or an oracle's dense attention."""

    def attend(
        self,
        i: int,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Write k, v ``[T, K, Dh]`` to layer i's cache; return what q ``[T, H, Dh]`` may see, ``[T, H, Dh]``."""
        return self.answer(Query(layer=i, q=q, k=k, v=v, sinks=sinks, scale=scale, window=window, soft_cap=soft_cap))


class Decoder(Protocol):
    """The model contract."""

    num_layers: int

    def embed(self, tokens: jax.Array, step: Step) -> jax.Array: ...
    def layer(self, i: int, x: jax.Array, step: Step) -> jax.Array: ...
    def logits(self, x: jax.Array) -> jax.Array: ...


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """What one layer keeps of every token."""

    num_kv_heads: int
    head_dim: int
    num_heads: int
    dtype: DTypeLike


def trace_layer_caches(graphdef: Any, params: Any) -> tuple[list[LayerCache], int]:
    """Run the model abstractly once; return each layer's cache needs and the width V of its logits.

    ``params`` is the module's pure dict of arrays or ShapeDtypeStructs. Nothing is computed. Raises UnsupportedModel
    for a module that does not keep the contract.
    """
    found: dict[int, LayerCache] = {}
    at: int | None = None  # the layer that runs
    rule = "each layer must call it exactly once, with its own number"

    def record(query: Query) -> jax.Array:
        if at is None:
            raise UnsupportedModel(f"step.attend was called outside of the layers; {rule}")
        if query.layer != at:
            raise UnsupportedModel(f"layer {at} called step.attend with the number {query.layer}; {rule}")
        if at in found:
            raise UnsupportedModel(f"layer {at} called step.attend twice; {rule}")
        if query.k is None:
            raise UnsupportedModel(f"layer {query.layer} reads another layer's cache (k=None); that is not built yet")
        found[query.layer] = LayerCache(
            num_kv_heads=query.k.shape[1],
            head_dim=query.k.shape[2],
            num_heads=query.q.shape[1],
            dtype=query.k.dtype,
        )
        return query.q

    def run(tokens: jax.Array, leaves: Any) -> jax.Array:
        nonlocal at
        model = nnx.merge(graphdef, leaves)
        absent = [name for name in ("num_layers", "embed", "layer", "logits") if not hasattr(model, name)]
        if absent:
            raise UnsupportedModel(f"{type(model).__name__} has no {', '.join(absent)}; see jserve.models.contract")
        step = Step(positions=jnp.zeros_like(tokens), valid=jnp.ones(tokens.shape, bool), answer=record)
        x = model.embed(tokens, step)
        for at in range(model.num_layers):
            x = model.layer(at, x, step)
            if at not in found:
                raise UnsupportedModel(f"layer {at} did not call step.attend; {rule}")
        at = None
        return model.logits(x)

    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    out = jax.eval_shape(run, tokens, params)
    return list(found.values()), int(out.shape[-1])
