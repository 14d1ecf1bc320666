"""Llama and its relatives in Hugging Face folders: config.json -> LlamaConfig, and their key maps.

Defaults are those of transformers' configuration classes, for files leave out what equals them; sizes that decide the
shapes of parameters are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.checkpoints.arrays.key_map import Entry, KeyMap
from jserve.checkpoints.hf.rope import read_rope
from jserve.checkpoints.hf.settings import HfSettings, by_layer, everywhere
from jserve.checkpoints.settings import Settings
from jserve.models.llama import LlamaConfig
from jserve.models.moe import ExpertsConfig

__all__ = [
    "KEY_MAP",
    "MIXTRAL_KEY_MAP",
    "PHI3_KEY_MAP",
    "QWEN3_MOE_KEY_MAP",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
]

_ATTN, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
_IGNORED = ("*.rotary_emb.inv_freq",)
_TWINS = {"*lm_head.weight": "token_embedding.weight"}  # of tied models
"""A tied head may be written out too; old files keep what rotation follows from."""
_OUTSIDE = (
    Entry(tensor="model.embed_tokens.weight", leaf="token_embedding.weight"),
    Entry(tensor="model.layers.{i}.input_layernorm.weight", leaf="layers.{i}.attn_norm"),
    Entry(tensor=_ATTN + "o_proj.weight", leaf="layers.{i}.o", how="D H Dh <- D (H Dh)"),
    Entry(tensor="model.layers.{i}.post_attention_layernorm.weight", leaf="layers.{i}.mlp_norm"),
    Entry(tensor="model.norm.weight", leaf="norm"),
    Entry(tensor="lm_head.weight", leaf="head"),
)
_ATTENTION = (
    Entry(tensor=_ATTN + "q_proj.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D"),
    Entry(tensor=_ATTN + "k_proj.weight", leaf="layers.{i}.k", how="K Dh D <- (K Dh) D"),
    Entry(tensor=_ATTN + "v_proj.weight", leaf="layers.{i}.v", how="K Dh D <- (K Dh) D"),
    Entry(tensor=_ATTN + "q_proj.bias", leaf="layers.{i}.q_bias", how="H Dh <- (H Dh)"),
    Entry(tensor=_ATTN + "k_proj.bias", leaf="layers.{i}.k_bias", how="K Dh <- (K Dh)"),
    Entry(tensor=_ATTN + "v_proj.bias", leaf="layers.{i}.v_bias", how="K Dh <- (K Dh)"),
    Entry(tensor=_ATTN + "q_norm.weight", leaf="layers.{i}.q_norm"),
    Entry(tensor=_ATTN + "k_norm.weight", leaf="layers.{i}.k_norm"),
)
_FEED_FORWARD = (
    Entry(tensor=_MLP + "gate_proj.weight", leaf="layers.{i}.gate"),
    Entry(tensor=_MLP + "up_proj.weight", leaf="layers.{i}.up"),
    Entry(tensor=_MLP + "down_proj.weight", leaf="layers.{i}.down"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    expert = f"model.layers.{{i}}.{block}.experts.{{e}}."
    return (
        Entry(tensor=f"model.layers.{{i}}.{block}.gate.weight", leaf="layers.{i}.experts.router"),
        Entry(tensor=f"{expert}{gate}.weight", leaf="layers.{i}.experts.gate"),
        Entry(tensor=f"{expert}{up}.weight", leaf="layers.{i}.experts.up"),
        Entry(tensor=f"{expert}{down}.weight", leaf="layers.{i}.experts.down"),
    )


KEY_MAP = KeyMap(entries=(*_OUTSIDE, *_ATTENTION, *_FEED_FORWARD), ignored=_IGNORED, twins=_TWINS)
MIXTRAL_KEY_MAP = KeyMap(
    entries=(*_OUTSIDE, *_ATTENTION, *_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
    ignored=_IGNORED,
    twins=_TWINS,
)
QWEN3_MOE_KEY_MAP = KeyMap(
    entries=(*_OUTSIDE, *_ATTENTION, *_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")),
    ignored=_IGNORED,
    twins=_TWINS,
)
PHI3_KEY_MAP = KeyMap(
    entries=(
        *_OUTSIDE,
        Entry(tensor=_ATTN + "qkv_proj.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D", fused_axis=0),
        Entry(tensor=_ATTN + "qkv_proj.weight", leaf="layers.{i}.k", how="K Dh D <- (K Dh) D", fused_axis=0),
        Entry(tensor=_ATTN + "qkv_proj.weight", leaf="layers.{i}.v", how="K Dh D <- (K Dh) D", fused_axis=0),
        Entry(tensor=_MLP + "gate_up_proj.weight", leaf="layers.{i}.gate", fused_axis=0),
        Entry(tensor=_MLP + "gate_up_proj.weight", leaf="layers.{i}.up", fused_axis=0),
        Entry(tensor=_MLP + "down_proj.weight", leaf="layers.{i}.down"),
    ),
    ignored=_IGNORED,
    twins=_TWINS,
)


def llama(values: Mapping[str, Any]) -> LlamaConfig:
    """Llama 2 and 3."""
    settings = HfSettings(values)
    settings.only("attention_bias", False)
    return settings.build(LlamaConfig, _fields(settings))


def mistral(values: Mapping[str, Any]) -> LlamaConfig:
    """Mistral: every layer may have a window; transformers' default is 4,096 tokens, null none."""
    settings = HfSettings(values)
    fields = _fields(settings)
    fields["windows"] = everywhere(_window(settings, fields, default=4096), fields["num_layers"])
    return settings.build(LlamaConfig, fields)


