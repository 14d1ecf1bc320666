"""Gemma 2 and 3 in Hugging Face folders: config.json -> GemmaConfig, and their key map.

Google's own files leave out what equals the defaults of transformers' configuration classes, heads and vocabulary
included, so those stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.checkpoints.arrays.key_map import Entry, KeyMap
from jserve.checkpoints.hf.rope import read_rope, scaling_inside
from jserve.checkpoints.hf.settings import HfSettings, by_layer
from jserve.checkpoints.settings import Settings
from jserve.models.gemma import GemmaConfig
from jserve.models.rope import RopeScaling

__all__ = ["KEY_MAP", "gemma2", "gemma3", "gemma3_text"]

_LAYER = "layers.{i}."
KEY_MAP = KeyMap(
    entries=(
        Entry(tensor="embed_tokens.weight", leaf="token_embedding.weight"),
        Entry(tensor=_LAYER + "input_layernorm.weight", leaf="layers.{i}.attn_norm"),
        Entry(tensor=_LAYER + "self_attn.q_proj.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D"),
        Entry(tensor=_LAYER + "self_attn.k_proj.weight", leaf="layers.{i}.k", how="K Dh D <- (K Dh) D"),
        Entry(tensor=_LAYER + "self_attn.v_proj.weight", leaf="layers.{i}.v", how="K Dh D <- (K Dh) D"),
        Entry(tensor=_LAYER + "self_attn.q_norm.weight", leaf="layers.{i}.q_norm"),
        Entry(tensor=_LAYER + "self_attn.k_norm.weight", leaf="layers.{i}.k_norm"),
        Entry(tensor=_LAYER + "self_attn.o_proj.weight", leaf="layers.{i}.o", how="D H Dh <- D (H Dh)"),
        Entry(tensor=_LAYER + "post_attention_layernorm.weight", leaf="layers.{i}.post_attn_norm"),
        Entry(tensor=_LAYER + "pre_feedforward_layernorm.weight", leaf="layers.{i}.mlp_norm"),
        Entry(tensor=_LAYER + "mlp.gate_proj.weight", leaf="layers.{i}.gate"),
        Entry(tensor=_LAYER + "mlp.up_proj.weight", leaf="layers.{i}.up"),
        Entry(tensor=_LAYER + "mlp.down_proj.weight", leaf="layers.{i}.down"),
        Entry(tensor=_LAYER + "post_feedforward_layernorm.weight", leaf="layers.{i}.post_mlp_norm"),
        Entry(tensor="norm.weight", leaf="norm"),
    ),
    # Of models that also see, only the text half is served.
    ignored=("*.rotary_emb.inv_freq", "*vision_tower.*", "*multi_modal_projector.*"),
    twins={"*lm_head.weight": "token_embedding.weight"},
    prefixes=("model.", "language_model.model.", "model.language_model."),
)


def gemma2(values: Mapping[str, Any]) -> GemmaConfig:
    """Gemma 2: every other layer, the first included, has a window."""
    settings = HfSettings(values)
    settings.only("attention_bias", False)
    fields = _fields(settings, vocab_size=256000, max_position=8192, pattern=2)
    rope = read_rope(settings, head_dim=fields["head_dim"], max_position=fields["max_position"], default_theta=10000.0)
    return settings.build(
        GemmaConfig,
        {
            **fields,
            "max_position": rope.max_position,
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "attn_soft_cap": _soft_cap(settings, "attn_logit_softcapping", default=50.0),
            "final_soft_cap": _soft_cap(settings, "final_logit_softcapping", default=30.0),
        },
    )


def gemma3(values: Mapping[str, Any]) -> GemmaConfig:
    """A Gemma 3 that also sees: its ``text_config``."""
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        settings = HfSettings(values)
        settings.miss("text_config", text, "a table of settings")
        settings.finish()
    return gemma3_text({"tie_word_embeddings": values.get("tie_word_embeddings"), **(text or {})})


def gemma3_text(values: Mapping[str, Any]) -> GemmaConfig:
    """Gemma 3: every sixth layer has no window, and only those have a rotary scaling."""
    settings = HfSettings(values)
    settings.only("attention_bias", False)
    settings.only("attn_logit_softcapping")  # transformers ignores it in this family
    fields = _fields(settings, vocab_size=262208, max_position=131072, pattern=6)
    fields |= _two_ropes(settings, fields["max_position"])
    fields["final_soft_cap"] = _soft_cap(settings, "final_logit_softcapping", default=None)
    return settings.build(GemmaConfig, {**fields, "qk_norm": True})


def _fields(settings: Settings, *, vocab_size: int, max_position: int, pattern: int) -> dict[str, Any]:
    """What both have. ``pattern``: the last of so many layers has no window, unless the file says otherwise."""
    for name in ("hidden_act", "hidden_activation"):
        settings.only(name, "gelu_pytorch_tanh")
    settings.only("tie_word_embeddings", True)
    layers = settings.layers("num_hidden_layers")
    window = settings.size("sliding_window", 4096)
    pattern = settings.size("sliding_window_pattern", settings.size("_sliding_window_pattern", pattern))
    windows = by_layer(settings, window, layers)
    if windows is None:
        windows = tuple(window if (i + 1) % pattern else None for i in range(layers))
    return {
        "vocab_size": settings.size("vocab_size", vocab_size),
        "hidden_size": settings.size("hidden_size", 2304),
        "intermediate_size": settings.size("intermediate_size", 9216),
        "num_layers": layers,
        "num_heads": settings.size("num_attention_heads", 8),
        "num_kv_heads": settings.size("num_key_value_heads", 4),
        "head_dim": settings.size("head_dim", 256),
        "windows": windows,
        "query_pre_attn_scalar": settings.number("query_pre_attn_scalar", 256),
        "rms_norm_eps": settings.number("rms_norm_eps", 1e-6),
        "max_position": settings.size("max_position_embeddings", max_position),
    }


def _soft_cap(settings: Settings, key: str, *, default: float | None) -> float | None:
    """Absent it is ``default``; null it is none."""
    return settings.maybe_number(key) if key in settings.values else default


def _two_ropes(settings: Settings, max_position: int) -> dict[str, Any]:
    """The rotary bases and the scaling of Gemma 3, and what that reaches: by kind of layer in new files, by key in old
    ones."""
    both, old = settings.inside("rope_parameters"), settings.inside("rope_scaling")
    full = both.inside("full_attention") if both is not None else None
    local = both.inside("sliding_attention") if both is not None else None
    theta, local_theta = settings.number("rope_theta", 1e6), settings.number("rope_local_base_freq", 1e4)
    scaling: RopeScaling | None = None
    if full is not None and old is not None:
        settings.wrong("rope_parameters and rope_scaling are both there; one is wanted")
    if full is not None:
        theta = full.number("rope_theta", theta)
        full.only("partial_rotary_factor", 1.0)
    if local is not None:
        local_theta = local.number("rope_theta", local_theta)
        local.only("partial_rotary_factor", 1.0)
        local.only("rope_type", "default")
    given = full if full is not None else old
    if given is not None:
        original = given.size("original_max_position_embeddings", max_position)
        scaling = scaling_inside(given, max_position=max_position, original=original)
    return {
        "rope_theta": theta,
        "local_rope_theta": local_theta,
        "rope_scaling": scaling,
        "max_position": max_position if scaling is None else scaling.reach(max_position),
    }
