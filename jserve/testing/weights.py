"""Random parameters that anybody can make again: each from a seed and its own name, by numpy alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

__all__ = ["random_weights"]


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int, *, kind: str) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face name, float32. ``kind`` is the model_type.

    No two are alike; vectors are multiples of 1/1024, so that adding 1 to them and taking it away changes nothing.
    Attention is sharper than random weights make it: greedy continuations then wander instead of repeating a token.
    """
    return {name: _tensor(name, shape, seed, kind) for name, shape in shapes.items()}


def _tensor(name: str, shape: tuple[int, ...], seed: int, kind: str) -> np.ndarray:
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if len(shape) == 1:
        return np.round(values * 128) / np.float32(1024) + np.float32(_centre(name, kind))
    fan_in = shape[0] if "c_attn" in name or "c_proj" in name or "c_fc" in name else shape[-1]
    sharper = any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "c_attn"))
    return values * np.float32((2.0 if sharper else 1.0) * fan_in**-0.5)


def _centre(name: str, kind: str) -> float:
    """What the values of a vector lie around."""
    if not name.endswith("weight"):
        return 0.0
    if kind.startswith("gemma"):
        # Norms are stored as what they differ from 1. Blocks that add more outweigh the token itself, which the tied
        # head would otherwise choose again and again.
        return 3.0 if "layernorm" in name and "post_" in name else 0.0
    return 1.0
