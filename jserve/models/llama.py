"""The Llama family: RMS norms, rotary grouped-query attention, SwiGLU. SmolLM2 and many others are Llamas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jserve.errors import UnsupportedModel
from jserve.models.contract import Step
from jserve.models.linear import linear
from jserve.models.rope import RopeScaling, apply_rope, inverse_frequencies

__all__ = ["Llama", "LlamaConfig", "LlamaLayer", "rms_norm"]


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
)
_MAX_WIDTH = 1 << 24
"""Largest size of a dimension: far beyond any model, and the bytes of a parameter still count in 64 bits."""
_MOST = {"num_layers": 1024, "max_position": 2**31 - 1}
"""Where it is not _MAX_WIDTH: layers are built one by one, positions are int32."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """The output head is the embedding table; there is no ``head`` parameter."""
    max_position: int = 2048
    """Most tokens of a sequence that the model was made for."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            value, most = getattr(self, name), _MOST.get(name, _MAX_WIDTH)
            if not 1 <= value <= most:
                raise UnsupportedModel(f"{name} is {value}; allowed are 1 to {most}")
        if self.num_heads * self.head_dim > _MAX_WIDTH:
            raise UnsupportedModel(
                f"num_heads {self.num_heads} times head_dim {self.head_dim} is more than {_MAX_WIDTH}"
            )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UnsupportedModel(f"{name} is {value}; it must be greater than 0, and finite")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs of dimensions")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LlamaConfig:
        """The inverse of ``to_dict``. Raises UnsupportedModel for names or values that do not belong there."""
        known = {field.name for field in dataclasses.fields(cls)}
        known |= {f"rope_scaling.{field.name}" for field in dataclasses.fields(RopeScaling)}
        scaling = values.get("rope_scaling")
        if not isinstance(scaling, Mapping):
            scaling = {}  # None, or what msgspec refuses below
        unknown = ({*values} | {f"rope_scaling.{name}" for name in scaling}) - known
        if unknown:
            raise UnsupportedModel(f"llama config has unknown {sorted(unknown)}; known: {', '.join(sorted(known))}")
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise UnsupportedModel(f"llama config does not fit: {error}") from None


class Embedding(nnx.Module):
    """The table of token vectors; calling it is the contract's ``embed``."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        size = (config.vocab_size, config.hidden_size)
        self.weight = _normal(size, ("vocab", "embed"), config.hidden_size, dtype, rngs)

    def __call__(self, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T D"]:
        del step
        return self.weight[...].at[tokens].get(mode="clip")


class LlamaLayer(nnx.Module):
    """One block: attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.intermediate_size
        H, K, Dh = config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.attn_norm = _ones((D,), ("embed",), dtype)
        self.q = _normal((H, Dh, D), ("heads", "head_dim", "embed"), D, dtype, rngs)
        self.k = _normal((K, Dh, D), ("kv_heads", "head_dim", "embed"), D, dtype, rngs)
        self.v = _normal((K, Dh, D), ("kv_heads", "head_dim", "embed"), D, dtype, rngs)
        self.o = _normal((D, H, Dh), ("embed", "heads", "head_dim"), H * Dh, dtype, rngs)
        self.mlp_norm = _ones((D,), ("embed",), dtype)
        self.gate = _normal((F, D), ("mlp", "embed"), D, dtype, rngs)
        self.up = _normal((F, D), ("mlp", "embed"), D, dtype, rngs)
        self.down = _normal((D, F), ("embed", "mlp"), F, dtype, rngs)

    def __call__(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        """The stream after this block, as layer i."""
        config = self.config
        h = rms_norm(x, self.attn_norm[...], config.rms_norm_eps)
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        q = apply_rope(linear(self.q[...], h), step.positions, frequencies)
        k = apply_rope(linear(self.k[...], h), step.positions, frequencies)
        seen = step.attend(i, q, k, linear(self.v[...], h), scale=config.head_dim**-0.5)
        x = x + linear(self.o[...], seen)
        h = rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
        return x + linear(self.down[...], jax.nn.silu(linear(self.gate[...], h)) * linear(self.up[...], h))


class Llama(nnx.Module):
    """A servable decoder (see ``jserve.models.contract``). Weights are stored output-major."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        V, D = config.vocab_size, config.hidden_size
        self.config = config
        self.num_layers = config.num_layers
        self.embed = Embedding(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = _ones((D,), ("embed",), dtype)
        if not config.tie_embeddings:
            self.head = _normal((V, D), ("vocab", "embed"), D, dtype, rngs)

    def layer(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        return self.layers[i](i, x, step)

    def logits(self, x: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        head = self.embed.weight if self.config.tie_embeddings else self.head
        return linear(head[...], rms_norm(x, self.norm[...], self.config.rms_norm_eps), out_dtype=jnp.float32)


def rms_norm(x: Float[Array, "T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "T D"]:
    """x over its root mean square, in float32, times weight; in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)[None]).astype(x.dtype)


def _normal(
    shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Param[Array]:
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return _param(value.astype(dtype), axes)


def _ones(shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param[Array]:
    return _param(jnp.ones(shape, dtype), axes)


def _param(value: Array, axes: tuple[str, ...]) -> nnx.Param[Array]:
    # Sharding at creation would want a mesh with axes of these very names; here they are only declared.
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)
