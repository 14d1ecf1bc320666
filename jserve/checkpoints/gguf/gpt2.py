"""GPT-2 in GGUF: metadata -> Gpt2Config, and its key map. Converters turn its products output-major."""

from __future__ import annotations

from jserve.checkpoints.arrays.key_map import Entry, KeyMap
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.settings import GgufSettings
from jserve.models.gpt2 import Gpt2Config

__all__ = ["KEY_MAP", "gpt2"]

_QKV = tuple(
    entry
    for part in "qkv"
    for entry in (
        Entry(tensor="blk.{i}.attn_qkv.weight", leaf=f"layers.{{i}}.{part}", how="H Dh D <- (H Dh) D", fused_axis=0),
        Entry(tensor="blk.{i}.attn_qkv.bias", leaf=f"layers.{{i}}.{part}_bias", how="H Dh <- (H Dh)", fused_axis=0),
    )
)
_NORMS = {
    "blk.{i}.attn_norm": "layers.{i}.attn_norm",
    "blk.{i}.ffn_norm": "layers.{i}.mlp_norm",
    "output_norm": "norm",
}

KEY_MAP = KeyMap(
    entries=(
        Entry(tensor="token_embd.weight", leaf="token_embedding.weight"),
        Entry(tensor="position_embd.weight", leaf="position_embedding"),
        *_QKV,
        *(
            Entry(tensor=f"{theirs}.{part}", leaf=f"{ours}.{part}")
            for theirs, ours in _NORMS.items()
            for part in ("weight", "bias")
        ),
        Entry(tensor="blk.{i}.attn_output.weight", leaf="layers.{i}.o", how="D H Dh <- D (H Dh)"),
        Entry(tensor="blk.{i}.attn_output.bias", leaf="layers.{i}.o_bias"),
        Entry(tensor="blk.{i}.ffn_up.weight", leaf="layers.{i}.up"),
        Entry(tensor="blk.{i}.ffn_up.bias", leaf="layers.{i}.up_bias"),
        Entry(tensor="blk.{i}.ffn_down.weight", leaf="layers.{i}.down"),
        Entry(tensor="blk.{i}.ffn_down.bias", leaf="layers.{i}.down_bias"),
        Entry(tensor="output.weight", leaf="head"),
    )
)


def gpt2(file: GgufFile) -> Gpt2Config:
    """Some files have the embedding table twice, the second time as a head.

    Raises CheckpointError for settings that are missing, malformed or contradict each other, and UnsupportedModel
    for settings that change the computation and are not built; either names all at once.
    """
    settings = GgufSettings(file)
    heads, _, head_dim = settings.heads()
    hidden = settings.size("embedding_length")
    settings.only("attention.head_count_kv", heads)
    settings.only("attention.key_length", hidden // heads)
    settings.only("rope.dimension_count", head_dim)  # written by some, and meaningless
    return settings.build(
        Gpt2Config,
        {
            "vocab_size": settings.vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": settings.size("feed_forward_length"),
            "num_layers": settings.layers("block_count"),
            "num_heads": heads,
            "layer_norm_eps": settings.number("attention.layer_norm_epsilon"),
            "tie_embeddings": settings.tied,
            "max_position": settings.size("context_length"),
        },
    )
