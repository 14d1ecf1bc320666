"""How many pages the KV cache gets, and whether one longest sequence fits, with the arithmetic in words."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jserve.config import ServeConfig
from jserve.engine.pages import pages_for
from jserve.errors import ConfigError, OutOfMemory

__all__ = ["DEFAULT_PAGE_SIZE", "MemoryPlan", "plan_memory"]

DEFAULT_PAGE_SIZE = {"cpu": 16, "gpu": 64, "tpu": 128}
_CPU_POOL_BYTES = 512 * 2**20
_WORKSPACE_BYTES = 512 * 2**20
"""Left free on an accelerator for a step's temporaries."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    num_pages: int
    page_size: int
    max_model_len: int
    """The model's limit, or less where the pool holds no longer sequence and the user named no length."""


def plan_memory(
    config: ServeConfig, *, mesh: Mesh, model_len: int, page_size: int, page_bytes: int, param_bytes: int
) -> MemoryPlan:
    """Decide pages and length.

    ``page_bytes``: one page over all layers, on one device. ``param_bytes``: weights on one device, not loaded yet.
    Raises ConfigError for a length beyond the model's, OutOfMemory where what was asked cannot fit.
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
    num_pages = config.num_pages
    if num_pages is None:
        room = _pool_bytes(config, mesh, param_bytes)
        # A pool beyond what all sequences could ever fill would be waste.
        num_pages = min(room // page_bytes, config.max_num_seqs * pages_for(length, page_size))
    need = pages_for(length, page_size)
    if need > num_pages:
        holds = max(num_pages, 0) * page_size
        if wanted is not None or holds < 2:
            raise OutOfMemory(
                f"the cache has {max(num_pages, 0)} pages of {page_size} tokens ({_mib(num_pages * page_bytes)}); "
                f"one sequence of {length} tokens needs {need} ({_mib(need * page_bytes)})",
                fix=f"--max-model-len {holds}, or more --num-pages" if holds >= 2 else "--num-pages, or another --mesh",
            )
        length = holds
    return MemoryPlan(num_pages=num_pages, page_size=page_size, max_model_len=length)


def _pool_bytes(config: ServeConfig, mesh: Mesh, param_bytes: int) -> int:
    """Bytes that one device has for its share of the cache; less than 0 where the weights leave none."""
    device: jax.Device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return _CPU_POOL_BYTES // mesh.size  # its virtual devices share one memory
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise OutOfMemory(f"{device.device_kind} does not tell its memory", fix="--num-pages N")
    limit = int(stats["bytes_limit"] * config.memory_fraction)
    return limit - int(stats.get("bytes_in_use", 0)) - param_bytes - _WORKSPACE_BYTES


def _mib(size: int) -> str:
    return f"{max(size, 0) / 2**20:.1f} MiB"
