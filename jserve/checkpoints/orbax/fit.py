"""A module's parameters found in the tree of a checkpoint, however it names, wraps and stacks them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jserve.checkpoints.arrays.key_map import Leaves, Path
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import is_number
from jserve.checkpoints.orbax.peel import KEPT_OUT, MAX_WRAPPERS, VALUE, WRAPPERS, is_random, refuse_adapters
from jserve.checkpoints.problems import raise_all
from jserve.errors import CheckpointError

__all__ = ["Fitted", "fit_tree", "holds"]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The parameters of a module, in the tree of a checkpoint."""

    leaves: Leaves
    root: Path
    """Where in the tree they lie."""
    stored: frozenset[Path]
    """The arrays of the checkpoint that they are."""
    stacked_axis: int | None
    """The axis that layers are stacked on; None where each has arrays of its own."""


def fit_tree(
    tree: Mapping[Path, LazyArray],
    wanted: Mapping[Path, tuple[int, ...]],
    *,
    where: str,
    ignored: Collection[Path] = (),
    unsaved: Collection[Path] = (),
    custom: Mapping[str, Any] | None = None,
) -> Fitted:
    """Every parameter of ``wanted`` (shapes by path, keys as text) as a view of ``tree``; nothing is read.

    Tried are the wrappings of ``peel``, a Linen module's outer ``params``, numbers as parts of names (``layers_0`` for
    ``layers/0``), and layers that are stacked on axis 0 or 1 of one array. ``ignored`` are paths, as ``wanted`` names
    them, that may be there besides; ``unsaved`` are those of ``wanted`` that are no ``nnx.Param``; ``custom`` is the
    checkpoint's ``custom_metadata``; ``where`` names the files.

    Raises CheckpointError that lists every parameter that is missing or of another shape and every array that is left
    over; and where the tree can be read in two ways.
    """
    fits = [_Fit(naming, tree, wanted, custom or {}) for naming in _namings(tree, wanted)]
    best = max(fits, key=lambda fit: len(fit.found))
    rivals = [fit for fit in fits if fit.found != best.found and len(fit.found) == len(wanted) == len(best.found)]
    if rivals:
        places = " and in ".join(sorted({"/".join(fit.naming.root) or "its root" for fit in (best, *rivals)}))
        raise CheckpointError(
            f"{where} has all parameters more than once, in {places}",
            fix="save the parameters alone, and give that folder",
        )
    leaves = best.leaves()
    absent = [".".join(path) for path in unsaved if path not in best.found]
    wrong = [*best.wrong, *best.left_over(set(ignored))]
    fix = None
    if len(wrong) == len(absent):
        fix = (
            f"save nnx.state(module): nnx.state(module, nnx.Param) leaves out {', '.join(absent)}, which no nnx.Param "
            "holds; or let the module compute what it needs where it uses it"
        )
    raise_all(f"{where} does not fit the model:", wrong, fix=fix)
    refuse_adapters(tree, best.naming.root, where=where)
    return Fitted(
        leaves=leaves,
        root=best.naming.root,
        stored=frozenset(best.found.values()),
        stacked_axis=best.stacked_axis,
    )


def holds(tree: Mapping[Path, LazyArray], wanted: Mapping[Path, tuple[int, ...]]) -> bool:
    """Whether ``tree`` has at least half of the parameters of ``wanted`` by their names, as ``fit_tree`` finds them."""
    most = max(len(_Fit(naming, tree, wanted, {}).found) for naming in _namings(tree, wanted))
    return 2 * most >= len(wanted)


@dataclass(frozen=True, kw_only=True)
class _Naming:
    """How a checkpoint names the parameters of a module."""

    root: Path
    strip: Path
    """How the module's own names begin and the checkpoint's, below the root, do not."""
    tail: Path
    """(value,) for an ``nnx.State``; its plain arrays, which lie in no ``nnx.Variable``, have none."""
    joined: bool
    """``layers_0``, where the module says ``layers/0``."""

    def stored(self, path: Path, tree: Collection[Path]) -> Path | None:
        """The checkpoint's name of the module's parameter; None where ``tree`` does not have it."""
        inner = path[len(self.strip) :]
        bare = (*self.root, *(_joined(inner) if self.joined else inner))
        return next((name for name in ((*bare, *self.tail), bare) if name in tree), None)


def _namings(tree: Mapping[Path, LazyArray], wanted: Mapping[Path, Any]) -> Iterator[_Naming]:
    strips: list[Path] = [(), ("params",)] if all(path[0] == "params" for path in wanted) else [()]
    for root in _roots(tree):
        for strip in strips:
            for tail in ((), (VALUE,)):
                for joined in (False, True):
                    yield _Naming(root=root, strip=strip, tail=tail, joined=joined)


