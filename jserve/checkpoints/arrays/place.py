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
import jax.numpy as jnp
import numpy as np

from jserve.checkpoints.arrays.key_map import Leaves, Path
from jserve.checkpoints.arrays.lazy import LazyArray, Region, Source, aligned_empty
from jserve.checkpoints.arrays.tree import flatten, unflatten_like
from jserve.checkpoints.problems import raise_all

__all__ = ["compare", "differences", "place"]

_IN_FLIGHT_BYTES = 384 << 20
"""Host memory for parameters on their way, beyond what the devices hold where they are the host (a CPU's); more only
where one stored array asks for more."""
_PIECE_BYTES = 32 << 20
"""Read and cast at once, so that a cast does not double what a parameter takes."""
_WORKERS = 4
"""Arrays that are read at once."""


def place(leaves: Leaves, wanted: Any, *, where: str) -> dict[Any, Any]:
    """``leaves`` as jax.Arrays, in the structure, dtypes and shardings of ``wanted``.

    ``wanted``: nested dicts (or nnx.State) of ShapeDtypeStruct; those without a sharding go to the first device. How
    the files were sharded does not matter. ``where`` names them in errors. Raises CheckpointError that lists every
    leaf that is missing, left over, of another shape or of another kind of dtype, and where files turn out to be
    damaged.
    """
    asked = flatten(wanted)
    compare(leaves, asked, where=where)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    groups = _groups(leaves, asked)
    on_host = _on_host()
    budget = _Budget(_IN_FLIGHT_BYTES + (sum(group.placed for group in groups) if on_host else 0))

    def one(path: Path) -> jax.Array:
        leaf = asked[path]
        sharding = getattr(leaf, "sharding", None) or first
        return _place_one(leaves[path], np.dtype(leaf.dtype), sharding)

    def together(group: _Group) -> dict[Path, jax.Array]:
        with (
            budget.take(group.passing, kept=group.placed if on_host else 0),
            group.source.held() if group.source is not None else nullcontext(),
        ):
            return {path: one(path) for path in group.paths}

    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="read") as pool:
        futures = [pool.submit(together, group) for group in groups]
        try:
            placed = {path: array for future in futures for path, array in future.result().items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return unflatten_like(wanted, placed)


def _on_host() -> bool:
    """Whether what the devices hold is host memory."""
    return bool(jax.local_devices()[0].platform == "cpu")


def compare(leaves: Leaves, wanted: Mapping[Path, Any], *, where: str) -> None:
    """Raise CheckpointError that lists all ``differences``. ``where`` names the files."""
    raise_all(f"{where} does not fit the model:", differences(leaves, wanted))


def differences(leaves: Leaves, wanted: Mapping[Path, Any]) -> list[str]:
    """Every difference in names, shapes and kinds of dtype between arrays and the leaves that a model wants, which
    have a shape and a dtype. Of one kind are all floats, all integers, and booleans: others lose what they say."""
    wrong = []
    for path, asked in wanted.items():
        leaf, shape = leaves.get(path), tuple(asked.shape)
        if leaf is None:
            wrong.append(f"{'.'.join(path)} is missing: wanted {list(shape)}")
        elif leaf.shape != shape:
            wrong.append(f"{'.'.join(path)}: wanted {list(shape)}, found {list(leaf.shape)}")
        elif _kind(leaf.dtype) != _kind(asked.dtype):
            wrong.append(f"{'.'.join(path)}: wanted {np.dtype(asked.dtype).name}, found {leaf.dtype.name}")
    return wrong + [f"{'.'.join(p)} {list(leaves[p].shape)} is not of this model" for p in leaves if p not in wanted]


def _kind(dtype: Any) -> str:
    # jnp's test: numpy does not count bfloat16 among its floats.
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    return next((kind.__name__ for kind in kinds if jnp.issubdtype(dtype, kind)), np.dtype(dtype).name)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Parameters that are read one after the other."""

    paths: list[Path]
    source: Source | None
    """What to hold in the meantime."""
    passing: int
    """Host memory that it takes meanwhile: what is held, and the largest part on its way to a device."""
    placed: int
    """What this process's devices hold of it in the end, copies not counted."""


def _groups(leaves: Leaves, asked: Mapping[Path, Any]) -> list[_Group]:
    """Parameters of one stored array together where its pieces are larger than what is read of them: so each piece is
    read once. Those that take most come first, when the least is on the devices."""
    together: dict[int, list[Path]] = {}
    for path in asked:
        source = leaves[path].source
        together.setdefault(id(path if source is None else source), []).append(path)
    groups = []
    for paths in together.values():
        sizes = [_sizes(leaves[path], asked[path]) for path in paths]
        source = leaves[paths[0]].source
        if source is None or source.piece_nbytes <= min(size.read for size in sizes):
            groups += [
                _Group(paths=[path], source=None, passing=size.read + size.part, placed=size.placed)
                for path, size in zip(paths, sizes, strict=True)
            ]
        else:
            passing = source.nbytes + max(size.part for size in sizes)
            placed = sum(size.placed for size in sizes)
            groups.append(_Group(paths=paths, source=source, passing=passing, placed=placed))
    return sorted(groups, key=lambda group: -group.passing)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes of one parameter."""

    read: int
    """Read at once, as it is stored."""
    part: int
    """One device's part, as it is served."""
    placed: int
    """All parts of this process's devices that differ."""


def _sizes(leaf: LazyArray, asked: Any) -> _Sizes:
    sharding = getattr(asked, "sharding", None)
    dtype = np.dtype(asked.dtype)
    size = math.prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))
    parts = 1 if sharding is None else len(_holders(leaf.shape, sharding))
    stored = size * leaf.dtype.itemsize
    return _Sizes(
        read=stored if leaf.dtype == dtype else min(stored, _PIECE_BYTES),
        part=size * dtype.itemsize,
        placed=size * dtype.itemsize * parts,
    )


def _holders(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
    """Each part (start and stop on every axis), and the devices of this process that hold it."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ends = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        holders.setdefault(ends, []).append(device)
    return holders


def _place_one(leaf: LazyArray, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    """A part at a time, which the host does not keep; devices that hold the same have it from one reading."""
    parts: list[jax.Array] = []
    for ends, devices in _holders(leaf.shape, sharding).items():
        values = _read_cast(leaf, tuple(slice(*pair) for pair in ends), dtype)
        there = [jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        parts += jax.block_until_ready([jax.device_put(values, one) for one in there])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _read_cast(leaf: LazyArray, region: Region, dtype: np.dtype) -> np.ndarray:
    shape = tuple(s.stop - s.start for s in region)
    out = aligned_empty(shape, dtype)
    if not shape or leaf.dtype == dtype:
        values = leaf.read(region)
        if values.flags.c_contiguous and values.dtype == dtype:
            return values.reshape(shape)
        out[...] = values
        return out
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
        self._users = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def take(self, passing: int, *, kept: int) -> Iterator[None]:
        """``passing`` bytes until the context ends, and ``kept`` for good."""
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            self._changed.wait_for(lambda: self._waiting[0] is turn and self._fits(passing + kept))
            self._waiting.popleft()
            self._held += passing + kept
            self._users += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= passing
                self._users -= 1
                self._changed.notify_all()

    def _fits(self, count: int) -> bool:
        return self._users == 0 or self._held + count <= self._total
