"""What one rendering of a template may still use: time, the size of a value, and work altogether."""

from __future__ import annotations

import time
from collections.abc import Mapping, MappingView, Sequence
from itertools import chain
from typing import Any

import jinja2

__all__ = ["Budget", "OverBudget", "check_bits", "check_width", "is_sized", "weight"]

MAX_INT_BITS = 4096
MAX_WIDTH = 10_000
"""Widest field or indentation that a template may ask for."""
WORK_FACTOR = 256
"""A rendering may make this many times its largest value altogether."""


class OverBudget(jinja2.TemplateError):
    """The template ran too long or made something too big."""


class Budget:
    """What one render may still use. ``max_seconds`` are of CPU time of the rendering thread."""

    def __init__(self, *, max_size: int, max_seconds: float) -> None:
        self.max_size = max_size
        self._max_seconds = max_seconds
        self._until = time.thread_time() + max_seconds
        self._work = max_size * WORK_FACTOR

    def tick(self) -> None:
        if time.thread_time() > self._until:
            raise OverBudget(f"it ran longer than {self._max_seconds:g} s")

    def spend(self, size: int) -> None:
        """Something of this size (characters, items) is about to be made."""
        self._work -= size
        if size > self.max_size or self._work < 0:
            raise OverBudget(f"it made a text or list larger than {self.max_size}")

    def weigh(self, value: Any) -> Any:
        """Return a value that was made; raise where, written out in full, it is too big."""
        if is_sized(value):
            self.spend(weight(value, self.max_size))
        return value

    def check(self, value: Any) -> None:
        """The same for a value that is only passed on."""
        if weight(value, self.max_size) > self.max_size:
            self.spend(self.max_size + 1)


def weight(value: Any, limit: int) -> int:
    """Items and characters of a value written out in full, shared parts each time; stops beyond the limit."""
    total = 0
    waiting: list[Any] = [value]
    while waiting and total <= limit:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif is_sized(item):
            total += len(item)
            if total <= limit and not isinstance(item, range):
                waiting.extend(chain(item, item.values()) if isinstance(item, Mapping) else item)
    return total


def is_sized(value: Any) -> bool:
    """Text, a list, a dict or a view of one; not what is made item by item."""
    return isinstance(value, (str, Sequence, Mapping, MappingView))


def check_width(width: int | str) -> int:
    if isinstance(width, str):
        width = int(width) if len(width) < 10 else MAX_WIDTH + 1
    if width > MAX_WIDTH:
        raise OverBudget(f"it formats text to a width of {width}; at most {MAX_WIDTH} is allowed")
    return width


def check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise OverBudget(f"it computes a number of {bits} bits; at most {MAX_INT_BITS} are allowed")
