"""What the writing of arrays asks of Orbax beyond its documented interface."""

import inspect

import numpy as np
from orbax.checkpoint import type_handlers

from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.orbax import write
from jserve.checkpoints.orbax.write import write_arrays
from jserve.progress import SILENT


def test_orbax_writes_each_array_through_the_method_that_is_overridden(tmp_path, monkeypatch):
    """An Orbax that renames it would leave failures of a write to its own threads, in silence."""
    theirs = type_handlers.NumpyHandler._open_and_write
    assert inspect.iscoroutinefunction(theirs)
    written = []
    ours = write._BatchHandler._open_and_write

    async def count(self, *args, **kwargs):
        inspect.signature(theirs).bind(self, *args, **kwargs)
        written.append(1)
        await ours(self, *args, **kwargs)

    monkeypatch.setattr(write._BatchHandler, "_open_and_write", count)
    values = np.arange(6, dtype=np.float32)
    leaf = LazyArray.of(values)
    write_arrays(tmp_path / "params", {("a",): leaf, ("b", "0"): leaf}, parts=tmp_path / "parts", progress=SILENT)
    assert len(written) == 2
