"""Waiting for room in the engine's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jserve.errors import QueueFull

__all__ = ["until_room"]

T = TypeVar("T")

_RETRY_S = (0.05, 1.0)
"""First and longest pause before a full queue is tried again."""


async def until_room(submit: Callable[[], Awaitable[T]], *, check: Callable[[], None]) -> T:
    """What ``submit`` gives, called until it raises QueueFull no more. ``check`` is asked after each pause: what it
    raises ends the wait."""
    pause, longest = _RETRY_S
    while True:
        try:
            return await submit()
        except QueueFull:
            await asyncio.sleep(pause)
        check()
        pause = min(2 * pause, longest)
