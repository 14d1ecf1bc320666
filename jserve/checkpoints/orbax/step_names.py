"""Names of the steps of a run: ``23``, ``0023``, ``step_23``, ``checkpoint_23``, and numbers behind any other word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jserve.errors import SourceError

__all__ = ["is_step_name", "one_prefix", "step_number", "step_prefix"]

_STEP = re.compile(
    r"(?:(?P<usual>step|checkpoint|ckpt)[_-]?|(?P<other>[A-Z][A-Z_-]*)[_-])?(?P<number>[0-9]+)", re.IGNORECASE
)


def is_step_name(name: str) -> bool:
    """Whether ``name`` is one that steps usually have: ``23``, ``step_23``, ``checkpoint_23``."""
    match = _STEP.fullmatch(name)
    return match is not None and match["other"] is None


def step_number(name: str) -> int | None:
    """The number of a step whose folder or file is called ``name``; None for other names."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match["number"])


def step_prefix(name: str) -> str | None:
    """What stands before the number of a step called ``name``: "" of a bare one. None for other names."""
    match = _STEP.fullmatch(name)
    return None if match is None else (match["usual"] or match["other"] or "").lower()


def one_prefix(folder: Path, names: Sequence[str]) -> str:
    """What ``names``, the steps of ``folder``, newest first, all begin with.

    Raises SourceError that names the newest of each where they begin with different words: a run's own steps and, say,
    copies of the best ones would be taken for each other.
    """
    newest: dict[str, str] = {}
    for name in names:
        newest.setdefault(step_prefix(name) or "", name)
    if len(newest) > 1:
        raise SourceError(
            f"{folder} holds steps of {len(newest)} kinds of names, the newest of each {', '.join(newest.values())}; "
            "which are meant cannot be told",
            fix=f"name the step, such as {folder / names[0]}",
        )
    return next(iter(newest))
