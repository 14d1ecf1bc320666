"""What the engine asks of a model, and how it learns what cache the model needs.

A servable decoder is a Flax NNX module, ragged and token-major: the ``T`` tokens of all sequences of a step lie
on one axis; there is no batch axis and no padding inside a sequence.

    class MyModel(nnx.Module):
        num_layers: int
        max_position: int                     # most tokens of a sequence; here, or on self.config
        def embed(self, tokens, step): ...    # Int32[T] -> Float[T, D]
        def layer(self, i, x, step): ...      # Float[T, D] -> Float[T, D], calls step.attend(i, q, k, v, scale=...)
        def logits(self, x): ...              # Float[R, D] -> Float[R, V]

Each layer calls ``step.attend`` exactly once, with its own number i; nothing else calls it. A layer has one cache, and
the engine cuts layers in two at that call. Only ``attend`` mixes tokens: everything else treats each row alone.
Each parameter declares logical axes once (see ``sharding.rules.LOGICAL_AXES``) as ``nnx.Param`` metadata.

A module in one piece is served as well, on every mesh without ``stage``:

    class MyModel(nnx.Module):
        max_position: int
        def __call__(self, tokens, positions, attend): ...    # Int32[T], Int32[T] -> Float[T, V]

It calls ``attend(i, q, k, v, scale=...)`` once for each of its layers, numbered from 0. Its logits are computed for
all T rows of a step, where those of the three methods are computed for the rows that are needed.
``jserve.models.check`` says in words what a module does otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int32

from jserve.errors import UnsupportedModel

__all__ = [
    "METHODS",
    "LayerCache",
    "Query",
    "Step",
    "all_logits",
    "is_whole",
    "only_decoders",
    "trace_layer_caches",
]

METHODS = ("embed", "layer", "logits")
"""What a decoder in layers has, beside num_layers."""


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


def is_whole(model: Any) -> bool:
    """Whether ``model`` is a module in one piece: without the three methods, and with ``__call__(..., attend)``."""
    if all(callable(getattr(model, name, None)) for name in METHODS) or not callable(model):
        return False
    return list(inspect.signature(type(model).__call__).parameters)[1:] == ["tokens", "positions", "attend"]


def all_logits(model: Any, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T V"]:
    """The logits of every token of a step, from a module of either form."""
    if is_whole(model):
        return model(tokens, step.positions, step.attend)
    x = model.embed(tokens, step)
    for i in range(model.num_layers):
        x = model.layer(i, x, step)
    return model.logits(x)


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """What one layer keeps of every token."""

    num_kv_heads: int
    head_dim: int
    num_heads: int
    dtype: DTypeLike


def only_decoders(absent: Sequence[str]) -> str:
    """What to add where a module has no ``absent``: a clause, if it looks like an encoder, else nothing."""
    if list(absent) != ["logits"]:
        return ""
    return ", as encoders have none; of modules of one's own decoders only are served"


def trace_layer_caches(graphdef: Any, params: Any) -> tuple[list[LayerCache], int]:
    """Run the model abstractly once; return each layer's cache needs and the width V of its logits.

    ``params`` is the module's pure dict of arrays or ShapeDtypeStructs. Nothing is computed. Raises UnsupportedModel
    for a module that does not keep the contract.
    """
    record = _Record()

    def run(tokens: Int32[Array, " T"], leaves: Any) -> Float[Array, "T V"]:
        model = nnx.merge(graphdef, leaves)
        step = Step(positions=jnp.zeros_like(tokens), valid=jnp.ones(tokens.shape, bool), answer=record)
        if is_whole(model):
            record.at = _ANY
            return model(tokens, step.positions, step.attend)
        absent = [name for name in METHODS if not callable(getattr(model, name, None))]
        absent = absent if hasattr(model, "num_layers") else ["num_layers", *absent]
        if absent:
            raise UnsupportedModel(
                f"{type(model).__name__} has no {', '.join(absent)}, nor __call__(tokens, positions, attend)"
                f"{only_decoders(absent)}; see jserve.models.contract"
            )
        x = model.embed(tokens, step)
        for record.at in range(model.num_layers):
            x = model.layer(record.at, x, step)
            if record.at not in record.found:
                raise UnsupportedModel(f"layer {record.at} did not call step.attend; {_RULE}")
        record.at = None
        return model.logits(x)

    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    out = jax.eval_shape(run, tokens, params)
    found = record.found
    if sorted(found) != list(range(len(found))) or not found:
        raise UnsupportedModel(
            f"attend was called with the numbers {sorted(found)}; call it once for each layer, numbered from 0"
        )
    return [found[i] for i in range(len(found))], int(out.shape[-1])


_ANY = -1
"""Where a module in one piece runs: any layer may ask."""
_RULE = "each layer must call it exactly once, with its own number"


class _Record:
    """Answers ``attend`` with q, and notes what each layer keeps."""

    def __init__(self) -> None:
        self.found: dict[int, LayerCache] = {}
        self.at: int | None = None
        """The layer that runs."""

    def __call__(self, query: Query) -> Float[Array, "T H Dh"]:
        if self.at is None:
            raise UnsupportedModel(f"step.attend was called outside of the layers; {_RULE}")
        if self.at not in (_ANY, query.layer):
            raise UnsupportedModel(f"layer {self.at} called step.attend with the number {query.layer}; {_RULE}")
        if query.layer in self.found:
            raise UnsupportedModel(f"layer {query.layer} called step.attend twice; {_RULE}")
        if query.k is None:
            raise UnsupportedModel(f"layer {query.layer} reads another layer's cache (k=None); that is not built yet")
        self.found[query.layer] = LayerCache(
            num_kv_heads=query.k.shape[1],
            head_dim=query.k.shape[2],
            num_heads=query.q.shape[1],
            dtype=query.k.dtype,
        )
        return query.q
