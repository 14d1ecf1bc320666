"""What was saved in a folder by Orbax or Flax: the newest readable step, and its whole tree, still to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from jserve.checkpoints.arrays.key_map import Path
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.orbax.layout import Layout, find_layouts
from jserve.checkpoints.orbax.msgpack import read_msgpack
from jserve.checkpoints.orbax.peel import KEPT_OUT
from jserve.checkpoints.orbax.read import Kvstore, inner_kvstore, read_folders, read_tree
from jserve.errors import CheckpointError, SourceError
from jserve.progress import SILENT, Progress

__all__ = ["Saved", "open_saved"]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One step of a checkpoint, opened; nothing of its arrays is read."""

    layout: Layout
    form: str
    """How the arrays are stored, in words: "OCDBT", "zarr3 in a folder each"."""
    tree: Mapping[Path, LazyArray]
    """Everything that was saved, by its path."""
    custom: Mapping[str, Any]
    """``custom_metadata`` of the tree and of the step."""
    absent: tuple[Path, ...] = ()
    """Arrays that lack pieces which are read as a fill value (see ``StoredTree``)."""

    @property
    def words(self) -> str:
        return f"{self.layout.words} ({self.form})"


def open_saved(
    folder: FilePath, *, base: Kvstore | None = None, step: str | None = None, progress: Progress = SILENT
) -> Saved:
    """Open what ``folder`` (or a msgpack file) holds: of several steps the newest that is finished and readable, or
    ``step``, where that is given.

    ``base`` is where the arrays are, if ``folder`` is a copy of a remote one without them. ``progress`` is told of
    steps that are passed over. Raises SourceError, UnsupportedModel and CheckpointError as ``find_layouts`` and
    ``read_tree`` do; where no step can be read, with the reason of each.
    """
    failed: list[CheckpointError] = []
    layouts = [layout for layout in find_layouts(folder) if step in (None, layout.step)]
    if not layouts:
        raise SourceError(f"step {step} of {folder} is gone", fix="run the command again")
    for layout in layouts:
        try:
            saved = _open(layout, base)
        except CheckpointError as error:
            # A store that cannot be asked says nothing against the step.
            if layout.step is None or (base is not None and isinstance(error, SourceError)):
                raise
            failed.append(error)
            continue
        for other in layout.unfinished:
            progress.note(f"{folder}: step {other.name} is passed over, it is unfinished: {other.why}")
        damaged = (*layout.damaged, *(failure.message for failure in failed))
        for damage in damaged:
            progress.note(f"a step is passed over: {damage}")
        progress.note(f"{folder}: {saved.words}")
        if lacking := [".".join(path) for path in saved.absent if not KEPT_OUT.intersection(path)]:
            progress.note(
                f"{folder}: pieces of {', '.join(lacking[:5])}"
                + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
                + " are not stored and are read as the fill value: their writer left them out, or they were lost"
            )
        return replace(saved, layout=replace(layout, damaged=damaged))
    reasons = [*layouts[0].damaged, *(failure.message for failure in failed)]
    if len(reasons) == 1:
        raise failed[0]
    raise CheckpointError("\n  ".join([f"no step of {folder} can be read:", *reasons[:10]]))


def _open(layout: Layout, base: Kvstore | None) -> Saved:
    if layout.kind == "msgpack":
        tree = _checked(layout, read_msgpack(layout.arrays))
        return Saved(layout=layout, form="msgpack", tree=tree, custom=layout.custom)
    if base is not None:
        inside = layout.arrays.relative_to(layout.folder).as_posix()
        base = base if inside == "." else inner_kvstore(base, inside)
    stored = (read_folders if layout.kind == "zarr" else read_tree)(layout.arrays, base=base)
    return Saved(
        layout=layout,
        form=stored.form,
        tree=_checked(layout, stored.arrays),
        custom={**layout.custom, **stored.custom},
        absent=stored.absent,
    )


def _checked(layout: Layout, tree: dict[Path, LazyArray]) -> dict[Path, LazyArray]:
    """``tree``, in which no name stands both for an array and for a folder of arrays."""
    if not tree:
        raise CheckpointError(f"{layout.arrays} holds no arrays")
    both = sorted({".".join(path[:n]) or "its root" for path in tree for n in range(len(path)) if path[:n] in tree})
    if both:
        raise CheckpointError(f"{layout.arrays} is damaged: {', '.join(both[:5])} is an array and holds arrays")
    if () in tree:
        raise CheckpointError(f"{layout.arrays} holds one array without a name", fix="save a dict of parameters")
    return tree
