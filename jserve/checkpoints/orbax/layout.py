"""A folder -> what kind of checkpoint it is: which step, which item, and where the arrays lie.

Looked for, in this order: the marker ``orbax.checkpoint`` (the v1 API); ``_CHECKPOINT_METADATA`` or folders of items;
a tree of its own (``_METADATA``); steps (``23``, ``0023``, ``step_23``; without any of these, numbers behind any other
word), newest first; a folder a parameter (``.zarray``); Flax's msgpack files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from jserve.checkpoints.json_file import read_json_file
from jserve.checkpoints.names import resolve_member
from jserve.checkpoints.orbax.read import METADATA_NAME
from jserve.checkpoints.orbax.steps import (
    TEMPORARY,
    Unfinished,
    final_name,
    find_steps,
    is_step_name,
    one_prefix,
    step_prefix,
    why_unfinished,
)
from jserve.checkpoints.problems import raise_all
from jserve.errors import CheckpointError, SourceError, UnsupportedModel

__all__ = [
    "CHECKPOINT_METADATA",
    "ITEMS",
    "LOOKED_FOR",
    "MARKER",
    "MSGPACK",
    "Layout",
    "find_layouts",
    "is_checkpoint",
]

MARKER = "orbax.checkpoint"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
ITEMS = ("params", "model_params", "items", "default", "state", "pytree", "model")
"""Items that may hold parameters, likeliest first."""
MSGPACK = ("flax_model.msgpack", "checkpoint")
LEVANTER = "metadata.json"
LOOKED_FOR = (
    f"{MARKER}, {CHECKPOINT_METADATA}, {METADATA_NAME}, items ({', '.join(ITEMS)}), steps (23, 0023, step_23), "
    f".zarray folders, {', '.join(MSGPACK)}"
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the arrays of a checkpoint lie. Nothing was read but names and Orbax's own description of the step."""

    folder: Path
    """As it was given."""
    kind: Literal["orbax", "zarr", "msgpack"]
    """An Orbax tree with its metadata; a folder a parameter, without; Flax's msgpack file."""
    arrays: Path
    """The folder of the tree, or the msgpack file."""
    writer: str
    """What wrote it, in words."""
    step: str | None = None
    """Name of the step taken, where there are steps."""
    item: str | None = None
    items: tuple[str, ...] = ()
    """All items of the step."""
    finished: tuple[str, ...] = ()
    """Names of the finished steps, newest first."""
    unfinished: tuple[Unfinished, ...] = ()
    damaged: tuple[str, ...] = ()
    """What is wrong with each finished step that cannot be read and was passed over."""
    custom: Mapping[str, Any] = field(default_factory=dict)
    """``custom_metadata`` of the step: what its writer wanted known of it."""

    @property
    def words(self) -> str:
        parts = [self.writer]
        if self.step is not None:
            parts.append(f"step {self.step} ({len(self.finished)} finished, {len(self.unfinished)} unfinished)")
        if self.item is not None:
            others_of = [item for item in self.items if item != self.item]
            parts.append(f"item {self.item}" + (f" (others: {', '.join(others_of)})" if others_of else ""))
        return ", ".join(parts)


def is_checkpoint(folder: Path) -> bool:
    """Whether ``find_layouts`` knows ``folder`` for a checkpoint, be it damaged or not."""
    try:
        names = {child.name for child in folder.iterdir()}
        return (
            bool(names & {MARKER, CHECKPOINT_METADATA, METADATA_NAME, LEVANTER, *MSGPACK})
            or any(TEMPORARY in name or step_prefix(name) is not None for name in names)
            or any(_is_array(folder / name) or _is_item(folder / name) for name in names)
        )
    except OSError:
        return False


def find_layouts(folder: Path) -> list[Layout]:
    """What ``folder`` (or a msgpack file) holds: one layout, or one a finished step, newest first.

    Raises SourceError where nothing is found or what was asked for is unfinished, UnsupportedModel for the layouts of
    others, CheckpointError where Orbax's description of it is damaged.
    """
    try:
        return _find(folder)
    except OSError as error:
        raise SourceError(f"cannot read {folder}: {error.strerror}") from None


def _find(folder: Path) -> list[Layout]:
    if folder.is_file():
        return [_msgpack(folder, folder)]
    real = folder.resolve()
    why = next((why for place in (real, real.parent) if (why := why_unfinished(place)) is not None), None)
    if why is not None:
        raise SourceError(f"{folder} is unfinished: {why}", fix="give an older step, or the folder of all steps")
    finished, unfinished = find_steps(folder)
    usual = [step for step in finished if is_step_name(step.name)]
    read: tuple[list[Layout], list[CheckpointError]] | None = None
    if usual and not _is_tree(folder) and any(read := _read_steps(folder, usual)):
        _refuse_rivals(folder, usual)  # other arrays beside steps, such as a copy of the best one, are passed over
    elif (layout := _one(folder, folder)) is not None:
        return [layout]
    for steps in (usual, [step for step in finished if not is_step_name(step.name)]):
        layouts, damaged = read if steps is usual and read is not None else _read_steps(folder, steps)
        if layouts:
            names = tuple(layout.step or "" for layout in layouts)
            prefix = one_prefix(folder, names)
            passed_over = tuple(
                step
                for step in unfinished
                if is_step_name(final_name(step.name)) or step_prefix(final_name(step.name)) == prefix
            )
            words = tuple(error.message for error in damaged)
            return [replace(layout, finished=names, unfinished=passed_over, damaged=words) for layout in layouts]
        if len(damaged) == 1:
            raise damaged[0]
        raise_all(f"no step of {folder} can be read:", [error.message for error in damaged])
    raise _nothing(folder, unfinished)


