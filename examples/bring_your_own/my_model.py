"""A small decoder, written as one would for training, in the three methods that jserve serves a model by.

It knows of jserve only what `step` is: the positions of the tokens, and `step.attend`, which answers with dense causal
attention in training and from the paged KV cache when it is served.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jserve.models.contract import Step


@dataclass(frozen=True)
class MyConfig:
    """Saved as config.json beside the checkpoint; jserve reads it back from there."""

    vocab_size: int
    width: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    max_position: int = 32
    """Tokens of a sequence."""


def axes(*names: str | None) -> nnx.Initializer:
    """What each dimension of a weight means; on a mesh, "heads", "mlp" and "vocab" are cut over its devices."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


def heads_of(x: jax.Array, heads: int) -> jax.Array:
    """[T, heads * Dh] -> [T, heads, Dh]"""
    return x.reshape(x.shape[0], heads, -1)


class Block(nnx.Module):
    def __init__(self, config: MyConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, head_dim = config.width, config.width // config.heads

        def linear(inner: int, outer: int, *names: str) -> nnx.Linear:
            return nnx.Linear(inner, outer, use_bias=False, kernel_init=axes(*names), rngs=rngs)

        self.norm_1, self.norm_2 = (norm(width, rngs) for _ in range(2))
        self.q = linear(width, config.heads * head_dim, "embed", "heads")
        self.k = linear(width, config.kv_heads * head_dim, "embed", "kv_heads")
        self.v = linear(width, config.kv_heads * head_dim, "embed", "kv_heads")
        self.o = linear(config.heads * head_dim, width, "heads", "embed")
        self.up = linear(width, 4 * width, "embed", "mlp")
        self.down = linear(4 * width, width, "mlp", "embed")

    def __call__(self, i: int, x: jax.Array, step: Step) -> jax.Array:
        h = self.norm_1(x)
        q, k, v = (
            heads_of(self.q(h), self.config.heads),
            *(heads_of(w(h), self.config.kv_heads) for w in (self.k, self.v)),
        )
        seen = step.attend(i, q, k, v, scale=q.shape[-1] ** -0.5)  # [T, heads, Dh]
        x = x + self.o(seen.reshape(x.shape[0], -1))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


def norm(width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    ones = nnx.with_partitioning(nnx.initializers.ones, ("embed",))
    return nnx.RMSNorm(width, scale_init=ones, rngs=rngs)


class MyModel(nnx.Module):
    def __init__(self, config: MyConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.num_layers = config.layers
        self.max_position = config.max_position
        table = nnx.with_partitioning(nnx.initializers.normal(0.5), ("vocab", "embed"))
        places = nnx.with_partitioning(nnx.initializers.normal(0.5), (None, "embed"))
        self.tokens = nnx.Embed(config.vocab_size, config.width, embedding_init=table, rngs=rngs)
        self.places = nnx.Embed(config.max_position, config.width, embedding_init=places, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = norm(config.width, rngs)
        self.head = nnx.Linear(
            config.width, config.vocab_size, use_bias=False, kernel_init=axes("embed", "vocab"), rngs=rngs
        )

    def embed(self, tokens: jax.Array, step: Step) -> jax.Array:
        """Ids [T] -> [T, width]."""
        return self.tokens(tokens) + self.places(step.positions)

    def layer(self, i: int, x: jax.Array, step: Step) -> jax.Array:
        """[T, width] -> [T, width]; calls `step.attend` once, with its own number."""
        return self.blocks[i](i, x, step)

    def logits(self, x: jax.Array) -> jax.Array:
        """Some rows of x, [R, width] -> float32 [R, vocabulary]."""
        return self.head(self.norm(x)).astype(jnp.float32)
