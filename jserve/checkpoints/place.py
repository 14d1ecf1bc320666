"""Lazy arrays onto a mesh: each device's part read, cast and put there, in bounded memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jserve.checkpoints.key_map import Leaves, Path
from jserve.checkpoints.lazy import LazyArray, Region, Source
from jserve.checkpoints.tree import flatten, unflatten_like
from jserve.errors import CheckpointError

__all__ = ["compare", "place"]

_IN_FLIGHT_BYTES = 256 << 20
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
    """Host memory that it takes until its parameters are on their devices, and the largest of them."""


def _groups(leaves: Leaves, asked: Mapping[Path, Any]) -> list[_Group]:
    """Parameters of one stored array together where its pieces are larger than what is read of them: so each piece is
    read once. Those that take most come first, when the least is on the devices."""
    together: dict[int, list[Path]] = {}
    for path in asked:
        source = leaves[path].source
        together.setdefault(id(path if source is None else source), []).append(path)
    groups = []
    for paths in together.values():
        sizes = [leaves[path].size * np.dtype(asked[path].dtype).itemsize for path in paths]
        source = leaves[paths[0]].source
        if source is None or source.piece_nbytes <= min(_part_nbytes(leaves[path], asked[path]) for path in paths):
            groups += [_Group(paths=[path], source=None, nbytes=size) for path, size in zip(paths, sizes, strict=True)]
        else:
            groups.append(_Group(paths=paths, source=source, nbytes=source.nbytes + max(sizes)))
    return sorted(groups, key=lambda group: -group.nbytes)


def _part_nbytes(leaf: LazyArray, asked: Any) -> int:
    """The least that is read of ``leaf`` at once, as it is stored."""
    sharding = getattr(asked, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    nbytes = math.prod(shape) * leaf.dtype.itemsize
    return nbytes if leaf.dtype == np.dtype(asked.dtype) else min(nbytes, _PIECE_BYTES)


def _place_one(leaf: LazyArray, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        """What one device holds; devices that hold the same share it."""
        region = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, leaf.shape, strict=True))
        key = tuple((s.start, s.stop) for s in region)
        if key not in parts:
            parts[key] = _read_cast(leaf, region, dtype)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, sharding, part)


def _read_cast(leaf: LazyArray, region: Region, dtype: np.dtype) -> np.ndarray:
    shape = tuple(s.stop - s.start for s in region)
    if not shape or leaf.dtype == dtype:
        return np.ascontiguousarray(leaf.read(region), dtype).reshape(shape)
    out = np.empty(shape, dtype)
    row_bytes = max(1, out[:1].size * leaf.dtype.itemsize)
    step = max(1, _PIECE_BYTES // row_bytes)
    for first in range(0, shape[0], step):
        rows = slice(region[0].start + first, min(region[0].start + first + step, region[0].stop))
        out[first : first + step] = leaf.read((rows, *region[1:]))
    return out


class _Budget:
    """Bytes that may be held at once; one that asks for more than there are waits until it is alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + count <= self._total)
            self._held += count
        try:
            yield
        finally:
            with self._changed:
                self._held -= count
                self._changed.notify_all()
