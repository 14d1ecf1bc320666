"""Which tensor of a file is which parameter of a model, written as data.

KeyMap(entries=(
    Entry(tensor="model.layers.{i}.self_attn.q_proj.weight", leaf="layers.{i}.q", how="H Dh D <- (H Dh) D"),
    Entry(tensor="model.layers.{i}.mlp.experts.{e}.up_proj.weight", leaf="layers.{i}.up", how="F D <- F D"),
    ...
))
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from jserve.checkpoints.arrays.axes import axis_groups
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import is_number
from jserve.checkpoints.problems import MAX_PROBLEMS, raise_all

__all__ = ["Entry", "KeyMap", "Leaves", "Path", "plan_leaves"]

Path = tuple[str, ...]
"""A parameter's place in a model's tree: ("layers", "0", "q")."""
Leaves = Mapping[Path, LazyArray]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One kind of tensor, and the parameter that it becomes."""

    tensor: str
    """Its name; ``{i}`` stands for each layer. With ``{e}`` there is a tensor for each expert, and the parameter has
    them stacked on its first axis."""
    leaf: str
    """Path of the parameter, with dots and the same ``{i}``."""
    how: str = ""
    """Axes of the parameter and, behind an arrow, of the tensor: ``"D H Dh <- (H Dh) D"`` for a tensor whose rows are
    heads times head_dim. Empty: they are the same. Experts of ``{e}`` are not written."""
    fused_axis: int | None = None
    """Entries that name the same tensor share this axis of it, their parts one after the other in the map's order."""
    interleaved: bool = False
    """``Dh`` is ordered for rotation of neighbours (0, 1), (2, 3), ...; ours is for i and i + Dh/2."""
    plus: float = 0.0
    """Added to every value."""

    @cached_property
    def axes(self) -> tuple[list[str], list[list[str]]]:
        """Names of the parameter's axes; of the tensor's, each with those that are merged in it."""
        ours, _, theirs = self.how.partition("<-")
        return ours.split(), axis_groups(theirs)

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.tensor

    def stored_shape(self, leaf_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the (part of the) tensor that becomes a parameter of ``leaf_shape``."""
        shape = tuple(leaf_shape[1:] if self.per_expert else leaf_shape)
        ours, theirs = self.axes
        if not self.how:
            return shape
        sizes = dict(zip(ours, shape, strict=True))
        return tuple(math.prod(sizes[name] for name in group) for group in theirs)

    def view(self, tensor: LazyArray, leaf_shape: Sequence[int]) -> LazyArray:
        """``tensor``, of ``stored_shape``, as the parameter (of one expert, where there is a tensor for each)."""
        ours, theirs = self.axes
        if self.how:
            sizes = dict(zip(ours, leaf_shape[1:] if self.per_expert else leaf_shape, strict=True))
            names: list[str] = []
            for group in theirs:
                if len(group) > 1:
                    tensor = tensor.split(len(names), [sizes[name] for name in group])
                names += group
            if names != ours:
                tensor = tensor.transposed([names.index(name) for name in ours])
        if self.interleaved:
            tensor = tensor.paired(ours.index("Dh"))
        return tensor.plus(self.plus) if self.plus else tensor


@dataclass(frozen=True, kw_only=True)
class KeyMap:
    """All entries of one family in one kind of file."""

    entries: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()
    """Patterns (``fnmatch``) of tensors that are no parameters, or that may be there twice."""
    twins: Mapping[str, str] = field(default_factory=dict)
    """Patterns of tensors that hold a parameter's values once more, and that parameter; they are held against each
    other when it is read."""
    prefixes: tuple[str, ...] = ("",)
    """What may stand before every name; the first is taken under which there is a tensor of the map."""
    old_endings: Mapping[str, str] = field(default_factory=dict)
    """How older files end names, and what is written here for it."""

    def named_anew(self, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """``tensors`` with old endings of their names replaced."""
        renamed = {}
        for name, tensor in tensors.items():
            old = next((ending for ending in self.old_endings if name.endswith(ending)), "")
            renamed[name.removesuffix(old) + self.old_endings.get(old, "")] = tensor
        return renamed

    @cached_property
    def by_leaf(self) -> Mapping[str, Entry]:
        return {entry.leaf: entry for entry in self.entries}


def plan_leaves(
    key_map: KeyMap,
    tensors: Mapping[str, LazyArray],
    wanted: Mapping[Path, tuple[int, ...]],
    *,
    where: str,
) -> dict[Path, LazyArray]:
    """Every parameter of ``wanted`` (shapes by path) as a view of ``tensors``; nothing is read.

    ``where`` names the files. Raises CheckpointError that lists every parameter whose tensor is missing or has another
    shape, and every tensor that is left over; of very many it lists some.
    """
    planner = _Planner(key_map, tensors, wanted, where=where)
    leaves: dict[Path, LazyArray] = {}
    with suppress(_TooMuchIsWrong):
        leaves = planner.leaves()
    raise_all(f"{where} does not fit its settings:", planner.wrong)
    return leaves


class _TooMuchIsWrong(Exception):
    """``MAX_PROBLEMS`` were found."""


class _Planner:
    def __init__(
        self,
        key_map: KeyMap,
        tensors: Mapping[str, LazyArray],
        wanted: Mapping[Path, tuple[int, ...]],
        *,
        where: str,
    ) -> None:
        self._map = key_map
        self._where = where
        self._tensors = key_map.named_anew(tensors)
        self._wanted = wanted
        self._prefix = next((p for p in key_map.prefixes if self._present(p)), key_map.prefixes[0])
        self._used: set[str] = set()
        self.wrong: list[str] = []

    def _miss(self, what: str) -> None:
        self.wrong.append(what)
        if len(self.wrong) == MAX_PROBLEMS:
            raise _TooMuchIsWrong

    def leaves(self) -> dict[Path, LazyArray]:
        found = {path: self._leaf(path, shape) for path, shape in self._wanted.items()}
        for name, tensor in self._tensors.items():
            if name not in self._used and self._is_twin(name, tensor, found):
                continue
            if name not in self._used and not any(fnmatch.fnmatchcase(name, p) for p in self._map.ignored):
                self._miss(f"tensor {name} {list(tensor.shape)} {tensor.dtype.name} belongs to no parameter")
        return {path: leaf for path, leaf in found.items() if leaf is not None}

    def _is_twin(self, name: str, tensor: LazyArray, found: dict[Path, LazyArray | None]) -> bool:
        """Whether ``tensor`` holds a parameter's values once more, which is then held against it."""
        leaf = next((leaf for p, leaf in self._map.twins.items() if fnmatch.fnmatchcase(name, p)), None)
        path = () if leaf is None else tuple(leaf.split("."))
        array = found.get(path)
        if array is None:  # told of already, where it is missing
            return path in found
        if array.shape != tensor.shape:
            return False
        found[path] = array.held_against(
            tensor,
            f"{self._where}: tensor {name} differs from {leaf}, and the settings say that they are one",
            fix="if the head is another one, config.json must have tie_word_embeddings = false",
        )
        return True

    def _present(self, prefix: str) -> bool:
        return any(_named(prefix + e.tensor, layer=0, expert=0) in self._tensors for e in self._map.entries)

    def _leaf(self, path: Path, shape: tuple[int, ...]) -> LazyArray | None:
        layer = int(next((part for part in path if is_number(part)), 0))
        leaf = ".".join("{i}" if is_number(part) else part for part in path)
        entry = self._map.by_leaf.get(leaf)
        if entry is None:
            self._miss(f"{'.'.join(path)} {list(shape)}: no tensor of such files holds it")
            return None
        if not entry.per_expert:
            return self._one(path, shape, entry, layer, expert=0)
        experts = [self._one(path, shape, entry, layer, expert=e) for e in range(shape[0])]
        whole = [expert for expert in experts if expert is not None]
        return LazyArray.stack(whole) if len(whole) == len(experts) else None

    def _one(self, path: Path, shape: tuple[int, ...], entry: Entry, layer: int, *, expert: int) -> LazyArray | None:
        name = _named(self._prefix + entry.tensor, layer=layer, expert=expert)
        stored = part = entry.stored_shape(shape)
        start, axis = 0, entry.fused_axis
        if axis is not None:
            start, length = self._share(path, entry, axis)
            stored = (*part[:axis], length, *part[axis + 1 :])
        tensor = self._tensors.get(name)
        self._used.add(name)
        if tensor is None or tensor.shape != stored:
            found = "it is missing" if tensor is None else f"found {list(tensor.shape)}"
            self._miss(f"{'.'.join(path)}: wanted {list(stored)} in tensor {name}, {found}")
            return None
        if axis is not None:
            tensor = tensor.part(axis, start, start + part[axis])
        return entry.view(tensor, shape)

    def _share(self, path: Path, entry: Entry, axis: int) -> tuple[int, int]:
        """Where the part of ``entry`` starts on the axis that it shares, and the axis's length."""
        layer = next((part for part in path if is_number(part)), "")
        start = length = 0
        for other in self._map.entries:
            shape = self._wanted.get(tuple(other.leaf.replace("{i}", layer).split(".")))
            if other.tensor == entry.tensor and shape is not None:
                if other is entry:
                    start = length
                length += other.stored_shape(shape)[axis]
        return start, length


def _named(name: str, *, layer: int, expert: int) -> str:
    return name.replace("{i}", str(layer)).replace("{e}", str(expert))
