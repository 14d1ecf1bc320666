"""Rotary position embedding and the ways of stretching it to longer texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float64, Int32

from jserve.errors import UnsupportedModel

__all__ = ["RopeScaling", "apply_rope", "inverse_frequencies"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the angles of a longer context are made from those of training; meanings as in Hugging Face configs."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    """llama3: wavelengths over original_max_position / this are divided by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under original_max_position / this are left alone."""
    original_max_position: int = 8192
    """llama3: the context length of training."""

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise UnsupportedModel(f"rope scaling {self.kind!r} is not built; built: default, linear, llama3")
        for name in ("factor", "original_max_position"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UnsupportedModel(f"rope scaling has {name} {value}; it must be greater than 0, and finite")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UnsupportedModel(
                f"rope scaling has low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}; the first must be greater than 0 and less than the second"
            )

    @classmethod
    def parse(cls, scaling: Mapping[str, Any] | None) -> RopeScaling | None:
        """Read a Hugging Face ``rope_scaling`` (its kind under ``rope_type``, or ``type`` in older files).

        None and the kind ``default`` give None. Other kinds, and missing or unknown entries, raise UnsupportedModel.
        """
        if scaling is None:
            return None
        entries = dict(scaling)
        kinds = [entries.pop(key) for key in ("rope_type", "type") if key in entries]
        if not kinds:
            raise UnsupportedModel(f"rope_scaling {dict(scaling)} names no kind; it wants rope_type")
        names = {"default": {}, "linear": _LINEAR, "llama3": _LLAMA3}.get(kinds[0])
        if names is None:
            raise UnsupportedModel(f"rope scaling {kinds[0]!r} is not built; built: default, linear, llama3")
        missing, extra = names.keys() - entries.keys(), entries.keys() - names.keys()
        if missing or extra:
            raise UnsupportedModel(
                f"rope_scaling of kind {kinds[0]!r} lacks {sorted(missing)} and has {sorted(extra)}, "
                f"which is not known; it wants exactly {sorted(names)}"
            )
        return cls(kind=kinds[0], **{names[key]: value for key, value in entries.items()}) if names else None


_LINEAR = {"factor": "factor"}
_LLAMA3 = _LINEAR | {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
"""The entries of each kind: Hugging Face's name and ours."""


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float64[np.ndarray, " {head_dim}//2"]:
    """Radians that each pair of dimensions turns by a position."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: turns of each pair within the context of training; few turns are stretched, many are kept,
    # and between the two bounds the stretch fades linearly.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    keep = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def apply_rope(
    x: Float[Array, "T N Dh"], positions: Int32[Array, " T"], frequencies: Float64[np.ndarray, " Dh//2"]
) -> Float[Array, "T N Dh"]:
    """Turn the N heads of x to their ``positions``; dimension i pairs with i + Dh/2. Angles are float32."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
