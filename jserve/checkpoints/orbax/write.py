"""Lazy arrays as an Orbax checkpoint, written one batch at a time.

What is written is a plain Orbax PyTree checkpoint (OCDBT), readable by any Orbax user. It is not compressed: trained
weights hardly shrink, and unpacking them doubles the time of a start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from jserve.checkpoints.arrays.hold import Holder, by_source
from jserve.checkpoints.arrays.key_map import Leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import nest
from jserve.checkpoints.cache import sync_tree
from jserve.progress import Progress

__all__ = ["write_arrays"]

_BATCH_BYTES = 256 << 20
"""Host memory that a write holds, beside one leaf and one stored array. Each batch becomes a file or two."""
_PROCESS_FOLDER = "ocdbt.process_"
"""How Orbax names the share of each process; its merge looks for these."""
_CHUNK_BYTES = 64 << 20
"""Largest piece of one array: a device that holds a part of it need not read it all."""


def write_arrays(path: Path, leaves: Leaves, *, parts: Path, progress: Progress) -> None:
    """Write ``leaves`` as a new Orbax checkpoint at ``path``, reading each only when its turn comes.

    Batches are finished one by one in the folder ``parts``, on the same disk. Those that an earlier call with the
    same ``leaves`` finished there, before it was killed, are taken as they are, and so is ``path`` itself: it is there
    only when all of it is on the disk. Raises OSError for what the operating system refuses, such as a full disk.
    """
    if path.is_dir():
        progress.advance(sum(leaf.nbytes for leaf in leaves.values()))
        shutil.rmtree(parts, ignore_errors=True)
        return
    tree = nest(leaves)
    parts.mkdir(exist_ok=True)
    scratch = _unfinished(path)
    shutil.rmtree(scratch, ignore_errors=True)
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_compression=False,
        type_handler_registry=type_handlers.create_type_handler_registry(
            (LazyArray, _LazyHandler(parts, progress)), (jax.Array, type_handlers.ArrayHandler())
        ),
    )
    save_args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with _os_errors(path), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(scratch.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
    sync_tree(scratch)
    scratch.rename(path)
    parts.rmdir()


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


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


_Item = tuple[LazyArray, type_handlers.ParamInfo, ocp.SaveArgs]


class _LazyHandler(type_handlers.NumpyHandler):
    """Writes LazyArrays as Orbax writes numpy arrays, holding a batch of them at a time.

    Each batch is written as Orbax has each process of several write its share: a database of its own, which Orbax then
    merges, by reference, with the others. So one that is finished stays good whatever becomes of the rest.
    """

    def __init__(self, parts: Path, progress: Progress) -> None:
        super().__init__()
        self._parts = parts
        self._progress = progress

    async def serialize(
        self,
        values: Sequence[LazyArray],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        items = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
        with Holder() as holder:
            folders = await self._finish(by_source(items, itemgetter(0)), holder)
        for info in infos:
            await info.await_path_creation()
        for folder in folders:
            folder.rename(Path(infos[0].parent_dir) / folder.name)
            folder.parent.rmdir()
        return []

    async def _finish(self, items: Sequence[_Item], holder: Holder) -> list[Path]:
        """The databases of all batches, those that are not there made."""
        folders = []
        for number, batch in enumerate(_batches(items)):
            names = [(info.name, lazy.shape, lazy.dtype.str) for lazy, info, _ in batch]
            part = self._parts / f"{number}-{hashlib.sha256(repr(names).encode()).hexdigest()[:16]}"
            folder = part / f"{_PROCESS_FOLDER}{number}"
            if folder.is_dir():  # the part may be there without it, if it was moved just before a kill
                self._progress.advance(sum(lazy.nbytes for lazy, _, _ in batch))
            else:
                await self._write(batch, part, str(number), holder)
            folders.append(folder)
        return folders

    async def _write(self, batch: Sequence[_Item], part: Path, process: str, holder: Holder) -> None:
        """Make the folder ``part``, which is there only when all of it is on the disk."""
        scratch = _unfinished(part)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        arrays = []
        for lazy, _, _ in batch:
            holder.turn_to(lazy)
            arrays.append(lazy.read())
            self._progress.advance(lazy.nbytes)
        infos = [info.replace(parent_dir=scratch, path=scratch / info.name) for _, info, _ in batch]
        handler = _BatchHandler(ocdbt_process_id=process, deepcopy_host_arrays=False)
        # Waiting here, and not for all at the end, is what bounds the memory.
        for future in await handler.serialize(arrays, infos, [arg for _, _, arg in batch]):
            future.result()
        if handler.failed:
            raise handler.failed[0]
        sync_tree(scratch)
        scratch.rename(part)


class _BatchHandler(type_handlers.NumpyHandler):
    """Writes one batch. A failure waits for the other arrays: Orbax would close the loop that they answer to, and
    TensorStore's threads would print a traceback for each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.failed: list[Exception] = []

    async def _open_and_write(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super()._open_and_write(*args, **kwargs)
        except Exception as error:
            self.failed.append(error)


def _batches(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    held = 0
    for item in items:
        if batch and held + item[0].nbytes > _BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += item[0].nbytes
    if batch:
        yield batch
