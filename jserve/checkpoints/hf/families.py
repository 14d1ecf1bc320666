"""The families that are read from Hugging Face folders, by their ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jserve.checkpoints.key_map import Entry, KeyMap
from jserve.errors import UnsupportedModel
from jserve.models.config import ModelConfig
from jserve.models.llama import LlamaConfig

__all__ = ["HF_FAMILIES", "HfFamily", "hf_family"]


@dataclass(frozen=True, kw_only=True)
class HfFamily:
    """How one ``model_type`` is read."""

    family: str
    config: Callable[[Mapping[str, Any]], ModelConfig]
    key_map: KeyMap


def _llama(values: Mapping[str, Any]) -> LlamaConfig:
    heads = values["num_attention_heads"]
    return LlamaConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        max_position=values.get("max_position_embeddings", 2048),
        rope_theta=values.get("rope_theta") or values.get("rope_parameters", {}).get("rope_theta", 10000.0),
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        tie_embeddings=values.get("tie_word_embeddings", False),
    )


_L = "model.layers.{i}."
HF_FAMILIES: Mapping[str, HfFamily] = {
    "llama": HfFamily(
        family="llama",
        config=_llama,
        key_map=KeyMap(
            entries=(
                Entry(tensor="model.embed_tokens.weight", leaf="embed.weight"),
                Entry(tensor=_L + "input_layernorm.weight", leaf="layers.{i}.attn_norm"),
                Entry(tensor=_L + "self_attn.q_proj.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D"),
                Entry(tensor=_L + "self_attn.k_proj.weight", leaf="layers.{i}.k", how="K Dh D <- (K Dh) D"),
                Entry(tensor=_L + "self_attn.v_proj.weight", leaf="layers.{i}.v", how="K Dh D <- (K Dh) D"),
                Entry(tensor=_L + "self_attn.o_proj.weight", leaf="layers.{i}.o", how="D H Dh <- D (H Dh)"),
                Entry(tensor=_L + "post_attention_layernorm.weight", leaf="layers.{i}.mlp_norm"),
                Entry(tensor=_L + "mlp.gate_proj.weight", leaf="layers.{i}.gate"),
                Entry(tensor=_L + "mlp.up_proj.weight", leaf="layers.{i}.up"),
                Entry(tensor=_L + "mlp.down_proj.weight", leaf="layers.{i}.down"),
                Entry(tensor="model.norm.weight", leaf="norm"),
                Entry(tensor="lm_head.weight", leaf="head"),
            ),
            ignored=("lm_head.weight", "*.rotary_emb.inv_freq"),
        ),
    )
}


def hf_family(values: Mapping[str, Any]) -> HfFamily:
    """The family of a config.json. Raises UnsupportedModel with the known ones."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in HF_FAMILIES:
        known = ", ".join(sorted(HF_FAMILIES))
        raise UnsupportedModel(f"config.json has the model_type {kind!r}; read from Hugging Face folders: {known}")
    return HF_FAMILIES[kind]
