"""BERT: learned positions, bidirectional attention with biases, layer norms behind what they norm, exact GELU."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from jserve.errors import UnsupportedModel
from jserve.models.config import ModelConfig, check_numbers, check_sizes
from jserve.models.encoder_contract import EncoderStep
from jserve.models.linear import linear
from jserve.models.norms import LayerNorm
from jserve.models.params import filled, normal

__all__ = ["Bert", "BertConfig", "BertLayer"]

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "max_position",
    "type_vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """Sizes and constants of a BERT. ``max_position`` is the rows of its table of positions."""

    intermediate_size: int
    num_layers: int
    num_heads: int
    type_vocab_size: int = 2
    """Rows of the table of token types; a text alone is of type 0 all through."""
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        check_sizes(self, _SIZES)
        check_numbers(self, ("layer_norm_eps",))
        if self.hidden_size % self.num_heads:
            raise UnsupportedModel(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Embeddings(nnx.Module):
    """Sums of three tables, normed; calling it is the contract's ``embed``."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        D = config.hidden_size
        self.word = normal((config.vocab_size, D), ("vocab", "embed"), D, dtype=dtype, rngs=rngs)
        self.position = normal((config.max_position, D), (None, "embed"), D, dtype=dtype, rngs=rngs)
        self.token_type = normal((config.type_vocab_size, D), (None, "embed"), D, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(D, config.layer_norm_eps, dtype=dtype)

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
        self.q = normal((H, Dh, D), (*heads, "embed"), D, dtype=dtype, rngs=rngs)
        self.q_bias = filled((H, Dh), heads, 0.0, dtype=dtype)
        self.k = normal((H, Dh, D), (*heads, "embed"), D, dtype=dtype, rngs=rngs)
        self.k_bias = filled((H, Dh), heads, 0.0, dtype=dtype)
        self.v = normal((H, Dh, D), (*heads, "embed"), D, dtype=dtype, rngs=rngs)
        self.v_bias = filled((H, Dh), heads, 0.0, dtype=dtype)
        self.o = normal((D, H, Dh), ("embed", *heads), D, dtype=dtype, rngs=rngs)
        self.o_bias = filled((D,), ("embed",), 0.0, dtype=dtype)
        self.attn_norm = LayerNorm(D, config.layer_norm_eps, dtype=dtype)
        self.up = normal((F, D), ("mlp", "embed"), D, dtype=dtype, rngs=rngs)
        self.up_bias = filled((F,), ("mlp",), 0.0, dtype=dtype)
        self.down = normal((D, F), ("embed", "mlp"), F, dtype=dtype, rngs=rngs)
        self.down_bias = filled((D,), ("embed",), 0.0, dtype=dtype)
        self.mlp_norm = LayerNorm(D, config.layer_norm_eps, dtype=dtype)

    def __call__(self, i: int, x: Float[Array, "T D"], step: EncoderStep) -> Float[Array, "T D"]:
        """The stream after this block, as layer i."""
        q = linear(self.q[...], x, self.q_bias[...])
        k = linear(self.k[...], x, self.k_bias[...])
        v = linear(self.v[...], x, self.v_bias[...])
        seen = step.attend(i, q, k, v, scale=self.config.head_dim**-0.5)
        x = self.attn_norm(x + linear(self.o[...], seen, self.o_bias[...]))
        h = jax.nn.gelu(linear(self.up[...], x, self.up_bias[...]), approximate=False)
        return self.mlp_norm(x + linear(self.down[...], h, self.down_bias[...]))


class Bert(nnx.Module):
    """A servable encoder (see ``jserve.models.encoder_contract``). Weights are stored output-major."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.num_layers = config.num_layers
        self.embed = Embeddings(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([BertLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])

    def layer(self, i: int, x: Float[Array, "T D"], step: EncoderStep) -> Float[Array, "T D"]:
        return self.layers[i](i, x, step)
