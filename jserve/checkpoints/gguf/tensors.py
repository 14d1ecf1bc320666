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


def read_tensor(file: GgufFile, tensor: GgufTensor) -> np.ndarray:
    """The tensor's values, ``tensor.shape`` in ``stored_dtype(tensor.kind)``. Its kind must be in READABLE."""
    dtype = stored_dtype(tensor.kind)
    if tensor.kind in _PLAIN:
        return file.read(tensor, 0, tensor.nbytes).view(dtype).reshape(tensor.shape)
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    columns = tensor.shape[-1]
    rows = math.prod(tensor.shape[:-1])
    row_bytes = columns // block * block_bytes
    step = max(1, _CHUNK_ELEMENTS // columns)
    out = np.empty((rows, columns), dtype)
    # Damaged scales overflow to infinity and infinities give NaN; whoever stores the values looks for both.
    with np.errstate(all="ignore"):
        for first in range(0, rows, step):
            n = min(step, rows - first)
            raw = file.read(tensor, first * row_bytes, n * row_bytes).reshape(n, row_bytes)
            out[first : first + n] = dequantize(raw, tensor.kind)
    return out.reshape(tensor.shape)
