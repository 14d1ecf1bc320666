"""The mesh of a config, on the devices that there are."""

from __future__ import annotations

from contextlib import suppress

import jax
from jax.sharding import Mesh

from jserve.errors import DeviceError, MeshError
from sharding import MeshSpec

__all__ = ["build_mesh"]

_MOST_CPU_DEVICES = 64
"""Each virtual device costs threads and memory; a bigger mesh on a CPU is a slip of the finger."""


def build_mesh(text: str) -> tuple[MeshSpec, Mesh]:
    """The mesh that ``text`` describes, as ``--mesh`` has it. Raises MeshError and DeviceError."""
    try:
        spec = MeshSpec.parse(text)
    except ValueError as error:
        raise MeshError(str(error)) from None
    try:
        _make_cpu_devices(spec.size)
        return spec, spec.build()
    except ValueError as error:
        raise MeshError(str(error), fix='a smaller --mesh, such as --mesh ""') from None
    except (RuntimeError, AssertionError) as error:  # what JAX raises where the platform asked for cannot be had
        raise DeviceError(
            f"JAX finds no device: {error}", fix="JAX_PLATFORMS=cpu, or the gpu or tpu extra of jserve"
        ) from None


def _make_cpu_devices(count: int) -> None:
    """On a CPU a mesh is made of virtual devices, which JAX makes only before its first use."""
    count = min(count, _MOST_CPU_DEVICES)
    if count > max(1, getattr(jax.config, "jax_num_cpu_devices", 0)):
        with suppress(RuntimeError):  # JAX is in use already: then what is there must do
            jax.config.update("jax_num_cpu_devices", count)
