"""Hugging Face tensors and settings as a GGUF file has them: what llama.cpp's converter does, family by family.

Names come from the gguf package; what is permuted, transposed, stacked or added to is written down here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

__all__ = ["gguf_metadata", "gguf_tensors"]

_ARCHITECTURES: Mapping[str, str] = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
"""By model_type."""

_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w1|w2|w3|\w+_proj)\.weight")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

Typed = tuple[str, np.ndarray]
"""A GGUF type's name and values."""


def gguf_tensors(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> dict[str, Typed]:
    """Tensors by GGUF name, all F32, of ``weights`` by Hugging Face name. ``config``: the contents of config.json."""
    arch = _ARCHITECTURES[config["model_type"]]
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.get("num_hidden_layers") or config["n_layer"])
    tensors: dict[str, Typed] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in weights.items():
        found = _EXPERT.fullmatch(name)
        if found is not None:
            layer, expert, part = found.groups()
            whole = f"model.layers.{layer}.mlp.experts.{_MIXTRAL.get(part, part)}.weight"
            experts.setdefault(whole, {})[int(expert)] = values
        else:
            tensors[_renamed(names, name)] = "F32", _changed(config, name, values)
    for name, parts in experts.items():
        tensors[_renamed(names, name)] = "F32", np.stack([parts[e] for e in range(len(parts))])
    scaling = config.get("rope_parameters") or {}
    for length in ("long", "short"):
        if f"{length}_factor" in scaling:
            tensors[f"rope_factors_{length}.weight"] = "F32", np.asarray(scaling[f"{length}_factor"], np.float32)
    return tensors


def _renamed(names: gguf.TensorNameMap, name: str) -> str:
    renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if renamed is None:
        raise ValueError(f"the gguf package has no name for {name}")
    return str(renamed)


def _changed(config: Mapping[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    kind = config["model_type"]
    if _ARCHITECTURES[kind] == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        # Row i of the first half of each head and row i of the second become neighbours.
        return values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if kind == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
        return np.ascontiguousarray(values.T)
    return values


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the tokenizer."""
    arch = _ARCHITECTURES[config["model_type"]]
    values = _gpt2(config) if arch == "gpt2" else _others(config, arch)
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in values.items() if value is not None},
    }


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": 4 * config["n_embd"],
        "block_count": config["n_layer"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _others(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    kind = rope["rope_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    has_window = config.get("use_sliding_window", True)
    has_experts = arch == "qwen3moe" or config["model_type"] == "mixtral"
    turned = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    factor = config["max_position_embeddings"] / rope.get("original_max_position_embeddings", 1)
    original = rope.get("original_max_position_embeddings")
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": None if arch == "phi3" else head_dim,
        "attention.value_length": None if arch == "phi3" else head_dim,
        # 0 where config.json has null, in the architecture whose converter always writes it.
        "attention.sliding_window": (config.get("sliding_window") or (0 if arch == "phi3" else None))
        if has_window
        else None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope.dimension_count": None if arch.startswith("gemma") else turned,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": kind if kind in ("linear", "yarn") else None,
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(factor) / np.log(original)))
        if kind == "longrope"
        else None,
        "expert_count": config.get("num_local_experts", config.get("num_experts")) if has_experts else None,
        "expert_used_count": config["num_experts_per_tok"] if has_experts else None,
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
