"""Small random models, the same at every call: real enough to serve, small enough to recompute."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jserve.models.bert import Bert, BertConfig
from jserve.models.llama import Llama, LlamaConfig

__all__ = ["TINY_BERT", "TINY_LLAMA", "tiny_bert", "tiny_llama"]

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position": 512,
}
"""LlamaConfig's fields for ``tiny_llama``: bytes as tokens, two layers, grouped-query attention, untied."""


TINY_BERT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "max_position": 64,
}
"""BertConfig's fields for ``tiny_bert``."""


def tiny_bert(
    *, dtype: DTypeLike = jnp.float32, seed: int = 0, **overrides: Any
) -> tuple[nnx.GraphDef[Any], dict[str, Any]]:
    """A random BERT: its graph and its parameters as a pure dict. ``overrides`` are fields of BertConfig."""
    config = BertConfig(**{**TINY_BERT, **overrides})
    graphdef, state = nnx.split(Bert(config, dtype=dtype, rngs=nnx.Rngs(seed)))
    return graphdef, nnx.to_pure_dict(state)


def tiny_llama(
    *, dtype: DTypeLike = jnp.float32, seed: int = 0, **overrides: Any
) -> tuple[nnx.GraphDef[Any], dict[str, Any]]:
    """A random Llama: its graph and its parameters as a pure dict.

    ``overrides`` are fields of LlamaConfig other than ``TINY_LLAMA``'s. The same arguments give the same values.
    """
    config = LlamaConfig(**{**TINY_LLAMA, **overrides})
    graphdef, state = nnx.split(Llama(config, dtype=dtype, rngs=nnx.Rngs(seed)))
    params = nnx.to_pure_dict(state)
    # Sharper attention than random weights give: greedy continuations then wander instead of repeating a token.
    for layer in params["layers"].values():
        layer["q"], layer["k"] = layer["q"] * 2, layer["k"] * 2
    return graphdef, params
