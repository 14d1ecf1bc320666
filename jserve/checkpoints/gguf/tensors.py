"""What the bytes of a GGUF tensor mean: plain floats, or blocks that the gguf package turns back into floats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jserve.checkpoints.gguf.file import GgufFile, GgufTensor

__all__ = ["READABLE", "read_tensor", "stored_dtype"]

_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_BLOCKS = frozenset(
    GGMLQuantizationType[name]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
READABLE = frozenset(_PLAIN) | _BLOCKS
"""The types that are read."""

_CHUNK_ELEMENTS = 1 << 22
"""Elements dequantized at once; the package makes several copies of what it is given."""


def stored_dtype(kind: GGMLQuantizationType) -> np.dtype:
    """The smallest of float32, float16 and bfloat16 that holds every value of ``kind`` exactly."""
    return _PLAIN.get(kind, np.dtype(np.float32))


def read_tensor(file: GgufFile, tensor: GgufTensor, rows: slice = slice(None)) -> np.ndarray:
    """The tensor's values, ``tensor.shape`` in ``stored_dtype(tensor.kind)``. Its kind must be in READABLE.

    ``rows``, without a step: only these entries of the first axis; no more of the file is read, but of a tensor with
    one axis.
    """
    if len(tensor.shape) == 1:
        return _read_rows(file, tensor, 0, 1)[0][rows]
    first, stop, _ = rows.indices(tensor.shape[0])
    count, inner = max(0, stop - first), math.prod(tensor.shape[1:-1])
    return _read_rows(file, tensor, first * inner, count * inner).reshape(count, *tensor.shape[1:])


def _read_rows(file: GgufFile, tensor: GgufTensor, first: int, count: int) -> np.ndarray:
    """``count`` rows, which are whole blocks that lie one after the other, of the last axis: ``[count, columns]``."""
    dtype, columns = stored_dtype(tensor.kind), tensor.shape[-1]
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    row_bytes = columns // block * block_bytes
    if tensor.kind in _PLAIN:
        return file.read(tensor, first * row_bytes, count * row_bytes).view(dtype).reshape(count, columns)
    step = max(1, _CHUNK_ELEMENTS // columns)
    out = np.empty((count, columns), dtype)
    # Damaged scales overflow to infinity and infinities give NaN; whoever stores the values looks for both.
    with np.errstate(all="ignore"):
        for done in range(0, count, step):
            n = min(step, count - done)
            raw = file.read(tensor, (first + done) * row_bytes, n * row_bytes).reshape(n, row_bytes)
            out[done : done + n] = dequantize(raw, tensor.kind)
    return out
