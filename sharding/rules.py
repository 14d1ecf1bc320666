"""From logical axes, which a model's parameters declare once, to mesh axes.

A parameter says what its dimensions mean, such as ``("heads", "head_dim", "embed")``, in the ``out_sharding``
metadata of its ``nnx.Param``; None stands for a dimension of no meaning here (replicated). Where each meaning
lies on the mesh is decided in one place, by a rule set. An array that a module holds as it is, in no ``nnx.Variable``,
declares nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["LOGICAL_AXES", "RULES", "Axes", "check_divisible", "param_axes", "param_shardings", "partition"]

LOGICAL_AXES = ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "experts", "layers")

RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "layers": None,
}
"""Each logical axis and the mesh axis that it is sharded over; None: replicated."""

Axes = tuple[str | None, ...]
"""A parameter's logical axes, one a dimension; () where it declares none."""


def partition(axes: Axes, rules: Mapping[str, str | None] = RULES) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes.

    Raises ValueError for a name that has no rule, and where two dimensions would lie on one mesh axis.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in rules]
    if unknown:
        raise ValueError(f"no rule for logical axes {unknown} of {axes}; known: {', '.join(rules)}")
    spec = [None if axis is None else rules[axis] for axis in axes]
    used = [mesh_axis for mesh_axis in spec if mesh_axis is not None]
    twice = sorted({mesh_axis for mesh_axis in used if used.count(mesh_axis) > 1})
    if twice:
        raise ValueError(f"logical axes {axes} put two dimensions on mesh axis {', '.join(twice)}")
    return PartitionSpec(*spec)


def param_axes(params_state: nnx.State) -> dict[str, Any]:
    """Each parameter's logical axes, in nested dicts of the structure of ``nnx.to_pure_dict(params_state)``."""
    return _map_params(params_state, lambda _, param: _axes(param))


def param_shardings(abstract_state: nnx.State, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> dict[str, Any]:
    """Each parameter's NamedSharding, in nested dicts of the structure of ``nnx.to_pure_dict(abstract_state)``.

    Raises ValueError where a dimension does not divide (see ``check_divisible``).
    """
    check_divisible(abstract_state, mesh.shape, rules)
    return _map_params(abstract_state, lambda _, param: NamedSharding(mesh, partition(_axes(param), rules)))


def check_divisible(
    abstract_state: nnx.State, mesh_shape: Mapping[str, int], rules: Mapping[str, str | None] = RULES
) -> None:
    """Raise ValueError if any dimension cannot be cut into the parts that the mesh asks for.

    ``mesh_shape`` is each mesh axis's size (``Mesh.shape`` or ``MeshSpec.shape``). The message lists every
    logical axis that does not divide, with its size and one parameter that has it, and the sizes of the mesh
    axis that would divide everything.
    """
    sizes: dict[str, dict[tuple[str, int], str]] = {}

    def note(path: str, param: Any) -> None:
        shape = (param.get_value() if isinstance(param, nnx.Variable) else param).shape
        for axis, mesh_axis, size in zip(_axes(param), partition(_axes(param), rules), shape, strict=False):
            if axis is not None and mesh_axis is not None:
                sizes.setdefault(mesh_axis, {}).setdefault((axis, size), path)

    _map_params(abstract_state, note)
    problems = []
    for mesh_axis, found in sizes.items():
        parts = mesh_shape[mesh_axis]
        bad = [f"{axis} {size} (such as {path})" for (axis, size), path in sorted(found.items()) if size % parts]
        if bad:
            common = math.gcd(*(size for _, size in found))
            works = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            problems.append(f"{mesh_axis}={parts} does not divide {', '.join(bad)}; {mesh_axis} may be {works}")
    if problems:
        raise ValueError("; ".join(problems))


def _axes(param: Any) -> Axes:
    return tuple(param.get_metadata().get("out_sharding") or ()) if isinstance(param, nnx.Variable) else ()


def _map_params(state: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """``function(dotted path, variable or plain array)`` of every leaf, in nested dicts."""
    if not isinstance(state, Mapping):
        return function(path, state)
    return {key: _map_params(value, function, f"{path}.{key}" if path else str(key)) for key, value in state.items()}
