"""The mesh: five named axes, of which most have size 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh

__all__ = ["MESH_AXES", "MeshSpec"]

MESH_AXES = ("data", "stage", "expert", "context", "tensor")
"""All mesh axes, outermost first: what talks most lies on neighbouring devices."""


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """How many devices lie on each axis."""

    data: int = 1
    """Replicas, each with its own sequences and cache."""
    stage: int = 1
    """Pipeline stages: groups of layers."""
    expert: int = 1
    context: int = 1
    """Shards of one sequence's pages."""
    tensor: int = 1
    """Shards of heads, feed-forward and vocabulary."""

    def __post_init__(self) -> None:
        for axis, size in self.shape.items():
            if size < 1:
                raise ValueError(f"mesh axis {axis} has size {size}; it must be 1 or more")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Read ``"tensor=2"`` or ``"data=2,tensor=4"``; an empty text is one device.

        Raises ValueError that names what is wrong: an unknown or repeated axis, or a size that is no number.
        """
        sizes: dict[str, int] = {}
        for part in text.split(",") if text.strip() else ():
            axis, _, size = (piece.strip() for piece in part.partition("="))
            if axis not in MESH_AXES:
                raise ValueError(f"unknown mesh axis {axis!r} in {text!r}; allowed: {', '.join(MESH_AXES)}")
            if axis in sizes:
                raise ValueError(f"mesh axis {axis} stands twice in {text!r}")
            if not (size.isascii() and size.isdigit()):
                raise ValueError(f"mesh axis {axis} in {text!r} has size {size!r}; write a whole number: {axis}=2")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def shape(self) -> dict[str, int]:
        """Every axis and its size, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def size(self) -> int:
        """Devices of the whole mesh."""
        return math.prod(self.shape.values())

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh over the first ``size`` of ``devices`` (default: all), with all five axes present.

        Raises ValueError where there are too few devices.
        """
        devices = jax.devices() if devices is None else devices
        if len(devices) < self.size:
            raise ValueError(
                f"mesh {self} needs {self.size} devices; there are {len(devices)} ({devices[0].platform})"
                if devices
                else f"mesh {self} needs {self.size} devices; none were given"
            )
        sizes = tuple(self.shape.values())
        return jax.make_mesh(sizes, MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), devices=devices[: self.size])

    def __str__(self) -> str:
        """As ``parse`` reads it, without axes of size 1; ``"1 device"`` where nothing is left."""
        return ",".join(f"{axis}={size}" for axis, size in self.shape.items() if size > 1) or "1 device"
