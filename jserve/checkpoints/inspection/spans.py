"""Names of arrays that are alike but for numbers, in one: ``layers.0-29.q``."""

from __future__ import annotations

import re

__all__ = ["NUMBER", "spanned"]

NUMBER = re.compile(
    r"(?<![^./])[0-9]{1,9}(?=[./]|$)|(?:(?<=layers_)|(?<=layer_)|(?<=blocks_)|(?<=block_)|(?<=h_))[0-9]{1,9}(?=[./])"
)
"""A layer or an expert, as ``layers.3.q``, ``layers_3.q`` and ``layer_3/q`` have it."""


def spanned(pattern: str, numbers: list[list[int]]) -> str:
    """``layers.{}.q`` of the numbers 0 to 3 as ``layers.0-3.q``."""
    for place in zip(*numbers, strict=True):
        pattern = pattern.replace("{}", _span(sorted(set(place))), 1)
    return pattern


def _span(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) <= 6:
        return ",".join(map(str, numbers))
    return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
