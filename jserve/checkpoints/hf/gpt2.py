"""GPT-2 in Hugging Face folders: config.json -> Gpt2Config, and its key map.

Its products are Conv1D: weights lie input-major, and queries, keys and values in one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.checkpoints.arrays.key_map import Entry, KeyMap
from jserve.checkpoints.hf.settings import HfSettings
from jserve.models.gpt2 import Gpt2Config

__all__ = ["KEY_MAP", "gpt2"]

_ATTN = "h.{i}.attn."
_QKV = tuple(
    entry
    for part in "qkv"
    for entry in (
        Entry(tensor=_ATTN + "c_attn.weight", leaf=f"layers.{{i}}.{part}", how="H Dh D <- D (H Dh)", fused_axis=1),
        Entry(tensor=_ATTN + "c_attn.bias", leaf=f"layers.{{i}}.{part}_bias", how="H Dh <- (H Dh)", fused_axis=0),
    )
)
_NORMS = tuple(
    Entry(tensor=f"{theirs}.{part}", leaf=f"{ours}.{part}")
    for theirs, ours in (
        ("h.{i}.ln_1", "layers.{i}.attn_norm"),
        ("h.{i}.ln_2", "layers.{i}.mlp_norm"),
        ("ln_f", "norm"),
    )
    for part in ("weight", "bias")
)

KEY_MAP = KeyMap(
    entries=(
        Entry(tensor="wte.weight", leaf="token_embedding.weight"),
        Entry(tensor="wpe.weight", leaf="position_embedding"),
        *_QKV,
        *_NORMS,
        Entry(tensor=_ATTN + "c_proj.weight", leaf="layers.{i}.o", how="D H Dh <- (H Dh) D"),
        Entry(tensor=_ATTN + "c_proj.bias", leaf="layers.{i}.o_bias"),
        Entry(tensor="h.{i}.mlp.c_fc.weight", leaf="layers.{i}.up", how="F D <- D F"),
        Entry(tensor="h.{i}.mlp.c_fc.bias", leaf="layers.{i}.up_bias"),
        Entry(tensor="h.{i}.mlp.c_proj.weight", leaf="layers.{i}.down", how="D F <- F D"),
        Entry(tensor="h.{i}.mlp.c_proj.bias", leaf="layers.{i}.down_bias"),
    ),
    # Old files keep causal masks.
    ignored=("*h.*.attn.bias", "*h.*.attn.masked_bias"),
    twins={"*lm_head.weight": "token_embedding.weight"},
    prefixes=("transformer.", ""),
)


def gpt2(values: Mapping[str, Any]) -> Gpt2Config:
    """GPT-2 as OpenAI published it; the variants of attention that transformers also has are not built."""
    settings = HfSettings(values)
    hidden = settings.size("n_embd")
    settings.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    settings.only("tie_word_embeddings", True)
    settings.get("reorder_and_upcast_attn")  # a way to compute the same
    settings.get("n_ctx")  # an older name of n_positions, beside it
    return settings.build(
        Gpt2Config,
        {
            "vocab_size": settings.size("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": settings.size("n_inner", 4 * hidden),
            "num_layers": settings.layers("n_layer"),
            "num_heads": settings.size("n_head"),
            "layer_norm_eps": settings.number("layer_norm_epsilon", 1e-5),
            "max_position": settings.size("n_positions"),
        },
    )
