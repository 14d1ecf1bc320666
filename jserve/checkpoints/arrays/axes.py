"""Axes of arrays by their names, as tables write them: ``(H Dh) D`` is an array whose first axis is two in one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jserve.checkpoints.arrays.lazy import LazyArray

__all__ = ["axis_groups", "regrouped"]


def axis_groups(text: str) -> list[list[str]]:
    """The names of each axis in ``text``: ``(H Dh) D`` has ``H`` and ``Dh``, and ``D``."""
    return [(inside or alone).split() for inside, alone in re.findall(r"\(([^)]*)\)|(\S+)", text)]


def regrouped(array: LazyArray, names: Sequence[str], groups: Sequence[Sequence[str]]) -> LazyArray:
    """``array``, whose axes are called ``names``, with them in the order of ``groups``, those of a group merged."""
    array = array.transposed([names.index(name) for group in groups for name in group])
    for axis, group in enumerate(groups):
        if len(group) > 1:
            array = array.merged(axis, len(group))
    return array
