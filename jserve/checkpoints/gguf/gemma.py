"""Gemma 2 and 3 in GGUF: metadata -> GemmaConfig, and their key map. Converters add 1 to the weights of norms."""

from __future__ import annotations

from typing import Any

from jserve.checkpoints.arrays.key_map import Entry, KeyMap
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.rope import read_scaling
from jserve.checkpoints.gguf.settings import GgufSettings
from jserve.models.gemma import GemmaConfig

__all__ = ["KEY_MAP", "gemma2", "gemma3"]

_NORMS = {
    "blk.{i}.attn_norm": "layers.{i}.attn_norm",
    "blk.{i}.attn_q_norm": "layers.{i}.q_norm",
    "blk.{i}.attn_k_norm": "layers.{i}.k_norm",
    "blk.{i}.post_attention_norm": "layers.{i}.post_attn_norm",
    "blk.{i}.ffn_norm": "layers.{i}.mlp_norm",
    "blk.{i}.post_ffw_norm": "layers.{i}.post_mlp_norm",
    "output_norm": "norm",
}
KEY_MAP = KeyMap(
    entries=(
        Entry(tensor="token_embd.weight", leaf="token_embedding.weight"),
        Entry(tensor="blk.{i}.attn_q.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D"),
        Entry(tensor="blk.{i}.attn_k.weight", leaf="layers.{i}.k", how="K Dh D <- (K Dh) D"),
        Entry(tensor="blk.{i}.attn_v.weight", leaf="layers.{i}.v", how="K Dh D <- (K Dh) D"),
        Entry(tensor="blk.{i}.attn_output.weight", leaf="layers.{i}.o", how="D H Dh <- D (H Dh)"),
        Entry(tensor="blk.{i}.ffn_gate.weight", leaf="layers.{i}.gate"),
        Entry(tensor="blk.{i}.ffn_up.weight", leaf="layers.{i}.up"),
        Entry(tensor="blk.{i}.ffn_down.weight", leaf="layers.{i}.down"),
        *(Entry(tensor=f"{theirs}.weight", leaf=ours, plus=-1.0) for theirs, ours in _NORMS.items()),
    )
)

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""In the largest of each, scores are divided by the root of hidden size over heads, in the others by that of the head
size. Files do not say which; llama.cpp goes by the number of layers, and so do we."""


def gemma2(file: GgufFile) -> GemmaConfig:
    """Gemma 2: every other layer, the first included, has a window.

    Raises CheckpointError for settings that are missing, malformed or contradict each other, and UnsupportedModel
    for settings that change the computation and are not built; either names all at once. So does the other here.
    """
    settings = GgufSettings(file)
    caps = {
        "attn_soft_cap": settings.number("attn_logit_softcapping", 50.0),
        "final_soft_cap": settings.number("final_logit_softcapping", 30.0),
    }
    return _build(settings, pattern=2, theta=10000.0, **caps)


def gemma3(file: GgufFile) -> GemmaConfig:
    """Gemma 3: every sixth layer has no window, and only those have the rotary base and scaling of the file."""
    settings = GgufSettings(file)
    settings.only("attn_logit_softcapping")
    local, cap = settings.number("rope.freq_base_swa", 10000.0), settings.maybe_number("final_logit_softcapping")
    return _build(settings, pattern=6, theta=1e6, qk_norm=True, local_rope_theta=local, final_soft_cap=cap)


def _build(settings: GgufSettings, *, pattern: int, theta: float, **changed: Any) -> GemmaConfig:
    """What both have. The last of ``pattern`` layers has no window."""
    heads, kv_heads, head_dim = settings.heads()
    hidden, layers = settings.size("embedding_length"), settings.layers("block_count")
    max_position = settings.size("context_length")
    window = settings.size("attention.sliding_window")
    settings.only("attention.sliding_window_pattern", pattern)
    settings.only("rope.dimension_count", head_dim)
    if not settings.tied:
        settings.unsupported("a head of its own in tensor output.weight (built: the embedding table is the head)")
    is_27b = layers == _LAYERS_OF_27B[settings.prefix.rstrip(".")]
    fields = {
        "vocab_size": settings.vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": settings.size("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "windows": tuple(window if (i + 1) % pattern else None for i in range(layers)),
        "query_pre_attn_scalar": hidden / heads if is_27b else float(head_dim),
        "rope_theta": settings.number("rope.freq_base", theta),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        **changed,
    }
    scaling = read_scaling(settings, rotary_dim=head_dim, theta=fields["rope_theta"], max_position=max_position)
    reach = max_position if scaling is None else scaling.reach(max_position)
    return settings.build(GemmaConfig, {**fields, "rope_scaling": scaling, "max_position": reach})
