"""The Llama family: RMS norms, rotary grouped-query attention, SwiGLU.

SmolLM2 is a Llama; Mistral, Qwen2, Qwen3, Phi-3, Mixtral and Qwen3-MoE are Llamas with a few things changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jserve.models.config import RotaryConfig, check_heads, check_numbers, check_windows
from jserve.models.contract import Step
from jserve.models.embedding import Embedding
from jserve.models.linear import linear
from jserve.models.moe import Experts, ExpertsConfig
from jserve.models.norms import rms_norm
from jserve.models.params import filled, normal
from jserve.models.rope import apply_rope, check_rope, inverse_frequencies

__all__ = ["Llama", "LlamaConfig", "LlamaLayer"]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(RotaryConfig):
    """Sizes and constants of a Llama, and what its relatives do otherwise."""

    rotary_dim: int | None = None
    """Dimensions of a head that rotate, the first ones; None: all. Phi-4-mini leaves some alone."""
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """The output head is the embedding table; there is no ``head`` parameter."""
    qkv_bias: bool = False
    """Queries, keys and values have biases, as in Qwen2."""
    qk_norm: bool = False
    """Each head of queries and keys goes through a norm before it rotates, as in Qwen3."""
    windows: tuple[int | None, ...] = ()
    """Each layer's window: a token sees so many, itself included. None: all before it. (): all layers see all."""
    experts: ExpertsConfig | None = None
    """Experts in the place of each layer's feed-forward, as in Mixtral and Qwen3-MoE."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, ("rms_norm_eps",))
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim, self.effective_rotary_dim)
        if self.windows:
            check_windows(self.windows, self.num_layers)
        check_rope(self.effective_rotary_dim, self.rope_theta, self.rope_scaling)

    @property
    def effective_rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


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
        if config.qkv_bias:
            self.q_bias = filled((H, Dh), ("heads", "head_dim"), 0.0, dtype=dtype)
            self.k_bias = filled((K, Dh), ("kv_heads", "head_dim"), 0.0, dtype=dtype)
            self.v_bias = filled((K, Dh), ("kv_heads", "head_dim"), 0.0, dtype=dtype)
        if config.qk_norm:
            self.q_norm = filled((Dh,), ("head_dim",), 1.0, dtype=dtype)
            self.k_norm = filled((Dh,), ("head_dim",), 1.0, dtype=dtype)
        self.o = normal((D, H, Dh), ("embed", "heads", "head_dim"), H * Dh, dtype=dtype, rngs=rngs)
        self.mlp_norm = filled((D,), ("embed",), 1.0, dtype=dtype)
        if config.experts is None:
            self.gate = normal((F, D), ("mlp", "embed"), D, dtype=dtype, rngs=rngs)
            self.up = normal((F, D), ("mlp", "embed"), D, dtype=dtype, rngs=rngs)
            self.down = normal((D, F), ("embed", "mlp"), F, dtype=dtype, rngs=rngs)
        else:
            self.experts = Experts(config.experts, hidden_size=D, intermediate_size=F, dtype=dtype, rngs=rngs)

    def __call__(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        """The stream after this block, as layer i."""
        config = self.config
        q, k, v = self._queries_keys_values(rms_norm(x, self.attn_norm[...], config.rms_norm_eps), step)
        window = config.windows[i] if config.windows else None
        seen = step.attend(i, q, k, v, scale=config.head_dim**-0.5, window=window)
        x = x + linear(self.o[...], seen)
        return x + self._feed_forward(rms_norm(x, self.mlp_norm[...], config.rms_norm_eps))

    def _queries_keys_values(
        self, h: Float[Array, "T D"], step: Step
    ) -> tuple[Float[Array, "T H Dh"], Float[Array, "T K Dh"], Float[Array, "T K Dh"]]:
        config = self.config
        if config.qkv_bias:
            q, k = linear(self.q[...], h, self.q_bias[...]), linear(self.k[...], h, self.k_bias[...])
            v = linear(self.v[...], h, self.v_bias[...])
        else:
            q, k, v = linear(self.q[...], h), linear(self.k[...], h), linear(self.v[...], h)
        if config.qk_norm:
            q, k = (
                rms_norm(q, self.q_norm[...], config.rms_norm_eps),
                rms_norm(k, self.k_norm[...], config.rms_norm_eps),
            )
        scaling = config.rope_scaling
        frequencies = inverse_frequencies(config.effective_rotary_dim, config.rope_theta, scaling)
        factor = 1.0 if scaling is None else scaling.attention_factor
        return (
            apply_rope(q, step.positions, frequencies, factor),
            apply_rope(k, step.positions, frequencies, factor),
            v,
        )

    def _feed_forward(self, h: Float[Array, "T D"]) -> Float[Array, "T D"]:
        if self.config.experts is not None:
            return self.experts(h)
        return linear(self.down[...], jax.nn.silu(linear(self.gate[...], h)) * linear(self.up[...], h))


class Llama(nnx.Module):
    """A servable decoder (see ``jserve.models.contract``). Weights are stored output-major."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        V, D = config.vocab_size, config.hidden_size
        self.config = config
        self.num_layers = config.num_layers
        self.token_embedding = Embedding(V, D, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = filled((D,), ("embed",), 1.0, dtype=dtype)
        if not config.tie_embeddings:
            self.head = normal((V, D), ("vocab", "embed"), D, dtype=dtype, rngs=rngs)

    def embed(self, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T D"]:
        return self.token_embedding(tokens, step)

    def layer(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        return self.layers[i](i, x, step)

    def logits(self, x: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        head = self.token_embedding.weight if self.config.tie_embeddings else self.head
        return linear(head[...], rms_norm(x, self.norm[...], self.config.rms_norm_eps), out_dtype=jnp.float32)
