"""Constants of a model: numbers that are computed with in float32."""

from __future__ import annotations

from jserve.errors import UnsupportedModel

__all__ = ["check_number"]

_LEAST, _MOST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""float32's range of full precision."""


def check_number(name: str, value: float) -> None:
    """Raise UnsupportedModel where ``value`` is no number above 0 that float32 holds."""
    if not _LEAST <= value <= _MOST:
        raise UnsupportedModel(f"{name} is {value}; allowed are {_LEAST:.3g} to {_MOST:.3g}")
