"""A tree of a family that nothing names: what its names look like, for people to go by."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jserve.checkpoints.arrays.key_map import Path

__all__ = ["resembles"]

_SIGNS: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (words, frozenset(names.split()))
    for words, names in (
        ("google-deepmind/gemma's, of a gemma3", "attn_vec_einsum _query_norm"),
        ("google-deepmind/gemma's, of a gemma2", "attn_vec_einsum post_ffw_norm"),
        ("google-deepmind/gemma's", "attn_vec_einsum"),
        ("MaxText's, of a qwen3", "token_embedder decoder self_attention query_norm"),
        ("MaxText's, of a llama or mistral", "token_embedder decoder self_attention"),
        ("Hugging Face's, of a bert", "token_type_embeddings"),
        ("Hugging Face's, of a gpt2", "wte wpe c_attn"),
        ("Hugging Face's, of a mixtral", "block_sparse_moe"),
        ("Hugging Face's, of a qwen3_moe", "embed_tokens experts q_norm"),
        ("Hugging Face's, of a phi3", "gate_up_proj qkv_proj"),
        ("Hugging Face's, of a gemma3", "pre_feedforward_layernorm q_norm"),
        ("Hugging Face's, of a gemma2", "pre_feedforward_layernorm"),
        ("Hugging Face's, of a qwen3", "embed_tokens q_proj q_norm"),
        ("Hugging Face's, of a qwen2", "embed_tokens q_proj.bias"),
        ("Hugging Face's, of a llama or mistral", "embed_tokens q_proj gate_proj"),
        ("those of jserve's own modules", "embed attn_norm mlp_norm q k v o"),
    )
)
"""What to say, and names that must all be there; the first that fits counts."""


def resembles(paths: Iterable[Path]) -> str | None:
    """Whose names the parameters ``paths`` have; None where none is known. Shapes and values are not asked."""
    names: set[str] = set()
    for path in paths:
        parts = [re.sub(r"_\d+$", "", part) for name in path for part in re.split(r"[./]", name)]
        names |= {*parts, ".".join(parts[-2:])}
    return next((words for words, signs in _SIGNS if signs <= names), None)
