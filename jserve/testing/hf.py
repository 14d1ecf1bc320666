"""Tiny Hugging Face folders: a random Llama with a real byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jserve.models.llama import LlamaConfig
from jserve.testing.gguf import CHAT_TEMPLATE, TINY_TOKENS, llama_metadata, random_leaves
from jserve.testing.models import TINY_LLAMA
from jserve.text.from_gguf import tokenizer_from_gguf

__all__ = ["llama_tensors", "write_shards", "write_tiny_hf"]

_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "token_embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}


def write_tiny_hf(
    folder: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 1,
    settings: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> dict[tuple[str, ...], np.ndarray]:
    """Write a random Llama to the new folder ``folder``; its parameters by path, in ``dtype``.

    ``overrides`` are fields of LlamaConfig other than ``TINY_LLAMA``'s. ``settings`` are put over what config.json has
    otherwise, and ``generation`` is generation_config.json; a value of None leaves its key out.
    """
    config = LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(TINY_TOKENS), **overrides})
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    leaves = {path: leaf.astype(kind) for path, leaf in random_leaves(config, seed).items()}
    folder.mkdir(parents=True)
    write_shards(folder, llama_tensors(leaves), count=shards)
    _write_json(folder / "config.json", {**_settings(config, dtype), **(settings or {})})
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, **(generation or {})})
    _write_json(folder / "tokenizer_config.json", _tokenizer_settings())
    metadata = llama_metadata(LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(TINY_TOKENS)}))
    (folder / "tokenizer.json").write_text(tokenizer_from_gguf(metadata).to_json(), encoding="utf-8")
    return leaves


def llama_tensors(leaves: Mapping[tuple[str, ...], np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by path -> tensors by the names that transformers gives them, in its shapes."""
    tensors = {}
    for path, leaf in leaves.items():
        inside = path[0] == "layers"
        part = path[2] if inside else path[0]
        values = leaf
        if part in ("q", "k", "v"):
            values = leaf.reshape(-1, leaf.shape[-1])
        elif part == "o":
            values = leaf.reshape(leaf.shape[0], -1)
        prefix = f"model.layers.{path[1]}." if inside else ""
        tensors[f"{prefix}{_NAMES[part]}.weight"] = values
    return tensors


def write_shards(folder: Path, tensors: Mapping[str, np.ndarray], *, count: int) -> None:
    """One file, or ``count`` of them and their index, through the safetensors package."""
    if count == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[i::count]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def _settings(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tokenizer_settings() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2), encoding="utf-8")
