"""A real Llama checkpoint that says what it is told: each token leads to a fixed next one.

Embeddings are one-hot, the head is a table of who follows whom, and the blocks add nothing to the stream. Yet it
runs the whole way: attention is computed over the cache (and multiplied by zero, so what is not finite shows).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jserve.models.llama import Llama, LlamaConfig

__all__ = ["follow", "scripted_llama"]


def follow(ids: Sequence[int], *, vocab_size: int, end: int) -> list[int]:
    """The table for a script: each id of ``ids`` leads to the one after it, the last and all others to ``end``.

    An id can lead to one other only, so none may come twice: ValueError.
    """
    if len(set(ids)) != len(ids):
        raise ValueError(f"an id comes twice in {list(ids)}; each can lead to one other only")
    table = [end] * vocab_size
    for before, after in pairwise(ids):
        table[before] = after
    return table


def scripted_llama(
    next_token: Sequence[int],
    *,
    margin: float = 30.0,
    num_layers: int = 1,
    max_position: int = 512,
    dtype: DTypeLike = jnp.float32,
) -> tuple[nnx.GraphDef[Any], dict[str, Any]]:
    """The model's graph and its parameters as a pure dict. After token t comes ``next_token[t]``.

    The vocabulary is as long as the table, and the model as wide: meant for some hundreds of tokens. ``margin`` is
    the logit of the next token, in which all others are 0: at 30 and temperature 1 the chance of another is below
    1e-10.
    """
    V = len(next_token)
    if not all(0 <= token < V for token in next_token):
        raise ValueError(f"next_token has an id that is not in 0..{V - 1}")
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=V,
        intermediate_size=8,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position=max_position,
    )
    graphdef, state = nnx.split(Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    for layer in params["layers"].values():
        layer["o"], layer["down"] = jnp.zeros_like(layer["o"]), jnp.zeros_like(layer["down"])
    params["token_embedding"]["weight"] = jnp.eye(V, dtype=dtype)
    head = np.zeros((V, V), np.float32)
    # The norm makes sqrt(V) of a one-hot's 1 (but for its eps).
    head[list(next_token), np.arange(V)] = margin / V**0.5
    params["head"] = jnp.asarray(head, dtype)
    return graphdef, params