def _is_tree(folder: Path) -> bool:
    """Whether ``folder`` is a tree or a step itself, by files that only those have."""
    return any((folder / name).exists() for name in (METADATA_NAME, MARKER, CHECKPOINT_METADATA))


def _refuse_rivals(folder: Path, steps: Sequence[Path]) -> None:
    """Raise SourceError where the parameters of ``folder`` may be those of a step, or those beside the steps."""
    there = _items(folder)
    items = [name for name in ITEMS if name in there]
    if items:
        raise SourceError(
            f"{folder} holds the steps {', '.join(step.name for step in steps[:3])}, and beside them "
            f"{', '.join(items)}; which is meant cannot be told",
            fix=f"name it: {steps[0]} or {folder / items[0]}",
        )


def _read_steps(folder: Path, steps: Sequence[Path]) -> tuple[list[Layout], list[CheckpointError]]:
    """Those of ``steps`` that hold something, and what is wrong with those that cannot be told."""
    layouts: list[Layout] = []
    damaged: list[CheckpointError] = []
    for step in steps:
        try:
            layout = _one(folder, step)
        except CheckpointError as error:
            damaged.append(error)
            continue
        if layout is not None:
            layouts.append(replace(layout, step=step.name))
    return layouts, damaged


def _one(given: Path, folder: Path) -> Layout | None:
    """The checkpoint that ``folder`` itself is, if it is one."""
    if folder.is_file():
        return _msgpack(given, folder)
    if folder.is_symlink() and folder != given:
        resolve_member(given, folder.name, may_be_folder=True)
    marker = (folder / MARKER).exists()
    described = _described(folder)
    writer = "Orbax checkpoint (v1 API)" if marker else "Orbax checkpoint"
    custom = described.custom_metadata if isinstance(described.custom_metadata, dict) else {}
    named = described.item_handlers if isinstance(described.item_handlers, dict) else {}
    if (folder / METADATA_NAME).exists():
        return Layout(folder=given, kind="orbax", arrays=folder, writer=writer, custom=custom)
    items = _items(folder)
    if items:
        item = next((name for name in ITEMS if name in items), items[0] if len(items) == 1 else None)
        if item is None:
            raise SourceError(
                f"{folder} has the items {', '.join(items)}, none of them called {', '.join(ITEMS)}",
                fix=f"name the one that holds the parameters, such as {folder / items[0]}",
            )
        kind: Literal["orbax", "zarr"] = "orbax" if (folder / item / METADATA_NAME).exists() else "zarr"
        return Layout(
            folder=given,
            kind=kind,
            arrays=folder / item,
            writer=writer,
            item=item,
            items=tuple(sorted({*items, *named})),
            custom=custom,
        )
    missing = [name for name in ITEMS if name in named]
    if marker or missing:
        raise CheckpointError(f"{folder} is damaged: it has no arrays; its items are {', '.join(missing) or 'missing'}")
    return _without_metadata(given, folder)


def _without_metadata(given: Path, folder: Path) -> Layout | None:
    children = sorted(folder.iterdir())
    if any(_is_array(child) for child in children):
        return Layout(folder=given, kind="zarr", arrays=folder, writer="arrays in a folder each, without metadata")
    for name in MSGPACK:
        if (folder / name).is_file():
            return _msgpack(given, folder / name)
    return None


def _msgpack(given: Path, file: Path) -> Layout:
    if file != given:
        resolve_member(file.parent, file.name)
    return Layout(folder=given, kind="msgpack", arrays=file, writer=f"Flax msgpack file {file.name}")


def _items(folder: Path) -> list[str]:
    """Folders of arrays right inside ``folder``."""
    found = []
    for child in sorted(folder.iterdir()):
        if _is_item(child):
            resolve_member(folder, child.name, may_be_folder=True)
            found.append(child.name)
    return [name for name in found if step_prefix(name) is None]


def _is_item(child: Path) -> bool:
    """Whether ``child`` is a folder of arrays; one without metadata only by its name."""
    if not child.is_dir() or TEMPORARY in child.name or _is_array(child):
        return False
    named = child.name in ITEMS
    return (child / METADATA_NAME).exists() or (named and any(_is_array(inner) for inner in child.iterdir()))


def _is_array(folder: Path) -> bool:
    return (folder / ".zarray").is_file() or (folder / "zarr.json").is_file()


def _nothing(folder: Path, unfinished: Sequence[Unfinished]) -> CheckpointError:
    if unfinished:
        return SourceError(
            f"{folder} holds no finished step: "
            + "; ".join(f"{step.name} is unfinished: {step.why}" for step in unfinished[:10])
        )
    if any((place / LEVANTER).is_file() for place in (folder, *folder.iterdir())):
        return UnsupportedModel(
            f"{folder} looks like a Levanter checkpoint ({LEVANTER}), which is not read",
            fix="export it as Hugging Face safetensors (levanter.main.export_lm_to_hf) and give that folder",
        )
    return SourceError(f"{folder} holds no Flax checkpoint; looked for {LOOKED_FOR}")


class _Described(msgspec.Struct):
    """``_CHECKPOINT_METADATA``: item_handlers is a dict by item, or the handler of the one tree."""

    item_handlers: Any = None
    custom_metadata: Any = None


def _described(folder: Path) -> _Described:
    path = resolve_member(folder, CHECKPOINT_METADATA)
    if not path.exists():
        return _Described()
    return read_json_file(path, _Described, what="description of Orbax's")
