"""GPT-2: learned positions, layer norms, biases everywhere, a feed-forward of two products."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jserve.errors import UnsupportedModel
from jserve.models.config import ModelConfig, check_numbers, check_sizes
from jserve.models.contract import Step
from jserve.models.embedding import Embedding
from jserve.models.linear import linear
from jserve.models.norms import LayerNorm
from jserve.models.params import filled, normal

__all__ = ["Gpt2", "Gpt2Config", "Gpt2Layer"]

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_position")


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(ModelConfig):
    """Sizes and constants of a GPT-2. ``max_position`` is a bound: there are no vectors for later positions."""

    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    """The output head is the embedding table; there is no ``head`` parameter."""

    def __post_init__(self) -> None:
        check_sizes(self, _SIZES)
        check_numbers(self, ("layer_norm_eps",))
        if self.hidden_size % self.num_heads:
            raise UnsupportedModel(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Gpt2Layer(nnx.Module):
    """One block: attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: Gpt2Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        D, F, H, Dh = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim
        self.scale = Dh**-0.5
        self.attn_norm = LayerNorm(D, config.layer_norm_eps, dtype=dtype)
        # Each query head has keys and values of its own, so these are "heads" like them.
        self.q = normal((H, Dh, D), ("heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        self.k = normal((H, Dh, D), ("heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        self.v = normal((H, Dh, D), ("heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        self.q_bias = filled((H, Dh), ("heads", "head_dim"), 0.0, dtype=dtype)
        self.k_bias = filled((H, Dh), ("heads", "head_dim"), 0.0, dtype=dtype)
        self.v_bias = filled((H, Dh), ("heads", "head_dim"), 0.0, dtype=dtype)
        self.o = normal((D, H, Dh), ("embed", "heads", "head_dim"), D, dtype=dtype, rngs=rngs)
        self.o_bias = filled((D,), ("embed",), 0.0, dtype=dtype)
        self.mlp_norm = LayerNorm(D, config.layer_norm_eps, dtype=dtype)
        self.up = normal((F, D), ("mlp", "embed"), D, dtype=dtype, rngs=rngs)
        self.up_bias = filled((F,), ("mlp",), 0.0, dtype=dtype)
        self.down = normal((D, F), ("embed", "mlp"), F, dtype=dtype, rngs=rngs)
        self.down_bias = filled((D,), ("embed",), 0.0, dtype=dtype)

    def __call__(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        """The stream after this block, as layer i."""
        h = self.attn_norm(x)
        q = linear(self.q[...], h, self.q_bias[...])
        k = linear(self.k[...], h, self.k_bias[...])
        v = linear(self.v[...], h, self.v_bias[...])
        x = x + linear(self.o[...], step.attend(i, q, k, v, scale=self.scale), self.o_bias[...])
        h = jax.nn.gelu(linear(self.up[...], self.mlp_norm(x), self.up_bias[...]), approximate=True)
        return x + linear(self.down[...], h, self.down_bias[...])


class Gpt2(nnx.Module):
    """A servable decoder (see ``jserve.models.contract``)."""

    def __init__(self, config: Gpt2Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        V, D = config.vocab_size, config.hidden_size
        self.num_layers = config.num_layers
        self.tied = config.tie_embeddings
        self.token_embedding = Embedding(V, D, dtype=dtype, rngs=rngs)
        self.position_embedding = normal((config.max_position, D), (None, "embed"), D, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Gpt2Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = LayerNorm(D, config.layer_norm_eps, dtype=dtype)
        if not config.tie_embeddings:
            self.head = normal((V, D), ("vocab", "embed"), D, dtype=dtype, rngs=rngs)

    def embed(self, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T D"]:
        return self.token_embedding(tokens, step) + self.position_embedding[...].at[step.positions].get(mode="clip")

    def layer(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        return self.layers[i](i, x, step)

    def logits(self, x: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        head = self.token_embedding.weight if self.tied else self.head
        return linear(head[...], self.norm(x), out_dtype=jnp.float32)
