"""Lazy arrays as an Orbax checkpoint, written one batch at a time.

What is written is a plain Orbax PyTree checkpoint (OCDBT), readable by any Orbax user. It is not compressed: trained
weights hardly shrink, and unpacking them doubles the time of a start.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from jserve.checkpoints.key_map import Leaves
from jserve.checkpoints.lazy import LazyArray
from jserve.checkpoints.tree import nest
from jserve.progress import Progress

__all__ = ["write_arrays"]

_BATCH_BYTES = 256 << 20
"""Host memory that a write holds, beside one leaf. Each batch becomes a file or two."""
_CHUNK_BYTES = 64 << 20
"""Largest piece of one array: a device that holds a part of it need not read it all."""


def write_arrays(path: Path, leaves: Leaves, *, progress: Progress) -> None:
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
