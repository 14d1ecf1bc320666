"""The Llama family: RMS norms, rotary grouped-query attention, SwiGLU. SmolLM2 and many others are Llamas."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jserve.errors import UnsupportedModel
from jserve.models.config import ModelConfig, check_numbers, check_size, check_sizes
from jserve.models.contract import Step
from jserve.models.linear import linear
from jserve.models.norms import rms_norm
from jserve.models.params import filled, normal
from jserve.models.rope import RopeScaling, apply_rope, inverse_frequencies

__all__ = ["Llama", "LlamaConfig", "LlamaLayer"]


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


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Sizes and constants of a Llama."""

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

    def __post_init__(self) -> None:
        check_sizes(self, _SIZES)
        check_numbers(self, ("rope_theta", "rms_norm_eps"))
        check_size("num_heads times head_dim", self.num_heads * self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs of dimensions")


class Embedding(nnx.Module):
    """The table of token vectors; calling it is the contract's ``embed``."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        size = (config.vocab_size, config.hidden_size)
        self.weight = normal(size, ("vocab", "embed"), config.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T D"]:
        del step
        return self.weight[...].at[tokens].get(mode="clip")


class LlamaLayer(nnx.Module):
    """One block: attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.intermediate_size
        H, K, Dh = config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.attn_norm = filled((D,), ("embed",), 1.0, dtype=dtype)
        self.q = normal((H, Dh, D), ("heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        self.k = normal((K, Dh, D), ("kv_heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        self.v = normal((K, Dh, D), ("kv_heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        self.o = normal((D, H, Dh), ("embed", "heads", "head_dim"), H * Dh, dtype=dtype, rngs=rngs)
        self.mlp_norm = filled((D,), ("embed",), 1.0, dtype=dtype)
        self.gate = normal((F, D), ("mlp", "embed"), D, dtype=dtype, rngs=rngs)
        self.up = normal((F, D), ("mlp", "embed"), D, dtype=dtype, rngs=rngs)
        self.down = normal((D, F), ("embed", "mlp"), F, dtype=dtype, rngs=rngs)

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
        self.norm = filled((D,), ("embed",), 1.0, dtype=dtype)
        if not config.tie_embeddings:
            self.head = normal((V, D), ("vocab", "embed"), D, dtype=dtype, rngs=rngs)

    def layer(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        return self.layers[i](i, x, step)

    def logits(self, x: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        head = self.embed.weight if self.config.tie_embeddings else self.head
        return linear(head[...], rms_norm(x, self.norm[...], self.config.rms_norm_eps), out_dtype=jnp.float32)
