"""Architecture "llama" of GGUF -> the Llama family: its configuration, and where each parameter comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jserve.checkpoints.gguf.file import GgufFile
from jserve.checkpoints.gguf.tensors import read_tensor
from jserve.checkpoints.key_map import Entry, KeyMap
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.llama import LlamaConfig
from jserve.models.rope import RopeScaling, inverse_frequencies

__all__ = ["KEY_MAP", "ROPE_FACTORS", "llama_config"]


KEY_MAP = KeyMap(
    entries=(
        Entry(tensor="token_embd.weight", leaf="embed.weight"),
        Entry(tensor="blk.{i}.attn_norm.weight", leaf="layers.{i}.attn_norm"),
        Entry(tensor="blk.{i}.attn_q.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D", interleaved=True),
        Entry(tensor="blk.{i}.attn_k.weight", leaf="layers.{i}.k", how="K Dh D <- (K Dh) D", interleaved=True),
        Entry(tensor="blk.{i}.attn_v.weight", leaf="layers.{i}.v", how="K Dh D <- (K Dh) D"),
        Entry(tensor="blk.{i}.attn_output.weight", leaf="layers.{i}.o", how="D H Dh <- D (H Dh)"),
        Entry(tensor="blk.{i}.ffn_norm.weight", leaf="layers.{i}.mlp_norm"),
        Entry(tensor="blk.{i}.ffn_gate.weight", leaf="layers.{i}.gate"),
        Entry(tensor="blk.{i}.ffn_up.weight", leaf="layers.{i}.up"),
        Entry(tensor="blk.{i}.ffn_down.weight", leaf="layers.{i}.down"),
        Entry(tensor="output_norm.weight", leaf="norm"),
        Entry(tensor="output.weight", leaf="head"),
    ),
    ignored=("rope_freqs.weight",),
)

ROPE_FACTORS = "rope_freqs.weight"
"""Not a parameter: what each rotary frequency is divided by, as Llama 3.1 and later stretch them."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.type": ("none", "linear"),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
}
"""Keys that may be there if they hold one of these values."""

_READ = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scale_linear",
    }
)

_LLAMA3_CONTEXT = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
"""Every published Llama with stretched frequencies uses these; the file keeps only what follows from them."""


def llama_config(file: GgufFile) -> LlamaConfig:
    """The configuration in ``file``'s metadata.

    Raises CheckpointError for settings that are missing, malformed or contradict each other, and UnsupportedModel
    for settings that change the computation and are not built; either names all at once.
    """
    settings = _Settings(file)
    hidden, heads = settings.size("embedding_length"), settings.size("attention.head_count")
    head_dim = settings.size("attention.key_length", hidden // heads if heads else None)
    config: dict[str, Any] = {
        "vocab_size": settings.vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": settings.size("feed_forward_length"),
        "num_layers": settings.size("block_count"),
        "num_heads": heads,
        "num_kv_heads": settings.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "tie_embeddings": "output.weight" not in file.tensors,
        "max_position": settings.size("context_length"),
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        settings.only(key, settings.size(key, head_dim), head_dim)
    settings.finish()
    return LlamaConfig(**config, rope_scaling=_rope_scaling(file, settings, head_dim, config["rope_theta"]))


def _rope_scaling(file: GgufFile, settings: _Settings, head_dim: int, theta: float) -> RopeScaling | None:
    linear = settings.values.get("rope.scaling.type", "linear") == "linear"
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    settings.finish()
    scaling = RopeScaling(kind="linear", factor=factor) if linear and factor != 1.0 else None
    if ROPE_FACTORS not in file.tensors:
        return scaling
    if scaling is not None:
        raise UnsupportedModel(f"{file.path} stretches rotary frequencies twice, by {ROPE_FACTORS} and linearly")
    return _llama3_scaling(file, head_dim, theta)


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling | None:
    """The scaling of which ``rope_freqs`` is the trace; UnsupportedModel where it is no Llama 3 scaling."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.shape != (head_dim // 2,) or tensor.kind.name != "F32":
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS} is {tensor.kind.name} {list(tensor.shape)}; wanted F32 [{head_dim // 2}]"
        )
    found = read_tensor(file, tensor)
    factor = float(found.max(initial=0.0))
    if np.all(found == 1.0):
        return None
    if factor > 1.0:
        scaling = RopeScaling(
            kind="llama3",
            factor=factor,
            low_freq_factor=_LLAMA3_LOW,
            high_freq_factor=_LLAMA3_HIGH,
            original_max_position=_LLAMA3_CONTEXT,
        )
        wanted = inverse_frequencies(head_dim, theta, None) / inverse_frequencies(head_dim, theta, scaling)
        if np.allclose(found, wanted, rtol=1e-4, atol=0.0):
            return scaling
    raise UnsupportedModel(
        f"{file.path}: {ROPE_FACTORS} is not the stretch of Llama 3 (low {_LLAMA3_LOW}, high {_LLAMA3_HIGH}, "
        f"context {_LLAMA3_CONTEXT}); other stretches are not built"
    )


class _Settings:
    """The ``llama.*`` metadata, read once; everything wrong is collected and raised by ``finish``."""

    def __init__(self, file: GgufFile) -> None:
        self._path: Path = file.path
        self._file = file
        self.values = {k.removeprefix("llama."): v for k, v in file.metadata.items() if k.startswith("llama.")}
        self._wrong: list[str] = []
        self._unsupported = [
            f"llama.{key} = {_short(value)}"
            for key, value in self.values.items()
            if key not in _READ and value not in _NEUTRAL.get(key, ())
        ]

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; 0 stands in for one that is missing or wrong until ``finish``."""
        value = self.values.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
            return value
        self._miss(key, value, "a whole number above 0")
        return 0

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.values.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < float("inf"):
            return float(value)
        self._miss(key, value, "a number above 0")
        return 1.0

    def vocab_size(self) -> int:
        """Rows of the embedding table, which the tokenizer may fill only in part."""
        table = self._file.tensors.get("token_embd.weight")
        if table is None:
            self._wrong.append("tensor token_embd.weight is missing")
            return 0
        size = self.size("vocab_size", table.shape[0])
        if size != table.shape[0]:
            self._wrong.append(f"llama.vocab_size is {size}, and token_embd.weight has {table.shape[0]} rows")
        return table.shape[0]

    def only(self, key: str, value: int, built: int) -> None:
        """A setting for which one value is built."""
        if value != built:
            self._unsupported.append(f"llama.{key} = {value} (built: {built})")

    def finish(self) -> None:
        if self._wrong:
            raise CheckpointError(f"{self._path}: {'; '.join(self._wrong)}")
        if self._unsupported:
            raise UnsupportedModel(
                f"{self._path} has settings that are not built: {', '.join(self._unsupported)}",
            )

    def _miss(self, key: str, value: Any, wanted: str) -> None:
        what = "is missing" if value is None else f"is {_short(value)}"
        self._wrong.append(f"llama.{key} {what}; it must be {wanted}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
