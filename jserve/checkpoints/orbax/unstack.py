"""Layers in one array -> an array each; names of layers in one spelling."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jserve.checkpoints.arrays.key_map import Path
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import is_number
from jserve.errors import CheckpointError

__all__ = ["spelled", "stacked_axes", "unstack"]

_CONTAINERS = frozenset({"block", "blocks", "h", "layer", "layers"})
_NUMBERED = re.compile(rf"({'|'.join(sorted(_CONTAINERS))})_([0-9]{{1,9}})")


def unstack(
    tree: Mapping[Path, LazyArray], num_layers: int | None, *, where: str, default_axis: int | None = None
) -> dict[Path, LazyArray]:
    """``tree`` with every layer's arrays under ``layers/7``: ``layers_7`` is spelled so, and arrays right under
    ``layers`` are taken apart along the axis that has ``num_layers`` entries in all of them.

    Where axes 0 and 1 both have, ``default_axis`` is taken. Raises CheckpointError where there is none, or no axis fits
    all; ``where`` names the files.
    """
    layers = spelled(tree)
    stacks = {path: at for path in layers if (at := _stacked_at(path)) is not None}
    if not stacks or num_layers is None:
        return layers
    axis = _axis([layers[path] for path in stacks], num_layers, where, default_axis)
    taken: dict[Path, LazyArray] = {}
    for path, array in layers.items():
        at = stacks.get(path)
        if at is None:
            taken[path] = array
            continue
        for i in range(num_layers):
            taken[(*path[:at], str(i), *path[at:])] = array.at(axis, i)
    return taken


def spelled(tree: Mapping[Path, LazyArray]) -> dict[Path, LazyArray]:
    """``tree`` with ``layers_7`` spelled ``layers/7``."""
    return {_spelled(path): array for path, array in tree.items()}


def stacked_axes(tree: Mapping[Path, LazyArray], num_layers: int | None = None) -> list[int]:
    """The axes that layers may be stacked on, of 0 and 1: those that are equally long (``num_layers``, where it is
    known) in all arrays right under ``layers`` and the like. Empty where layers have arrays of their own."""
    stacks = [array.shape for path, array in tree.items() if _stacked_at(_spelled(path)) is not None]
    counts = [{shape[axis] if len(shape) > axis else 0 for shape in stacks} for axis in (0, 1)]
    return [axis for axis in (0, 1) if len(counts[axis]) == 1 and num_layers in (None, *counts[axis])]


def _spelled(path: Path) -> Path:
    parts: list[str] = []
    for part in path:
        match = _NUMBERED.fullmatch(part)
        parts += [part] if match is None else [match[1], match[2]]
    return tuple(parts)


def _stacked_at(path: Path) -> int | None:
    """Where the number of the layer is missing."""
    if any(is_number(part) for part in path):
        return None
    return next((i + 1 for i, part in enumerate(path[:-1]) if part in _CONTAINERS), None)


def _axis(arrays: list[LazyArray], count: int, where: str, default: int | None) -> int:
    axes = [axis for axis in (0, 1) if all(len(a.shape) > axis and a.shape[axis] == count for a in arrays)]
    if len(axes) == 1:
        return axes[0]
    if axes and default is not None:
        return default
    if axes:
        raise CheckpointError(
            f"{where}: {count} layers lie on axis 0 or on axis 1 of their arrays; the shapes allow both"
        )
    shapes = sorted({str(list(array.shape)) for array in arrays})
    raise CheckpointError(
        f"{where}: layers lie in one array each kind; wanted {count} of them on axis 0 or on axis 1 of all, found the "
        f"shapes {', '.join(shapes[:10])}"
    )
