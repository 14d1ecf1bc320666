"""Gemma 2 and 3, text: norms before and after each half of a block, layers that see a window and layers that see all.

Weights of norms are stored as what they differ from 1, as Hugging Face has them. The output head is the embedding
table, always.
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
from jserve.models.norms import rms_norm_plus_one
from jserve.models.params import filled, normal
from jserve.models.rope import apply_rope, check_rope, inverse_frequencies

__all__ = ["Gemma", "GemmaConfig", "GemmaLayer"]


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(RotaryConfig):
    """Sizes and constants of a Gemma."""

    windows: tuple[int | None, ...]
    """Each layer's window: a token sees so many, itself included. None: all before it."""
    query_pre_attn_scalar: float
    """Scores are products of queries and keys over the root of it."""
    attn_soft_cap: float | None = None
    """Scores stay within this, by tanh; None: they are not capped."""
    final_soft_cap: float | None = None
    """As ``attn_soft_cap``, of logits."""
    qk_norm: bool = False
    """Each head of queries and keys goes through a norm before it rotates, as in Gemma 3."""
    local_rope_theta: float | None = None
    """Rotary base of the layers with a window, which then have no scaling; None: they rotate as the others do."""
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        optional = ("attn_soft_cap", "final_soft_cap", "local_rope_theta")
        given = tuple(name for name in optional if getattr(self, name) is not None)
        check_numbers(self, ("rms_norm_eps", "query_pre_attn_scalar", *given))
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)
        check_windows(self.windows, self.num_layers)
        check_rope(self.head_dim, self.rope_theta, self.rope_scaling)
        if self.local_rope_theta is not None:
            check_rope(self.head_dim, self.local_rope_theta, None)


class GemmaLayer(nnx.Module):
    """One block: attention and feed-forward, each between two norms and added to the stream."""

    def __init__(self, config: GemmaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.intermediate_size
        H, K, Dh = config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.attn_norm = filled((D,), ("embed",), 0.0, dtype=dtype)
        self.q = normal((H, Dh, D), ("heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        self.k = normal((K, Dh, D), ("kv_heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        self.v = normal((K, Dh, D), ("kv_heads", "head_dim", "embed"), D, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = filled((Dh,), ("head_dim",), 0.0, dtype=dtype)
            self.k_norm = filled((Dh,), ("head_dim",), 0.0, dtype=dtype)
        self.o = normal((D, H, Dh), ("embed", "heads", "head_dim"), H * Dh, dtype=dtype, rngs=rngs)
        self.post_attn_norm = filled((D,), ("embed",), 0.0, dtype=dtype)
        self.mlp_norm = filled((D,), ("embed",), 0.0, dtype=dtype)
        self.gate = normal((F, D), ("mlp", "embed"), D, dtype=dtype, rngs=rngs)
        self.up = normal((F, D), ("mlp", "embed"), D, dtype=dtype, rngs=rngs)
        self.down = normal((D, F), ("embed", "mlp"), F, dtype=dtype, rngs=rngs)
        self.post_mlp_norm = filled((D,), ("embed",), 0.0, dtype=dtype)

    def __call__(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        """The stream after this block, as layer i."""
        config, eps = self.config, self.config.rms_norm_eps
        h = rms_norm_plus_one(x, self.attn_norm[...], eps)
        q, k, v = linear(self.q[...], h), linear(self.k[...], h), linear(self.v[...], h)
        if config.qk_norm:
            q, k = rms_norm_plus_one(q, self.q_norm[...], eps), rms_norm_plus_one(k, self.k_norm[...], eps)
        seen = step.attend(
            i,
            self._turned(q, i, step),
            self._turned(k, i, step),
            v,
            scale=config.query_pre_attn_scalar**-0.5,
            window=config.windows[i],
            soft_cap=config.attn_soft_cap,
        )
        x = x + rms_norm_plus_one(linear(self.o[...], seen), self.post_attn_norm[...], eps)
        h = rms_norm_plus_one(x, self.mlp_norm[...], eps)
        h = jax.nn.gelu(linear(self.gate[...], h), approximate=True) * linear(self.up[...], h)
        return x + rms_norm_plus_one(linear(self.down[...], h), self.post_mlp_norm[...], eps)

    def _turned(self, x: Float[Array, "T N Dh"], i: int, step: Step) -> Float[Array, "T N Dh"]:
        """Queries or keys of layer i, at their positions."""
        config = self.config
        if config.local_rope_theta is not None and config.windows[i] is not None:
            theta, scaling = config.local_rope_theta, None
        else:
            theta, scaling = config.rope_theta, config.rope_scaling
        factor = 1.0 if scaling is None else scaling.attention_factor
        return apply_rope(x, step.positions, inverse_frequencies(config.head_dim, theta, scaling), factor)


class Gemma(nnx.Module):
    """A servable decoder (see ``jserve.models.contract``)."""

    def __init__(self, config: GemmaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.num_layers = config.num_layers
        self.token_embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([GemmaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = filled((config.hidden_size,), ("embed",), 0.0, dtype=dtype)

    def embed(self, tokens: Int32[Array, " T"], step: Step) -> Float[Array, "T D"]:
        """Vectors times the root of their width, which is rounded to their dtype first: so it was in training."""
        x = self.token_embedding(tokens, step)
        return x * jnp.float32(self.config.hidden_size**0.5).astype(x.dtype)

    def layer(self, i: int, x: Float[Array, "T D"], step: Step) -> Float[Array, "T D"]:
        return self.layers[i](i, x, step)

    def logits(self, x: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        h = rms_norm_plus_one(x, self.norm[...], self.config.rms_norm_eps)
        logits = linear(self.token_embedding.weight[...], h, out_dtype=jnp.float32)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
