"""Arrays on disk, as Orbax keeps them: written one batch at a time, restored straight onto their shardings.

What is written is a plain Orbax PyTree checkpoint (OCDBT), readable by any Orbax user. It is not compressed: trained
weights hardly shrink, and unpacking them doubles the time of a start.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from jserve.checkpoints.tree import flatten, nest, unflatten_like
from jserve.errors import CheckpointError
from jserve.progress import Progress

__all__ = ["ArrayInfo", "LazyArray", "compare_arrays", "describe_arrays", "restore_arrays", "write_arrays"]

_BATCH_BYTES = 256 << 20
"""Host memory that a write holds, beside one leaf. Each batch becomes a file or two."""
_CHUNK_BYTES = 64 << 20
"""Largest piece of one array: a device that holds a part of it need not read it all."""
_IN_FLIGHT_BYTES = 512 << 20
"""Host memory that a restore may fill with reads under way; more only where one leaf asks for more."""


@dataclass(frozen=True, kw_only=True)
class LazyArray:
    """An array that is read when it is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    """Gives the array: ``shape``, ``dtype``."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """An array of a checkpoint, by its metadata."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_arrays(path: Path, leaves: Mapping[tuple[str, ...], LazyArray], *, progress: Progress) -> None:
    """Write ``leaves`` as a new Orbax checkpoint at ``path``, reading each only when its turn comes.

    Raises OSError for what the operating system refuses, such as a full disk.
    """
    tree = nest(leaves)
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_compression=False,
        type_handler_registry=type_handlers.create_type_handler_registry(
            (LazyArray, _LazyHandler(progress)), (jax.Array, type_handlers.ArrayHandler())
        ),
    )
    save_args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with _os_errors(path), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """TensorStore tells what the operating system refused in the words of a ValueError; Orbax logs it as well."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except ValueError as error:
        number = re.search(r"\[os_error_code='(\d+)'", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    finally:
        log.setLevel(before)


def describe_arrays(path: Path) -> dict[tuple[str, ...], ArrayInfo]:
    """Every array of the Orbax checkpoint at ``path``. Raises CheckpointError where its metadata is damaged."""
    with _orbax_errors(path):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            item = checkpointer.metadata(path.absolute()).item_metadata
        if item is None:
            raise FileNotFoundError("its _METADATA is missing or cannot be read")
        tree = item.tree
    return {
        leaf_path: ArrayInfo(shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype))
        for leaf_path, leaf in flatten(tree).items()
    }


def restore_arrays(path: Path, wanted: Any) -> dict[Any, Any]:
    """The arrays at ``path``, as ``wanted`` (nested dicts of ShapeDtypeStruct with shardings) asks for them.

    Each goes straight to its devices in the dtype asked for; how the checkpoint was sharded when it was saved does not
    matter. Leaves without a sharding go to the first device. Raises CheckpointError that lists every leaf that is
    missing, left over or of another shape, and where the files are damaged.
    """
    leaves, stored = flatten(wanted), describe_arrays(path)
    compare_arrays(path, leaves, stored)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    asked = {
        leaf_path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or first)
        for leaf_path, leaf in leaves.items()
    }
    # Orbax counts whole chunks, and refuses a leaf that counts for more than the limit: up to twice its size an axis.
    sizes = [math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in asked.values()]
    limit = max(_IN_FLIGHT_BYTES, 4 * max(*sizes, *(info.nbytes for info in stored.values())))
    handler = ocp.PyTreeCheckpointHandler(handler_impl=ocp.BasePyTreeCheckpointHandler(restore_concurrent_bytes=limit))
    tree = nest(asked)
    args = ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    with _orbax_errors(path), ocp.Checkpointer(handler) as checkpointer:
        restored = jax.block_until_ready(checkpointer.restore(path.absolute(), args=args))
    return unflatten_like(wanted, flatten(restored))


def compare_arrays(
    path: Path, wanted: Mapping[tuple[str, ...], Any], found: Mapping[tuple[str, ...], ArrayInfo]
) -> None:
    """Raise CheckpointError that lists every difference in names and shapes between a model and its arrays."""
    wrong = []
    for leaf_path, leaf in wanted.items():
        info = found.get(leaf_path)
        if info is None:
            wrong.append(f"{'.'.join(leaf_path)} is missing: wanted {list(leaf.shape)}")
        elif info.shape != tuple(leaf.shape):
            wrong.append(f"{'.'.join(leaf_path)}: wanted {list(leaf.shape)}, found {list(info.shape)}")
    wrong += [f"{'.'.join(p)} {list(found[p].shape)} is not of this model" for p in found if p not in wanted]
    if wrong:
        raise CheckpointError("\n  ".join([f"{path} does not fit the model:", *wrong]))


@contextmanager
def _orbax_errors(path: Path) -> Iterator[None]:
    """Whatever Orbax and TensorStore raise over files that are damaged (bare Exception among it), as ours."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise  # A device without memory, say, is not the checkpoint's fault.
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise CheckpointError(
            f"{path} cannot be read as an Orbax checkpoint: {line}",
            fix=f"see which file is damaged: jserve inspect --check {path.parent}",
        ) from error


class _LazyHandler(type_handlers.NumpyHandler):
    """Writes LazyArrays as Orbax writes numpy arrays, holding a batch of them at a time."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._progress = progress
        self._failed: list[Exception] = []

    async def serialize(
        self,
        values: Sequence[LazyArray],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        args = args or [ocp.SaveArgs()] * len(values)
        batch: list[tuple[np.ndarray, type_handlers.ParamInfo, ocp.SaveArgs]] = []
        held = 0
        for lazy, info, arg in zip(values, infos, args, strict=True):
            if batch and held + lazy.nbytes > _BATCH_BYTES:
                await self._write(batch)
                batch, held = [], 0
            batch.append((lazy.read(), info, arg))
            held += lazy.nbytes
            self._progress.advance(lazy.nbytes)
        if batch:
            await self._write(batch)
        return []

    async def _write(self, batch: Sequence[tuple[np.ndarray, type_handlers.ParamInfo, ocp.SaveArgs]]) -> None:
        arrays, infos, args = (list(column) for column in zip(*batch, strict=True))
        # Waiting here, and not for all at the end, is what bounds the memory.
        for future in await super().serialize(arrays, infos, args):
            future.result()
        if self._failed:
            raise self._failed[0]

    async def _open_and_write(self, *args: Any, **kwargs: Any) -> None:
        """One array. A failure waits for the others of its batch: Orbax would close the loop that they answer to, and
        TensorStore's threads would print a traceback for each."""
        try:
            await super()._open_and_write(*args, **kwargs)
        except Exception as error:
            self._failed.append(error)
