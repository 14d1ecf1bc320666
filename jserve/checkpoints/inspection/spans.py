"""Names of arrays that are alike but for numbers, in one: ``layers.0-29.q``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

__all__ = ["NUMBER", "spanned"]

NUMBER = re.compile(
    r"(?<![^./])[0-9]{1,9}(?=[./]|$)|(?:(?<=layers_)|(?<=layer_)|(?<=blocks_)|(?<=block_)|(?<=h_))[0-9]{1,9}(?=[./])"
)
"""A layer or an expert, as ``layers.3.q``, ``layers_3.q`` and ``layer_3/q`` have it."""


def spanned(around: Sequence[str], numbers: Sequence[Sequence[int]]) -> str:
    """Names as one: ``around`` is what stands around the numbers of all (``NUMBER.split``), ``numbers`` has those of
    each. ``("layers.", ".q")`` and 0 to 3 are ``layers.0-3.q``."""
    spans = [_span(sorted(set(place))) for place in zip(*numbers, strict=True)]
    return "".join(itertools.chain.from_iterable(zip(around, [*spans, ""], strict=True)))


def _span(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) <= 6:
        return ",".join(map(str, numbers))
    return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
