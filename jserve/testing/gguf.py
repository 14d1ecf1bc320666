"""Tiny GGUF files: a random Llama with a real byte-level tokenizer and a chat template, in a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

from jserve.checkpoints.arrays.tree import flatten
from jserve.models.llama import LlamaConfig
from jserve.models.registry import build_abstract, family
from jserve.testing.models import TINY_LLAMA
from jserve.text.pieces import BYTE_ALPHABET

__all__ = [
    "CHAT_TEMPLATE",
    "TINY_MERGES",
    "TINY_TOKENS",
    "llama_metadata",
    "llama_tensors",
    "random_leaves",
    "tokenizer_metadata",
    "write_gguf",
    "write_tiny_gguf",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_MERGES = ("h e", "l l", "he ll", "hell o", "Ġ t", "Ġ a", "i n", "o u", "Ġt he", "a n", "Ġ w", "o r", "Ġw or")
TINY_TOKENS = (
    *_SPECIAL,
    *sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__),
    *(merge.replace(" ", "") for merge in TINY_MERGES),
)
"""Three special tokens, every byte, and what the merges make: "hello" is one token."""


def write_tiny_gguf(
    path: Path,
    *,
    kind: str = "F32",
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> dict[tuple[str, ...], np.ndarray]:
    """Write a random Llama to ``path``; its parameters by path, float32, as they were before ``kind`` rounded them.

    ``kind`` is a type that the gguf package can write, such as F32, BF16 or Q8_0; norms stay F32. ``overrides`` are
    fields of LlamaConfig other than ``TINY_LLAMA``'s; ``metadata`` is put over what is written otherwise, and a value
    of None leaves its key out.
    """
    config = LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(TINY_TOKENS), **overrides})
    leaves = random_leaves(config, seed)
    write_gguf(path, {**llama_metadata(config), **(metadata or {})}, llama_tensors(leaves, kind=kind))
    return leaves


def random_leaves(config: LlamaConfig, seed: int) -> dict[tuple[str, ...], np.ndarray]:
    """Parameters of a Llama by path, float32. Made by numpy: nothing is compiled, and no two are alike, norms
    included."""
    rng = np.random.default_rng(seed)
    _, state = build_abstract(family("llama"), config, np.dtype(np.float32))
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    for name, leaf in flatten(state).items():
        values = rng.standard_normal(leaf.shape, np.float32)
        # Sharper attention than random weights give: greedy continuations then wander instead of repeating a token.
        fan_in = math.prod(leaf.shape[1:]) if name[-1] == "o" else leaf.shape[-1]
        scale = (2.0 if name[-1] in ("q", "k") else 1.0) * fan_in**-0.5
        leaves[name] = 1 + values / 8 if leaf.ndim == 1 else values * np.float32(scale)
    return leaves


def llama_metadata(config: LlamaConfig) -> dict[str, Any]:
    """What a converter writes for ``config`` and the tiny tokenizer. Rows beyond its tokens are unused ones."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.block_count": config.num_layers,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        **tokenizer_metadata(config.vocab_size),
    }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        metadata["llama.rope.scaling.type"] = "linear"
        metadata["llama.rope.scaling.factor"] = config.rope_scaling.factor
    return metadata


def tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    """The tiny tokenizer, filled up with unused tokens."""
    pad = vocab_size - len(TINY_TOKENS)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*TINY_TOKENS, *(f"[PAD{i}]" for i in range(pad))],
        "tokenizer.ggml.token_type": [3] * len(_SPECIAL) + [1] * (len(TINY_TOKENS) - len(_SPECIAL)) + [5] * pad,
        "tokenizer.ggml.merges": list(TINY_MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


_NAMES: Mapping[str, str] = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "token_embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
}


def llama_tensors(leaves: Mapping[tuple[str, ...], np.ndarray], *, kind: str) -> dict[str, tuple[str, np.ndarray]]:
    """Parameters by path -> tensors by name, each with its type, permuted and flattened as converters do."""
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for path, leaf in leaves.items():
        part = path[2] if path[0] == "layers" else path[0]
        values = leaf
        if part in ("q", "k"):
            heads, head_dim, width = leaf.shape
            # Row i of the first half and row i of the second become neighbours.
            values = leaf.reshape(heads, 2, head_dim // 2, width).swapaxes(1, 2)
        if part in ("q", "k", "v"):
            values = values.reshape(-1, leaf.shape[-1])
        elif part == "o":
            values = values.reshape(leaf.shape[0], -1)
        prefix = f"blk.{path[1]}." if path[0] == "layers" else ""
        tensors[f"{prefix}{_NAMES[part]}.weight"] = ("F32" if leaf.ndim == 1 else kind, values)
    return tensors


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Write a GGUF file of any contents. A tensor of a quantized type is float values, or uint8 rows of its blocks."""
    writer = gguf.GGUFWriter(path, arch=metadata.get("general.architecture") or "")
    for key, value in metadata.items():
        if key != "general.architecture" and value is not None:
            _ADDERS[type(value)](writer, key, value)
    for name, (kind, values) in tensors.items():
        type_ = GGMLQuantizationType[kind]
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=type_)
        else:
            writer.add_tensor(name, quants.quantize(np.ascontiguousarray(values, np.float32), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_ADDERS: Mapping[type, Any] = {
    str: gguf.GGUFWriter.add_string,
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    list: gguf.GGUFWriter.add_array,
}
