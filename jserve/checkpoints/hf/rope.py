"""Rotary embedding in a config.json: every way that transformers has spelled it.

New files have ``rope_parameters``, with ``rope_theta`` and ``partial_rotary_factor`` in it; old ones ``rope_scaling``,
with these two beside it, and the kind under ``rope_type`` or, older still, ``type``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jserve.checkpoints.settings import Settings
from jserve.errors import UnsupportedModel
from jserve.models.rope import ROPE_KINDS, RopeScaling

__all__ = ["Rope", "read_rope", "scaling_inside"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How the heads of a model rotate."""

    theta: float
    scaling: RopeScaling | None
    rotary_dim: int
    max_position: int
    """Tokens that the model can be served with."""


def read_rope(
    settings: Settings, *, head_dim: int, max_position: int, default_theta: float, partial: bool = False
) -> Rope:
    """What ``settings`` say of rotation. ``max_position`` is what they have as max_position_embeddings.

    ``partial``: whether the family may leave some dimensions of a head alone. transformers does not ask the others for
    ``partial_rotary_factor``, so that a file which has it means something else.
    """
    new, old = settings.inside("rope_parameters"), settings.inside("rope_scaling")
    theta, fraction = settings.number("rope_theta", default_theta), settings.number("partial_rotary_factor", 1.0)
    original = settings.size("original_max_position_embeddings", max_position)
    scaling = None
    found = old if old is not None and old.values else new
    if found is not None:
        theta, fraction = found.number("rope_theta", theta), found.number("partial_rotary_factor", fraction)
        if settings.get("original_max_position_embeddings") is None:
            original = found.size("original_max_position_embeddings", max_position)
        else:
            found.get("original_max_position_embeddings")  # as transformers: the one outside wins
        scaling = scaling_inside(found, max_position=max_position, original=original)
    if fraction > 1.0:
        settings.miss("partial_rotary_factor", fraction, "a number above 0, and at most 1")
        fraction = 1.0
    if fraction != 1.0 and not partial:
        settings.unsupported(f"partial_rotary_factor = {fraction:g} (built for this family: 1.0)")
    for unused in (part for part in (new, old) if part is not None and part is not found):
        if unused.values:
            settings.wrong("rope_parameters and rope_scaling are both there; one is wanted")
    return Rope(
        theta=theta,
        scaling=scaling,
        rotary_dim=int(head_dim * fraction),
        max_position=max_position if scaling is None else scaling.reach(max_position),
    )


def scaling_inside(settings: Settings, *, max_position: int, original: int) -> RopeScaling | None:
    """The scaling in ``rope_parameters`` or ``rope_scaling``; None where the kind is default.

    ``original``: the context of training. Defaults, and what follows from what, are transformers'.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    settings.get("type")  # both may be there
    if kind == "su" or (kind == "yarn" and "short_factor" in settings.values):
        kind = "longrope"  # as Phi-3's first files call it
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        settings.unsupported(f"rope scaling of kind {kind!r} (built: default, {', '.join(ROPE_KINDS)})")
        for key in settings.values:
            settings.get(key)
        return None
    fields = {
        "linear": lambda: {"factor": settings.number("factor")},
        "dynamic": lambda: {"factor": settings.number("factor"), "original_max_position": max_position},
        "llama3": lambda: _llama3(settings, original),
        "yarn": lambda: _yarn(settings, max_position, original),
        "longrope": lambda: _longrope(settings, max_position, original),
    }[kind]()
    if settings.has_problems:
        return None
    try:
        return RopeScaling(kind=kind, **fields)  # type: ignore[arg-type]
    except UnsupportedModel as error:
        settings.unsupported(error.message)
        return None


def _llama3(settings: Settings, original: int) -> dict[str, Any]:
    return {
        "factor": settings.number("factor"),
        "low_freq_factor": settings.number("low_freq_factor"),
        "high_freq_factor": settings.number("high_freq_factor"),
        "original_max_position": original,
    }


def _yarn(settings: Settings, max_position: int, original: int) -> dict[str, Any]:
    settings.get("finetuned")
    factor = settings.number("factor", max_position / original)
    mscale, mscale_all_dim = settings.maybe_number("mscale"), settings.maybe_number("mscale_all_dim")
    attention = settings.maybe_number("attention_factor")
    if attention is None and mscale is not None and mscale_all_dim is not None:
        attention = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": _mscale(factor, 1.0) if attention is None else attention,
        "beta_fast": settings.number("beta_fast", 32.0),
        "beta_slow": settings.number("beta_slow", 1.0),
        "truncate": settings.flag("truncate", default=True),
    }


def _mscale(factor: float, weight: float) -> float:
    """Sharper attention for longer texts (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(settings: Settings, max_position: int, original: int) -> dict[str, Any]:
    factor = settings.number("factor", max_position / original)
    attention = settings.maybe_number("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(max(original, 2)))
    return {
        "short_factors": settings.numbers("short_factor"),
        "long_factors": settings.numbers("long_factor"),
        "original_max_position": original,
        "attention_factor": attention,
    }
