"""Where things lie: device meshes, and rules from logical axes to mesh axes. Needs only jax and flax."""

from sharding.mesh import MESH_AXES, MeshSpec
from sharding.rules import LOGICAL_AXES, RULES, check_divisible, param_axes, param_shardings, partition

__all__ = [
    "LOGICAL_AXES",
    "MESH_AXES",
    "RULES",
    "MeshSpec",
    "check_divisible",
    "param_axes",
    "param_shardings",
    "partition",
]
