"""The norms of all families, by their formulas in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.norms import LayerNorm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norm(dtype):
    norm = LayerNorm(8, 1e-3, dtype=dtype)
    rng = np.random.default_rng(0)
    weight, bias, x = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((8,), (8,), (3, 8)))
    norm.weight[...], norm.bias[...] = weight, bias
    wide, found = np.asarray(x, np.float64), norm(x)
    mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    wanted = (wide - mean) / np.sqrt(variance + 1e-3) * np.asarray(weight, np.float64) + np.asarray(bias, np.float64)
    assert found.dtype == x.dtype
    # Half a step of the dtype: it is rounded once, at the end.
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2.0**-8 if dtype == "bfloat16" else 1e-5)
