"""What the engine asks of a model, and how it learns what cache the model needs.

A servable decoder is a Flax NNX module, ragged and token-major: the ``T`` tokens of all sequences of a step lie
on one axis; there is no batch axis and no padding inside a sequence.

    class MyModel(nnx.Module):
        num_layers: int
        def embed(self, tokens, step): ...    # Int[T] -> Float[T, D]
        def layer(self, i, x, step): ...      # Float[T, D] -> Float[T, D], calls step.attend(i, q, k, v, scale=...)
        def logits(self, x): ...              # Float[R, D] -> Float[R, V]

Each parameter declares logical axes once (see ``sharding.rules.LOGICAL_AXES``) as ``nnx.Param`` metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jserve.errors import UnsupportedModel

__all__ = ["Decoder", "LayerCache", "RecordingStep", "Step", "trace_layer_caches"]


class Step(Protocol):
    """One pass of the model over the tokens of a step."""

    positions: jax.Array
    """Int32[T]: each token's position in its own sequence."""
    valid: jax.Array
    """Bool[T]: False for tokens of padding."""

    def attend(
        self,
        i: int | jax.Array,
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
        ...


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
    window: int | None
    dtype: DTypeLike


class RecordingStep:
    """A Step that attends to nothing and writes down what each layer asks for."""

    def __init__(self, num_tokens: int) -> None:
        self.positions = jnp.zeros((num_tokens,), jnp.int32)
        self.valid = jnp.ones((num_tokens,), bool)
        self.layers: dict[int, LayerCache] = {}

    def attend(
        self,
        i: int | jax.Array,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        del v, scale, soft_cap, sinks
        if k is None:
            raise UnsupportedModel(f"layer {i} reads another layer's cache (k=None); that is not built yet")
        self.layers[int(i)] = LayerCache(
            num_kv_heads=k.shape[1],
            head_dim=k.shape[2],
            num_heads=q.shape[1],
            window=window,
            dtype=k.dtype,
        )
        return q


def trace_layer_caches(graphdef: Any, params: Any) -> tuple[list[LayerCache], int]:
    """Run the model abstractly once; return each layer's cache needs and the width V of its logits.

    ``params`` is the module's pure dict of arrays or ShapeDtypeStructs. Nothing is computed. Raises UnsupportedModel
    for a module that does not keep the contract.
    """
    step = RecordingStep(1)
    num_layers = 0

    def run(tokens: jax.Array, leaves: Any) -> jax.Array:
        nonlocal num_layers
        model = nnx.merge(graphdef, leaves)
        absent = [name for name in ("num_layers", "embed", "layer", "logits") if not hasattr(model, name)]
        if absent:
            raise UnsupportedModel(f"{type(model).__name__} has no {', '.join(absent)}; see jserve.models.contract")
        num_layers = model.num_layers
        x = model.embed(tokens, step)
        for i in range(num_layers):
            x = model.layer(i, x, step)
        return model.logits(x)

    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    out = jax.eval_shape(run, tokens, params)
    if sorted(step.layers) != list(range(num_layers)):
        raise UnsupportedModel(
            f"step.attend was called for layers {sorted(step.layers)}; "
            f"each of layers 0 to {num_layers - 1} must call it with its own number"
        )
    return [step.layers[i] for i in range(num_layers)], int(out.shape[-1])
