"""Llama and its relatives in GGUF: metadata -> LlamaConfig, and where each parameter comes from.

Architectures: llama (Llama, Mistral, Mixtral), qwen2, qwen3, qwen3moe, phi3. Only "llama" has the rows of queries and
keys in another order.
"""

from __future__ import annotations

from typing import Any

from jserve.checkpoints.arrays.key_map import Entry, KeyMap
from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.rope import LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS, read_scaling
from jserve.checkpoints.gguf.settings import GgufSettings
from jserve.models.llama import LlamaConfig
from jserve.models.moe import ExpertsConfig

__all__ = ["KEY_MAP", "PHI3_KEY_MAP", "QWEN_KEY_MAP", "llama", "phi3", "qwen2", "qwen3", "qwen3moe"]


def _attention(*, interleaved: bool) -> tuple[Entry, ...]:
    q, k = "blk.{i}.attn_q", "blk.{i}.attn_k"
    return (
        Entry(tensor=f"{q}.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D", interleaved=interleaved),
        Entry(tensor=f"{k}.weight", leaf="layers.{i}.k", how="K Dh D <- (K Dh) D", interleaved=interleaved),
        Entry(tensor="blk.{i}.attn_v.weight", leaf="layers.{i}.v", how="K Dh D <- (K Dh) D"),
    )


_OUTSIDE = (
    Entry(tensor="token_embd.weight", leaf="token_embedding.weight"),
    Entry(tensor="blk.{i}.attn_norm.weight", leaf="layers.{i}.attn_norm"),
    Entry(tensor="blk.{i}.attn_output.weight", leaf="layers.{i}.o", how="D H Dh <- D (H Dh)"),
    Entry(tensor="blk.{i}.ffn_norm.weight", leaf="layers.{i}.mlp_norm"),
    Entry(tensor="blk.{i}.ffn_down.weight", leaf="layers.{i}.down"),
    Entry(tensor="output_norm.weight", leaf="norm"),
    Entry(tensor="output.weight", leaf="head"),
)
_FEED_FORWARD = (
    Entry(tensor="blk.{i}.ffn_gate.weight", leaf="layers.{i}.gate"),
    Entry(tensor="blk.{i}.ffn_up.weight", leaf="layers.{i}.up"),
    Entry(tensor="blk.{i}.ffn_gate_inp.weight", leaf="layers.{i}.experts.router"),
    Entry(tensor="blk.{i}.ffn_gate_exps.weight", leaf="layers.{i}.experts.gate"),
    Entry(tensor="blk.{i}.ffn_up_exps.weight", leaf="layers.{i}.experts.up"),
    Entry(tensor="blk.{i}.ffn_down_exps.weight", leaf="layers.{i}.experts.down"),
)
_QWEN = (
    Entry(tensor="blk.{i}.attn_q.bias", leaf="layers.{i}.q_bias", how="H Dh <- (H Dh)"),
    Entry(tensor="blk.{i}.attn_k.bias", leaf="layers.{i}.k_bias", how="K Dh <- (K Dh)"),
    Entry(tensor="blk.{i}.attn_v.bias", leaf="layers.{i}.v_bias", how="K Dh <- (K Dh)"),
    Entry(tensor="blk.{i}.attn_q_norm.weight", leaf="layers.{i}.q_norm"),
    Entry(tensor="blk.{i}.attn_k_norm.weight", leaf="layers.{i}.k_norm"),
)
_FACTORS = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""No parameters: what rotary frequencies are divided by."""

KEY_MAP = KeyMap(entries=(*_OUTSIDE, *_attention(interleaved=True), *_FEED_FORWARD), ignored=_FACTORS)
QWEN_KEY_MAP = KeyMap(entries=(*_OUTSIDE, *_attention(interleaved=False), *_QWEN, *_FEED_FORWARD), ignored=_FACTORS)
PHI3_KEY_MAP = KeyMap(
    entries=(
        *_OUTSIDE,
        Entry(tensor="blk.{i}.attn_qkv.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D", fused_axis=0),
        Entry(tensor="blk.{i}.attn_qkv.weight", leaf="layers.{i}.k", how="K Dh D <- (K Dh) D", fused_axis=0),
        Entry(tensor="blk.{i}.attn_qkv.weight", leaf="layers.{i}.v", how="K Dh D <- (K Dh) D", fused_axis=0),
        Entry(tensor="blk.{i}.ffn_up.weight", leaf="layers.{i}.gate", fused_axis=0),
        Entry(tensor="blk.{i}.ffn_up.weight", leaf="layers.{i}.up", fused_axis=0),
    ),
    ignored=_FACTORS,
)


def llama(file: GgufFile) -> LlamaConfig:
    """Llama and Mistral; Mixtral where there are experts, whose weights always add up to 1.

    Raises CheckpointError for settings that are missing, malformed or contradict each other, and UnsupportedModel
    for settings that change the computation and are not built; either names all at once. So do the others here.
    """
    settings = GgufSettings(file)
    experts = _experts(settings) if settings.get("expert_count", 0) else None
    return _build(settings, experts=experts)


def qwen2(file: GgufFile) -> LlamaConfig:
    """Qwen2 and Qwen2.5."""
    return _build(GgufSettings(file), qkv_bias=True)


def qwen3(file: GgufFile) -> LlamaConfig:
    """Qwen3."""
    return _build(GgufSettings(file), qk_norm=True)


def qwen3moe(file: GgufFile) -> LlamaConfig:
    """Qwen3-MoE, all layers with experts, as its published models have them; so are their weights divided by their
    sum, which the file does not say."""
    settings = GgufSettings(file)
    settings.get("feed_forward_length")  # of layers without experts
    return _build(settings, width="expert_feed_forward_length", qk_norm=True, experts=_experts(settings))


def phi3(file: GgufFile) -> LlamaConfig:
    """Phi-3 and Phi-4-mini, with the window that their config.json has."""
    return _build(GgufSettings(file))


def _experts(settings: GgufSettings) -> ExpertsConfig | None:
    settings.only("expert_weights_norm", True)
    count, per_token = settings.experts("expert_count"), settings.size("expert_used_count")
    if not settings.has_problems and per_token > count:
        settings.wrong(f"{settings.prefix}expert_used_count is {per_token}, of {count} experts")
    return None if settings.has_problems else ExpertsConfig(count=count, per_token=per_token, normalize=True)


def _build(settings: GgufSettings, *, width: str = "feed_forward_length", **changed: Any) -> LlamaConfig:
    """What all have; ``changed`` are the fields of one."""
    heads, kv_heads, head_dim = settings.heads()
    layers, max_position = settings.layers("block_count"), settings.size("context_length")
    rotary_dim = settings.size("rope.dimension_count", head_dim)
    window = settings.get("attention.sliding_window", 0)
    window = settings.size("attention.sliding_window") if window != 0 else 0
    fields = {
        "vocab_size": settings.vocab_size(),
        "hidden_size": settings.size("embedding_length"),
        "intermediate_size": settings.size(width),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "tie_embeddings": settings.tied,
        **changed,
    }
    scaling = read_scaling(settings, rotary_dim=rotary_dim, theta=fields["rope_theta"], max_position=max_position)
    reach = max_position if scaling is None else scaling.reach(max_position)
    windows = (window,) * layers if 0 < window < reach else ()
    return settings.build(LlamaConfig, {**fields, "rope_scaling": scaling, "max_position": reach, "windows": windows})