def _roots(tree: Mapping[Path, LazyArray]) -> list[Path]:
    roots: list[Path] = [()]
    for root in roots:
        depth = len(root)
        if depth < MAX_WRAPPERS:
            inside = {path[depth] for path in tree if path[:depth] == root and len(path) > depth + 1}
            roots += [(*root, wrapper) for wrapper in WRAPPERS if wrapper in inside]
    return roots


def _joined(path: Path) -> Path:
    parts: list[str] = []
    for part in path:
        if is_number(part) and parts:
            parts[-1] = f"{parts[-1]}_{part}"
        else:
            parts.append(part)
    return tuple(parts)


class _Fit:
    """One way to read the tree."""

    def __init__(
        self,
        naming: _Naming,
        tree: Mapping[Path, LazyArray],
        wanted: Mapping[Path, tuple[int, ...]],
        custom: Mapping[str, Any],
    ) -> None:
        self.naming = naming
        self._tree = tree
        self._wanted = wanted
        self._custom = custom
        self.found: dict[Path, Path] = {}
        """Where the array of a parameter is, its shape not asked."""
        self._layer: dict[Path, int] = {}
        """Of the parameters that are stacked with others: which of them."""
        self.wrong: list[str] = []
        self.stacked_axis: int | None = None
        self._counts: dict[Path, int] = {}
        for path in wanted:
            at = _layer_at(path)
            if at is not None:
                self._counts[path[:at]] = max(self._counts.get(path[:at], 0), int(path[at]) + 1)
        for path in wanted:
            self._find(path)

    def leaves(self) -> dict[Path, LazyArray]:
        axis = self.stacked_axis = self._axis() if self._layer else None
        leaves: dict[Path, LazyArray] = {}
        for path, shape in self._wanted.items():
            if path not in self.found:
                self.wrong.append(f"{'.'.join(path)} is missing: wanted {list(shape)}")
                continue
            array = self._tree[self.found[path]]
            stored = shape
            if path in self._layer:
                stored = _stacked(shape, self._count(path), axis or 0)
            if array.shape != stored:
                stack = f" (all {self._count(path)} layers)" if path in self._layer else ""
                self.wrong.append(f"{'.'.join(path)}: wanted {list(stored)}{stack}, found {list(array.shape)}")
                continue
            leaves[path] = array if path not in self._layer else array.at(axis or 0, self._layer[path])
        return leaves

    def left_over(self, ignored: set[Path]) -> list[str]:
        """Arrays beside the parameters that neither the module nor a train state has."""
        used = set(self.found.values()) | {self.naming.stored(path, self._tree) for path in ignored}
        depth = len(self.naming.root)
        return [
            f"{'.'.join(path)} {list(array.shape)} {array.dtype.name} is not of this model"
            for path, array in self._tree.items()
            if path[:depth] == self.naming.root
            and path not in used
            and path[depth] not in KEPT_OUT
            and not is_random(path)
        ]

    def _find(self, path: Path) -> None:
        stored = self.naming.stored(path, self._tree)
        if stored is not None:
            self.found[path] = stored
            return
        at = _layer_at(path)
        if at is not None:
            stored = self.naming.stored((*path[:at], *path[at + 1 :]), self._tree)
            if stored is not None:
                self.found[path] = stored
                self._layer[path] = int(path[at])

    def _count(self, path: Path) -> int:
        return self._counts[path[: _layer_at(path)]]

    def _axis(self) -> int:
        """The axis that layers are stacked on: the one that all shapes allow, or that most do where none is right."""
        allowed = [
            {
                axis
                for axis in (0, 1)
                if self._tree[self.found[path]].shape == _stacked(self._wanted[path], self._count(path), axis)
            }
            for path in self._layer
        ]
        common = set.intersection({0, 1}, *allowed)
        if len(common) == 1:
            return common.pop()
        if len(common) == 2:
            if self._custom.get("scan_layers"):
                return 1  # MaxText, which says so; its param_scan_axis
            self.wrong.append("layers are stacked on axis 0 or on axis 1 of their arrays: the shapes allow both")
        return max((0, 1), key=lambda axis: sum(axis in axes for axes in allowed))


def _layer_at(path: Path) -> int | None:
    return next((i for i, part in enumerate(path) if is_number(part)), None)


def _stacked(shape: tuple[int, ...], count: int, axis: int) -> tuple[int, ...]:
    return (*shape[:axis], count, *shape[axis:])
