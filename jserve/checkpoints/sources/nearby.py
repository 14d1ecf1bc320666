"""What there is in place of a path that does not exist."""

from __future__ import annotations

import difflib
from pathlib import Path

from jserve.checkpoints.orbax.layout import find_layouts, is_checkpoint
from jserve.checkpoints.orbax.steps import is_step_name
from jserve.errors import CheckpointError

__all__ = ["instead"]

_MOST = 10


def instead(path: Path) -> str:
    """``; did you mean X?``, or what steps or items there are; "" where nothing is near. ``path`` does not exist."""
    parent = path.parent
    try:
        while not parent.is_dir():
            if parent == parent.parent:
                return ""
            path, parent = parent, parent.parent
        names = sorted(entry.name for entry in parent.iterdir())
        if is_step_name(path.name) and any(is_step_name(name) for name in names) and is_checkpoint(parent):
            return _steps(parent)
        near = difflib.get_close_matches(path.name, names, n=1)
        if near:
            return f"; did you mean {parent / near[0]}?"
        items = find_layouts(parent)[0].items if is_checkpoint(parent) else ()
    except (OSError, CheckpointError):
        return ""
    return f"; {parent} has the items {', '.join(items)}" if items else ""


def _steps(folder: Path) -> str:
    """Those of a run, newest first."""
    layout = find_layouts(folder)[0]
    finished, unfinished = layout.finished, [step.name for step in layout.unfinished]
    more = f" and {len(finished) - _MOST} more" if len(finished) > _MOST else ""
    words = f"; {folder} has the finished steps {', '.join(finished[:_MOST])}{more}"
    return f"{words}; unfinished: {', '.join(unfinished[:_MOST])}" if unfinished else words
