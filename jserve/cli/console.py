"""Talk to the person at the terminal, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["rows", "say"]


def say(text: str = "") -> None:
    """One line, or several, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def rows(pairs: Sequence[tuple[str, str]], *, indent: str = "  ") -> str:
    """Names and values in two aligned columns. An empty name goes on with the value above."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{indent}{name:<{width}}  {value}".rstrip() for name, value in pairs)
