"""Nested dicts of parameters and their paths. Orbax keeps names as text, so paths are text here: ("layers", "0")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["flatten", "is_number", "main_dtype", "nest", "unflatten_like"]

_MOST_DIGITS = 9


def flatten(tree: Any) -> dict[tuple[str, ...], Any]:
    """Leaves of nested mappings by path, in order. An ``nnx.State`` is taken as the dict of its values."""
    from flax import nnx

    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    leaves: dict[tuple[str, ...], Any] = {}
    _collect(tree, (), leaves)
    return leaves


def _collect(node: Any, path: tuple[str, ...], leaves: dict[tuple[str, ...], Any]) -> None:
    if isinstance(node, Mapping):
        for key, child in node.items():
            _collect(child, (*path, str(key)), leaves)
    else:
        leaves[path] = node


def is_number(part: str) -> bool:
    """Whether a part of a path counts layers, experts or the like: ``int`` reads it, and it is of a sane length."""
    return part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS


def main_dtype(leaves: Iterable[Any]) -> str:
    """The name of the dtype that most bytes of ``leaves`` (arrays, or whatever has ``size`` and ``dtype``) have."""
    sizes: dict[str, int] = {}
    for leaf in leaves:
        sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.size * leaf.dtype.itemsize
    return max(sizes, key=sizes.__getitem__)


def nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The inverse of ``flatten``, with text keys."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    return tree


def unflatten_like(tree: Any, leaves: Mapping[tuple[str, ...], Any]) -> dict[Any, Any]:
    """``leaves`` in the structure of ``tree``, with its own keys (integers stay integers)."""
    from flax import nnx

    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)

    def fill(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, Mapping):
            return {key: fill(child, (*path, str(key))) for key, child in node.items()}
        return leaves[path]

    filled: dict[Any, Any] = fill(tree, ())
    return filled
