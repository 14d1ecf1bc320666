"""BERT as Hugging Face writes it: its config.json and its tensors' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.checkpoints.key_map import Entry, KeyMap
from jserve.checkpoints.lazy import LazyArray
from jserve.errors import UnsupportedModel
from jserve.models.bert import BertConfig

__all__ = ["KEY_MAP", "bert_config", "with_new_names"]

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
)

_OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""The first BERTs, which TensorFlow trained, say gamma and beta."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
}
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
"""Settings and the values that are built; one that is absent has the first."""


def bert_config(settings: Mapping[str, Any], *, where: str) -> BertConfig:
    """The configuration in a config.json. ``where`` names it. Raises UnsupportedModel that lists all that is not
    built, and all sizes that are missing or no numbers."""
    wrong = []
    values: dict[str, Any] = {}
    for name, key in _SIZES.items():
        value = settings.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            values[name] = value
        else:
            wrong.append(f"{key} is {value!r}; it must be a whole number")
    eps = settings.get("layer_norm_eps", BertConfig.layer_norm_eps)
    if isinstance(eps, int | float) and not isinstance(eps, bool):
        values["layer_norm_eps"] = float(eps)
    else:
        wrong.append(f"layer_norm_eps is {eps!r}; it must be a number")
    for key, built in _ONLY.items():
        value = settings.get(key, built[0])
        if value not in built:
            wrong.append(f"{key} is {value!r}; built: {', '.join(map(repr, built))}")
    if wrong:
        raise UnsupportedModel("\n  ".join([f"{where} cannot be served:", *wrong]))
    try:
        return BertConfig(**values)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{where}: {error.message}") from None


def with_new_names(tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Tensors under the names that KEY_MAP knows."""
    renamed = {}
    for name, tensor in tensors.items():
        old = next((ending for ending in _OLD_NAMES if name.endswith(ending)), "")
        renamed[name.removesuffix(old) + _OLD_NAMES.get(old, "")] = tensor
    return renamed
