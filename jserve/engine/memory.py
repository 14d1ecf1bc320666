"""How many pages the KV cache gets, and whether one longest sequence fits, with the arithmetic in words."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from jserve.config import ServeConfig
from jserve.engine.pages import pages_for
from jserve.errors import ConfigError, OutOfMemory

__all__ = [
    "DEFAULT_PAGE_SIZE",
    "MemoryPlan",
    "check_weights_fit",
    "device_bytes",
    "exhaustion_in_words",
    "plan_memory",
    "weights_exhaustion_in_words",
]

DEFAULT_PAGE_SIZE = {"cpu": 16, "gpu": 64, "tpu": 128}
_CPU_POOL_BYTES = 512 * 2**20
"""The cache on a CPU where nobody says how many pages; it shares its memory with everything else."""
_WORKSPACE_BYTES = 512 * 2**20
"""Left free on an accelerator for a step's temporaries."""
_MAX_ROWS = 2**31 - 1
"""Rows of a pool are counted in int32."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    num_pages: int
    max_model_len: int
    """The model's limit, or less where the pool holds no longer sequence and the user named no length."""
    pool_bytes: int
    """The cache on one device."""
    param_bytes: int
    """The weights on one device."""


def plan_memory(
    config: ServeConfig,
    *,
    mesh: Mesh,
    model_len: int,
    page_size: int,
    page_bytes: int,
    page_rows: int,
    param_bytes: int,
) -> MemoryPlan:
    """Decide pages and length, before anything is loaded or compiled.

    ``page_bytes``: one page over all layers, on one device. ``page_rows``: see CacheLayout. ``param_bytes``: weights
    on one device, not loaded yet. Raises ConfigError for a length beyond the model's and for more pages than can be
    counted, OutOfMemory where what was asked cannot fit.
    """
    wanted = config.max_model_len
    if (wanted or model_len) < 2:
        raise ConfigError(
            f"max_model_len is {wanted or model_len}; it must be 2 or more: a token in and a token out",
            fix=f"--max-model-len {model_len}" if model_len >= 2 else None,
        )
    if wanted is not None and wanted > model_len:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the model's limit of {model_len} tokens",
            fix=f"--max-model-len {model_len} or less",
        )
    length = wanted or model_len
    need = pages_for(length, page_size)
    room = _room(config, mesh, param_bytes)
    countable = _MAX_ROWS // page_rows
    if room is not None and room < page_bytes:
        raise OutOfMemory(
            f"weights of {_mib(param_bytes)} a device leave no room for a page of cache ({_mib(page_bytes)}): "
            f"memory_fraction {config.memory_fraction:g} of its memory leaves {_mib(room)}",
            fix="a --mesh of more devices, or a higher --memory-fraction",
        )
    num_pages = config.num_pages
    if num_pages is None:
        if room is None:
            raise OutOfMemory(f"{mesh.devices.flat[0].device_kind} does not tell its memory", fix="--num-pages N")
        if _on_cpu(mesh):
            room = min(room, _CPU_POOL_BYTES // mesh.size)
        # A pool beyond what all sequences could ever fill would be waste.
        num_pages = min(room // page_bytes, config.max_num_seqs * need, countable)
    elif num_pages > countable:
        raise ConfigError(
            f"num_pages is {num_pages}; at most {countable} pages of this model can be counted",
            fix=f"--num-pages {countable} or less",
        )
    elif room is not None and num_pages * page_bytes > room:
        raise OutOfMemory(
            f"{num_pages} pages of {page_size} tokens take {_mib(num_pages * page_bytes)} a device; beside weights of "
            f"{_mib(param_bytes)}, memory_fraction {config.memory_fraction:g} of its memory leaves {_mib(room)}",
            fix=f"--num-pages {room // page_bytes} or less",
        )
    if need > num_pages:
        holds = num_pages * page_size
        if wanted is not None or holds < 2:
            raise OutOfMemory(
                f"the cache has {num_pages} pages of {page_size} tokens ({_mib(num_pages * page_bytes)}); "
                f"one sequence of {length} tokens needs {need} ({_mib(need * page_bytes)})",
                fix=f"--max-model-len {holds}, or more --num-pages" if holds >= 2 else "--num-pages, or another --mesh",
            )
        length = holds
    return MemoryPlan(
        num_pages=num_pages, max_model_len=length, pool_bytes=num_pages * page_bytes, param_bytes=param_bytes
    )


def check_weights_fit(config: ServeConfig, *, mesh: Mesh, param_bytes: int) -> None:
    """OutOfMemory where a model without a cache is larger than what it may fill. ``param_bytes``: on one device."""
    room = _room(config, mesh, param_bytes)
    if room is not None and room < 0:
        raise OutOfMemory(
            f"weights of {_mib(param_bytes)} a device exceed memory_fraction {config.memory_fraction:g} of its memory "
            f"by {_mib(-room)}",
            fix="a --mesh of more devices, or a higher --memory-fraction",
        )


def device_bytes(shapes: Any) -> int:
    """Bytes of a tree of sharded ShapeDtypeStructs on its fullest device."""
    total = 0
    for leaf in jax.tree.leaves(shapes):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


@contextmanager
def exhaustion_in_words(plan: MemoryPlan) -> Iterator[None]:
    """What ends because memory ran out, here or on a device, ends as OutOfMemory with the plan's numbers."""
    held = (
        f"weights of {_mib(plan.param_bytes)} and a cache of {_mib(plan.pool_bytes)} ({plan.num_pages} pages) a device"
    )
    fix = f"--num-pages less than {plan.num_pages}, a smaller --max-num-tokens, or a --mesh of more devices"
    with _in_words(held, fix):
        yield


@contextmanager
def weights_exhaustion_in_words(param_bytes: int) -> Iterator[None]:
    """The same for a model without a cache."""
    with _in_words(
        f"weights of {_mib(param_bytes)} a device", "a smaller --max-num-tokens, or a --mesh of more devices"
    ):
        yield


@contextmanager
def _in_words(held: str, fix: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause = _exhaustion(error)
        if cause is None:
            raise
        said = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise OutOfMemory(f"memory ran out with {held}: {said}", fix=fix) from error


def _exhaustion(error: BaseException | None) -> BaseException | None:
    """The error, of this one and those that led to it, that says that memory ran out."""
    while error is not None:
        told = isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        if told or isinstance(error, MemoryError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _room(config: ServeConfig, mesh: Mesh, param_bytes: int) -> int | None:
    """Bytes that one device has for its share of the cache, less than 0 where the weights leave none; None where the
    device does not tell."""
    if _on_cpu(mesh):  # its virtual devices share one memory
        return int(_system_bytes() * config.memory_fraction) // mesh.size - param_bytes
    device: jax.Device = mesh.devices.flat[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    limit = int(stats["bytes_limit"] * config.memory_fraction)
    return limit - int(stats.get("bytes_in_use", 0)) - param_bytes - _WORKSPACE_BYTES


def _on_cpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "cpu")


def _system_bytes() -> int:
    """The physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _mib(size: int) -> str:
    return f"{max(size, 0) / 2**20:.1f} MiB"
