"""A model run the plain way, every token recomputed with dense attention: for training, and the oracle of the engine.

The same module that is served through the engine's cache is trained through ``dense_logits``:

    def loss(model, tokens):  # Int32[B, T]
        logits = jax.vmap(lambda row: dense_logits(model, row[:-1]))(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32

from jserve.models.contract import Query, Step, all_logits

__all__ = ["dense_attention", "dense_logits", "dense_step", "naive_generate", "naive_logits"]


def dense_attention(query: Query) -> Float[Array, "T H Dh"]:
    """One whole sequence, seen through a causal mask; no cache. Scores and sums are float32."""
    q, k, v = query.q, query.k, query.v
    if k is None or v is None:
        raise ValueError(f"layer {query.layer} reads another layer's cache (k=None); that is not built yet")
    num_tokens, _, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k.astype(jnp.float32), precision=highest) * query.scale
    if query.soft_cap is not None:
        scores = query.soft_cap * jnp.tanh(scores / query.soft_cap)
    position = jnp.arange(num_tokens)
    behind = position[:, None] - position[None]
    seen = (behind >= 0) & (behind < (num_tokens if query.window is None else query.window))
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    if query.sinks is not None:
        sinks = query.sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens]
    out = jnp.einsum("kgts,skd->tkgd", weights, v.astype(jnp.float32), precision=highest)
    return out.reshape(q.shape).astype(q.dtype)


def dense_step(num_tokens: int) -> Step:
    """A Step over one whole sequence, from its first token on: ``attend`` is ``dense_attention``. Differentiable."""
    return Step(
        positions=jnp.arange(num_tokens, dtype=jnp.int32),
        valid=jnp.ones((num_tokens,), bool),
        answer=dense_attention,
    )


def dense_logits(model: Any, tokens: Int32[Array, " T"]) -> Float[Array, "T V"]:
    """The logits after each token of one whole sequence, through the contract that ``model`` keeps.

    Differentiable, and a batch of sequences of one length is a ``jax.vmap`` of it.
    """
    return all_logits(model, tokens, dense_step(tokens.shape[0]))


@partial(jax.jit, static_argnums=0)
def _logits(
    graphdef: nnx.GraphDef[Any], params: Any, tokens: Int32[Array, " T"], num_real: Int32[Array, ""]
) -> Float[Array, "T V"]:
    """As ``dense_logits``; tokens from ``num_real`` on are padding, which stands at position 0 as in the engine."""
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    valid = index < num_real
    step = Step(positions=jnp.where(valid, index, 0), valid=valid, answer=dense_attention)
    return all_logits(nnx.merge(graphdef, params), tokens, step)


def _padded(tokens: Sequence[int], room: int = 0) -> Int32[np.ndarray, " T"]:
    """``tokens`` and at least ``room`` zeros, at a round length: few compilations.

    The zeros come later than every token that counts, so they are behind the causal mask.
    """
    out = np.zeros(-(-(len(tokens) + room) // 128) * 128, np.int32)
    out[: len(tokens)] = tokens
    return out


def naive_logits(graphdef: nnx.GraphDef[Any], params: Mapping[str, Any], tokens: Sequence[int]) -> Float[Array, "T V"]:
    """The logits after each of the T ``tokens`` of one sequence. ``params`` is the pure dict."""
    return _logits(graphdef, params, jnp.asarray(_padded(tokens)), jnp.int32(len(tokens)))[: len(tokens)]


def naive_generate(
    graphdef: nnx.GraphDef[Any], params: Mapping[str, Any], prompt_ids: Sequence[int], steps: int
) -> list[int]:
    """``steps`` greedy tokens after ``prompt_ids``; on ties the lowest id."""
    tokens = _padded(prompt_ids, steps)
    for n in range(len(prompt_ids), len(prompt_ids) + steps):
        logits = np.asarray(_logits(graphdef, params, jnp.asarray(tokens), jnp.int32(n)))
        tokens[n] = logits[n - 1].argmax()
    return tokens[len(prompt_ids) : len(prompt_ids) + steps].tolist()
