"""Lazy arrays onto a mesh: each device's part read, cast and put there, in bounded memory."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jserve.checkpoints.key_map import Leaves, Path
from jserve.checkpoints.lazy import LazyArray, Region, Source, aligned_empty
from jserve.checkpoints.tree import flatten, unflatten_like
from jserve.errors import CheckpointError

__all__ = ["compare", "place"]

_IN_FLIGHT_BYTES = 384 << 20
"""Host memory for parameters on their way; more only where one parameter asks for more."""
_PIECE_BYTES = 32 << 20
"""Read and cast at once, so that a cast does not double what a parameter takes."""
_WORKERS = 4


def place(leaves: Leaves, wanted: Any, *, where: str) -> dict[Any, Any]:
    """``leaves`` as jax.Arrays, in the structure, dtypes and shardings of ``wanted``.

    ``wanted``: nested dicts (or nnx.State) of ShapeDtypeStruct; those without a sharding go to the first device. How
    the files were sharded does not matter. ``where`` names them in errors. Raises CheckpointError that lists every
    leaf that is missing, left over or of another shape, and where files turn out to be damaged.
    """
    asked = flatten(wanted)
    compare(leaves, {path: tuple(leaf.shape) for path, leaf in asked.items()}, where=where)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    budget = _Budget(_IN_FLIGHT_BYTES)

    def one(path: Path) -> jax.Array:
        leaf = asked[path]
        sharding = getattr(leaf, "sharding", None) or first
        return jax.block_until_ready(_place_one(leaves[path], np.dtype(leaf.dtype), sharding))

    def together(group: _Group) -> dict[Path, jax.Array]:
        with budget.take(group.nbytes), group.source.held() if group.source is not None else nullcontext():
            return {path: one(path) for path in group.paths}

    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="read") as pool:
        futures = [pool.submit(together, group) for group in _groups(leaves, asked)]
        try:
            placed = {path: array for future in futures for path, array in future.result().items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return unflatten_like(wanted, placed)


def compare(leaves: Leaves, wanted: Mapping[Path, tuple[int, ...]], *, where: str) -> None:
    """Raise CheckpointError that lists every difference in names and shapes between a model and its arrays."""
    wrong = []
    for path, shape in wanted.items():
        leaf = leaves.get(path)
        if leaf is None:
            wrong.append(f"{'.'.join(path)} is missing: wanted {list(shape)}")
        elif leaf.shape != shape:
            wrong.append(f"{'.'.join(path)}: wanted {list(shape)}, found {list(leaf.shape)}")
    wrong += [f"{'.'.join(p)} {list(leaves[p].shape)} is not of this model" for p in leaves if p not in wanted]
    if wrong:
        raise CheckpointError("\n  ".join([f"{where} does not fit the model:", *wrong]))


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Parameters that are read one after the other."""

    paths: list[Path]
    source: Source | None
    """What to hold in the meantime."""
    nbytes: int
    """Host memory that it takes: what is held, and the largest part on its way to a device."""


def _groups(leaves: Leaves, asked: Mapping[Path, Any]) -> list[_Group]:
    """Parameters of one stored array together where its pieces are larger than what is read of them: so each piece is
    read once. Those that take most come first, when the least is on the devices."""
    together: dict[int, list[Path]] = {}
    for path in asked:
        source = leaves[path].source
        together.setdefault(id(path if source is None else source), []).append(path)
    groups = []
    for paths in together.values():
        sizes = [_part(leaves[path], asked[path]) for path in paths]
        source = leaves[paths[0]].source
        if source is None or source.piece_nbytes <= min(stored for stored, _ in sizes):
            groups += [
                _Group(paths=[path], source=None, nbytes=stored + served)
                for path, (stored, served) in zip(paths, sizes, strict=True)
            ]
        else:
            largest = max(served for _, served in sizes)
            groups.append(_Group(paths=paths, source=source, nbytes=source.nbytes + largest))
    return sorted(groups, key=lambda group: -group.nbytes)


def _part(leaf: LazyArray, asked: Any) -> tuple[int, int]:
    """Bytes of what is read of ``leaf`` at once, as it is stored; and of what a device holds of it, as it is served."""
    sharding = getattr(asked, "sharding", None)
    size = math.prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))
    stored, served = size * leaf.dtype.itemsize, size * np.dtype(asked.dtype).itemsize
    return stored if leaf.dtype == np.dtype(asked.dtype) else min(stored, _PIECE_BYTES), served


def _place_one(leaf: LazyArray, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    """A part at a time, which the host does not keep; devices that hold the same have it from one reading."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        ends = tuple(s.indices(n)[:2] for s, n in zip(index or (), leaf.shape, strict=True))
        holders.setdefault(ends, []).append(device)
    parts: list[jax.Array] = []
    for ends, devices in holders.items():
        values = _read_cast(leaf, tuple(slice(*pair) for pair in ends), dtype)
        there = [jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        parts += jax.block_until_ready([jax.device_put(values, one) for one in there])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _read_cast(leaf: LazyArray, region: Region, dtype: np.dtype) -> np.ndarray:
    shape = tuple(s.stop - s.start for s in region)
    if not shape or leaf.dtype == dtype:
        return np.ascontiguousarray(leaf.read(region), dtype).reshape(shape)
    out = aligned_empty(shape, dtype)
    row_bytes = max(1, out[:1].size * leaf.dtype.itemsize)
    step = max(1, _PIECE_BYTES // row_bytes)
    for first in range(0, shape[0], step):
        rows = slice(region[0].start + first, min(region[0].start + first + step, region[0].stop))
        out[first : first + step] = leaf.read((rows, *region[1:]))
    return out


class _Budget:
    """Bytes that may be held at once, given out in the order in which they are asked for; whoever asks for more than
    there are waits until it is alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        with self._changed:
            self._waiting.append(turn := object())
            self._changed.wait_for(
                lambda: self._waiting[0] is turn and (self._held == 0 or self._held + count <= self._total)
            )
            self._waiting.popleft()
            self._held += count
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= count
                self._changed.notify_all()
