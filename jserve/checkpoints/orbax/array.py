"""One array in TensorStore, still to be read, and what TensorStore may use for all of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorstore as ts

from jserve.checkpoints.arrays.lazy import LazyArray, Region, aligned_empty
from jserve.errors import CheckpointError, SourceError

__all__ = ["CONTEXT", "COPY_FIX", "StoredArray", "raise_store_failure", "reason"]

_RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}
"""A store that cannot be reached is given up after seconds. TensorStore's own limits come to a quarter of an hour."""
CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},
    "cache_pool#index": {"total_bytes_limit": 16 << 20},
    "data_copy_concurrency": {"limit": min(16, max(2, os.cpu_count() or 2))},
    "file_io_concurrency": {"limit": 8},
    "s3_request_concurrency": {"limit": 16},
    "gcs_request_concurrency": {"limit": 16},
    "s3_request_retries": _RETRIES,
    "gcs_request_retries": _RETRIES,
}
"""What TensorStore may hold and do at once; ``#index`` holds the nodes that say where OCDBT's values lie. A context a
checkpoint: a context remembers the folders that it saw."""
COPY_FIX = "copy it anew from where it was made, or give an older step"
_STORE_FAILS = (
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "ABORTED",
    "DEADLINE_EXCEEDED",
)
"""Statuses of an object store that cannot be asked; they say nothing of the checkpoint."""


class StoredArray:
    """One array in TensorStore; the ``Source`` of its LazyArray."""

    def __init__(self, spec: Mapping[str, Any], array: Any, *, where: str, name: str) -> None:
        self._spec = spec
        self._array = array
        self._is_held = False
        self._where, self._name = where, name
        self._dtype = np.dtype(array.dtype.numpy_dtype)
        size = math.prod(array.shape) * self._dtype.itemsize
        self.piece_nbytes = math.prod(array.chunk_layout.read_chunk.shape or ()) * self._dtype.itemsize
        self.nbytes = size + self.piece_nbytes  # a piece as it is stored, and unpacked

    def lazy(self) -> LazyArray:
        return LazyArray(
            shape=tuple(self._array.shape),
            dtype=self._dtype,
            read_region=self._read,
            source=self if self._array.shape else None,
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        if self._is_held:
            yield
            return
        before = self._array
        context = ts.Context({**CONTEXT, "cache_pool": {"total_bytes_limit": 2 * self.nbytes}})
        self._array = self._await(ts.open(dict(self._spec), open=True, read=True, context=context))
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._array = before  # what was held goes with the other

    def _read(self, region: Region) -> np.ndarray:
        values = aligned_empty([s.stop - s.start for s in region], self._dtype)
        self._await(ts.array(values).write(self._array[region]))
        return values

    def _await(self, future: Any) -> Any:
        try:
            return future.result()
        except (ValueError, OSError) as error:
            raise_store_failure(self._where, error)
            raise CheckpointError(f"{self._where} is damaged at {self._name}: {reason(error)}", fix=COPY_FIX) from None


def raise_store_failure(where: str, error: Exception) -> None:
    if "://" in where and str(error).startswith(_STORE_FAILS):
        raise SourceError(f"{where} cannot be read: {reason(error)}", fix="check the network and the credentials")


def reason(error: Exception) -> str:
    """What TensorStore says, without the specification and without the layers that the error came through: its status,
    and from the innermost ``Error ...`` on that names a file."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = re.split(r" \[(?:tensorstore_spec|source locations|os_error_code|http_|curl_code|x-)", line)[0]
    status = re.match(r"[A-Z_]+: ", line)
    begins = [match.start() for match in re.finditer("Error ", line)]
    start = max((at for at in begins if 'file "' in line[at:]), default=max(begins, default=-1))
    return (line if start < 0 else f"{status[0] if status else ''}{line[start:]}")[:300]
