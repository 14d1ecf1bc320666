"""Rotary scaling in GGUF files: in metadata, or in tensors that say what each frequency is divided by."""

from __future__ import annotations

import math

import numpy as np

from jserve.checkpoints.gguf.settings import GgufSettings, read_factors
from jserve.errors import UnsupportedModel
from jserve.models.rope import RopeScaling, inverse_frequencies

__all__ = ["LLAMA3_FACTORS", "LONG_FACTORS", "SHORT_FACTORS", "read_scaling"]

LLAMA3_FACTORS = "rope_freqs.weight"
"""Llama 3.1 and later: what is left of their stretch."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Phi-3: both lists of longrope."""

_LLAMA3_CONTEXT = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
"""Every published Llama with stretched frequencies uses these; the file keeps only what follows from them."""


def read_scaling(settings: GgufSettings, *, rotary_dim: int, theta: float, max_position: int) -> RopeScaling | None:
    """The scaling of a file. To be asked for last: raises CheckpointError for all that is malformed up to here, for
    tensors are read then, and where they are malformed themselves; UnsupportedModel where they are not built."""
    kind = settings.get("rope.scaling.type")
    settings.only("rope.scaling.type", "none", "linear", "yarn", "longrope")
    # A factor without a kind is linear, as it is to llama.cpp.
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    original = settings.size("rope.scaling.original_context_length", max_position)
    attention = settings.number("rope.scaling.attn_factor", 1.0)
    beta_fast = settings.number("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = settings.number("rope.scaling.yarn_beta_slow", 1.0)
    settings.only("rope.scaling.yarn_ext_factor", 1.0)
    settings.only("rope.scaling.yarn_attn_factor", 1.0)
    tensors = settings.file.tensors
    is_long = LONG_FACTORS in tensors or SHORT_FACTORS in tensors
    if not is_long and kind != "yarn":
        settings.only("rope.scaling.attn_factor", 1.0)
    if kind == "longrope" and not is_long:
        settings.wrong(f"rope scaling is longrope, and there are no tensors {LONG_FACTORS} and {SHORT_FACTORS}")
    if is_long:
        for name in (LONG_FACTORS, SHORT_FACTORS):
            if name not in tensors:
                settings.wrong(f"tensor {name} is missing")
        if settings.get("rope.scaling.attn_factor") is None:
            settings.miss("rope.scaling.attn_factor", None, "a number above 0")
    settings.check()
    found: list[RopeScaling] = []
    if is_long:
        found.append(
            RopeScaling(
                kind="longrope",
                original_max_position=original,
                attention_factor=attention,
                short_factors=_factors(settings, SHORT_FACTORS, rotary_dim),
                long_factors=_factors(settings, LONG_FACTORS, rotary_dim),
            )
        )
    elif kind == "yarn":
        found.append(
            RopeScaling(
                kind="yarn",
                factor=factor,
                original_max_position=original,
                # llama.cpp sharpens attention by the logarithm of the factor, as transformers does by default.
                attention_factor=attention * (1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0),
                beta_fast=beta_fast,
                beta_slow=beta_slow,
            )
        )
    elif kind in (None, "linear") and factor != 1.0:
        found.append(RopeScaling(kind="linear", factor=factor))
    if LLAMA3_FACTORS in tensors:
        llama3 = _llama3(settings, rotary_dim, theta)
        found += [llama3] if llama3 is not None else []
    if len(found) > 1:
        kinds = " and ".join(one.kind for one in found)
        raise UnsupportedModel(f"{settings.where} stretches rotary frequencies twice: {kinds}")
    return found[0] if found else None


def _factors(settings: GgufSettings, name: str, rotary_dim: int) -> tuple[float, ...]:
    return tuple(read_factors(settings.file, name, rotary_dim // 2).tolist())


def _llama3(settings: GgufSettings, rotary_dim: int, theta: float) -> RopeScaling | None:
    """The scaling of which the tensor is the trace; UnsupportedModel where it is no Llama 3 scaling."""
    found = read_factors(settings.file, LLAMA3_FACTORS, rotary_dim // 2)
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
        wanted = inverse_frequencies(rotary_dim, theta, None) / inverse_frequencies(rotary_dim, theta, scaling)
        if np.allclose(found, wanted, rtol=1e-4, atol=0.0):
            return scaling
    raise UnsupportedModel(
        f"{settings.where}: {LLAMA3_FACTORS} is not the stretch of Llama 3 (low {_LLAMA3_LOW}, high {_LLAMA3_HIGH}, "
        f"context {_LLAMA3_CONTEXT}); other stretches are not built"
    )
