"""All that a compiled program depends on, as one text: the key of the program store."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import flax
import jax
import jaxlib
from jax.sharding import Mesh

import jserve.engine
import jserve.models
import jserve.request
import pallas_kernels
import sharding

__all__ = ["environment", "source_digest", "tree_text"]


def environment(mesh: Mesh) -> str:
    """Versions, settings, devices and the code that shapes a program."""
    devices = mesh.devices.flat
    parts = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "platform_version": devices[0].client.platform_version,
        "kinds": sorted({d.device_kind for d in devices}),
        "ids": [d.id for d in devices],
        "cpu": _cpu_features() if devices[0].platform == "cpu" else "",
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "settings": {name: getattr(jax.config, name) for name in _SETTINGS},
        "xla_flags": _xla_flags(),
        "sources": source_digest(),
    }
    return repr(parts)


_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_debug_nans",
    "jax_compiler_enable_remat_pass",
    "jax_optimization_level",
    "jax_random_seed_offset",
    "jax_high_dynamic_range_gumbel",
)
"""JAX's settings that shape what is lowered or how it is compiled."""


def tree_text(tree: Any) -> str:
    """Shapes, dtypes and shardings of a tree of arrays or ShapeDtypeStructs."""
    leaves, structure = jax.tree.flatten(tree)
    return repr(structure) + ";".join(f"{x.shape}{x.dtype}{getattr(x, 'sharding', None)}" for x in leaves)


@functools.cache
def source_digest() -> str:
    """SHA-256 over every file, code and tuning data, that takes part in building a program."""
    digest = hashlib.sha256()
    rooms: list[ModuleType] = [jserve.engine, jserve.models, pallas_kernels, sharding]
    for room in rooms:
        folder = Path(next(iter(room.__path__)))
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.parent.name != "__pycache__":
                name = f"{room.__name__}/{file.relative_to(folder).as_posix()}"
                digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(Path(str(jserve.request.__file__)).read_bytes())
    return digest.hexdigest()


def _xla_flags() -> str:
    return os.environ.get("XLA_FLAGS", "") + "|" + os.environ.get("LIBTPU_INIT_ARGS", "")


def _cpu_features() -> str:
    """Compiled CPU code fits one kind of processor: name it as closely as the system does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return platform.processor() + platform.machine()
    kept = [line for line in lines.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()
