"""Values in messages."""

from __future__ import annotations

from typing import Any

__all__ = ["shown"]

_MOST = 60


def shown(value: Any) -> str:
    """``value`` as text for a message, short whatever it is."""
    text = repr(value)
    return text if len(text) <= _MOST else text[: _MOST - 3] + "..."
