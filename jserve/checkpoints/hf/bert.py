"""BERT as Hugging Face writes it: its config.json and its tensors' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.checkpoints.arrays.key_map import Entry, KeyMap
from jserve.checkpoints.hf.settings import HfSettings
from jserve.models.bert import BertConfig

__all__ = ["KEY_MAP", "bert"]

_LAYER = "encoder.layer.{i}."
_HEADS_IN, _HEADS_BIAS, _HEADS_OUT = "H Dh D <- (H Dh) D", "H Dh <- (H Dh)", "D H Dh <- D (H Dh)"

KEY_MAP = KeyMap(
    entries=(
        Entry(tensor="embeddings.word_embeddings.weight", leaf="embed.word"),
        Entry(tensor="embeddings.position_embeddings.weight", leaf="embed.position"),
        Entry(tensor="embeddings.token_type_embeddings.weight", leaf="embed.token_type"),
        Entry(tensor="embeddings.LayerNorm.weight", leaf="embed.norm.weight"),
        Entry(tensor="embeddings.LayerNorm.bias", leaf="embed.norm.bias"),
        Entry(tensor=_LAYER + "attention.self.query.weight", leaf="layers.{i}.q", how=_HEADS_IN),
        Entry(tensor=_LAYER + "attention.self.query.bias", leaf="layers.{i}.q_bias", how=_HEADS_BIAS),
        Entry(tensor=_LAYER + "attention.self.key.weight", leaf="layers.{i}.k", how=_HEADS_IN),
        Entry(tensor=_LAYER + "attention.self.key.bias", leaf="layers.{i}.k_bias", how=_HEADS_BIAS),
        Entry(tensor=_LAYER + "attention.self.value.weight", leaf="layers.{i}.v", how=_HEADS_IN),
        Entry(tensor=_LAYER + "attention.self.value.bias", leaf="layers.{i}.v_bias", how=_HEADS_BIAS),
        Entry(tensor=_LAYER + "attention.output.dense.weight", leaf="layers.{i}.o", how=_HEADS_OUT),
        Entry(tensor=_LAYER + "attention.output.dense.bias", leaf="layers.{i}.o_bias"),
        Entry(tensor=_LAYER + "attention.output.LayerNorm.weight", leaf="layers.{i}.attn_norm.weight"),
        Entry(tensor=_LAYER + "attention.output.LayerNorm.bias", leaf="layers.{i}.attn_norm.bias"),
        Entry(tensor=_LAYER + "intermediate.dense.weight", leaf="layers.{i}.up"),
        Entry(tensor=_LAYER + "intermediate.dense.bias", leaf="layers.{i}.up_bias"),
        Entry(tensor=_LAYER + "output.dense.weight", leaf="layers.{i}.down"),
        Entry(tensor=_LAYER + "output.dense.bias", leaf="layers.{i}.down_bias"),
        Entry(tensor=_LAYER + "output.LayerNorm.weight", leaf="layers.{i}.mlp_norm.weight"),
        Entry(tensor=_LAYER + "output.LayerNorm.bias", leaf="layers.{i}.mlp_norm.bias"),
    ),
    # Heads of other tasks, which vectors are not made of, and a table of the numbers 0, 1, 2, ...
    ignored=("pooler.*", "bert.pooler.*", "cls.*", "classifier.*", "*.position_ids"),
    prefixes=("", "bert."),
    # The first BERTs, which TensorFlow trained, say gamma and beta.
    old_endings={".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"},
)


def bert(values: Mapping[str, Any]) -> BertConfig:
    """``model_type: bert``."""
    settings = HfSettings(values)
    settings.only("hidden_act", "gelu")
    settings.only("position_embedding_type", "absolute")
    settings.only("is_decoder", False)
    settings.get("tie_word_embeddings")  # there is no head
    fields = {
        "vocab_size": settings.size("vocab_size"),
        "hidden_size": settings.size("hidden_size"),
        "intermediate_size": settings.size("intermediate_size"),
        "num_layers": settings.layers("num_hidden_layers"),
        "num_heads": settings.size("num_attention_heads"),
        "max_position": settings.size("max_position_embeddings"),
        "type_vocab_size": settings.size("type_vocab_size"),
        "layer_norm_eps": settings.number("layer_norm_eps", BertConfig.layer_norm_eps),
    }
    return settings.build(BertConfig, fields)
