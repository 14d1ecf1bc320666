"""BERT: learned positions, bidirectional attention with biases, layer norms behind what they norm, exact GELU."""

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
from jaxtyping import Float, Int32

from jserve.errors import UnsupportedModel
from jserve.models.encoder_contract import EncoderStep
from jserve.models.linear import linear

__all__ = ["Bert", "BertConfig", "BertLayer"]

_MAX_WIDTH = 1 << 24
_MOST = {"num_layers": 1024}
"""Where it is not _MAX_WIDTH: layers are built one by one."""


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes and constants of a BERT."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    """Most tokens of a text: rows of the table of positions."""
    type_vocab_size: int = 2
    """Rows of the table of token types; a text alone is of type 0 all through."""
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, most = getattr(self, field.name), _MOST.get(field.name, _MAX_WIDTH)
            if field.name != "layer_norm_eps" and not 1 <= value <= most:
                raise UnsupportedModel(f"{field.name} is {value}; allowed are 1 to {most}")
        if not 0 < self.layer_norm_eps < math.inf:
            raise UnsupportedModel(f"layer_norm_eps is {self.layer_norm_eps}; it must be greater than 0, and finite")
        if self.hidden_size % self.num_heads:
            raise UnsupportedModel(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BertConfig:
        """The inverse of ``to_dict``. Raises UnsupportedModel for names or values that do not belong there."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := values.keys() - known:
            raise UnsupportedModel(f"bert config has unknown {sorted(unknown)}; known: {', '.join(sorted(known))}")
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise UnsupportedModel(f"bert config does not fit: {error}") from None


class LayerNorm(nnx.Module):
    """Zero mean and unit variance over D, in float32, then weight and bias; in x's dtype."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike) -> None:
        self.eps = config.layer_norm_eps
        self.weight = _param(jnp.ones((config.hidden_size,), dtype), ("embed",))
        self.bias = _param(jnp.zeros((config.hidden_size,), dtype), ("embed",))

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (wide * weight[None] + bias[None]).astype(x.dtype)


class Embeddings(nnx.Module):
    """Sums of three tables, normed; calling it is the contract's ``embed``."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        D = config.hidden_size
        self.word = _normal((config.vocab_size, D), ("vocab", "embed"), D, dtype, rngs)
        self.position = _normal((config.max_position, D), (None, "embed"), D, dtype, rngs)
        self.token_type = _normal((config.type_vocab_size, D), (None, "embed"), D, dtype, rngs)
        self.norm = LayerNorm(config, dtype=dtype)

    def __call__(self, tokens: Int32[Array, " T"], step: EncoderStep) -> Float[Array, "T D"]:
        words = self.word[...].at[tokens].get(mode="clip")
        positions = self.position[...].at[step.positions].get(mode="clip")
        return self.norm(words + positions + self.token_type[...][:1])


class BertLayer(nnx.Module):
    """One block: attention and feed-forward, each added to the stream and normed with it."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.intermediate_size
        H, Dh = config.num_heads, config.head_dim
        heads = ("heads", "head_dim")
        self.config = config
        self.q = _normal((H, Dh, D), (*heads, "embed"), D, dtype, rngs)
        self.q_bias = _zeros((H, Dh), heads, dtype)
        self.k = _normal((H, Dh, D), (*heads, "embed"), D, dtype, rngs)
        self.k_bias = _zeros((H, Dh), heads, dtype)
        self.v = _normal((H, Dh, D), (*heads, "embed"), D, dtype, rngs)
        self.v_bias = _zeros((H, Dh), heads, dtype)
        self.o = _normal((D, H, Dh), ("embed", *heads), D, dtype, rngs)
        self.o_bias = _zeros((D,), ("embed",), dtype)
        self.attn_norm = LayerNorm(config, dtype=dtype)
        self.up = _normal((F, D), ("mlp", "embed"), D, dtype, rngs)
        self.up_bias = _zeros((F,), ("mlp",), dtype)
        self.down = _normal((D, F), ("embed", "mlp"), F, dtype, rngs)
        self.down_bias = _zeros((D,), ("embed",), dtype)
        self.mlp_norm = LayerNorm(config, dtype=dtype)

    def __call__(self, i: int, x: Float[Array, "T D"], step: EncoderStep) -> Float[Array, "T D"]:
        """The stream after this block, as layer i."""
        q = linear(self.q[...], x) + self.q_bias[...][None]
        k = linear(self.k[...], x) + self.k_bias[...][None]
        v = linear(self.v[...], x) + self.v_bias[...][None]
        seen = step.attend(i, q, k, v, scale=self.config.head_dim**-0.5)
        x = self.attn_norm(x + linear(self.o[...], seen) + self.o_bias[...][None])
        h = jax.nn.gelu(linear(self.up[...], x) + self.up_bias[...][None], approximate=False)
        return self.mlp_norm(x + linear(self.down[...], h) + self.down_bias[...][None])


class Bert(nnx.Module):
    """A servable encoder (see ``jserve.models.encoder_contract``). Weights are stored output-major."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.num_layers = config.num_layers
        self.embed = Embeddings(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([BertLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])

    def layer(self, i: int, x: Float[Array, "T D"], step: EncoderStep) -> Float[Array, "T D"]:
        return self.layers[i](i, x, step)


def _normal(
    shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Param[Array]:
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return _param(value.astype(dtype), axes)


def _zeros(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: DTypeLike) -> nnx.Param[Array]:
    return _param(jnp.zeros(shape, dtype), axes)


def _param(value: Array, axes: tuple[str | None, ...]) -> nnx.Param[Array]:
    # Sharding at creation would want a mesh with axes of these very names; here they are only declared.
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)
