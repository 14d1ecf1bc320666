"""Waiting in tests for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_for"]


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return once ``condition()`` holds; AssertionError after ``timeout_s``, which a loaded machine needs."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"did not come about within {timeout_s:g} s"
        time.sleep(0.005)
