"""Rotary position embedding and the ways of stretching it to longer texts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float64, Int32

from jserve.errors import UnsupportedModel
from jserve.models.number import check_number

__all__ = ["ROPE_KINDS", "RopeScaling", "apply_rope", "check_rope", "inverse_frequencies"]

Kind = Literal["linear", "dynamic", "yarn", "longrope", "llama3"]
ROPE_KINDS: tuple[str, ...] = get_args(Kind)

_BOUNDS = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
"""Fields that are pairs: the less, the greater."""
_MOST_RADIANS = 2.0**64
"""A position's turn. Times 2**31 positions it is far within float32; real ones are about 1."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the angles of a longer context are made from those of training; meanings as in Hugging Face configs."""

    kind: Kind
    factor: float = 1.0
    """How many times longer. longrope has lists instead."""
    original_max_position: int = 8192
    """All but linear: the context length of training."""
    attention_factor: float = 1.0
    """yarn and longrope: what cosines and sines, and so queries and keys, are multiplied by."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths over original_max_position / this are divided by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under original_max_position / this are left alone."""
    beta_fast: float = 32.0
    """yarn: pairs that turn at least this often within original_max_position are left alone."""
    beta_slow: float = 1.0
    """yarn: pairs that turn at most this often are divided by the whole factor."""
    truncate: bool = True
    """yarn: the two bounds are moved outwards to whole pairs."""
    short_factors: tuple[float, ...] = ()
    """longrope: each pair's divisor while sequences fit original_max_position."""
    long_factors: tuple[float, ...] = ()
    """longrope: each pair's divisor where they may be longer."""
    length: int = 0
    """dynamic and longrope: tokens of the longest sequence that is served; see ``for_length``."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UnsupportedModel(f"rope scaling {self.kind!r} is not built; built: default, {', '.join(ROPE_KINDS)}")
        for name in ("factor", "attention_factor", *itertools.chain(*_BOUNDS)):
            check_number(f"{name} of rope scaling", getattr(self, name))
        if not 0 < self.original_max_position < 1 << 31:
            raise UnsupportedModel(
                f"rope scaling has original_max_position {self.original_max_position}; allowed are 1 to {2**31 - 1}"
            )
        for low, high in _BOUNDS:
            if not getattr(self, low) < getattr(self, high):
                raise UnsupportedModel(
                    f"rope scaling has {low} {getattr(self, low)} and {high} {getattr(self, high)}; "
                    "the first must be less than the second"
                )
        for factor in self.short_factors + self.long_factors:
            check_number("a factor of longrope scaling", factor)

    def for_length(self, length: int) -> RopeScaling:
        """This scaling where sequences have at most ``length`` tokens: what transformers computes for one that long.

        dynamic stretches by how far ``length`` exceeds the context of training; longrope takes its long factors where
        it does. transformers chooses anew as a sequence grows, and then old keys, which are cached, no longer fit the
        new angles; so here it is chosen once. Other kinds do not ask.
        """
        return dataclasses.replace(self, length=length) if self.kind in ("dynamic", "longrope") else self

    def reach(self, max_position: int) -> int:
        """Tokens that a model whose file says ``max_position`` can be served with: dynamic and yarn files often name
        the context of training there."""
        if self.kind not in ("dynamic", "yarn"):
            return max_position
        # More positions than an int32 counts are no size that a configuration may have, however many they are.
        return max(max_position, round(min(self.original_max_position * self.factor, 2.0**31)))

    def check_dim(self, rotary_dim: int) -> None:
        """Raise UnsupportedModel where this scaling cannot turn ``rotary_dim`` dimensions of a head."""
        if self.kind == "dynamic" and rotary_dim < 4:
            raise UnsupportedModel(f"dynamic rope scaling wants 4 rotary dimensions or more; there are {rotary_dim}")
        if self.kind == "longrope":
            found = len(self.short_factors), len(self.long_factors)
            if found != (rotary_dim // 2,) * 2:
                raise UnsupportedModel(
                    f"longrope scaling has {found[0]} short and {found[1]} long factors; "
                    f"{rotary_dim} rotary dimensions want {rotary_dim // 2} of each"
                )


def check_rope(rotary_dim: int, theta: float, scaling: RopeScaling | None) -> None:
    """Raise UnsupportedModel where ``inverse_frequencies`` of these gives no angles that float32 holds."""
    if scaling is not None:
        scaling.check_dim(rotary_dim)
    try:
        found = inverse_frequencies(rotary_dim, theta, scaling)
    except (ArithmeticError, ValueError):  # of Python's own floats
        found = np.array([math.nan])
    if not np.all((found >= 0.0) & (found <= _MOST_RADIANS)):
        how = "" if scaling is None else f", stretched by {scaling.kind} scaling with factor {scaling.factor}"
        raise UnsupportedModel(
            f"rope_theta {theta}{how} gives {rotary_dim} rotary dimensions no finite angles; common are rope_theta "
            "above 1 and factors up to 100"
        )


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None
) -> Float64[np.ndarray, " {rotary_dim}//2"]:
    """Radians that each pair of the rotary dimensions turns by a position. ``check_rope`` says what is allowed."""
    with np.errstate(all="ignore"):
        return _inverse_frequencies(rotary_dim, theta, scaling)


def _inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None
) -> Float64[np.ndarray, " {rotary_dim}//2"]:
    if scaling is not None and scaling.kind == "dynamic":
        theta *= _dynamic_stretch(scaling) ** (rotary_dim / (rotary_dim - 2))
    frequencies = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        is_long = scaling.length > scaling.original_max_position
        factors = np.asarray(scaling.long_factors if is_long else scaling.short_factors, np.float32)
        # In float32, as in training: it may round the fastest pair otherwise, which adds up over positions.
        return (np.float32(1.0) / (factors * (1.0 / frequencies).astype(np.float32))).astype(np.float64)
    keep = _kept_llama3(frequencies, scaling) if scaling.kind == "llama3" else _kept_yarn(rotary_dim, theta, scaling)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _dynamic_stretch(scaling: RopeScaling) -> float:
    """NTK-aware scaling (its authors: u/bloc97, u/emozilla), as transformers computes it."""
    length = max(scaling.length, scaling.original_max_position)
    return scaling.factor * length / scaling.original_max_position - (scaling.factor - 1.0)


def _kept_llama3(frequencies: Float64[np.ndarray, " N"], scaling: RopeScaling) -> Float64[np.ndarray, " N"]:
    """How much of each frequency stays. By turns within the context of training: many are kept, few are stretched,
    and between the two bounds it fades linearly."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    return np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)


def _kept_yarn(rotary_dim: int, theta: float, scaling: RopeScaling) -> Float64[np.ndarray, " {rotary_dim}//2"]:
    """As for llama3, fading by the pair's number (arXiv 2309.00071, section 3.2, with bounds as transformers has)."""

    def pair_with(turns: float) -> float:
        return rotary_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return 1.0 - np.clip((np.arange(rotary_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)


def apply_rope(
    x: Float[Array, "T N Dh"],
    positions: Int32[Array, " T"],
    frequencies: Float64[np.ndarray, " pairs"],
    attention_factor: float = 1.0,
) -> Float[Array, "T N Dh"]:
    """Turn the N heads of x to their ``positions``. Angles are float32.

    Of the first 2 * pairs dimensions, i pairs with i + pairs, and their lengths change by ``attention_factor``; those
    behind them stay as they are.
    """
    rotary_dim = 2 * frequencies.shape[0]
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"{rotary_dim} rotary dimensions do not fit heads of {x.shape[-1]}")
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None]
    cos = attention_factor * jnp.cos(angles)[:, None]
    sin = attention_factor * jnp.sin(angles)[:, None]
    low, high = jnp.split(x[..., :rotary_dim].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
    return turned if rotary_dim == x.shape[-1] else jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)
