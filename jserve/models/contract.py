"""What the engine asks of a model, and how it learns what cache the model needs.

A servable decoder is a Flax NNX module, ragged and token-major: the ``T`` tokens of all sequences of a step lie
on one axis; there is no batch axis and no padding inside a sequence.

    class MyModel(nnx.Module):
        num_layers: int
        def embed(self, tokens, step): ...    # Int32[T] -> Float[T, D]
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
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int32

from jserve.errors import UnsupportedModel

__all__ = ["Decoder", "LayerCache", "Query", "Step", "trace_layer_caches"]


@dataclass(frozen=True, kw_only=True)
class Query:
    """One call of ``attend``."""

    layer: int
    q: Float[Array, "T H Dh"]
    k: Float[Array, "T K Dh"] | None
    """To be written to the layer's cache, as v is."""
    v: Float[Array, "T K Dh"] | None
    sinks: Float[Array, " H"] | None
    scale: float
    window: int | None
    soft_cap: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One pass of the model over the tokens of a step."""

    positions: Int32[Array, " T"]
    """Each token's position in its own sequence."""
    valid: Bool[Array, " T"]
    """False for tokens of padding."""
    answer: Callable[[Query], Float[Array, "T H Dh"]]
    """What stands behind ``attend``: the engine's paged cache, say, or an oracle's dense attention."""

    def attend(
        self,
        i: int,
        q: Float[Array, "T H Dh"],
        k: Float[Array, "T K Dh"] | None,
        v: Float[Array, "T K Dh"] | None,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " H"] | None = None,
    ) -> Float[Array, "T H Dh"]:
        """Write k and v to layer i's cache; return what q may see."""
        return self.answer(Query(layer=i, q=q, k=k, v=v, sinks=sinks, scale=scale, window=window, soft_cap=soft_cap))


class Decoder(Protocol):
    """The model contract."""

    num_layers: int

    def embed(self, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T D"]: ...
    def layer(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]: ...
    def logits(self, x: Float[Array, "R D"]) -> Float[Array, "R V"]: ...


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

    def record(query: Query) -> Float[Array, "T H Dh"]:
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

    def run(tokens: Int32[Array, " T"], leaves: Any) -> Float[Array, "T V"]:
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