def qwen2(values: Mapping[str, Any]) -> LlamaConfig:
    """Qwen2 and Qwen2.5: biases of queries, keys and values."""
    settings = HfSettings(values)
    fields = _fields(settings)
    return settings.build(LlamaConfig, {**fields, "qkv_bias": True, "windows": _windows_of_upper(settings, fields)})


def qwen3(values: Mapping[str, Any]) -> LlamaConfig:
    """Qwen3: norms of queries and keys."""
    settings = HfSettings(values)
    settings.only("attention_bias", False)
    fields = _fields(settings, head_dim=128)
    return settings.build(LlamaConfig, {**fields, "qk_norm": True, "windows": _windows_of_upper(settings, fields)})


def phi3(values: Mapping[str, Any]) -> LlamaConfig:
    """Phi-3 and Phi-4-mini."""
    settings = HfSettings(values)
    settings.only("attention_bias", False)
    fields = _fields(settings, eps=1e-5, partial=True)
    fields["windows"] = everywhere(_window(settings, fields), fields["num_layers"])
    return settings.build(LlamaConfig, fields)


def mixtral(values: Mapping[str, Any]) -> LlamaConfig:
    """Mixtral: the weights of a token's experts always add up to 1."""
    settings = HfSettings(values)
    fields = _fields(settings, eps=1e-5, theta=1e6)
    fields["windows"] = everywhere(_window(settings, fields), fields["num_layers"])
    count = settings.experts("num_local_experts", settings.get("num_experts", 8))
    per_token = settings.size("num_experts_per_tok", 2)
    settings.finish()
    fields["experts"] = ExpertsConfig(count=count, per_token=per_token, normalize=True)
    return settings.build(LlamaConfig, fields)


def qwen3_moe(values: Mapping[str, Any]) -> LlamaConfig:
    """Qwen3-MoE, where every layer has experts. ``intermediate_size`` is that of layers without."""
    settings = HfSettings(values)
    settings.only("attention_bias", False)
    settings.only("use_sliding_window", False)
    settings.only("decoder_sparse_step", 1)
    settings.only("mlp_only_layers", [])
    for unused in ("sliding_window", "max_window_layers", "layer_types", "shared_expert_intermediate_size"):
        settings.get(unused)
    fields = _fields(settings, width="moe_intermediate_size")
    settings.get("intermediate_size")
    count = settings.experts("num_local_experts", settings.get("num_experts", 128))
    per_token = settings.size("num_experts_per_tok", 8)
    normalize = settings.flag("norm_topk_prob", default=False)
    settings.finish()
    fields["experts"] = ExpertsConfig(count=count, per_token=per_token, normalize=normalize)
    return settings.build(LlamaConfig, {**fields, "qk_norm": True})


def _fields(
    settings: Settings,
    *,
    eps: float = 1e-6,
    theta: float = 10000.0,
    head_dim: int | None = None,
    width: str = "intermediate_size",
    partial: bool = False,
) -> dict[str, Any]:
    """What all have. The rest are defaults of the family."""
    hidden, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    head_dim = settings.size("head_dim", head_dim or max(1, hidden // heads))
    settings.only("hidden_act", "silu")
    rope = read_rope(
        settings,
        head_dim=head_dim,
        max_position=settings.size("max_position_embeddings"),
        default_theta=theta,
        partial=partial,
    )
    return {
        "vocab_size": settings.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.size(width),
        "num_layers": settings.layers("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": settings.size("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_dim": None if rope.rotary_dim == head_dim else rope.rotary_dim,
        "rms_norm_eps": settings.number("rms_norm_eps", eps),
        "tie_embeddings": settings.flag("tie_word_embeddings", default=False),
        "max_position": rope.max_position,
    }


def _window(settings: Settings, fields: Mapping[str, Any], default: int | None = None) -> int | None:
    """``sliding_window``: absent it is ``default``, null it is none. One that no sequence can leave is none, too."""
    if settings.get("sliding_window") is None and ("sliding_window" in settings.values or default is None):
        return None
    window = settings.size("sliding_window", default)
    return window if window < fields["max_position"] else None


def _windows_of_upper(settings: Settings, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    """As Qwen has it: layers from ``max_window_layers`` on, or those of ``layer_types``."""
    layers = fields["num_layers"]
    uses = settings.flag("use_sliding_window", default=False)
    window = _window(settings, fields, default=4096)
    first = settings.get("max_window_layers", 28)
    if not isinstance(first, int) or first < 0:
        settings.miss("max_window_layers", first, "a whole number")
        first = 0
    windows = by_layer(settings, window if uses else None, layers)
    if windows is None:
        windows = tuple(window if uses and i >= first else None for i in range(layers))
    return windows if any(windows) else ()
