"""A key map the other way: parameters as the tensors of a file."""

from __future__ import annotations

from jserve.checkpoints.arrays.axes import regrouped
from jserve.checkpoints.arrays.key_map import Entry, KeyMap, Leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import is_number

__all__ = ["plan_tensors"]


def plan_tensors(key_map: KeyMap, leaves: Leaves) -> dict[str, LazyArray]:
    """The tensors, by name, that ``plan_leaves`` makes ``leaves`` of; nothing is read.

    ``key_map`` must hold every parameter as it is, with nothing ``interleaved`` or added (``plus``). Names get the
    first of its prefixes. What is outside the layers comes first, then layer after layer. Parts of one tensor, and
    layers that lie in one, must have one dtype.
    """
    layers = sorted({int(part) for path in leaves for part in path if is_number(part)})
    prefix = key_map.prefixes[0]
    tensors: dict[str, LazyArray] = {}
    for layer in [None, *layers]:
        groups: dict[str, list[Entry]] = {}
        for entry in key_map.entries:
            if ("{i}" in entry.leaf) == (layer is not None) and _path(entry, layer) in leaves:
                groups.setdefault(entry.tensor, []).append(entry)
        for tensor, entries in groups.items():
            name = prefix + tensor.replace("{i}", str(layer))
            parts = [_stored(entry, leaves[_path(entry, layer)]) for entry in entries]
            for expert in range(len(parts[0])):
                of_expert = [part[expert] for part in parts]
                axis = entries[0].fused_axis
                tensors[name.replace("{e}", str(expert))] = (
                    of_expert[0] if axis is None else LazyArray.concatenated(of_expert, axis)
                )
    return tensors


def _path(entry: Entry, layer: int | None) -> tuple[str, ...]:
    return tuple(entry.leaf.replace("{i}", str(layer)).split("."))


def _stored(entry: Entry, leaf: LazyArray) -> list[LazyArray]:
    """``leaf`` as it lies in a file: one array, or one for each expert."""
    wholes = [leaf.at(0, e) for e in range(leaf.shape[0])] if entry.per_expert else [leaf]
    ours, theirs = entry.axes
    return [regrouped(whole, ours, theirs) for whole in wholes] if entry.how else wholes
