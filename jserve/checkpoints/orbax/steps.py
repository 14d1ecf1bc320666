"""The steps of a run: ``23``, ``0023``, ``step_23``, ``checkpoint_23``, and numbers behind any other word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jserve.errors import SourceError

__all__ = [
    "COMMITTED",
    "TEMPORARY",
    "Unfinished",
    "final_name",
    "find_steps",
    "is_step_name",
    "one_prefix",
    "step_number",
    "step_prefix",
    "why_unfinished",
]

COMMITTED = "commit_success.txt"
TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(
    r"(?:(?P<usual>step|checkpoint|ckpt)[_-]?|(?P<other>[A-Z][A-Z_-]*)[_-])?(?P<number>[0-9]+)", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A step that was not written to its end."""

    name: str
    why: str


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


def find_steps(folder: Path) -> tuple[list[Path], tuple[Unfinished, ...]]:
    """Finished steps, newest first, and those that are not."""
    numbered: dict[Path, int] = {}
    unfinished = []
    children = sorted(folder.iterdir())
    committed = _committed(children)
    for child in children:
        number = step_number(final_name(child.name))
        if number is None or not (child.is_dir() or child.name.startswith("checkpoint_")):
            continue
        why = _why(child, committed)
        if why is None:
            numbered[child] = number
        else:
            unfinished.append(Unfinished(name=child.name, why=why))
    return sorted(numbered, key=numbered.__getitem__, reverse=True), tuple(unfinished)


def final_name(name: str) -> str:
    """What a step will be called once it is finished."""
    return name.partition(TEMPORARY)[0]


def why_unfinished(folder: Path) -> str | None:
    """Why the step ``folder`` is unfinished; None for one that is finished, and for what is no step."""
    asks = TEMPORARY not in folder.name and step_prefix(folder.name) is not None and folder.is_dir()
    return _why(folder, _committed(folder.parent.iterdir()) if asks else {})


def _committed(children: Iterable[Path]) -> dict[str, set[Path]]:
    """The steps of one folder that have the file of finished ones, by what stands before their numbers."""
    committed: dict[str, set[Path]] = {}
    for child in children:
        prefix = step_prefix(child.name)
        if prefix is not None and (child / COMMITTED).exists():
            committed.setdefault(prefix, set()).add(child)
    return committed


def _why(folder: Path, committed: Mapping[str, set[Path]]) -> str | None:
    if TEMPORARY in folder.name:
        return f"its name has {TEMPORARY} in it, which Orbax takes away when all is written"
    marked = committed.get(step_prefix(folder.name) or "", set())
    if marked and folder not in marked and step_prefix(folder.name) is not None and folder.is_dir():
        return f"it has no {COMMITTED}, and other steps beside it have"
    return None
